"""Columns that the tables of the page and of the terminal share: a cell for each method over its seeds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedblend.report.guarantees import shares_raw_samples
from fedblend.runs import summary
from fedblend.runs.differences import LEVEL, Difference, paired_difference
from fedblend.runs.groups import Group
from fedblend.runs.summary import MEGABYTE, MINUTE, NOTHING, averaged, duration, plus_minus, rows_of, score

MethodRow = dict[str, Any]
"""A method's row of :func:`~fedblend.runs.summary.rows_of`, by column name.

``by_seed`` has the same row of each finished run alone; ``unsafe`` is whether the method shares raw samples.
"""

BOLD_RULE = (
    "Bold: the best of a column where the 95 % interval of its difference to every other method, over the same seeds, "
    "leaves out zero. Never bold: one seed, numbers that are the same with every seed (such as bytes), two or three "
    "equal differences, and a method that shares raw samples."
)
"""The rule of :func:`best_row`, for readers."""

HEADING_WIDTH = 16  # Letters in a line of a heading that has a name, in the terminal

CellText = Callable[[MethodRow], str]
CellValue = Callable[[MethodRow], float]


@dataclass(frozen=True)
class Column:
    """A column of a table, with a cell for each method."""

    heading: str
    text: CellText
    value: CellValue
    """The number by which cells are compared and sorted; NaN: none."""
    sign: int
    """1 where more is better, -1 where less is better, 0 where neither is."""
    explanation: str = ""
    exact: bool = False
    """Whether values are counted, such as bytes (:func:`~fedblend.runs.differences.half_width`)."""
    short: str = ""
    """The heading in the terminal; columns without one are on the page only."""


def method_rows(groups: Sequence[Group]) -> list[MethodRow]:
    """The rows of methods on one data set; a method that failed before its first round has NaN as scores."""
    finished = {g.name: [o for o in g.outcomes if o.finished] for g in groups}
    single = [Group(name, [outcome]) for name, outcomes in finished.items() for outcome in outcomes]
    rows = rows_of([*groups, *single])  # at once, so that all rows have the same columns
    of_seeds = iter(rows[len(groups) :])
    scores = dict.fromkeys(("final", "last", "best", "chosen"), math.nan)
    return [
        row
        | (scores if row["failed"] else {})
        | {"by_seed": {outcome.seed: next(of_seeds) for outcome in finished[g.name]}}
        | {"unsafe": shares_raw_samples(g.outcomes[0])}
        for g, row in zip(groups, rows, strict=False)
    ]


def best_row(rows: Sequence[MethodRow], column: Column) -> int | None:
    """The index of the row that is best in a column under :data:`BOLD_RULE`.

    Rows without a finite value, without a finished run, or of methods that share raw samples are not compared. There is
    none if another compared cell has the same text.
    """
    text, value, sign = column.text, column.value, column.sign
    if not sign:
        return None
    compared = {
        i: {seed: value(of_seed) for seed, of_seed in row["by_seed"].items()}
        for i, row in enumerate(rows)
        if row["by_seed"] and not row["unsafe"] and math.isfinite(value(row))
    }
    if len(compared) < 2 or (column.exact and all(len({*values.values()}) == 1 for values in compared.values())):
        return None
    best = max(compared, key=lambda i: sign * value(rows[i]))

    def clear(i: int) -> bool:
        found = paired_difference(compared[best], compared[i], column.exact)
        leads = found is not None and min(sign * found.low, sign * found.high) > 0
        return leads and text(rows[i]) != text(rows[best])

    return best if all(clear(i) for i in compared if i != best) else None


def result_columns(rows: Sequence[MethodRow], baseline: str | None) -> tuple[list[Column], list[Column], list[Column]]:
    """The columns of scores, of rounds to the target (empty without one), and of costs; on one data set."""
    accuracy = measure_of(rows) == "accuracy"
    sign = 1 if accuracy else -1
    over_evaluations = sign if evaluated_alike(rows) else 0
    last, mean_of_last = last_evaluations(rows)
    unit, time = times(rows)

    def best(row: MethodRow) -> str:
        return score(row["measure"], row["best"], row["best_std"])

    def memory(row: MethodRow) -> str:
        return NOTHING if math.isnan(row["peak_memory"]) else f"{row['peak_memory'] / MEGABYTE:,.0f}"

    scores = [
        Column("seeds", lambda row: str(row["seeds"]), lambda row: row["seeds"], 0,
               "finished runs averaged, or all where none is finished", short="seeds"),
        Column(f"final {'accuracy (%)' if accuracy else 'loss'}", final_score, lambda row: row["final"], sign,
               "after the last round; mean ± sample deviation over seeds",
               short="accuracy\n% ± std" if accuracy else "loss\n± std"),
        *difference_columns(rows, baseline),
        Column(last, mean_of_last, lambda row: row["last"], over_evaluations,
               "the mean of the last evaluations, ten at most", short=last.replace("of last", "of\nlast")),
        *(chosen_columns(rows) or [
            Column("best", best, lambda row: row["best"], over_evaluations,
                   "the best of all evaluations; it was selected on the test samples"),
        ]),
    ]  # fmt: skip
    costs = [
        bytes_column("bytes_up", "up (MB)", "sent by all clients together, in the whole run", -1, "MB\nup"),
        bytes_column("bytes_down", "down (MB)", "sent to all clients together, in the whole run", -1, "MB\ndown"),
        Column(f"time ({unit})", time, lambda row: row["seconds"], -1, "wall clock of a whole run, with evaluation",
               short=f"time\n{unit}"),
        Column("peak memory (MB)", memory, lambda row: row["peak_memory"], 0, "the largest of the run's process"),
        Column("status", lambda row: str(row["states"]), lambda row: row["unfinished"], 0, "whether all runs finished"),
    ]  # fmt: skip
    targets = {summary.target_text(row) for row in rows if not math.isnan(row["target"])}
    if not targets:
        return scores, [], costs
    to = f"rounds to {targets.pop()}" if len(targets) == 1 else "rounds to target"
    where = " on the validation samples" if any(row["target_on_validation"] for row in rows) else ""
    why = f"the first evaluated round that reached it{where}, over the seeds that did"
    short = to.replace("rounds to", "rounds\nto").replace(" on ", "\non ")
    sign = -abs(over_evaluations)
    return scores, [Column(to, summary.rounds_to_target, rounds_of_all_seeds, sign, why, short=short)], costs


def bytes_column(name: str, heading: str, explanation: str, sign: int = 0, short: str = "") -> Column:
    """Megabytes of one count of a row."""

    def value(row: MethodRow) -> float:
        return float(row[name] / MEGABYTE)

    return Column(heading, lambda row: summary.megabytes(row[name], ""), value, sign, explanation, True, short)


def rounds_of_all_seeds(row: MethodRow) -> float:
    """Rounds to the target, or NaN unless every seed reached it: a mean over the best seeds alone is no comparison."""
    return row["target_round"] if row["target_reached"] == row["seeds"] else math.nan


WHEN = {"final": "after the last round", "chosen": "in the round that was best on validation"}
"""When the scores are taken that methods are compared by."""


def score_of(rows: Sequence[MethodRow]) -> str:
    """The score that methods are compared by, of :data:`WHEN`: that of validation, where every method has it."""
    return "final" if any(math.isnan(row["chosen"]) for row in rows if row["by_seed"]) else "chosen"


def difference_columns(rows: Sequence[MethodRow], baseline: str | None) -> list[Column]:
    """The difference of each method to the baseline over the same seeds; empty where no two seeds are common."""
    base = next((row for row in rows if row["method"] == baseline), None)
    if base is None:
        return []
    which = score_of(rows)
    factor, digits = (100, 1) if measure_of(rows) == "accuracy" else (1, 3)

    def scores(row: MethodRow) -> dict[int, float]:
        return {seed: factor * of_seed[which] for seed, of_seed in row["by_seed"].items()}

    def difference(row: MethodRow) -> Difference | None:
        return None if row is base or row["failed"] else paired_difference(scores(row), scores(base))

    def text(row: MethodRow) -> str:
        if row is base:
            return "baseline"
        if (found := difference(row)) is None:
            return NOTHING
        seeds = "" if len(found.seeds) == len(row["by_seed"]) else f" ({len(found.seeds)} seeds)"
        return f"{found.mean:+.{digits}f} [{found.low:+.{digits}f}, {found.high:+.{digits}f}]{seeds}"

    def value(row: MethodRow) -> float:
        return 0.0 if row is base else found.mean if (found := difference(row)) is not None else math.nan

    if all(difference(row) is None for row in rows):
        return []
    unit = "percentage points of accuracy" if factor == 100 else "loss"
    why = (
        f"{unit} {WHEN[which]}: mean over the seeds that both methods finished of the difference with the same seed, "
        f"and its {100 * LEVEL:g} % interval (Student's t)"
    )
    of = {"final": "", "chosen": " (best on validation)"}[which]
    to = f"to {baseline}{of}"
    return [Column(f"difference {to}", text, value, 0, why, short=f"difference\n{_in_lines(to)}")]


def evaluated_alike(rows: Sequence[MethodRow]) -> bool:
    """Whether all methods were evaluated in the same rounds, so that what is taken over evaluations compares."""
    return len({row["eval_every"] for row in rows if row["seeds"]}) < 2


def evaluations_note(rows: Sequence[MethodRow]) -> str:
    """The rounds between evaluations of each method where they are not the same in all."""
    if evaluated_alike(rows):
        return ""
    texts = [f"{row['method']} every {row['eval_every']}" for row in rows if row["seeds"]]
    return (
        f"Rounds of evaluation differ: {', '.join(texts)}. So means of the last evaluations, best ones and rounds to a "
        "target do not compare, and are never bold."
    )


def rounds_note(groups: Sequence[Group]) -> str:
    """The number of rounds of each method where it is not the same in all: scores and costs are of whole runs."""
    rounds = {g.name: sorted({o.round for o in g.counted}) for g in groups if g.counted[0].finished}
    if len({tuple(numbers) for numbers in rounds.values()}) < 2:
        return ""
    texts = [
        f"{name} {numbers[0]}{f' to {numbers[-1]}' if len(numbers) > 1 else ''}" for name, numbers in rounds.items()
    ]
    return f"Rounds differ: {', '.join(texts)}. Scores, differences and costs are of whole runs."


def measure_of(rows: Sequence[MethodRow]) -> str:
    """The measure of the methods of one data set: ``accuracy``, or ``loss`` in regression."""
    return next((row["measure"] for row in rows if row["seeds"]), "accuracy")


def final_score(row: Mapping[str, Any]) -> str:
    """The final accuracy or loss, "failed" where no run of the method made a round, or the seeds that diverged."""
    if row["diverged"] and not row["failed"]:
        return f"diverged: seed{'s' if len(row['diverged']) > 1 else ''} {', '.join(map(str, row['diverged']))}"
    return "failed" if row["failed"] else score(row["measure"], row["final"], row["final_std"])


def last_evaluations(rows: Sequence[MethodRow]) -> tuple[str, CellText]:
    """Heading and cells of the mean of the last evaluations. Their number is in the heading if all methods share it."""
    evaluated = [row for row in rows if row["seeds"]]
    counts = {averaged(row) for row in [row for row in evaluated if not row["failed"]] or evaluated}

    def text(row: MethodRow) -> str:
        mean = score(row["measure"], row["last"], row["last_std"])
        return f"{mean} (n = {averaged(row)})" if len(counts) > 1 and not math.isnan(row["last"]) else mean

    return f"mean of last {next(iter(counts)) if len(counts) == 1 else 'n'}", text


def chosen_columns(rows: Sequence[MethodRow]) -> list[Column]:
    """The test score in the round that was best on validation; empty where no run has samples for validation."""
    if all(math.isnan(row["chosen"]) for row in rows):
        return []

    def text(row: MethodRow) -> str:
        if math.isnan(row["chosen"]):
            return NOTHING
        rounds = plus_minus(row["chosen_round"], digits=0 if len(row["chosen_by_seed"]) == 1 else 1)
        return f"{score(row['measure'], row['chosen'], row['chosen_std'])} (round {rounds})"

    why = "on the test samples, in the round that was best on the validation samples (the mean round over seeds)"
    sign = 1 if measure_of(rows) == "accuracy" else -1
    return [Column("best on validation", text, lambda row: row["chosen"], sign, why, short="best\non validation")]


def metric_columns(rows: Sequence[MethodRow]) -> list[Column]:
    """The final values of the experiment's metrics."""
    names = dict.fromkeys(name.removeprefix("metric.") for row in rows for name in row if name.startswith("metric."))
    means = [name for name in names if not (name.endswith("_std") and name.removesuffix("_std") in names)]

    def column(name: str) -> Column:
        def value(row: MethodRow) -> float:
            return math.nan if row["failed"] else float(row.get(f"metric.{name}", math.nan))

        def text(row: MethodRow) -> str:
            return plus_minus(value(row), row.get(f"metric.{name}_std", math.nan), 3)

        found = [sign for row in rows if not math.isnan(sign := float(row.get(f"larger.{name}", math.nan)))]
        why = "after the last round, on the test samples; mean ± sample deviation over seeds"
        return Column(name, text, value, -1 if found[:1] == [0.0] else 1, why, short=_in_lines(name))

    return [column(name) for name in means]


def _in_lines(heading: str) -> str:
    return textwrap.fill(heading, HEADING_WIDTH, break_long_words=False)


def times(rows: Sequence[MethodRow]) -> tuple[str, CellText]:
    """Unit and cells of the whole time: minutes, or seconds where a run took less than a minute."""
    minutes = all(row["seconds"] >= MINUTE for row in rows if row["seeds"])
    return "min" if minutes else "s", lambda row: duration(row["seconds"] / (MINUTE if minutes else 1))
