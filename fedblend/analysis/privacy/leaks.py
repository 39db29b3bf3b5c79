"""A leak report card: what left the clients of a run, and what was rebuilt from it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from fedblend.analysis.attacks.outcome import attacks_on
from fedblend.analysis.privacy.rebuilt import RAW, Nearness, by_chance, of_means, of_seeds, of_targets, sizes_of
from fedblend.core.errors import FedblendError
from fedblend.core.state import RunState
from fedblend.experiment.setup import make_setup
from fedblend.methods.sharing.means import HiddenMeans, SharedMeans
from fedblend.methods.sharing.seeds import MixedSeeds
from fedblend.methods.sharing.xor_seeds import MixedTargetSeeds, XorSeeds
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import Outcome, read

NOT_ATTACKED = "not attacked yet (fedblend attack)"
NO_MEASURE = "no measure of it"

SEEDS = {
    "Mixup": "mixtures beside the nearest raw sample",
    "Mix2up": "inversely mixed up, beside the nearest",
    "sent": "what is sent, beside the nearest raw sample of a device",
    "guessed": "decoded with a usual dummy, beside the nearest",
    "decoded": "decoded by the server, beside the nearest",
}
"""What is said of each measure of seeds."""


@dataclass(frozen=True)
class Leak:
    """One kind of what left the clients of a run, and one measure of what was rebuilt from it.

    ``kind`` is the word under which bytes are counted, ``shape`` what one client sends at a time; ``senders`` are the
    clients that sent any, ``times`` how often all of them did together, ``bytes`` all that they sent. ``how`` says what
    was done to rebuild samples, or why nothing was; measures are NaN then. ``mse``, ``psnr`` and ``ssim`` are as in
    :mod:`fedblend.analysis.attacks.metrics`, of what was rebuilt beside the original (of weights), or the raw sample
    nearest to it; the share ``recognised`` and the ``distance`` are as in :mod:`fedblend.analysis.privacy.rebuilt`.
    """

    run: str
    method: str
    accuracy: float
    kind: str
    shape: str
    senders: int
    times: int
    bytes: int
    how: str
    mse: float = math.nan
    psnr: float = math.nan
    ssim: float = math.nan
    distance: float = math.nan
    recognised: float = math.nan

    @property
    def measured(self) -> bool:
        """Whether anything was rebuilt."""
        return not math.isnan(self.psnr)

    def table(self) -> dict[str, Any]:
        """As plain data; what was not measured is ``None``, an infinite PSNR "inf"."""
        return {name: _plain(value) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Card:
    """A run's leaks, and where it shares means the nearness of means by M_k: rows ``samples_per_mean``, measures."""

    run: str
    leaks: tuple[Leak, ...]
    by_size: tuple[dict[str, Any], ...] = ()


def card(run: RunDirectory) -> Card:
    """The leak report card of a run, of what its folder keeps.

    Loads the run's data if there is anything to compare it with. Raises :class:`FedblendError` for runs without a
    checkpoint, and for attacks in its folder that are damaged.
    """
    outcome, state = read(run), checkpoint.read(run.path)
    sent: dict[str, int] = defaultdict(int)
    for record in outcome.records:
        for kind, number in record.get("bytes_up", {}).items():
            sent[kind] += int(number)
    experiment = run.experiment()
    sharing = experiment.method.sharing
    leaks: list[Leak] = []
    by_size: list[dict[str, Any]] = []
    for kind, number in sent.items():
        if not number:
            continue
        base = _base(run, outcome, state, kind, number, sharing)
        if kind == "weights":
            found = _of_attacks(attacks_on(run))
        elif sharing.active and kind == sharing.bytes_kind:
            found, by_size = _of_sharing(experiment, sharing)
        else:
            found = []
        nothing = NOT_ATTACKED if kind == "weights" else NO_MEASURE
        leaks += [replace(base, how=how, **measures) for how, measures in found] or [replace(base, how=nothing)]
    return Card(run.path.name, tuple(leaks), tuple(by_size))


def _base(run: RunDirectory, outcome: Outcome, state: RunState | None, kind: str, number: int, sharing: Any) -> Leak:
    """What is known of one kind without any measure."""
    shared = sharing.active and kind == sharing.bytes_kind
    cohorts = [record.get("cohort", ()) for record in outcome.records]
    if shared:
        owners = np.unique(state.entries.owner) if state is not None else np.empty(0)
        senders, times = len(owners), sum(r["shared"]["sent"] for r in outcome.records if "shared" in r)
        shape = _entries(state.entries.tensors, len(state.entries), senders) if state is not None else ""
    else:
        senders, times = len({client for cohort in cohorts for client in cohort}), sum(map(len, cohorts))
        shape = _tensors(state.weights if kind == "weights" else state.global_outputs) if state is not None else ""
    evaluated = [record for record in outcome.evaluated if "accuracy" in record]
    accuracy = float(evaluated[-1]["accuracy"]) if evaluated else math.nan
    return Leak(run.path.name, outcome.label, accuracy, kind, shape, senders, times, number, "")


def _tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """``10 tensors, 61,706 numbers``."""
    numbers = sum(t.numel() for t in tensors.values())
    return f"{len(tensors)} tensor{'' if len(tensors) == 1 else 's'}, {numbers:,} numbers"


def _entries(tensors: Mapping[str, torch.Tensor], entries: int, senders: int) -> str:
    """``about 5 of x 1x28x28, y 10``: what a client sends."""
    what = ", ".join(f"{name} {'x'.join(map(str, t.shape[1:])) or '1'}" for name, t in tensors.items())
    return f"about {entries / max(1, senders):.3g} of {what}"


Found = list[tuple[str, dict[str, Any]]]


def _of_attacks(tables: Sequence[Mapping[str, Any]]) -> Found:
    """Attacks on weights, means over the clients of those that were made alike."""
    alike: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for one in tables:
        labels = "" if one["labels"] == "true" else ", labels inferred"
        settings = f"{one['images']} images, {one['steps']} steps, {one['iterations']} iterations{labels}"
        alike[f"{one['attack']} at round {one['round']}, attacker {one['attacker']}, {settings}"].append(one)
    rows = []
    for how, several in alike.items():
        clients = f"{len(several)} client{'' if len(several) == 1 else 's'}"
        measures = {name: float(np.mean([_number(one[name]) for one in several])) for name in ("mse", "psnr", "ssim")}
        rows.append((f"{how}, {clients}", measures))
    return rows


def _of_sharing(experiment: Any, sharing: Any) -> tuple[Found, list[dict[str, Any]]]:
    """What was shared, beside the raw samples; of means also by M_k."""
    if sharing.unsafe:
        return [("these are raw samples", _measures(RAW))], []
    means = isinstance(sharing, SharedMeans) and not isinstance(sharing, HiddenMeans)
    if not means and not isinstance(sharing, MixedSeeds | XorSeeds | MixedTargetSeeds):
        return [], []
    setup = make_setup(experiment)
    if setup.data.kind != "image" or setup.task.kind != "classification":
        return [], []
    if not means:
        try:
            found = of_seeds(setup, sharing) if isinstance(sharing, MixedSeeds) else of_targets(setup, sharing)
        except FedblendError as error:
            return [(f"not measured: {error}", {})], []
        return [(SEEDS[name], _measures(near)) for name, near in found.items()], []
    own = of_means(setup, sharing)
    rows: list[dict[str, Any]] = []
    for size in sizes_of(setup, sharing):
        near = own if size == sharing.samples_per_mean else of_means(setup, sharing, size)
        if near is not None:
            own_size = size == sharing.samples_per_mean
            rows.append(
                {"samples_per_mean": size, "own": own_size, "by_chance": by_chance(setup, size), **near.table()}
            )
    how = f"means of {sharing.samples_per_mean} beside the nearest raw sample"
    return ([(how, _measures(own))] if own else []), rows


def _measures(near: Nearness) -> dict[str, Any]:
    return {name: value for name, value in near.table().items() if name != "samples"}


def _number(value: float | None) -> float:
    """A measure as it was kept: only an infinite PSNR is not a number there."""
    return math.inf if value is None else float(value)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf"
    return value
