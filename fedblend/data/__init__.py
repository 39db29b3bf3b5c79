"""Data sets: loaders, scales, partitions over clients, and measures of a partition."""
