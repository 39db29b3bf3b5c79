"""Which blend helps on given data: candidates, what their runs show, and the answer in words."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from fedblend.analysis.privacy.leak_report import leak_report
from fedblend.core.engine import client_parts
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import Experiment
from fedblend.experiment.make_setup import make_setup
from fedblend.experiment.study import expand
from fedblend.runs.differences import Difference, certain_together, paired_difference
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import Group, group
from fedblend.runs.summary import MEGABYTE, NOTHING, costs

BASE = "fedavg"  # The method that a blend must beat

BLENDS = "fedprox localmix naivemix fedmix-checked virtual-means server-means vhl fed-augmix aggenhance"
CANDIDATES = (BASE, *BLENDS.split())
"""Methods that are tried unless the user names others: FedAvg, and blends whose clients give no raw sample away."""

HEADS = ("fed3r", "fedlda", "fedncm")  # Further ones where the model is one dense layer, a head on features

RATES = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Learning rates that are tried where the file does not say what to search, as multiples of its own."""

SEEDS = [0, 1, 2]  # Seeds that fill up those of a file with fewer

NOT_TAKEN = ("method", "methods", "seed", "variants", "grid")
"""Fields of a file that a study does not take over: the candidates are its methods, and it has several seeds."""

OF_MODELS = ("weights", "masked", "keys", "extras")
"""Kinds of payload that are models, or made of their changes as SCAFFOLD's control variates are."""

LAST = 3  # Evaluations at the end of a run whose mean is its score


@dataclass(frozen=True)
class Limits:
    """What the user allows."""

    megabytes: float | None = None
    """Most megabytes that a client sends and receives in the run, the mean over clients."""
    score: float | None = None
    """Least score; the largest loss where a smaller score is better."""
    leaves: frozenset[str] | None = None
    """Kinds of payload that may leave a client beside its model; ``None`` for all but raw samples."""

    def fault(self, option: Option, larger_is_better: bool) -> str:
        """Why an option is not allowed; empty for one that is."""
        forbidden = [k for k in option.leaves if (k == "raw" if self.leaves is None else k not in self.leaves)]
        if forbidden:
            return f"{', '.join(forbidden)} may not leave a client"
        if self.megabytes is not None and option.megabytes > self.megabytes:
            return f"needs {option.megabytes:.3g} MB a client"
        if self.score is not None and (option.score < self.score if larger_is_better else option.score > self.score):
            return f"reaches {option.score:.4g} only"
        return ""


@dataclass(frozen=True)
class Option:
    """What the runs of one method show."""

    method: str
    scores: dict[int, float]
    """The score on the test samples by seed: the mean of the last evaluations. Without seeds that diverged."""
    megabytes: float
    """Megabytes that a client sent and received, the mean over clients and seeds."""
    leaves: tuple[str, ...]
    """Kinds of payload that left clients beside the model."""
    to_clients: bool
    """Whether other clients receive what clients share, or the server alone."""
    membership: dict[str, float]
    """Membership advantage by kind of payload, of the first seed's run."""
    recognised: float
    """Share of shared samples of which the nearest raw sample is one that they were made of; NaN without such."""
    difference: Difference | None = None
    """The score minus that of :data:`BASE` with the same seeds."""
    fault: str = ""
    """Why the limits exclude it."""

    @property
    def score(self) -> float:
        """The mean over seeds; NaN where every seed diverged."""
        return fmean(self.scores.values()) if self.scores else math.nan

    @property
    def given_away(self) -> str:
        """What leaves a client beside its model, and to whom, in words."""
        whom = "the server and the other clients" if self.to_clients else "the server alone"
        return f"{', '.join(self.leaves)}, to {whom}" if self.leaves else "nothing"

    @property
    def exposure(self) -> float:
        """The largest membership advantage, which may be below 0 by chance; NaN where none was measured."""
        return max((one for one in self.membership.values() if not math.isnan(one)), default=math.nan)


@dataclass(frozen=True)
class Advice:
    """All options, and the answer."""

    metric: str
    larger_is_better: bool
    options: list[Option]
    """In the order of the candidates."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Candidates that cannot be used with these data, with the reason."""

    @property
    def base(self) -> Option:
        """FedAvg's option."""
        return next(option for option in self.options if option.method == BASE)

    @property
    def sign(self) -> int:
        """1 where a larger score is better, -1 where a smaller one is."""
        return 1 if self.larger_is_better else -1

    @property
    def compared(self) -> dict[str, float]:
        """The p-value of each method's difference to FedAvg that was tested."""
        return {option.method: option.difference.p_value for option in self.options if option.difference is not None}

    @property
    def helping(self) -> list[Option]:
        """The allowed options that help or may help: those that help first, of these the best score first."""
        words = ("helps", "may help")
        helping = [option for option in self.options if not option.fault and self.verdict(option) in words]
        return sorted(helping, key=lambda option: (words.index(self.verdict(option)), -self.sign * option.score))

    @property
    def best(self) -> Option | None:
        """The first of :attr:`helping`; ``None`` if there is none."""
        return next(iter(self.helping), None)

    @property
    def to_run(self) -> Option | None:
        """The advised option: the best one, or FedAvg; ``None`` where FedAvg does not keep the limits either."""
        return self.best or (None if self.base.fault else self.base)

    def verdict(self, option: Option) -> str:
        """Whether an option "helps", "hurts", is "level" with FedAvg as far as the seeds can tell, or is the "base".

        It "may help" or "may hurt" where zero lies outside its own interval, but the difference is not certain among
        all that were tested (:func:`~fedblend.runs.differences.certain_together`). An option of which a seed failed or
        diverged "failed", whatever the others say.
        """
        if option.method == BASE:
            return "base"
        if not self.base.scores.keys() <= option.scores.keys():
            return "failed with a seed"
        if (d := option.difference) is None:
            return "one seed"
        if d.low <= 0 <= d.high:
            return "level"
        word = "help" if self.sign * d.mean > 0 else "hurt"
        return f"{word}s" if option.method in certain_together(self.compared) else f"may {word}"

    def as_text(self, value: float, signed: bool = False) -> str:
        """A score in words: accuracies in percent."""
        if math.isnan(value):
            return NOTHING
        number = 100 * value if self.metric == "accuracy" else value
        return f"{number:{'+' if signed else ''}.{1 if self.metric == 'accuracy' else 3}f}"

    def interval(self, option: Option) -> str:
        """The difference to FedAvg with its interval, in words."""
        d = option.difference
        if d is None:
            return ""
        mean, low, high = (self.as_text(value, signed=True) for value in (d.mean, d.low, d.high))
        return f"{mean} [{low}, {high}]"

    def answer(self) -> list[str]:
        """The answer in sentences."""
        unit = " points" if self.metric == "accuracy" else ""
        seeds, best, base = len(self.base.scores), self.best, self.base
        if best is None and base.fault:
            return [f"Nothing that helps for certain keeps the limits, nor does FedAvg: it {base.fault}."]
        if best is None:
            found = [f"No blend helps for certain here, over {seeds} seeds: train with FedAvg."]
            level = [option for option in self.options if self.verdict(option) == "level" and not option.fault]
            level = [option for option in level if option.difference and self.sign * option.difference.mean > 0]
            if level:
                guess = max(level, key=lambda option: self.sign * option.score)
                found.append(
                    f"The best guess is {guess.method}: {self.interval(guess)}{unit}; more seeds would decide it."
                )
            return found
        word = self.verdict(best)
        found = [
            f"{best.method} {word}: {self.interval(best)}{unit} over FedAvg's {self.as_text(base.score)}, "
            f"{seeds} seeds."
        ]
        if word == "may help":
            found.append(f"This is not certain among {len(self.compared)} comparisons; more seeds would decide it.")
        more = best.megabytes - base.megabytes
        found.append(f"It costs a client {best.megabytes:.3g} MB in all, {more:+.3g} MB beside FedAvg.")
        found.append(f"What leaves a client beside its model: {best.given_away}.")
        if not math.isnan(best.recognised):
            found.append(
                f"Of the shared samples, {best.recognised:.0%} are nearest to a raw sample that they were made of."
            )
        if not math.isnan(best.exposure):
            found.append(
                f"An attacker tells members from others with an advantage of {best.exposure:.3f} "
                f"(FedAvg: {base.exposure:.3f}; 0 is guessing)."
            )
        found += [
            f"{other.method} {self.verdict(other)} too: {self.interval(other)}{unit}, {other.megabytes:.3g} MB in all; "
            f"beside its model a client gives away {other.given_away}."
            for other in self.helping[1:]
        ]
        return found

    def table(self) -> dict[str, Any]:
        """The advice as plain data; NaN becomes ``None``."""
        rows = []
        for option in self.options:
            row = {**asdict(option), "verdict": self.verdict(option)}
            row["recognised"] = None if math.isnan(option.recognised) else option.recognised
            row["membership"] = {k: None if math.isnan(v) else v for k, v in option.membership.items()}
            if option.difference is not None:
                row["difference"] |= {"low": option.difference.low, "high": option.difference.high}
            rows.append(row)
        best = self.best
        return {
            "metric": self.metric,
            "larger_is_better": self.larger_is_better,
            "base": BASE,
            "best": best.method if best else None,
            "answer": self.answer(),
            "options": rows,
            "left_out": self.left_out,
        }


def front(options: Sequence[Option], cost: Mapping[str, float], larger_is_better: bool = True) -> list[Option]:
    """The options that no other one beats in score and cost: the Pareto front, by rising cost.

    Options without a cost or a score (NaN) are not on it.
    """
    sign = 1 if larger_is_better else -1
    known = [option for option in options if not math.isnan(cost[option.method] + option.score)]
    found: list[Option] = []
    for option in sorted(known, key=lambda one: (cost[one.method], -sign * one.score)):
        if not found or sign * option.score > sign * found[-1].score:
            found.append(option)
    return found


# Before the runs ---------------------------------------------------------------------------------------------


def study_of(
    table: Mapping[str, Any], methods: Sequence[str] | None, limits: Limits = Limits()
) -> tuple[dict[str, Any], dict[str, str]]:
    """A file's table with the candidates that its data and model permit, and what is to be searched.

    Without ``methods`` these are :data:`CANDIDATES`. It has at least three seeds: the file's, and where these are
    fewer the smallest others. Also returns the other candidates, each with the reason. Raises :class:`FedblendError`
    if FedAvg is one of these, and for a least accuracy above 1.
    """
    study = copy.deepcopy({key: value for key, value in table.items() if key not in NOT_TAKEN})
    study.setdefault("validation", {"clients": 0.1})
    seed = {"seed": table["seed"]} if "seed" in table else {}
    plain = expand({key: value for key, value in study.items() if key != "tune"} | seed | {"method": BASE})
    first, *_ = plain.experiments.values()
    seeds = [one.seed for one in plain.experiments.values()]
    if methods is None:
        methods = (*CANDIDATES, *(HEADS if getattr(first.model, "hidden", None) == () else ()))
    others = [one for one in SEEDS if one not in seeds]
    study["seeds"] = seeds + others[: max(0, len(SEEDS) - len(seeds))]
    if "tune" not in study:
        rates = [float(f"{rate * first.train.lr:.4g}") for rate in RATES]
        study["tune"] = {"search": "grid", "halving": True, "fields": {"train.lr": rates}}
    data, possible, left_out = first.data.load(), [], {}
    measured = first.validation.metric or ("accuracy" if data.task == "classification" else "loss")
    if measured == "accuracy" and (limits.score or 0) > 1:
        raise FedblendError(f"--least {limits.score:g}: an accuracy is from 0 to 1; valid: such as 0.8 for 80 %")
    for method in dict.fromkeys((BASE, *methods)):
        plainly = {key: value for key, value in study.items() if key not in ("tune", "seeds")}
        try:
            experiment = next(iter(expand({**plainly, "method": method}, seeds=[0]).experiments.values()))
            _require_possible(experiment, data)
        except FedblendError as error:
            if method == BASE:
                raise
            left_out[method] = str(error)
        else:
            possible.append(method)
    study["methods"] = possible
    return study, left_out


def _require_possible(experiment: Experiment, data: Any) -> None:
    """Raise :class:`FedblendError` for a method that cannot be used; some say so only when clients train."""
    train = experiment.train.model_copy(update={"cohort": 1, "epochs": 1})
    small = experiment.model_copy(update={"train": train, "min_uploads": 0})
    setup = make_setup(small, data)
    loop = RoundLoop(setup, LoopEngine(setup))
    loop.round(loop.start()[0])


# After the runs ----------------------------------------------------------------------------------------------


def read_advice(
    runs: Sequence[RunDirectory], metric: str, larger_is_better: bool, limits: Limits, left_out: Mapping[str, str]
) -> Advice:
    """What runs show that differ in method and seed alone. Raises :class:`FedblendError` without a run of FedAvg.

    A seed whose score is not a finite number diverged, and counts as failed.
    """
    groups = group(runs)
    found = {g.name: _option(g, metric) for g in groups if any(outcome.finished for outcome in g.outcomes)}
    left_out = {**left_out, **{g.name: "no run finished" for g in groups if g.name not in found}}
    if BASE not in found:
        raise FedblendError(f"no run of '{BASE}', with which the others are compared")
    if not found[BASE].scores:
        raise FedblendError(
            f"every run of '{BASE}' diverged, with which the others are compared; set a smaller train.lr"
        )
    options = []
    for option in found.values():
        difference = None if option.method == BASE else paired_difference(option.scores, found[BASE].scores)
        options.append(replace(option, difference=difference, fault=limits.fault(option, larger_is_better)))
    return Advice(metric, larger_is_better, options, dict(left_out))


def _option(g: Group, metric: str) -> Option:
    scores, megabytes = {}, []
    for outcome in g.counted:
        values = [v for record in outcome.evaluated if record.round and (v := record.score_of(metric)) is not None]
        if values and math.isfinite(score := fmean(values[-LAST:])):
            scores[outcome.seed] = score
        sent = sum(costs(record)[way] for record in outcome.records for way in ("bytes_up", "bytes_down"))
        megabytes.append(sent / MEGABYTE / max(1, outcome.facts["clients"]["number"]))
    run = RunDirectory(g.counted[0].path)
    method = run.experiment().method
    sharing, objective = method.sharing, method.objective
    leaks = leak_report(run, trust=True).leaks
    statistics = any(part.exchanges == "map-statistics" for part in client_parts(method).values())
    beside = [leak for leak in leaks if leak.kind not in OF_MODELS or (leak.kind == "extras" and statistics)]
    return Option(
        method=g.name,
        scores=scores,
        megabytes=fmean(megabytes),
        leaves=tuple(dict.fromkeys(leak.kind for leak in beside)),
        to_clients=bool(sharing.plan.leaves and objective.needs),
        membership={leak.kind: leak.membership for leak in leaks},
        recognised=max((leak.recognised for leak in beside if not math.isnan(leak.recognised)), default=math.nan),
    )
