"""The record of a round: what one line of ``metrics.jsonl`` holds, and in which units."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, Literal, NotRequired

import pydantic
from pydantic import Field, Strict
from typing_extensions import TypedDict

from fedblend.core.errors import FedblendError
from fedblend.core.registry import LARGEST_INT, explain

Whole = Annotated[int, Strict(), Field(ge=0, le=LARGEST_INT)]
Amount = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
Number = Annotated[float, Strict()]
Score = Annotated[float, Strict(), Field(ge=0, le=1)]


class ClientScores(TypedDict, total=False):
    """Accuracy over clients that have test samples."""

    tested: Whole
    mean: Amount
    std: Amount
    p10: Amount
    by_size: dict[str, dict[str, Number]]


class MetricOverClients(TypedDict, total=False):
    """A metric over the clients that have test samples and for which it is defined."""

    tested: Whole
    mean: Number
    std: Amount
    worst_tenth: Number


class ValidationScores(TypedDict, total=False):
    """Scores on samples for validation; ``tested`` is the number of clients."""

    tested: Whole
    samples: Whole
    loss: Number
    accuracy: Score
    metrics: dict[str, Number | None]


class Refusal(TypedDict):
    """An upload that was refused."""

    client: Whole
    reason: str


class EngineChoice(TypedDict):
    """The engine of a run, and the reason for it."""

    engine: str
    stack: Annotated[int, Strict(), Field(ge=1, le=LARGEST_INT)] | None
    ranks: Annotated[int, Strict(), Field(ge=1, le=LARGEST_INT)]
    memory_format: Literal["contiguous", "channels_last"]
    why: str
    kernels: NotRequired[dict[str, str] | None]


class MachineFacts(TypedDict, total=False):
    """What differs between machines: seconds by phase, peak memory in bytes, seconds of computing, and the engine."""

    seconds: dict[str, Amount]
    peak_memory: Amount
    computing: Amount
    engine: EngineChoice


@dataclass
class RoundRecord:
    """One round's record. A field that is ``None`` does not apply to the round and is not written.

    Everything but ``machine`` is the same on every machine, to rounding.
    """

    round: Whole
    """Rounds made so far; 0 is the untrained model."""
    loss: Number | None = None
    """Mean loss on the test samples; only in rounds that are evaluated."""
    accuracy: Score | None = None
    """Share of the test samples that are right; only in classification."""
    per_class: list[Score | None] | None = None
    """Accuracy by class; ``None`` for a class without test samples."""
    sites: dict[str, Score] | None = None
    """Accuracy by the data's own clients, by name, where these are few."""
    clients: ClientScores | None = None
    """Accuracy over clients that have test samples."""
    metrics: dict[str, Number | None] | None = None
    """The experiment's metrics on the test samples, by name; ``None`` where one is not defined."""
    class_metrics: dict[str, list[Number | None]] | None = None
    """Metrics by class, for those that have values by class."""
    site_metrics: dict[str, dict[str, Number | None]] | None = None
    """Metrics by the data's own clients, where these are few."""
    client_metrics: dict[str, MetricOverClients] | None = None
    """Metrics over clients that have test samples."""
    validation: dict[Literal["server", "clients"], ValidationScores] | None = None
    """Scores on the samples that the server, and the clients, keep for validation."""
    best_round: Whole | None = None
    """The evaluated round so far that is best on validation; only where there is a validation split."""
    asked: dict[str, Any] | None = None
    """``clients`` that a selection asked for their loss, ``losses`` that arrived, and clients that ``refused``."""
    uploads: Whole | None = None
    """Good uploads."""
    cohort: list[Whole] | None = None
    """Clients that trained."""
    train_loss: Number | None = None
    """Mean training loss over the good uploads, weighted by samples, without terms; of clients that send theirs."""
    measured: dict[str, Score] | None = None
    """Shares that parts of the method measure, by name: of the samples in clients' steps, weighted by samples, or of
    the server's points."""
    lost: list[Whole] | None = None
    """Clients whose upload did not arrive."""
    late: list[Whole] | None = None
    """Clients that missed the deadline with some of their training."""
    stale: list[Whole] | None = None
    """Clients whose upload of an earlier round arrived in this one, and counts."""
    refused: list[Refusal] | None = None
    """Refused uploads."""
    change: Number | None = None
    """Relative change of the model, or of mean outputs, in the round; ``None`` where it is not finite."""
    converged: Annotated[bool, Strict()] | None = None
    """Whether ``change`` is below ``convergence_tol``; only where that is set."""
    shared: dict[str, Any] | None = None
    """Clients ``asked`` to share, payloads ``sent``, ``entries`` in all, and clients ``lost`` or ``refused``."""
    channel: dict[str, Amount] | None = None
    """Seconds on the air, ``up`` and ``down``."""
    computing: Amount | None = None
    """Seconds of computing, where the experiment fixes them or states how long batches take."""
    bytes_up: dict[str, Whole] = field(default_factory=dict)
    """Bytes from clients to the server, by kind."""
    bytes_down: dict[str, Whole] = field(default_factory=dict)
    """Bytes from the server to clients, by kind."""
    machine: MachineFacts = field(default_factory=lambda: MachineFacts())
    """What differs between machines."""

    @property
    def evaluated(self) -> bool:
        """Whether the model was evaluated in this round; real sites that test their own models state no losses."""
        return not (self.loss is None and self.accuracy is None)

    def score_of(self, metric: str, validation: bool = False) -> float | None:
        """The loss, the accuracy or a metric by name, on the test samples or for ``validation``.

        The server's validation samples come before the clients'. ``None`` where there is no such number.
        """
        if validation:
            where = self.validation or {}
            table: Mapping[str, Any] = where.get("server") or where.get("clients") or {}
        else:
            table = {"loss": self.loss, "accuracy": self.accuracy, "metrics": self.metrics}
        if metric in ("loss", "accuracy"):
            return table.get(metric)
        found: float | None = (table.get("metrics") or {}).get(metric)
        return found

    def as_dict(self) -> dict[str, Any]:
        """The record as plain data, in the order of the fields."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {k: v for k, v in values.items() if v is not None or (k == "change" and self.converged is not None)}

    @staticmethod
    def from_dict(table: Mapping[str, Any]) -> RoundRecord:
        """The record that :meth:`as_dict` wrote; names that no field has are left out.

        Raises :class:`FedblendError` for a value of another type, and without ``round``.
        """
        try:
            return _validator().validate_python(table)
        except pydantic.ValidationError as error:
            raise FedblendError(explain(error)) from None


@cache
def _validator() -> pydantic.TypeAdapter[RoundRecord]:
    return pydantic.TypeAdapter(RoundRecord)


class RoundLog:
    """What one round costs, and what is noted of it: seconds by phase, bytes by direction and kind, seconds on the air,
    and fields of its record.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a round."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, dict[str, int]] = {"up": defaultdict(int), "down": defaultdict(int)}
        self.channel: dict[str, float] = {}
        self.facts: dict[str, Any] = {}
        self.computing = 0.0
        """Seconds until the last client has trained, or until the deadline, where the experiment states how long
        batches take."""

    def note(self, **facts: Any) -> None:
        """Set fields of the round's record."""
        self.facts |= facts

    def measure(self, name: str, share: float) -> None:
        """Set a share that a part of the method measured."""
        self.facts["measured"] = {**(self.facts.get("measured") or {}), name: share}

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to ``phase``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def wait(self, direction: str, seconds: float) -> None:
        """Add seconds that a transmission "up" or "down" took."""
        if seconds:
            self.channel[direction] = self.channel.get(direction, 0.0) + seconds

    def count(self, direction: str, kind: str, number: int) -> None:
        """Add bytes sent "up" or "down"."""
        if number:
            self.bytes[direction][kind] += int(number)

    def write(self, record: RoundRecord, compute_seconds: float | None) -> None:
        """Set what the round cost in its record; ``compute_seconds`` are the experiment's, where it fixes them."""
        if self.channel:
            record.channel = dict(self.channel)
        if record.round and (compute_seconds is not None or self.computing):
            record.computing = (compute_seconds or 0.0) + self.computing
        record.bytes_up, record.bytes_down = dict(self.bytes["up"]), dict(self.bytes["down"])
        record.machine = {"seconds": {phase: round(seconds, 4) for phase, seconds in self.seconds.items()}}
        if record.channel is not None and record.computing is None:
            # Real clients train at the same time; simulated ones train one after another.
            per_client = self.seconds["train"] / max(1, len(record.cohort or ()))
            record.machine["computing"] = round(per_client + self.seconds["server"] + self.seconds["aggregate"], 4)
