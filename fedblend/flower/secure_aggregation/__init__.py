"""Secure aggregation over Flower: the server learns sums of models or of shared means, and no single one."""
