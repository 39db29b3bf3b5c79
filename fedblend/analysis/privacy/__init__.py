"""Privacy of what leaves a client: (epsilon, delta) guarantees, sample privacy, and leak reports."""
