"""The record of a round: what one line of ``metrics.jsonl`` holds, and in which units."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class RoundRecord:
    """One round's record. A field that is ``None`` does not apply to the round and is not written.

    Everything but ``machine`` is the same on every machine, to rounding.
    """

    round: int
    """Rounds made so far; 0 is the untrained model."""
    loss: float | None = None
    """Mean loss on the test samples; only in rounds that are evaluated."""
    accuracy: float | None = None
    """Share of the test samples that are right; only in classification."""
    per_class: list[float | None] | None = None
    """Accuracy by class; ``None`` for a class without test samples."""
    sites: dict[str, float] | None = None
    """Accuracy by the data's own clients, by name, where these are few."""
    clients: dict[str, Any] | None = None
    """Accuracy over clients that have test samples: ``tested``, ``mean``, ``std``, ``p10``, ``by_size``."""
    uploads: int | None = None
    """Good uploads."""
    cohort: list[int] | None = None
    """Clients that trained."""
    train_loss: float | None = None
    """Mean training loss over the good uploads, weighted by samples, without terms."""
    lost: list[int] | None = None
    """Clients whose upload did not arrive."""
    refused: list[dict[str, Any]] | None = None
    """``client`` and ``reason`` of each refused upload."""
    change: float | None = None
    """Relative change of the model, or of mean outputs, in the round; ``None`` where it is not finite."""
    converged: bool | None = None
    """Whether ``change`` is below ``convergence_tol``; only where that is set."""
    shared: dict[str, Any] | None = None
    """Clients ``asked`` to share, payloads ``sent``, ``entries`` in all, and clients ``lost`` or ``refused``."""
    channel: dict[str, float] | None = None
    """Seconds on the air, ``up`` and ``down``."""
    computing: float | None = None
    """Seconds of computing, where the experiment fixes them."""
    bytes_up: dict[str, int] = field(default_factory=dict)
    """Bytes from clients to the server, by kind."""
    bytes_down: dict[str, int] = field(default_factory=dict)
    """Bytes from the server to clients, by kind."""
    machine: dict[str, Any] = field(default_factory=dict)
    """What differs between machines: ``seconds`` by phase, ``peak_memory`` in bytes, ``computing``, ``engine``."""

    def as_dict(self) -> dict[str, Any]:
        """The record as plain data, in the order of the fields."""
        made = {one.name: getattr(self, one.name) for one in fields(self)}
        return {k: v for k, v in made.items() if v is not None or (k == "change" and self.converged is not None)}

    @staticmethod
    def from_dict(table: Mapping[str, Any]) -> RoundRecord:
        """The record that :meth:`as_dict` wrote; names that no field has are left out.

        Raises :class:`TypeError` without ``round``.
        """
        known = {one.name for one in fields(RoundRecord)}
        return RoundRecord(**{name: value for name, value in table.items() if name in known})


class CostMeter:
    """What one round costs: seconds by phase, bytes by direction and kind, seconds on the air by direction."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, dict[str, int]] = {"up": defaultdict(int), "down": defaultdict(int)}
        self.channel: dict[str, float] = {}

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
