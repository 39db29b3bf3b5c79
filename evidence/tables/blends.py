"""Which blend, when: the best method of each price for each kind of split, as a table and as a forest plot."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from statistics import fmean

from fedblend.analysis.advice import BASE, Option
from fedblend.analysis.plotting import COLOURS, INK, MUTED, blank_figure, style_axes
from fedblend.runs.differences import Difference, certain_together
from tables.common import save_svg, table
from tables.comparisons import advice_of, of_map, span, told

SPLITS = {
    "few classes (two)": {"fashion-classes": "Fashion-MNIST", "cifar10-classes": "CIFAR10"},
    "uneven classes (Dirichlet 0.1)": {"fashion-dirichlet": "Fashion-MNIST", "cifar10-dirichlet": "CIFAR10"},
    "most classes (Dirichlet 0.5)": {"fashion-dirichlet-half": "Fashion-MNIST", "cifar10-dirichlet-half": "CIFAR10"},
    "one writer, person, hospital or role": {
        "femnist": "FEMNIST",
        "har": "HAR",
        "heart": "hospitals",
        "shakespeare": "Shakespeare",
    },
}
"""What each client has: settings of the map, with the names of their data."""

PRICES = {
    "nothing": COLOURS[0],
    "means or statistics, to the server alone": COLOURS[2],
    "means or features, to other clients too": COLOURS[1],
    "mixtures of few samples, to other clients too": COLOURS[3],
}
"""What a client gives beside its model, and its colour."""

MARKS = {"Fashion-MNIST": "o", "CIFAR10": "s"}
"""The mark of a data set; the others have their names beside them."""

Blend = dict[str, Option]
"""A method: what was found out about it by setting."""


def blend_table() -> str:
    """What to run for each kind of split: the best of each price, if one of its gains is above 0 by its own interval.

    Methods that share with other clients are left out. Where none is left the row is FedAvg's.
    """
    rows = []
    for split, data in SPLITS.items():
        found = [
            blend
            for blend in _best_of_each_price(data)
            if not any(one.to_clients for one in blend.values()) and any(d.low > 0 for d in _gains(blend).values())
        ]
        for blend in found:
            gains = [
                told(gain, 100.0) + "\u00a0†" * (_first(blend).method in _certain(setting))
                for setting, gain in _gains(blend).items()
            ]
            words, one = split if blend is found[0] else "", _first(blend)
            rows.append([words, f"`{one.method}`", *gains, span(_times(blend), 2), one.given_away])
        if not found:
            rows.append([split, f"`{BASE}`", "no gain is certain", "", "1.00", "nothing"])
    heads = [
        "each client has",
        "run",
        *(f"points gained on {name}" for name in MARKS),
        "times FedAvg's bytes",
        "a client gives, beside its model",
    ]
    return table(heads, rows)


def draw_blends() -> None:
    """A forest plot: the best of each price for each kind of split; where clients are sources, the best of each.

    A mark is filled where the gain is certain among all methods of its setting.
    """
    from matplotlib.lines import Line2D

    figure = blank_figure(4.9, 7.0)
    axes = figure.subplots()
    across, labels = axes.get_yaxis_transform(), {}
    place = 0.0
    for split, data in SPLITS.items():
        place += 0.7
        head = axes.text(0.01, place, split, transform=across, fontsize=9, color=INK, weight="bold", va="center")
        head.set_backgroundcolor("white")
        by_data = len(data) > 2
        blends = [_tried([one])[0] for one in data] if by_data else _best_of_each_price(data)
        for blend in blends:
            place += 1
            labels[place] = ": ".join([data[one] for one in blend if by_data] + [_first(blend).method])
            colour = PRICES[_price(blend)]
            for number, (setting, gain) in enumerate(_gains(blend).items()):
                ground = colour if _first(blend).method in _certain(setting) else "white"
                y = place + 0.32 * number - 0.16 * (len(blend) - 1)
                axes.errorbar(
                    100 * gain.mean, y, xerr=100 * gain.half, color=colour, linewidth=1.5,
                    marker=MARKS.get(data[setting], "D"), markersize=5.5, markerfacecolor=ground,
                )  # fmt: skip
            axes.text(1.02, place, f"{span(_times(blend), 1)}", transform=across, fontsize=8.5, color=INK, va="center")
        place += 0.6
    axes.text(1.02, 0.7, "times bytes", transform=across, fontsize=8.5, color=MUTED, va="center")
    axes.axvline(0, color=MUTED, linewidth=1, zorder=0)
    style_axes(axes, "points over tuned FedAvg, 95 % interval", "")
    axes.set_yticks(list(labels), list(labels.values()))
    axes.set_ylim(place, 0)
    axes.grid(False, axis="y")
    prices = [Line2D([], [], color=colour, linewidth=3) for colour in PRICES.values()]
    marks = [Line2D([], [], color=MUTED, marker=mark, linewidth=0) for mark in MARKS.values()]
    words = [*PRICES, *(f"{name}; filled: certain among all methods" for name in MARKS)]
    figure.legend(
        [*prices, *marks], words, title="beside its model a client gives", alignment="left", loc="outside lower left",
        fontsize=8.5, title_fontsize=8.5, frameon=False, labelcolor=INK,
    )  # fmt: skip
    save_svg(figure, "blends", "Blends gain most where clients have few classes")


@functools.cache
def _options() -> dict[str, dict[str, Option]]:
    """All methods of the map and their relatives, by setting and name."""
    found: dict[str, dict[str, Option]] = {}
    for kind in ("relatives", "map"):
        for setting, result in of_map(kind).items():
            options = advice_of(result["advice"]).options
            found.setdefault(setting, {}).update({one.method: one for one in options})
    return found


@functools.cache
def _certain(setting: str) -> set[str]:
    """The methods whose difference is certain among all of a setting (Holm's correction)."""
    found = _options()[setting].items()
    return set(certain_together({name: one.difference.p_value for name, one in found if one.difference}))


def _tried(settings: Iterable[str]) -> list[Blend]:
    """The methods without a failed seed in these settings, and without raw samples; the best mean gain first."""
    tables = {setting: _options()[setting] for setting in settings}
    names = functools.reduce(lambda some, more: some & more, (set(one) for one in tables.values()))
    blends = [{setting: one[name] for setting, one in tables.items()} for name in sorted(names - {BASE})]
    seeds = {setting: len(_options()[setting][BASE].scores) for setting in tables}
    whole = [b for b in blends if all(len(one.scores) == seeds[s] and not one.fault for s, one in b.items())]
    return sorted(whole, key=lambda blend: -fmean(gain.mean for gain in _gains(blend).values()))


def _best_of_each_price(settings: Iterable[str]) -> list[Blend]:
    """The best method of each price and with more bytes than FedAvg's for nothing given away, the best first."""
    found: dict[tuple[str, bool], Blend] = {}
    for blend in _tried(settings):
        found.setdefault((_price(blend), _price(blend) == "nothing" and max(_times(blend)) > 1), blend)
    return list(found.values())


def _first(blend: Blend) -> Option:
    return next(iter(blend.values()))


def _gains(blend: Blend) -> dict[str, Difference]:
    return {setting: one.difference for setting, one in blend.items() if one.difference}


def _times(blend: Blend) -> list[float]:
    """A client's bytes as multiples of FedAvg's."""
    return [one.megabytes / _options()[setting][BASE].megabytes for setting, one in blend.items()]


def _price(blend: Blend) -> str:
    """What a client gives away: one of :data:`PRICES`."""
    one = _first(blend)
    nothing, server, clients, mixtures = PRICES
    return nothing if not one.leaves else mixtures if "seeds" in one.leaves else clients if one.to_clients else server
