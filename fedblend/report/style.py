"""How methods look: the same colour in every figure, told apart without colour too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

METHODS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F8790")
"""Okabe and Ito's colours, told apart by colour-blind readers; without yellow and black, which one of the
page's two backgrounds would swallow."""

PHASES = {
    "train": "#77AADD",
    "evaluate": "#EE8866",
    "aggregate": "#EEDD88",
    "share": "#FFAABB",
    "download": "#99DDFF",
    "server": "#44BB99",
}
"""Each phase of a round has one colour in all reports: Paul Tol's light colours, safe for the colour-blind, and
unlike those of the methods."""

OTHER_PHASES = ("#BBCC33", "#AAAA00")
"""For phases that a part of someone's own brings."""

DASHES = (("solid", "-"), ("dash", "--"), ("dashdot", "-."), ("longdash", (0, (8, 3))))
"""Dashes by their names in plotly and in matplotlib. Dots are kept for unfinished runs."""

INK, MUTED, GRID = "#1d2730", "#5c6873", "#e3e7ea"
"""Colours of a figure on white paper; the page changes them when it is dark."""

BAND = 0.16
"""Opacity of the band between seeds."""


@dataclass(frozen=True)
class Look:
    """A method's colour and dash."""

    colour: str
    dash: str
    stroke: Any  # as matplotlib has it: a string or (offset, lengths)

    @property
    def pale(self) -> str:
        """The colour as the filling of a band, in CSS."""
        red, green, blue = (int(self.colour[i : i + 2], 16) for i in (1, 3, 5))
        return f"rgba({red},{green},{blue},{BAND})"


def looks(methods: Sequence[str]) -> dict[str, Look]:
    """A look for each method, in order; after seven colours come the same with another dash.

    >>> made = looks(["fedavg", "fedmix"])
    >>> made["fedavg"].colour != made["fedmix"].colour
    True
    """
    made = {}
    for i, method in enumerate(dict.fromkeys(methods)):
        dash, stroke = DASHES[i // len(METHODS) % len(DASHES)]
        made[method] = Look(METHODS[i % len(METHODS)], dash, stroke)
    return made


def phase_colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each phase, the same wherever the phase stands among others.

    >>> phase_colours(["evaluate", "train"])["train"] == phase_colours(["train", "encode"])["train"]
    True
    """
    others = sorted(set(names) - set(PHASES))
    return PHASES | {name: OTHER_PHASES[i % len(OTHER_PHASES)] for i, name in enumerate(others)}
