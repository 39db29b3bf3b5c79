"""Reproduction of papers' tables and figures: items as data (`*.toml`), run at a scale, and judged claim by claim."""
