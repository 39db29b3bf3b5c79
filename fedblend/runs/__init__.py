"""Runs: directories, metrics logs, checkpoints, and running one or many experiments."""
