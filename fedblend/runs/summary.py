"""Tables of runs: one row for each run and evaluated round, and one row for each method over its seeds."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from fedblend.core.record import RoundRecord
from fedblend.runs.groups import Group, Outcome

if TYPE_CHECKING:
    import pandas as pd

LAST = 10  # Number of evaluations at the end of a run in the mean ``last``, as in FedMix's tables
MEGABYTE = 10**6
MINUTE = 60

NOTHING = "—"


def curves_of(groups: Sequence[Group]) -> pd.DataFrame:
    """Return one row for each run and evaluated round.

    Columns: ``study`` and ``run`` (folders), ``method``, ``seed``, ``finished`` (the run, not the round),
    ``round``, ``accuracy`` (missing in regression), ``loss``, ``train_loss``, each metric (``metric.f1``), the same on
    validation samples (``validation.f1``), shares that parts measure (``measured.taylor_failed``), and the total
    :func:`costs` from the beginning to this round.
    """
    import pandas as pd

    rows = [row for g in groups for o in g.outcomes for row in _rounds(g, o)]
    first = ["study", "run", "method", "seed", "finished", "round", "accuracy", "loss", "train_loss"]
    first += ["bytes_up", "bytes_down", "seconds", "clock"]
    later = sorted({name for row in rows for name in row} - set(first))
    frame = pd.DataFrame(rows, columns=[*first, *later])
    # A kind of bytes or a phase that a run does not have costs nothing.
    free = [name for name in later if not name.startswith(("metric.", "measured.", "validation."))]
    return frame.fillna(dict.fromkeys(free, 0)).astype(dict.fromkeys(["accuracy", "loss", "train_loss"], float))


def _rounds(g: Group, outcome: Outcome) -> Iterable[dict[str, Any]]:
    total: dict[str, float] = defaultdict(float)
    for record in outcome.records:
        for name, number in costs(record).items():
            total[name] += number
        if record.evaluated:
            yield {
                "study": str(outcome.path.parent),
                "run": outcome.path.name,
                "method": g.name,
                "seed": outcome.seed,
                "finished": outcome.finished,
                **{name: getattr(record, name) for name in ("round", "accuracy", "loss", "train_loss")},
                **_scores(record),
                **total,
            }


def _scores(record: RoundRecord) -> dict[str, float]:
    names = list(record.metrics or {})
    found = {f"metric.{name}": record.score_of(name) for name in names}
    found |= {f"measured.{name}": share for name, share in (record.measured or {}).items()}
    found |= {f"validation.{name}": record.score_of(name, True) for name in ("loss", "accuracy", *names)}
    return {name: value for name, value in found.items() if value is not None}


def costs(record: RoundRecord) -> dict[str, float]:
    """Return bytes and seconds of one round, in total and by kind, such as ``bytes_up.weights``."""
    parts: dict[str, Mapping[str, float]] = {
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
        "seconds": record.machine.get("seconds", {}),
    }
    # Time of a federation with clients in parallel, for transmission and computation (0 if neither is known).
    computing = record.machine.get("computing", 0.0) if record.computing is None else record.computing
    clock = sum((record.channel or {}).values()) + computing
    named = {f"{name}.{kind}": number for name, kinds in parts.items() for kind, number in kinds.items()}
    return {name: sum(kinds.values()) for name, kinds in parts.items()} | {"clock": clock} | named


def rows_of(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return one row for each method (runs that differ only in the seed): means over its seeds, by column name.

    Means are over ``seeds`` finished runs, or over all if none is finished; ``status`` and ``states`` tell of the
    others. A column ``x_std`` is the sample standard deviation over seeds (missing with one seed).

    - ``failed``: whether all failed in their first round or before, so that scores, if any, are of the untrained model;
      ``diverged``: the seeds in the means whose final measure is not a finite number;
    - ``measure``: "accuracy", or "loss" in regression; of it ``final``, ``best``, ``last`` (the mean of the last
      ``last_n`` evaluations, 10 at most, the untrained model left out; in the seed with fewest ``last_n_least``) and
      ``chosen``, in the round that was best on validation;
    - ``metric.NAME``: the final value of each metric, and ``larger.NAME``, whether larger is better;
    - ``target_round``: the mean of the first evaluated rounds that reached ``target``; ``target_reached``: in how many
      seeds; ``target_bytes``: the mean of the bytes in both directions until then;
    - ``client_mean``, ``client_std``, ``client_p10``: accuracies over clients, where they have tests;
    - costs of the whole run, also by kind (``bytes_up.weights``) and phase (``seconds.train``); ``peak_memory``: bytes,
      the largest of the seeds'.
    """
    rows = [_row(g) for g in groups]
    names = dict.fromkeys(name for row in rows for name in row)
    # Costs by kind and phase are the last columns. A cost that a method does not have is 0, a metric is missing.
    columns = sorted(names, key=lambda name: name.startswith(("bytes_", "seconds")))
    absent = {name: math.nan if name.startswith(("metric.", "larger.")) else 0.0 for name in columns}
    return [{name: row.get(name, absent[name]) for name in columns} for row in rows]


def _row(g: Group) -> dict[str, Any]:
    counted = [o for o in g.counted if o.evaluated]
    has_accuracy = any(o.evaluated[-1].accuracy is not None for o in counted)
    measure = "accuracy" if has_accuracy else "loss"
    series = [[v for r in o.evaluated if (v := getattr(r, measure)) is not None] for o in counted]
    row: dict[str, Any] = {
        "method": g.name,
        "seeds": len(counted),
        "finished": sum(o.finished for o in g.outcomes),
        "unfinished": len(g.unfinished),
        "status": status(g),
        "states": states(g),
        "failed": all(o.state == "failed" and o.round == 0 for o in counted or g.outcomes),
        "diverged": [o.seed for o, values in zip(counted, series, strict=True) if not math.isfinite(values[-1])],
        "measure": measure,
        **_over_seeds("final", [values[-1] for values in series]),
        **_over_seeds("last", [_mean(_last(values)) for values in series]),
        "eval_every": g.config.get("eval_every", 1),
        "last_n": max((len(_last(values)) for values in series), default=0),
        "last_n_least": min((len(_last(values)) for values in series), default=0),
        **_over_seeds("best", [(max if has_accuracy else min)(_trained(values)) for values in series]),
        **_over_seeds("loss", [v for o in counted if (v := o.evaluated[-1].loss) is not None]),
        **_target(counted, g.config),
        **_chosen(counted, measure),
    }
    for metric in dict.fromkeys(name for o in counted for name in o.evaluated[-1].metrics or {}):
        values = [v for o in counted if (v := o.evaluated[-1].score_of(metric)) is not None]
        row |= _over_seeds(f"metric.{metric}", values)
        row[f"larger.{metric}"] = float(larger_is_better(counted[0], metric))
    over_clients = [clients for o in counted if (clients := o.evaluated[-1].clients) is not None]
    for name in ("mean", "std", "p10"):
        row[f"client_{name}"] = _mean([clients[name] for clients in over_clients])
    spent = [totals(o.records) for o in counted]
    for name in dict.fromkeys(chain(("bytes_up", "bytes_down", "seconds", "clock"), *spent)):
        row[name] = _mean([total.get(name, 0.0) for total in spent])
    peaks = [r.machine["peak_memory"] for o in counted for r in o.records if "peak_memory" in r.machine]
    row["peak_memory"] = max(peaks, default=math.nan)
    return row


def larger_is_better(outcome: Outcome, metric: str) -> bool:
    """Return whether a larger value of a metric is better, as the run's facts state."""
    return bool({"loss": False, **outcome.facts.get("metrics", {})}.get(metric, True))


def validates(config: Mapping[str, Any]) -> bool:
    """Return whether a run has samples for validation."""
    validation = config.get("validation", {})
    return bool(validation.get("server") or validation.get("clients"))


def _target(counted: Sequence[Outcome], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rounds until a trained model first reached the target, and the bytes of these, over seeds."""
    by_seed: dict[int, int | None] = {}
    target, metric = config.get("target"), config.get("target_metric", "accuracy")
    on_validation = validates(config)
    recorded = any(r.score_of(metric, on_validation) is not None for o in counted for r in o.evaluated)
    if target is not None and recorded:
        for o in counted:
            sign = 1 if larger_is_better(o, metric) else -1
            scores = ((r.round, r.score_of(metric, on_validation)) for r in o.evaluated if r.round)
            reached = (round for round, value in scores if value is not None and sign * (value - target) >= 0)
            by_seed[o.seed] = next(reached, None)
    reached_in = [round for round in by_seed.values() if round is not None]
    spent = [totals(r for r in o.records if r.round <= round) for o in counted if (round := by_seed.get(o.seed))]
    return {
        "target": target if target is not None and recorded else math.nan,
        "target_metric": metric,
        "target_on_validation": on_validation,
        **_over_seeds("target_round", reached_in),
        "target_reached": len(reached_in),
        "target_bytes": _mean([total["bytes_up"] + total["bytes_down"] for total in spent]),
        "target_by_seed": by_seed,
    }


def _chosen(counted: Sequence[Outcome], measure: str) -> dict[str, Any]:
    rounds: dict[int, int] = {}
    scores = []
    for o in counted:
        best = next((r.best_round for r in reversed(o.evaluated) if r.best_round is not None), None)
        value = next((getattr(r, measure) for r in o.evaluated if r.round == best), None)
        if best is not None and value is not None:
            rounds[o.seed] = best
            scores.append(value)
    return {
        **_over_seeds("chosen", scores),
        **_over_seeds("chosen_round", list(map(float, rounds.values()))),
        "chosen_by_seed": rounds,
    }


def status(g: Group) -> str:
    """Return ``done``, or the seeds that are not finished with their states and reasons."""
    return "; ".join(f"seed {o.seed}: {o.status_text}" for o in g.unfinished) or "done"


def progress(g: Group) -> str:
    """Return :func:`status` without the reasons."""
    return "; ".join(f"seed {o.seed}: {o.progress_text}" for o in g.unfinished) or "done"


def states(g: Group) -> str:
    """Return ``done``, or the numbers of unfinished runs by state: ``1 failed, 2 stopped``."""
    counts = Counter(o.state for o in g.unfinished)
    return ", ".join(f"{number} {state}" for state, number in counts.items()) or "done"


def totals(records: Iterable[RoundRecord]) -> dict[str, float]:
    """Return the :func:`costs` of all rounds together."""
    total: dict[str, float] = defaultdict(float)
    for record in records:
        for name, number in costs(record).items():
            total[name] += number
    return total


def _trained(values: Sequence[float]) -> Sequence[float]:
    """Return the evaluations without that of the untrained model, unless it is the only one."""
    return values[1:] or values


def _last(values: Sequence[float]) -> Sequence[float]:
    return _trained(values)[-LAST:]


def _over_seeds(name: str, values: Sequence[float]) -> dict[str, float]:
    mean, deviation = _mean(values), math.nan
    if len(values) > 1:
        deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return {name: mean, f"{name}_std": deviation}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def plus_minus(mean: float, std: float = math.nan, digits: int = 1) -> str:
    """Return a mean, with its deviation if there is one, as text.

    >>> plus_minus(71.23, 1.4), plus_minus(71.23), plus_minus(math.nan), plus_minus(math.inf)
    ('71.2 ± 1.4', '71.2', '—', '—')
    """
    if not math.isfinite(mean):
        return NOTHING
    return f"{mean:.{digits}f}" if math.isnan(std) else f"{mean:.{digits}f} ± {std:.{digits}f}"


def score(measure: str, mean: float, std: float = math.nan) -> str:
    """Return an accuracy in per cent, or a loss, as text.

    >>> score("accuracy", 0.7123, 0.014), score("loss", 0.5)
    ('71.2 ± 1.4', '0.500')
    """
    return plus_minus(100 * mean, 100 * std) if measure == "accuracy" else plus_minus(mean, std, 3)


def megabytes(number: float, unit: str = " MB") -> str:
    """Return bytes as megabytes (10^6 bytes), with more decimals for smaller numbers.

    >>> megabytes(4_936_480), megabytes(63_520), megabytes(0), megabytes(12_345_678_900, "")
    ('4.9 MB', '0.064 MB', '0 MB', '12,345.7')
    """
    return NOTHING if math.isnan(number) else _short(number / MEGABYTE, math.inf) + unit


def duration(time: float) -> str:
    """Return seconds or minutes as text, with more decimals for smaller numbers.

    >>> duration(1266.4), duration(31.62), duration(0.1), duration(0.0002), duration(0)
    ('1,266', '31.6', '0.10', '<0.001', '0')
    """
    return NOTHING if math.isnan(time) else _short(time, 100)


def _short(number: float, whole: float) -> str:
    """A number with more decimals the smaller it is; with none from ``whole`` on."""
    if 0 < number < 0.0005:
        return "<0.001"
    digits = 0 if number >= whole or not number else 1 if number >= 1 else 2 if number >= 0.1 else 3
    return f"{number:,.{digits}f}"


def target_text(row: Any) -> str:
    """Return the target of a row of :func:`rows_of` as text: an accuracy in per cent, or another metric with its name.

    >>> target_text({"target": 0.8, "target_metric": "accuracy"}), target_text({"target": 0.5, "target_metric": "f1"})
    ('80 %', 'f1 0.5')
    >>> target_text({"target": 0.8, "target_metric": "accuracy", "target_on_validation": True})
    '80 % on validation'
    """
    metric, target = row["target_metric"], row["target"]
    text = f"{100 * target:g} %" if metric == "accuracy" else f"{metric} {target:g}"
    return f"{text} on validation" if row.get("target_on_validation") else text


def averaged(row: Any) -> str:
    """Return the number of evaluations in ``last`` of a row of :func:`rows_of`.

    >>> averaged({"last_n": 10, "last_n_least": 10}), averaged({"last_n": 3, "last_n_least": 1})
    ('10', '1 to 3')
    """
    most, least = row["last_n"], row["last_n_least"]
    return str(most) if least == most else f"{least} to {most}"


def rounds_to_target(row: Any) -> str:
    """Return a row's rounds to the target, with the number of seeds that reached it unless all did.

    >>> row = {"target": 0.5, "seeds": 3, "target_reached": 2, "target_round": 5.0, "target_round_std": 1.0}
    >>> rounds_to_target(row)
    '5.0 ± 1.0 (2 of 3)'
    """
    if math.isnan(row["target"]) or not row["seeds"]:
        return NOTHING
    if not row["target_reached"]:
        return "not reached"
    several = row["target_reached"] > 1
    text = plus_minus(row["target_round"], row["target_round_std"], digits=1 if several else 0)
    return text if row["target_reached"] == row["seeds"] else f"{text} ({row['target_reached']} of {row['seeds']})"
