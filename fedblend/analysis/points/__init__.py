"""Measurements of a run from its checkpoint, for AggEnhance and Fed-AugMix; nothing in the run's folder changes."""
