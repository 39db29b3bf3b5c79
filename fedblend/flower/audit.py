"""A site's audit log of payloads that it sent or refused, and the guard that lets a payload leave once.

The log is JSON lines. A line is on the disk before its payload leaves the site.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedblend.core.upload import bytes_of
from fedblend.flower.client_task import Memory
from fedblend.flower.messages import Tensors
from fedblend.flower.site import RefusedByPolicy
from fedblend.runs.files import append_line, read_lines


class AuditLog:
    """The audit log at ``path``; without a path nothing is written."""

    def __init__(self, path: str | None) -> None:
        self.path = Path(path) if path else None

    def record_sent(self, run: str, round: int, client: int, kind: str, tensors: Tensors, trained: bool) -> None:
        """Record a payload that is about to leave; ``trained`` states whether training made it.

        Raises :class:`FedblendError` if the line cannot be written; the payload must not leave then.
        """
        payload = {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in tensors.items()}
        facts: dict[str, Any] = {"tensors": payload, "bytes": bytes_of(tensors), "sha256": digest_of(tensors)}
        facts |= {"trained": True} if trained else {}
        self._write(run, round, client, kind, facts)

    def record_refused(self, run: str, round: int, client: int, kind: str, reason: str) -> None:
        """Record a payload that the server requested and the site refused."""
        self._write(run, round, client, kind, {"refused": reason})

    def rounds_trained(self) -> set[tuple[str, int]]:
        """Return the runs and rounds in which a payload made by training has left."""
        return {(line["run"], line["round"]) for line in self.lines() if line.get("trained")}

    def has_sent(self, run: str, round: int, client: int, kind: str, trained: bool) -> bool:
        """Whether such a payload of this client has left in this round of this run."""
        payload = (run, round, client, kind, trained)
        return any(
            payload == (line["run"], line["round"], line["client"], line["kind"], line.get("trained", False))
            for line in self.lines()
            if "refused" not in line
        )

    def lines(self) -> list[dict[str, Any]]:
        """Return all lines, oldest first."""
        return read_lines(self.path) if self.path else []

    def _write(self, run: str, round: int, client: int, kind: str, facts: dict[str, Any]) -> None:
        if self.path:
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            append_line(self.path, {"time": when, "run": run, "round": round, "client": client, "kind": kind, **facts})


def audit_rows(lines: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return lines of an audit log as rows of text: time, run, round, kind, payload, bytes, digest."""
    rows: list[tuple[str, ...]] = []
    for line in lines:
        if "refused" in line:
            payload, size, digest = f"refused: {line['refused']}", "", ""
        else:
            shapes = [f"{name} {'x'.join(map(str, form[1:])) or '1'}" for name, form in line["tensors"].items()]
            more = f" and {len(shapes) - 3} more" if len(shapes) > 3 else ""
            payload, size, digest = ", ".join(shapes[:3]) + more, f"{line['bytes']:,}", line["sha256"][:12]
        rows.append((line["time"], line["run"], str(line["round"] + 1), line["kind"], payload, size, digest))
    return rows


def digest_of(tensors: Tensors) -> str:
    """Return the SHA-256 of tensors with their names, shapes and types, in order of name; hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name].detach().cpu().contiguous().numpy()
        digest.update(f"{name}\0{array.dtype.str}\0{list(array.shape)}\0".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


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

    def check(self, payload: str, trained: bool) -> None:
        """Raise :class:`RefusedByPolicy` if the client has sent the payload in this round or a later one."""
        last = self.memory.mark(f"sent-{payload}")
        if (last is not None and self.round <= int(last)) or self.audit.has_sent(
            self.run, self.round, self.client, self.kind, trained
        ):
            raise RefusedByPolicy(
                f"it has given its {self.kind} of round {self.round + 1} in this run, and gives them once"
            )

    def mark_sent(self, payload: str) -> None:
        """Note that the payload is about to leave."""
        self.memory.keep(f"sent-{payload}", str(self.round), {})
