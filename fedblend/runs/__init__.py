"""Runs: the run directory, its metrics log and its checkpoints."""
