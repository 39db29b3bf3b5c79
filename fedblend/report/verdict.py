"""What a comparison of methods shows, in sentences made from its numbers: what helps, by how much, at which price.

A difference is named where it is not chance: where its 95 % interval over common seeds leaves out zero after Holm's
correction for all methods that are compared (:func:`~fedblend.runs.differences.certain_together`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedblend.core.errors import listed
from fedblend.report.columns import WHEN, MethodRow, evaluated_alike, measure_of, rounds_of_all_seeds, score_of
from fedblend.runs.differences import Difference, certain_together, paired_difference
from fedblend.runs.summary import MEGABYTE, megabytes, target_text

NO_SEEDS = "No method has two finished seeds in common with the baseline, so that nothing is compared."
ONE_SEED = "One seed decides nothing: a difference may be chance. Give three seeds or more, such as seeds = [0, 1, 2]."


@dataclass(frozen=True)
class Comparison:
    """One measure of several methods beside that of the baseline, over the seeds that both finished."""

    found: dict[str, Difference]
    sign: int
    """1 where more is better, -1 where less is."""

    def certain(self, direction: int) -> list[str]:
        """The methods that are better for certain (1) or worse (-1), the largest difference first."""
        sure = certain_together({name: one.p_value for name, one in self.found.items()})
        chosen = [name for name in sure if direction * self.sign * self.found[name].mean > 0]
        return sorted(chosen, key=lambda name: -abs(self.found[name].mean))

    @property
    def unsure(self) -> list[str]:
        """The methods whose difference may be chance."""
        return [name for name in self.found if name not in (*self.certain(1), *self.certain(-1))]


def verdict(rows: Sequence[MethodRow], baseline: str | None) -> list[str]:
    """The sentences for the methods of one data set beside ``baseline``; empty where there is nothing to compare."""
    base = next((row for row in rows if row["method"] == baseline and row["by_seed"]), None)
    others = [row for row in rows if row is not base and row["by_seed"] and not row["failed"]]
    if base is None or base["failed"] or not others:
        return []
    if max(len(row["by_seed"].keys() & base["by_seed"].keys()) for row in others) < 2:
        return [NO_SEEDS if len(base["by_seed"]) > 1 and any(len(row["by_seed"]) > 1 for row in others) else ONE_SEED]
    safe, which = [row for row in others if not row["unsafe"]], score_of(rows)
    final = _compared(safe, base, lambda row: row[which], 1 if measure_of(rows) == "accuracy" else -1)
    sentences, helping = [], final.certain(1)
    if not math.isnan(base["target"]) and evaluated_alike(rows):
        rounds = _compared(safe, base, rounds_of_all_seeds, -1)
        sentences += _to_target(safe, base, rounds)
        helping = [*rounds.certain(1), *helping]
    sentences.append(_scores(base, final, WHEN[which]))
    if left_out := [row["method"] for row in safe if row["method"] not in final.found]:
        sentences.append(f"Not compared, since it diverged or lacks common seeds: {listed(left_out)}.")
    if helping:
        sentences.append(_price(next(row for row in rows if row["method"] == helping[0]), base))
    return sentences


def _compared(rows: Sequence[MethodRow], base: MethodRow, value: Callable[[MethodRow], float], sign: int) -> Comparison:
    found = {}
    for row in rows:
        seeds = row["by_seed"].keys() & base["by_seed"].keys()
        mine, theirs = ({seed: value(one["by_seed"][seed]) for seed in seeds} for one in (row, base))
        finite = all(map(math.isfinite, (*mine.values(), *theirs.values())))
        if finite and (difference := paired_difference(mine, theirs)) is not None:
            found[row["method"]] = difference
    return Comparison(found, sign)


def _to_target(rows: Sequence[MethodRow], base: MethodRow, rounds: Comparison) -> list[str]:
    target, name = target_text(base), base["method"]
    reached = [row for row in rows if row["target_reached"] == row["seeds"]]
    missed = [f"{row['method']} ({row['target_reached']} of {row['seeds']})" for row in rows if row not in reached]
    sentences = []
    if base["target_reached"] < base["seeds"]:
        own = f"{name} ({base['target_reached']} of {base['seeds']})"
        if not reached:
            return [f"No method reaches {target} with every seed: {listed([own, *missed])}."]
        does = [f"{row['method']} does, in {row['target_round']:.1f} rounds" for row in reached]
        sentences.append(
            f"{name} reaches {target} with {base['target_reached']} of {base['seeds']} seeds; {listed(does)}."
        )
    elif sooner := rounds.certain(1):
        row = next(row for row in rows if row["method"] == sooner[0])
        cost = _compared([row], base, lambda one: one["target_bytes"] / MEGABYTE, -1).found[sooner[0]]
        # Means over the seeds of the difference.
        mine, theirs = (
            {key: fmean(one["by_seed"][seed][key] for seed in cost.seeds) for key in ("target_round", "target_bytes")}
            for one in (row, base)
        )
        digits = 1 if theirs["target_bytes"] > MEGABYTE else 3
        sentences.append(
            f"{sooner[0]} reaches {target} in {mine['target_round']:.1f} rounds instead of "
            f"{theirs['target_round']:.1f} ({_interval(rounds.found[sooner[0]], 1)}), with "
            f"{megabytes(mine['target_bytes'])} instead of {megabytes(theirs['target_bytes'])} "
            f"({_interval(cost, digits)})."
        )
    if more := [f"{one} ({_interval(rounds.found[one], 1)})" for one in rounds.certain(1)[1:]]:
        sentences.append(f"Also sooner, in rounds: {listed(more)}.")
    if later := [f"{one} ({_interval(rounds.found[one], 1)})" for one in rounds.certain(-1)]:
        sentences.append(f"Later, in rounds: {listed(later)}.")
    if rounds.unsure:
        sentences.append(f"Rounds to {target} within noise: {listed(rounds.unsure)}.")
    if missed:
        sentences.append(f"{target} not with every seed: {listed(missed)}.")
    return sentences


def _scores(base: MethodRow, final: Comparison, when: str) -> str:
    when = when.capitalize()
    factor, digits, unit = (100, 1, " points") if base["measure"] == "accuracy" else (1, 3, " of loss")
    texts = {name: _interval(one, digits, factor, unit) for name, one in final.found.items()}
    parts = [
        f"{word}: {listed([f'{name} ({texts[name]})' for name in names])}"
        for word, names in (("better", final.certain(1)), ("worse", final.certain(-1)))
        if names
    ]
    if not parts:
        among = f" among {len(texts)} (Holm's correction)" if len(texts) > 1 else ""
        return f"{when} no difference to {base['method']} is certain{among}."
    rest = f"; within noise: {listed(final.unsure)}" if final.unsure else ""
    return f"{when}, beside {base['method']}, {'; '.join(parts)}{rest}."


def _price(row: MethodRow, base: MethodRow) -> str:
    """What the helping method sends that the baseline does not, and its bytes."""
    more = {
        name.partition(".")[2]: number
        for name, number in row.items()
        if name.startswith("bytes_up.") and number and not base.get(name)
    }
    sent, of_base = (one["bytes_up"] + one["bytes_down"] for one in (row, base))
    times = f"{sent / of_base:.2f} times" if of_base else f"{megabytes(sent)} beside"
    beside = listed([f"{megabytes(number)} of {kind}" for kind, number in more.items()])
    extra = f"its clients also send {beside}; " if more else ""
    return f"Price of {row['method']}: {extra}all rounds together take {times} the bytes of {base['method']}."


def _interval(one: Difference, digits: int, factor: float = 1, unit: str = "") -> str:
    low, high = factor * one.low, factor * one.high
    return f"{factor * one.mean:+.{digits}f}{unit}; 95 %: {low:+.{digits}f} to {high:+.{digits}f}"
