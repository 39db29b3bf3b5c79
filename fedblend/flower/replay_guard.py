"""A site gives a payload once in a round of a run: a second one, with other noise or masks, would tell more.

Noise that is drawn anew averages out over answers; two masked sums differ by the model of a site that is in one only.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedblend.flower.audit import Audit
from fedblend.flower.client_task import Memory
from fedblend.flower.site import RefusedByPolicy


@dataclass(frozen=True)
class Once:
    """What a client has given in a Flower run: its memory of the last round, and the audit log, if there is one.

    The memory lives as long as the SuperNode, the log longer. A run that is begun anew, to go on from a checkpoint, is
    another run of Flower's.
    """

    memory: Memory
    record: Audit
    run: str
    round: int
    client: int
    kind: str

    def require(self, what: str, trained: bool) -> None:
        """Raise :class:`RefusedByPolicy` if the client has given it in this round or a later one."""
        last = self.memory.mark(f"gave-{what}")
        if (last is not None and self.round <= int(last)) or self.record.has_left(
            self.run, self.round, self.client, self.kind, trained
        ):
            raise RefusedByPolicy(
                f"it has given its {self.kind} of round {self.round + 1} in this run, and gives them once"
            )

    def done(self, what: str) -> None:
        """The payload is about to leave."""
        self.memory.keep(f"gave-{what}", str(self.round), {})
