"""Data sets, one module for each format or source."""
