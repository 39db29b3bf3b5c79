"""A site's audit log of payloads that it sent or refused, and the guard that lets a payload leave once.

The log is JSON lines in a chain (:mod:`~fedblend.flower.audit_chain`). A line is on the disk before its payload leaves
the site, and before it is counted. Several messages may be answered at once, by one process each: a site checks and
records under the log's lock.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedblend.core.errors import FedblendError, printable
from fedblend.core.files import append_line, waiting_lock
from fedblend.core.trees import bytes_of, digest_of
from fedblend.flower.audit_chain import AuditFault, Counts, End, once_key, open_log, read_chain, tagged
from fedblend.flower.client_task import Memory
from fedblend.flower.messages import Tensors
from fedblend.flower.secrets import site_secret
from fedblend.flower.site import UNWRITTEN, RefusedByPolicy

log = logging.getLogger("flwr")


class AuditLog:
    """The audit log at ``path``; without a path nothing is written.

    What its lines count is in ``audit.shared/counts.sqlite`` for ``audit.jsonl``, with the end of the log. A line that
    a killed process has not counted is counted by the next.
    """

    def __init__(self, path: str | None) -> None:
        self.path = Path(path) if path else None
        self._counts: Counts | None = None
        self._secret, self._end = b"", End()

    @property
    def folder(self) -> Path:
        """The folder beside the log that only the site's user can read."""
        return self._path.with_suffix(".shared")

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
        sharing: str = "",
    ) -> None:
        """Record a payload that is about to leave; ``trained`` states whether training made it.

        ``part`` states which one it is where several payloads of a kind leave in a round, ``samples`` is a keyed digest
        of the samples that it covers, ``split`` names the samples that a model is scored on, ``sharing`` is a keyed
        digest of a request to share and of its result. ``begun`` is for one that is yet to be computed, and counts
        whether it leaves or not. Raises :class:`FedblendError` if the line cannot be
        written; the payload must not leave then.
        """
        payload = {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in tensors.items()}
        facts: dict[str, Any] = {"tensors": payload, "bytes": bytes_of(tensors), "sha256": digest_of(tensors)}
        more = {
            "trained": trained,
            "part": part,
            "samples": samples,
            "begun": begun,
            "split": split,
            "sharing": sharing,
        }
        self._write(run, round, client, kind, facts | {name: value for name, value in more.items() if value})

    def record_refused(self, run: str, round: int, client: int, kind: str, reason: str) -> None:
        """Record a payload that the server requested and the site refused."""
        self._write(run, round, client, kind, {"refused": printable(reason)})

    def rounds_trained(self) -> set[tuple[str, int]]:
        """Return the runs and rounds in which a payload made by training has left."""
        return {(run, round) for run, round in self._keys("rounds")}

    def has_sent(self, run: str, round: int, client: int, kind: str, trained: bool, part: str = "") -> bool:
        """Whether such a payload of this client (:func:`once_key`) has left in this round of this run."""
        with self.lock():
            key = once_key(run, round, client, kind, trained, part)
            return self._counts is not None and self._counts.has("once", key)

    def times_sent(self, kind: str) -> int:
        """Return how many payloads of a kind have left, in all runs."""
        with self.lock():
            return 0 if self._counts is None else self._counts.number(f"sent {kind}")

    def times_shared(self) -> int:
        """Return how many sharings count (:meth:`check_sharings`), in all runs."""
        return len(self._keys("shared"))

    def parts_sent(self, kind: str) -> set[str]:
        """Return which payloads of a kind have left, in all runs."""
        return set(self._keys(f"parts {kind}"))

    def sets_sent(self, scores: bool) -> set[str]:
        """Return the digests of the sets of samples that scores covered, or means and statistics of any kind."""
        return set(self._keys("sets scores" if scores else "sets means"))

    def check_sharings(self, sharing: str, payload: Tensors | None, most: int) -> None:
        """Raise :class:`RefusedByPolicy` if a sharing is a new one, and there were ``most`` others, in all runs.

        One that was answered before is answered again: it reveals nothing new. Of those in lines of version 0.2 only
        the payload is known. A masked payload (without ``sharing``) is always a new one, because two sums over
        different sites reveal more than one. It counts from its beginning.
        """
        left = set(self._keys("shared"))
        known = sharing in left or (payload is not None and digest_of(payload) in left)
        if self.path and not known and len(left) >= most:
            raise RefusedByPolicy(
                f"this site has shared {len(left)} payload{'s' if len(left) > 1 else ''} of its samples in all runs, "
                f"and shares no other (sharings in its site file: {most}); only an unmasked one is sent again, for the "
                "same sharing, scale and samples"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Wait for the log's lock, and hold it; in a block that holds it, go on. Without a path there is no lock.

        Raises :class:`FedblendError` if the log is not as this site wrote it; the log of the SuperNode states how.
        """
        if self.path is None or self._counts is not None:
            yield
            return
        with waiting_lock(self.path), self._open():
            try:
                self._count_new()
            except AuditFault as fault:
                log.error("fedblend: %s", fault)
                raise FedblendError(
                    "this site's audit log is not as the site wrote it, and nothing leaves; the site's log states what "
                    "to do"
                ) from None
            yield

    @contextmanager
    def verified(self) -> Iterator[dict[str, int]]:
        """Read the whole log, and write nothing; inside, what it counted can be read. Yield the numbers of its lines.

        Raises :class:`AuditFault` for the first line that does not fit.
        """
        with self._open(write=False) as counts:
            known, end = counts.end(), End()
            found = {"lines": 0, "payloads": 0, "gaps": 0}
            fits = known is None or not known.lines
            with open_log(self._path) as file:
                for line, end in read_chain(file, self._path, self._secret):
                    found["lines"] += 1
                    found["payloads"] += "tensors" in line
                    found["gaps"] += "accepted" in line
                    fits = fits or (known is not None and (end.lines, end.chain) == (known.lines, known.chain))
            if end.misfit:
                raise AuditFault(self._path, f"line {end.misfit} does not fit the lines before it")
            if known is None:
                self._count_new()
            elif not fits:
                lost = f"it has {end.lines} lines, and the last of the {known.lines} that were counted is not there"
                raise AuditFault(self._path, lost)
            yield found

    def accept(self) -> None:
        """Go on with a log that is not as this site wrote it. All that was counted counts, and all of its lines do.

        A line in the log tells of it. Raises :class:`FedblendError` if nothing is at fault, or a line is damaged.
        """
        with waiting_lock(self._path), self._open() as counts:
            try:
                self._count_new()
            except AuditFault:
                known, end = counts.end(), End()
            else:
                raise FedblendError(f"{self.path}: nothing to accept: its lines fit, and all are counted")
            with open_log(self._path) as file:
                for one in read_chain(file, self._path, self._secret):
                    end = one[1]
            was = "its counter was lost" if known is None else f"{known.lines} had been counted"
            note = {"accepted": f"this site's user goes on with the {end.lines} lines before; {was}"}
            line = tagged(_line("", 0, 0, "gap", note), self._secret, end.content)
            append_line(self._path, line, UNWRITTEN)
            with open_log(self._path) as file:
                counts.add(read_chain(file, self._path, self._secret), end)

    def lines(self) -> list[dict[str, Any]]:
        """Return all lines, oldest first, whether or not they fit."""
        if self.path is None:
            return []
        with open_log(self.path) as file:
            return [line for line, _ in read_chain(file, self.path, b"")]

    @property
    def _path(self) -> Path:
        assert self.path is not None
        return self.path

    def _keys(self, what: str) -> list[Any]:
        with self.lock():
            return [] if self._counts is None else self._counts.keys(what)

    @contextmanager
    def _open(self, write: bool = True) -> Iterator[Counts]:
        """Open the counter and read the secret; where they do not exist, make them, or without ``write`` do without."""
        path = self.folder / "counts.sqlite"
        self._secret = site_secret(self.folder) if write or (self.folder / "key").exists() else b""
        with closing(Counts(path if write or path.exists() else None)) as self._counts:
            try:
                yield self._counts
            finally:
                self._counts = None

    def _count_new(self) -> None:
        """Count the lines that are not counted yet. Raises :class:`AuditFault` if one does not fit."""
        assert self._counts is not None
        counts, known = self._counts, self._counts.end()
        self._end = known or End()
        with open_log(self._path) as file:
            file.seek(self._end.start)
            if hashlib.sha256(file.read(self._end.size - self._end.start)).digest() != self._end.last:
                lost = f"line {self._end.lines}, the last one that was counted, is gone or changed"
                raise AuditFault(self._path, lost)

            def fitting() -> Iterator[tuple[dict[str, Any], End]]:
                for line, end in read_chain(file, self._path, self._secret, known):
                    if known is None and "chain" in line:
                        raise AuditFault(self._path, f"the counter of its lines, {counts.path}, is lost")
                    if end.misfit:
                        raise AuditFault(self._path, f"line {end.misfit} does not fit the lines before it")
                    yield line, end

            # Nothing is written where nothing is new.
            if known is None or file.read(1):
                self._end = counts.add(fitting(), self._end)

    def _write(self, run: str, round: int, client: int, kind: str, facts: dict[str, Any]) -> None:
        if self.path is not None:
            with self.lock():
                line = _line(run, round, client, kind, facts)
                append_line(self.path, tagged(line, self._secret, self._end.chain), UNWRITTEN)
                self._count_new()


def _line(run: str, round: int, client: int, kind: str, facts: dict[str, Any]) -> dict[str, Any]:
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"time": when, "run": run, "round": round, "client": client, "kind": kind, **facts}


def audit_rows(lines: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return lines of an audit log as rows of text: time, run, round, kind, payload, bytes, digest."""
    rows: list[tuple[str, ...]] = []
    for line in lines:
        if said := [f"{word}: {line[word]}" for word in ("refused", "accepted") if word in line]:
            payload, size, digest = said[0], "", ""
        elif line.get("begun"):
            payload, size, digest = "begun, and counted", "", ""
        else:
            shapes = [f"{name} {'x'.join(map(str, form[1:])) or '1'}" for name, form in line["tensors"].items()]
            more = f" and {len(shapes) - 3} more" if len(shapes) > 3 else ""
            of = f"{line['split']}: " if line.get("split") else ""
            payload = of + ", ".join(shapes[:3]) + more or "nothing, and counted"
            size, digest = f"{line['bytes']:,}", line["sha256"][:12]
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
