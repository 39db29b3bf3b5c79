"""The leak report of a run: the payloads that left its clients, and the raw samples reconstructed from them."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from fedblend.analysis.attacks.outcome import changed_options, read_attacks
from fedblend.analysis.privacy import membership
from fedblend.analysis.privacy.similarity import (
    RAW,
    Similarity,
    mean_sizes,
    recognised_by_chance,
    similarity_of_entries,
    similarity_of_means,
    similarity_of_mixed_seeds,
    similarity_of_target_seeds,
)
from fedblend.core import registry
from fedblend.core.errors import FedblendError, counted
from fedblend.core.payload import PAYLOAD_KINDS
from fedblend.core.random import stream
from fedblend.core.setup import Setup, model_spec
from fedblend.core.state import RunState
from fedblend.methods.sharing.channel_statistics import ChannelStatistics, channel_statistics
from fedblend.methods.sharing.features import Features
from fedblend.methods.sharing.means import HiddenMeans, SharedMeans
from fedblend.methods.sharing.moments import Moments, SecureMoments, unpacked
from fedblend.methods.sharing.seeds import MixedSeeds
from fedblend.methods.sharing.synthetic import MatchedSamples
from fedblend.methods.sharing.xor_seeds import MixedTargetSeeds, XorSeeds
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory, reading
from fedblend.runs.groups import Outcome, read

NOT_ATTACKED = "not attacked yet (fedblend attack)"
NO_ATTACK = "no attack: attacks rebuild images of classes only"
NO_MEASURE = "no measure available"
FEATURES = "not measured: one entry a sample, which whoever has the model can compare with candidates' features"

SEED_MEASURES = {
    "Mixup": "mixtures, compared with the nearest raw sample",
    "Mix2up": "inversely mixed samples, compared with the nearest raw sample",
    "sent": "seeds as sent, compared with the nearest raw sample of a device",
    "guessed": "seeds decoded with a guessed dummy, compared with the nearest raw sample",
    "decoded": "seeds decoded by the server, compared with the nearest raw sample",
}
"""Text of each measure of seeds in a report."""


@dataclass(frozen=True)
class Leak:
    """One kind of payload that left the clients of a run, and one measure of how much it reveals.

    Measures are NaN where nothing was reconstructed. They compare reconstructed images with their originals (weights),
    or shared samples with the nearest raw sample (means and seeds); see
    :mod:`fedblend.analysis.attacks.image_similarity` and :mod:`fedblend.analysis.privacy.similarity`.
    """

    run: str
    method: str
    accuracy: float
    """Last test accuracy of the run, from 0 to 1."""
    kind: str
    """The kind of payload, as in the count of bytes."""
    shape: str
    """The payload of one client at a time."""
    senders: int
    """Clients that sent such a payload."""
    times: int
    bytes: int
    how: str
    """How samples were reconstructed or compared, or why not."""
    mse: float = math.nan
    psnr: float = math.nan
    ssim: float = math.nan
    distance: float = math.nan
    recognised: float = math.nan
    membership: float = math.nan
    """How well samples that were used can be told from others (:mod:`fedblend.analysis.privacy.membership`)."""

    @property
    def measured(self) -> bool:
        return not math.isnan(self.psnr)

    def table(self) -> dict[str, Any]:
        """The leak as plain data; NaN becomes ``None``, an infinite PSNR "inf"."""
        return {name: _plain(value) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class LeakReport:
    """The leaks of one run."""

    run: str
    leaks: tuple[Leak, ...]
    by_size: tuple[dict[str, Any], ...] = ()
    """Where the run shares means: their similarity by M_k, as rows of ``samples_per_mean`` and the measures."""

    def named(self, name: str) -> LeakReport:
        """The same report under another name of the run."""
        return replace(self, run=name, leaks=tuple(replace(leak, run=name) for leak in self.leaks))


def leak_report(run: RunDirectory, trust: bool = False) -> LeakReport:
    """Make the leak report of a run from its folder.

    Loads the run's data, with which models and shared samples are compared. Unless ``trust``, code that the run names
    is not imported, and what needs it is not measured. Raises :class:`FedblendError` for a run without a
    checkpoint, and for damaged attack files in its folder.
    """
    with reading([run], trust):
        return _leak_report(run)


def _leak_report(run: RunDirectory) -> LeakReport:
    outcome, state = read(run), checkpoint.read(run.path)
    sent: Counter[str] = Counter()
    for record in outcome.records:
        sent.update(record.bytes_up)
    setup, left_out = None, ""
    try:
        experiment = run.experiment()
        sharing = experiment.method.sharing
        if run.is_of_sites:
            left_out = "not measured: the clients' samples are at their sites"
        else:
            setup = run.load_setup()
    except registry.UntrustedCode as error:
        left_out, sharing = f"not measured: {error}", _stored_sharing(outcome)
    leaks: list[Leak] = []
    by_size: list[dict[str, Any]] = []
    for kind, number in sent.items():
        if not number:
            continue
        base = _unmeasured(outcome, state, kind, number, sharing, setup)
        if kind == "weights":
            found = _from_attacks(read_attacks(run))
            last = {client: record.round for record in outcome.records for client in record.cohort or ()}
            # Where layers stay at clients, nobody has the whole model of the checkpoint.
            if setup is not None and state is not None and last and not setup.own_layers:
                used = _sizes_in(setup, last)
                base = replace(base, membership=membership.of_model(setup, state.weights, last, used))
        elif _is_shared(kind, sharing):
            found, by_size = ([(left_out, {})], []) if setup is None else _from_sharing(setup, sharing, state)
            if setup is not None and state is not None and (compared := _compared(setup, sharing, state)) is not None:
                base = replace(base, membership=membership.of_entries(setup, *compared, state.shared_sizes))
            elif setup is not None and state is not None and isinstance(sharing, Moments | SecureMoments):
                base = replace(base, membership=_of_sums(setup, sharing, state))
        else:
            found = []
        possible = setup is None or _has_images(setup)
        nothing = NO_MEASURE if kind != "weights" else NOT_ATTACKED if possible else NO_ATTACK
        nothing = left_out if run.is_of_sites else nothing
        leaks += [replace(base, how=how, **measures) for how, measures in found] or [replace(base, how=nothing)]
    return LeakReport(run.path.name, tuple(leaks), tuple(by_size))


def _sizes_in(setup: Setup, rounds: Mapping[int, int]) -> np.ndarray:
    """Samples that each client held in its round of ``rounds``, counted from 1; 0 for other clients."""
    sizes = np.zeros(len(setup.population), np.int64)
    for round in sorted({*rounds.values()}):  # in order: portions that arrive are counted from round to round
        clients = [client for client, last in rounds.items() if last == round]
        sizes[clients] = setup.sizes(round - 1)[clients]
    return sizes


def _has_images(setup: Setup) -> bool:
    """Whether samples are images of classes, which attacks can rebuild."""
    return setup.data.kind == "image" and setup.task.kind == "classification"


def _stored_sharing(outcome: Outcome) -> Any:
    """The sharing of a run of which other parts are not trusted; ``None`` if the sharing is not trusted either."""
    try:
        return registry.build("sharing", outcome.config["method"].get("sharing", "none"))
    except registry.UntrustedCode:
        return None


def _is_shared(kind: str, sharing: Any) -> bool:
    """Whether clients sent this kind of payload before training; of an unknown ``sharing``, by the kinds of others."""
    if sharing is None:
        return kind not in PAYLOAD_KINDS or PAYLOAD_KINDS[kind].is_shared
    return bool(sharing.plan.active and kind == sharing.bytes_kind)


def _unmeasured(
    outcome: Outcome, state: RunState | None, kind: str, number: int, sharing: Any, setup: Setup | None
) -> Leak:
    shape = ""
    if _is_shared(kind, sharing):
        owners = np.unique(state.entries.owner) if state is not None else np.empty(0)
        senders, times = len(owners), sum(r.shared["sent"] for r in outcome.records if r.shared is not None)
        if state is not None:
            tensors = state.entries.tensors.items()
            entry = ", ".join(f"{name} {'x'.join(map(str, t.shape[1:])) or '1'}" for name, t in tensors)
            shape = f"about {len(state.entries) / max(1, senders):.3g} of {entry}"  # of one client
    else:
        trained = [client for record in outcome.records for client in record.cohort or ()]
        senders, times = len(set(trained)), len(trained)
        if state is not None:
            extras = {name: t for name, t in state.server_state.items() if not name.startswith("server_step/")}
            weights = state.weights if setup is None else setup.shared(state.weights)
            sent = {"weights": weights, "extras": extras}.get(kind, state.global_outputs)
            shape = f"{counted(len(sent), 'tensor')}, {sum(t.numel() for t in sent.values()):,} numbers"
    accuracies = [record.accuracy for record in outcome.evaluated if record.accuracy is not None]
    accuracy = accuracies[-1] if accuracies else math.nan
    return Leak(outcome.path.name, outcome.label, accuracy, kind, shape, senders, times, number, "")


Measures = list[tuple[str, dict[str, Any]]]  # The text and the measures of each leak of one kind


def _from_attacks(tables: Sequence[Mapping[str, Any]]) -> Measures:
    """Measures of attacks on weights, averaged over the clients of attacks with equal settings."""
    by_settings: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for one in tables:
        options = {name: value for name, value in one.get("options", {}).items() if name != "iterations"}
        words = [f"{one['attack']} at round {one['round']}", f"attacker {one['attacker']}"]
        words += [counted(one[f"{what}s"], what) for what in ("image", "step", "iteration")]
        words += ["labels inferred"] * (one["labels"] != "true")
        words += changed_options(one["attack"], options)
        words += ["stopped"] * bool(one.get("stopped")) + ["client not drawn"] * (not one.get("drawn", True))
        how = ", ".join(words)
        by_settings[how, json.dumps(options, sort_keys=True)].append(one)
    rows = []
    for (how, _), attacks in by_settings.items():
        # Attack files store an infinite PSNR as null.
        measures = {
            name: float(np.mean([math.inf if one[name] is None else float(one[name]) for one in attacks]))
            for name in ("mse", "psnr", "ssim")
        }
        rows.append((f"{how}, {counted(len(attacks), 'client')}", measures))
    return rows


def _compared(
    setup: Setup, sharing: Any, state: RunState
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]] | None:
    """The entries of a state that can be compared with samples, and what makes the same of stored samples."""
    tensors = state.entries.tensors
    if isinstance(sharing, ChannelStatistics) and tensors:
        return torch.cat([tensors["mean"], tensors["std"]], 1), lambda x: torch.cat(
            channel_statistics(setup.scale(x)), 1
        )
    x = tensors.get("x")
    if x is None or isinstance(sharing, HiddenMeans | Features | XorSeeds):
        return None
    if isinstance(sharing, SharedMeans) and sharing.scale == "unit":
        return setup.scale.from_unit(x), setup.scale
    return x if sharing.plan.form == "inputs" else setup.scale(x), setup.scale


def _of_sums(setup: Setup, sharing: Moments | SecureMoments, state: RunState) -> float:
    """The membership advantage against sums of features as the server has them; NaN for sums of a trained model."""
    if state.shared_round:
        return math.nan
    spec, rng = model_spec(setup, setup.model), stream(setup.experiment.seed, "leaks")
    pool = setup.pool(spec, state.entries, state.shared_sizes, rng)
    moments = sharing.moments if isinstance(sharing, SecureMoments) else sharing
    read = lambda x: moments.features(setup.model.eval(), setup.scale, x)  # noqa: E731
    if "gram" not in pool.tensors:
        sums = pool.tensors["sums"].flatten(0, -2)
        means = sums[sums[:, -1] >= 1]
        return membership.of_entries(setup, means[:, :-1] / means[:, -1:], read, state.shared_sizes)
    owners = np.unique(pool.owner)
    grams = {
        None if owner < 0 else int(owner): unpacked(pool.tensors["gram"][torch.from_numpy(pool.owner == owner)])
        for owner in rng.permutation(owners)[: membership.CLIENTS]
    }
    return membership.of_second_moments(setup, grams, read, state.shared_sizes)


def _from_sharing(setup: Setup, sharing: Any, state: RunState | None) -> tuple[Measures, list[dict[str, Any]]]:
    """Measures of what was shared, compared with the raw samples; of means also by M_k."""
    if sharing.plan.form == "raw":
        return [("raw samples", _measures(RAW))], []
    if isinstance(sharing, Features):
        return [(FEATURES, {})], []
    if not _has_images(setup):
        return [], []
    if isinstance(sharing, MatchedSamples) and state is not None and len(state.entries):
        nearest = _measures(similarity_of_entries(setup, state.entries))
        return [("synthetic samples, compared with the nearest raw sample", nearest)], []
    if isinstance(sharing, MixedSeeds | XorSeeds | MixedTargetSeeds):
        measure: Any = similarity_of_mixed_seeds if isinstance(sharing, MixedSeeds) else similarity_of_target_seeds
        try:
            found = measure(setup, sharing)
        except FedblendError as error:
            return [(f"not measured: {error}", {})], []
        return [(SEED_MEASURES[name], _measures(measured)) for name, measured in found.items()], []
    if not isinstance(sharing, SharedMeans) or isinstance(sharing, HiddenMeans):
        return [], []
    own = similarity_of_means(setup, sharing)
    rows: list[dict[str, Any]] = []
    for size in mean_sizes(setup, sharing):
        is_own = size == sharing.samples_per_mean
        measured = own if is_own else similarity_of_means(setup, sharing, size)
        if measured is not None:
            by_chance = recognised_by_chance(setup, size)
            rows.append({"samples_per_mean": size, "own": is_own, "by_chance": by_chance, **asdict(measured)})
    how = f"means of {sharing.samples_per_mean}, compared with the nearest raw sample"
    return ([(how, _measures(own))] if own else []), rows


def _measures(measured: Similarity) -> dict[str, Any]:
    return {name: value for name, value in asdict(measured).items() if name != "samples"}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf"
    return value
