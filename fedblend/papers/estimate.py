"""About how long an item takes on this machine: the time of a training step, measured once and kept, times steps.

A step is timed with the run's own model, method and batch size on made-up inputs of the data set's shape
(:func:`fedblend.engines.autotune.seconds_a_step`). What is left out: aggregation, and engines that run clients faster
than one after another; so an estimate tells minutes from hours, and no more.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path

from fedblend.core import registry
from fedblend.core.errors import FedblendError
from fedblend.experiment.config import Experiment
from fedblend.papers.availability import Size
from fedblend.papers.plan import ItemPlan
from fedblend.papers.synthetic import BATCHES, size_of
from fedblend.runs.parallel import processors

BUDGET_S = 4.0
"""Seconds that one look at the list spends on timing; what is left over then is timed the next time."""

TRIALS = 4
"""Times that :func:`seconds_a_step` trains on the same batches."""

OFFHAND_S = 0.003
"""Seconds of a step that nothing is known of yet."""

FULL_BATCH = 10
"""Samples from which on a step's time is about in proportion to them; below, it is mostly the step's own."""

POINT_STEPS = 2.0
"""Samples' steps of training that one of AggEnhance's steps down a client's loss takes."""


def cache_file() -> Path:
    """Where times are kept: in the user's cache."""
    import pooch

    return Path(pooch.os_cache("fedblend")) / "pace.json"


class Pace:
    """Times of steps on this machine, by what is trained."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_file()
        self.budget = BUDGET_S
        self.new = False
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            kept = {}
        self.known: dict[str, float] = kept.get(_machine(), {}) if isinstance(kept, dict) else {}

    def step(self, experiment: Experiment) -> float:
        """Seconds of a client's step: known, timed now, or (where the budget is spent) that of a like one."""
        key = _key(experiment)
        if key not in self.known and self.budget > 0:
            start = time.perf_counter()
            try:
                self.known[key] = _timed(experiment)
                self.new = True
            except FedblendError:
                self.known[key] = self._alike(key)
            self.budget -= time.perf_counter() - start
        return self.known.get(key) or self._alike(key)

    def _alike(self, key: str) -> float:
        """The mean over what has the same model and data."""
        head = key.rsplit("|", 1)[0]
        alike = [value for other, value in self.known.items() if other.rsplit("|", 1)[0] == head]
        return sum(alike) / len(alike) if alike else OFFHAND_S

    def seconds(self, experiment: Experiment) -> float:
        """Seconds of one run: its clients' training, the server's, and the evaluations."""
        size = size_of(experiment)
        step, train = self.step(experiment), experiment.train
        clients, held = held_by(experiment, size)
        cohort = min(train.cohort, clients)
        trains = experiment.method.upload.name != "nothing"
        a_round = float(cohort * train.steps_of(held)) if trains else 0.0
        a_round += server_steps(experiment, size, cohort, held)
        # A forward pass alone is about a third of a step's work, and tests come in large batches.
        tests = size.test / max(train.batch_size, FULL_BATCH) / 3 / experiment.eval_every
        return step * (a_round + tests) * max(1, experiment.rounds)

    def of(self, plan: ItemPlan) -> float:
        """Seconds of a whole item, all seeds, one run a processor: each experiment once, and what is measured."""
        total, seen = 0.0, set()
        for cell in plan.cells:
            if cell.fingerprint in seen:
                continue
            seen.add(cell.fingerprint)
            measures = {}
            for place, measure in plan.measures.items():
                if place[1:] == (cell.row, cell.column):
                    # Several figures of one piece of work are made at once.
                    measures[str({k: v for k, v in registry.dump(measure).items() if k != "figure"})] = measure
            if any(m.trains for m in measures.values()):
                total += self.seconds(cell.experiment)
            total += sum(m.steps(cell.experiment) for m in measures.values()) * self.step(cell.experiment)
        number = len(seen) * len(plan.seeds)
        return total * len(plan.seeds) / min(processors(), number)

    def keep(self) -> None:
        """Write what was timed; a cache that cannot be written is done without."""
        if not self.new:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({_machine(): self.known}, indent=1), encoding="utf-8")
        except OSError:
            return


def held_by(experiment: Experiment, size: Size) -> tuple[int, int]:
    """Clients, and samples that one trains on, as the split's options tell."""
    split = experiment.partition
    clients = getattr(split, "clients", None) or size.clients or 10
    total = round(size.train * experiment.fraction * (1 - experiment.holdout))
    if split.name == "natural" and size.clients:
        return min(clients, size.clients), max(1, total // size.clients)
    if split.name == "xormixfl":
        return clients, split.samples * size.classes
    if split.name == "counts":
        return len(split.counts), max(1, sum(map(sum, split.counts)) // len(split.counts))
    return clients, getattr(split, "samples", None) or max(1, total // clients)


def server_steps(experiment: Experiment, size: Size, cohort: int, held: int) -> float:
    """Steps of the clients that a server step's work in a round amounts to, on average over the rounds."""
    step = experiment.method.server_step
    batch = experiment.train.batch_size
    work = 0.0
    if hasattr(step, "step_size"):  # class interior points: every class, down every client's loss
        work += POINT_STEPS * size.classes * step.steps * cohort / batch
    if step.name == "train-on-seeds":
        work += step.epochs * held / batch
    if step.name == "distill-to-model":
        work += step.steps
    if hasattr(step, "epochs") and step.name != "train-on-seeds":
        points = getattr(step, "keep", None) or size.classes * experiment.rounds / 2
        work += step.epochs * points / batch
    return work


def _machine() -> str:
    import torch

    return f"{platform.node()} {platform.processor() or platform.machine()} torch {torch.__version__}"


def _key(experiment: Experiment) -> str:
    """What decides the time of a step; the method last, of which numbers hardly matter."""
    method = experiment.method
    words = [registry.dump(experiment.model), experiment.data.name, experiment.train.batch_size]
    objective = method.objective
    how = [objective.name, *(term.name for term in method.terms), getattr(objective, "severity", 1) == 0]
    return "|".join([json.dumps(words, sort_keys=True, default=str), json.dumps(how)])


def _timed(experiment: Experiment) -> float:
    """Seconds of a step of an experiment, on made-up data: of the processor, so that others' work does not count."""
    from fedblend.engines.autotune import seconds_a_step
    from fedblend.engines.loop import LoopEngine
    from fedblend.papers.synthetic import made_up
    from fedblend.runs.runner import one_thread

    with one_thread():
        setup = made_up(experiment)
        engine = LoopEngine(setup, "cpu")
        seconds_a_step(engine, 1)  # what is made once (tables, kernels) is no part of a step
        start = time.process_time()
        seconds_a_step(engine, 1)
        steps = TRIALS * setup.experiment.train.steps_of(BATCHES * experiment.train.batch_size)
        return (time.process_time() - start) / steps


def words(seconds: float) -> str:
    """A time in two or three letters and a number.

    >>> words(0.4), words(75), words(5400), words(400000)
    ('1 s', '2 min', '1.5 h', '4.6 d')
    """
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    if seconds < 3600:
        return f"{seconds / 60 + 0.499:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 86400 else f"{seconds / 86400:.1f} d"
