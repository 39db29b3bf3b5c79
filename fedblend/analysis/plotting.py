"""How methods look: the same colour in every figure, told apart without colour too."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 150
"""Pixels an inch of every still figure."""

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


def dress(axes: Axes, x: str, y: str) -> None:
    """Label a still figure's axes, and give them the house's grid and colours."""
    axes.set_xlabel(x, fontsize=9.5, color=INK)
    axes.set_ylabel(y, fontsize=9.5, color=INK)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5, colors=INK, length=0)
    axes.margins(x=0.01)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)


def spread(rounds: Sequence[int], most: int) -> list[int]:
    """Up to ``most`` of the rounds, evenly chosen, the first and the last among them.

    >>> spread([1, 2, 3, 4, 5], 3), spread([4, 7], 8), spread([1, 2, 3], 1)
    ([1, 3, 5], [4, 7], [3])
    """
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[i * (len(rounds) - 1) // (most - 1)] for i in range(most)] if most > 1 else [rounds[-1]]


NAMED = 3
"""Classes named in a caption; the rest of a mixture is summed up."""

SIDE = 96
"""Smallest width in pixels at which an image is stored: small ones are enlarged by whole factors."""


@dataclass(frozen=True)
class Picture:
    """One image that left a client: a data URL, whose it is, and its label mixture in words."""

    url: str
    client: int
    mixture: str


def as_png(image: np.ndarray) -> str:
    """An image [C, H, W] in [0, 1], of one channel or three, as a data URL with a PNG in it."""
    pixels = np.rint(255 * image).astype(np.uint8)
    made = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    times = max(1, -(-SIDE // made.width))
    made = made.resize((made.width * times, made.height * times), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    made.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def mixture(y: torch.Tensor, classes: Sequence[str]) -> str:
    """A label, or a mixture of labels, in words, the largest share first.

    >>> mixture(torch.tensor([0.0, 0.25, 0.75]), ["cat", "dog", "hen"])
    'hen: 75 %, dog: 25 %'
    >>> mixture(torch.tensor(1), ["cat", "dog"]), mixture(torch.tensor([0.5]), [])
    ('dog', '0.5')
    """
    if not classes:
        return ", ".join(f"{value:.3g}" for value in y.flatten().tolist())
    if y.dim() == 0:
        return classes[int(y)]
    shares = sorted(enumerate(y.tolist()), key=lambda one: (-one[1], one[0]))
    present = [(classes[i], share) for i, share in shares if round(100 * share) > 0]
    words = [f"{name}: {100 * share:.0f} %" for name, share in present[:NAMED]]
    if len(present) > NAMED:
        words.append(f"{len(present) - NAMED} more: {100 * sum(share for _, share in present[NAMED:]):.0f} %")
    return ", ".join(words)
