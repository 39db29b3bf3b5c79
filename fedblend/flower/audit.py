"""A site's record of everything that it sent or refused to send: JSON lines, on the disk before anything leaves."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

from fedblend.core.trees import Tensors
from fedblend.core.upload import bytes_of
from fedblend.runs.files import append_line, read_lines


class Audit:
    """The audit log at ``path``; without a path nothing is written."""

    def __init__(self, path: str | None) -> None:
        self.path = Path(path) if path else None

    def sent(self, run: str, round: int, client: int, kind: str, tensors: Tensors, trained: bool) -> None:
        """Record a payload that is about to leave, and whether training made it.

        Raises :class:`FedblendError` if that fails; then nothing leaves.
        """
        payload = {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in tensors.items()}
        facts: dict[str, Any] = {"tensors": payload, "bytes": bytes_of(tensors), "sha256": digest_of(tensors)}
        facts |= {"trained": True} if trained else {}
        self._write(run, round, client, kind, facts)

    def refused(self, run: str, round: int, client: int, kind: str, reason: str) -> None:
        """Record what was asked for and not given."""
        self._write(run, round, client, kind, {"refused": reason})

    def rounds_trained(self) -> set[tuple[str, int]]:
        """The runs and rounds in which something that was trained has left."""
        return {(line["run"], line["round"]) for line in self.lines() if line.get("trained")}

    def has_left(self, run: str, round: int, client: int, kind: str, trained: bool) -> bool:
        """Whether such a payload of this client has left in this round of this run."""
        asked = (run, round, client, kind, trained)
        return any(
            asked == (line["run"], line["round"], line["client"], line["kind"], line.get("trained", False))
            for line in self.lines()
            if "refused" not in line
        )

    def lines(self) -> list[dict[str, Any]]:
        """All that was recorded, oldest first."""
        return read_lines(self.path) if self.path else []

    def _write(self, run: str, round: int, client: int, kind: str, facts: dict[str, Any]) -> None:
        if self.path:
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            append_line(self.path, {"time": when, "run": run, "round": round, "client": client, "kind": kind, **facts})


def digest_of(tensors: Tensors) -> str:
    """SHA-256 of tensors with their names, shapes and types, in order of name; hexadecimal."""
    made = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name].detach().cpu().contiguous().numpy()
        made.update(f"{name}\0{array.dtype.str}\0{list(array.shape)}\0".encode())
        made.update(array.tobytes())
    return made.hexdigest()
