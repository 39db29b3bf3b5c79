"""Reproducing papers' tables and figures: items as data (`fedblend/papers/*.toml`), run at a scale, judged by claim."""
