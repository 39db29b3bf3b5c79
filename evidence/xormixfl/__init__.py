"""XorMixFL's tables and figures: ours beside the paper's, with a verdict on each of its claims."""

from xormixfl.distances import distance_claims, leaks, table_3
from xormixfl.dummies import dummy_claims, offset, offset_leaks, table_4
from xormixfl.shots import figure_3, figure_3_table, shot_claims, table_2
from xormixfl.warm import warm_start

TABLES = {
    "xormixfl table 2": table_2,
    "xormixfl figure 3": figure_3_table,
    "xormixfl claims": shot_claims,
    "xormixfl table 3": table_3,
    "xormixfl table 3 claims": distance_claims,
    "xormixfl leaks": leaks,
    "xormixfl table 4": table_4,
    "xormixfl table 4 claims": dummy_claims,
    "xormixfl offset": offset,
    "warm-start": warm_start,
    "xormixfl offset leaks": offset_leaks,
    "xormixfl-mnist5k table 2": lambda: table_2("xormixfl-mnist5k"),
    "xormixfl-mnist5k figure 3": lambda: figure_3_table("xormixfl-mnist5k"),
    "xormixfl-mnist5k claims": lambda: shot_claims("xormixfl-mnist5k"),
}
"""Makers of the tables of docs/results.md by their marks."""

FIGURES = {
    "xormixfl-figure-3": figure_3,
    "xormixfl-mnist5k-figure-3": lambda: figure_3("xormixfl-mnist5k"),
}
"""Makers of pictures in docs/figures; nothing where the study was not run yet."""
