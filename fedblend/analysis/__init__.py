"""What is found out about a run: attacks, privacy and leakage, AggEnhance's class interior points."""
