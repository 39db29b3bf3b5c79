"""Partitions of the samples over clients."""
