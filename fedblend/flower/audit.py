"""A site's audit log of payloads that it sent or refused, and the guard that lets a payload leave once.

The log is JSON lines. A line is on the disk before its payload leaves the site. Several messages may be answered at
once, by one process each: a site checks and records under the log's lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter

from fedblend.core.errors import FedblendError, printable
from fedblend.core.payload import PAYLOAD_KINDS
from fedblend.core.registry import LARGEST_INT, explain
from fedblend.core.trees import digest_of
from fedblend.core.upload import bytes_of
from fedblend.flower.client_task import Memory
from fedblend.flower.messages import Tensors
from fedblend.flower.site import UNWRITTEN, RefusedByPolicy
from fedblend.runs.files import append_line, read_lines, waiting_lock

SHARED_KINDS = (*(kind.name for kind in PAYLOAD_KINDS.values() if kind.is_shared), "masked")
"""Kinds of payload that a site makes of its samples without training."""


COUNTED = "this site's limits count its lines: restore it from a copy"
"""What to do about a damaged log. Without its lines the site would share and train again."""


class _Line(BaseModel):
    """A line of the log: a payload that left, or why it did not."""

    model_config = ConfigDict(strict=True, extra="allow")

    time: str
    run: str
    round: Annotated[int, Field(ge=0, le=LARGEST_INT)]
    client: int
    kind: str


class _Refused(_Line):
    refused: str


class _Sent(_Line):
    tensors: dict[str, list[str | int]]
    bytes: Annotated[int, Field(ge=0, le=LARGEST_INT)]
    sha256: str
    trained: bool = False
    part: str = ""
    samples: str = ""
    split: str = ""
    begun: bool = False


_LINES = TypeAdapter(
    list[
        Annotated[
            Annotated[_Refused, Tag("refused")] | Annotated[_Sent, Tag("sent")],
            Discriminator(lambda line: "refused" if "refused" in line else "sent"),
        ]
    ]
)


class AuditLog:
    """The audit log at ``path``; without a path nothing is written."""

    def __init__(self, path: str | None) -> None:
        self.path = Path(path) if path else None

    def record_sent(
        self,
        run: str,
        round: int,
        client: int,
        kind: str,
        tensors: Tensors,
        trained: bool,
        part: str = "",
        samples: str = "",
        begun: bool = False,
        split: str = "",
    ) -> None:
        """Record a payload that is about to leave; ``trained`` states whether training made it.

        ``part`` states which one it is where several payloads of a kind leave in a round, ``samples`` is a keyed digest
        of the samples that it covers, ``split`` names the samples that a model is scored on. ``begun`` is for one that
        is yet to be computed, and counts whether it leaves or not. Raises :class:`FedblendError` if the line cannot be
        written; the payload must not leave then.
        """
        payload = {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in tensors.items()}
        facts: dict[str, Any] = {"tensors": payload, "bytes": bytes_of(tensors), "sha256": digest_of(tensors)}
        facts |= ({"trained": True} if trained else {}) | ({"part": part} if part else {})
        facts |= ({"samples": samples} if samples else {}) | ({"begun": True} if begun else {})
        facts |= {"split": split} if split else {}
        self._write(run, round, client, kind, facts)

    def record_refused(self, run: str, round: int, client: int, kind: str, reason: str) -> None:
        """Record a payload that the server requested and the site refused.

        Under the lock: a line that another process has half written would be removed as one that a kill cut off.
        """
        with self.lock():
            self._write(run, round, client, kind, {"refused": printable(reason)})

    def rounds_trained(self) -> set[tuple[str, int]]:
        """Return the runs and rounds in which a payload made by training has left."""
        return {(line["run"], line["round"]) for line in self.lines() if line.get("trained")}

    def has_sent(self, run: str, round: int, client: int, kind: str, trained: bool, part: str = "") -> bool:
        """Whether such a payload of this client has left in this round of this run.

        Payloads that training made are one payload, of whichever kind: a server may change the experiment. Of the run
        only Flower's number counts, since the server chooses the experiment's name before it.
        """
        number = run.rpartition("/")[2]
        payload = (number, round, client, trained, "" if trained else kind, part)
        return any(
            payload
            == (
                *(line["run"].rpartition("/")[2], line["round"], line["client"], line.get("trained", False)),
                *("" if line.get("trained") else line["kind"], line.get("part", "")),
            )
            for line in self._sent()
        )

    def times_sent(self, kind: str) -> int:
        """Return how many payloads of a kind have left, in all runs."""
        return sum(line["kind"] == kind for line in self._sent())

    def parts_sent(self, kind: str) -> set[str]:
        """Return which payloads of a kind have left, in all runs."""
        return {line["part"] for line in self._sent() if line["kind"] == kind and line.get("part")}

    def sets_sent(self, scores: bool) -> set[str]:
        """Return the digests of the sets of samples that scores covered, or means and statistics of any kind."""
        lines = (line for line in self._sent() if line.get("samples"))
        return {line["samples"] for line in lines if (line["kind"] == "scores") == scores}

    def check_sharings(self, payload: Tensors | None, most: int) -> None:
        """Raise :class:`RefusedByPolicy` if a shared payload is a new one, and ``most`` others have left, in all runs.

        A payload that left before may leave again: it reveals nothing new. A masked payload (``None``) is always a new
        one, because two sums over different sites reveal more than one. It counts from its beginning.
        """
        left = {
            f"{line['run']} {line['round']} {line['client']}" if line["kind"] == "masked" else line["sha256"]
            for line in self._sent()
            if not line.get("trained") and line["kind"] in SHARED_KINDS and (line.get("bytes") or line.get("begun"))
        }
        if self.path and (payload is None or digest_of(payload) not in left) and len(left) >= most:
            raise RefusedByPolicy(
                f"this site has shared {len(left)} payload{'s' if len(left) > 1 else ''} of its samples in all runs, "
                f"and shares no other (sharings in its site file: {most}); only an unmasked one is sent again, for the "
                "same sharing, scale and samples"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Wait for the log's lock, and hold it. Without a path there is no lock."""
        with nullcontext() if self.path is None else waiting_lock(self.path):
            yield

    def lines(self) -> list[dict[str, Any]]:
        """Return all lines, oldest first."""
        if self.path is None:
            return []
        lines = read_lines(self.path, COUNTED)
        try:
            _LINES.validate_python(lines)
        except pydantic.ValidationError as error:
            number, _, fault = explain(error).partition(".")
            raise FedblendError(
                f"{self.path}: line {int(number) + 1}: {fault}; the file is damaged, or no audit log; {COUNTED}"
            ) from None
        return lines

    def _sent(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "refused" not in line]

    def _write(self, run: str, round: int, client: int, kind: str, facts: dict[str, Any]) -> None:
        if self.path:
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            line = {"time": when, "run": run, "round": round, "client": client, "kind": kind, **facts}
            append_line(self.path, line, UNWRITTEN)


def audit_rows(lines: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return lines of an audit log as rows of text: time, run, round, kind, payload, bytes, digest."""
    rows: list[tuple[str, ...]] = []
    for line in lines:
        if "refused" in line:
            payload, size, digest = f"refused: {line['refused']}", "", ""
        elif line.get("begun"):
            payload, size, digest = "begun, and counted", "", ""
        else:
            shapes = [f"{name} {'x'.join(map(str, form[1:])) or '1'}" for name, form in line["tensors"].items()]
            more = f" and {len(shapes) - 3} more" if len(shapes) > 3 else ""
            of = f"{line['split']}: " if line.get("split") else ""
            payload, size, digest = of + ", ".join(shapes[:3]) + more, f"{line['bytes']:,}", line["sha256"][:12]
        rows.append((line["time"], line["run"], str(line["round"] + 1), line["kind"], payload, size, digest))
    return rows


@dataclass(frozen=True)
class ReplayGuard:
    """Lets a client send a payload once in a round of a Flower run.

    A second payload with other noise or masks would reveal more: fresh noise averages out, and two masked sums differ
    by the model of a site that is in one of them only. A run that continues from a checkpoint is a new Flower run.
    """

    memory: Memory
    """Holds the last round of each payload, until the SuperNode ends."""
    audit: AuditLog
    """Holds all rounds, also after the SuperNode has ended, where the site has a log."""
    run: str
    round: int
    client: int
    kind: str
    part: str = ""
    """Which of several payloads of the kind in a round."""

    def check(self, payload: str, trained: bool) -> None:
        """Raise :class:`RefusedByPolicy` if the client has sent the payload in this round or a later one."""
        last = self.memory.mark(f"sent-{payload}{self.part}")
        if (last is not None and self.round <= int(last)) or self.audit.has_sent(
            self.run, self.round, self.client, self.kind, trained, self.part
        ):
            about = f" ({self.part})" if self.part else ""
            raise RefusedByPolicy(
                f"it has given its {self.kind}{about} of round {self.round + 1} in this run, and gives them once"
            )

    def mark_sent(self, payload: str) -> None:
        """Note that the payload is about to leave."""
        self.memory.keep(f"sent-{payload}{self.part}", str(self.round), {})
