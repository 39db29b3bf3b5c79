"""A site's audit log of payloads that it sent or refused, and the guard that lets a payload leave once.

The log is JSON lines in a chain. A line is on the disk before its payload leaves the site, and before it is counted.
Several messages may be answered at once, by one process each: a site checks and records under the log's lock.

Each line ends in its tag, HMAC-SHA256 with the site's secret of the previous line's tag and its own text. So who lacks
the secret can neither change, remove nor add lines unseen. Lines of version 0.2 have no tag: the first tag after them
covers the SHA-256 of all their bytes. So does that of a line that accepts a gap (:meth:`AuditLog.accept`).
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import logging
import os
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict, Unpack

from fedblend.core.errors import FedblendError, printable
from fedblend.core.files import append_line, waiting_lock, without_waiting
from fedblend.core.payload import PAYLOAD_KINDS
from fedblend.core.registry import LARGEST_INT, explain
from fedblend.core.trees import bytes_of, digest_of
from fedblend.flower.client_task import Memory
from fedblend.flower.messages import Tensors
from fedblend.flower.secrets import site_secret
from fedblend.flower.site import UNWRITTEN, RefusedByPolicy

log = logging.getLogger("flwr")

SHARED_KINDS = (*(kind.name for kind in PAYLOAD_KINDS.values() if kind.is_shared), "masked")
"""Kinds of payload that a site makes of its samples without training."""

COUNTED = "this site's limits count its lines: restore it from a copy"
"""What to do about a damaged log. Without its lines the site would share and train again."""

TAG = b', "chain": "'  # What is between a line's text and its tag


class _Line(BaseModel):
    """A line of the log: a payload that left, why it did not, or a gap that the site's user accepted."""

    model_config = ConfigDict(strict=True, extra="allow")

    time: str
    run: str
    round: Annotated[int, Field(ge=0, le=LARGEST_INT)]
    client: int
    kind: str
    chain: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] = ""


class _Refused(_Line):
    refused: str


class _Accepted(_Line):
    accepted: str


class _Sent(_Line):
    tensors: dict[str, list[str | int]]
    bytes: Annotated[int, Field(ge=0, le=LARGEST_INT)]
    sha256: str
    trained: bool = False
    part: str = ""
    samples: str = ""
    split: str = ""
    sharing: str = ""
    begun: bool = False


_LINES: dict[str, type[_Line]] = {"refused": _Refused, "accepted": _Accepted, "sent": _Sent}


class AuditFault(FedblendError):
    """An audit log that is not the one that the site wrote."""

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(
            f"{path}: is not as this site wrote it: {fault}; nothing leaves until it is restored from a copy. If there "
            "is none, go on with: fedblend site audit --accept (all that is still known counts)"
        )


@dataclass(frozen=True)
class End:
    """Where a log ends, as far as it was read."""

    lines: int = 0
    start: int = 0  # Where its last line begins, in bytes
    size: int = 0
    last: bytes = hashlib.sha256().digest()  # The SHA-256 of its last line
    chain: bytes = hashlib.sha256().digest()  # The tag of its last line; without tags the SHA-256 of all lines
    content: bytes = hashlib.sha256().digest()  # The SHA-256 of all lines, where all were read
    misfit: int = 0  # The first line that does not fit, counted from 1, unless a later line accepts it; 0 if all fit


@contextmanager
def open_log(path: Path) -> Iterator[IO[bytes]]:
    """Open a log to read. A log that does not exist is empty. Raises :class:`FedblendError` for what is no file."""
    try:
        with open(path, "rb", opener=without_waiting) if os.path.lexists(path) else io.BytesIO() as file:
            if isinstance(file, io.BufferedReader) and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FedblendError(f"{path}: is no regular file; {COUNTED}")
            yield file
    except IsADirectoryError:
        raise FedblendError(f"{path}: is a folder; {COUNTED}") from None
    except OSError as error:
        raise FedblendError(f"{path}: cannot be read: {error.strerror}; {COUNTED}") from None


def read_chain(
    file: IO[bytes], path: Path, secret: bytes, known: End | None = None
) -> Iterator[tuple[dict[str, Any], End]]:
    """Yield each line that is whole, from where ``known`` ends (default: all), with the end of the log up to there.

    Raises :class:`FedblendError` for a line that is damaged. One that does not fit is noted in ``End.misfit``.
    """
    end, content = known or End(), hashlib.sha256()
    chained = known is not None
    file.seek(end.size)
    for raw in file:
        if not raw.endswith(b"\n"):
            return
        line, number = _parsed(raw, path, end.lines + 1), end.lines + 1
        accepts = known is None and "accepted" in line
        before = content.digest() if accepts else end.chain
        content.update(raw)
        if tag := line.get("chain", ""):
            text = raw.rpartition(TAG)[0]
            fits = hmac.compare_digest(hmac.digest(secret, before + text, "sha256").hex(), tag)
            chain, chained = bytes.fromhex(tag), True
        else:
            fits, chain = not chained, content.digest()
        misfit = 0 if accepts and fits else end.misfit or (0 if fits else number)
        last, whole = hashlib.sha256(raw).digest(), content.digest() if known is None else b""
        end = End(number, end.size, end.size + len(raw), last, chain, whole, misfit)
        yield line, end


def tagged(line: dict[str, Any], secret: bytes, before: bytes) -> dict[str, Any]:
    """Return a line with its tag, after a line with the tag ``before``."""
    text = json.dumps(line)[:-1].encode()
    return {**line, "chain": hmac.digest(secret, before + text, "sha256").hex()}


def _parsed(raw: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        line: dict[str, Any] = json.loads(raw.decode("utf-8-sig", "replace"))
        kind = next((word for word in ("refused", "accepted") if word in line), "sent")
        _LINES[kind].model_validate(line)
    except pydantic.ValidationError as error:
        raise FedblendError(
            f"{path}: line {number}: {explain(error, kind)}; the file is damaged, or no audit log; {COUNTED}"
        ) from None
    except (ValueError, RecursionError, TypeError):
        raise FedblendError(f"{path}: line {number} is damaged; {COUNTED}") from None
    return line


def once_key(run: str, round: int, client: int, kind: str, trained: bool, part: str) -> list[Any]:
    """Return what identifies a payload that leaves once.

    Payloads that training made are one payload, of whichever kind: a server may change the experiment. Of the run only
    Flower's number counts, since the server chooses the experiment's name before it.
    """
    return [run.rpartition("/")[2], round, client, trained, "" if trained else kind, part]


def _counted(line: dict[str, Any], end: End) -> Iterator[tuple[str, Any]]:
    """What a line counts, as pairs of a quantity and a key; equal pairs count once."""
    if "refused" in line or "accepted" in line:
        return
    kind, trained, part = line["kind"], line.get("trained", False), line.get("part", "")
    place = (line["run"], line["round"], line["client"])
    yield "once", once_key(*place, kind, trained, part)
    yield f"sent {kind}", end.chain.hex()
    if trained:
        yield "rounds", place[:2]
    if part:
        yield f"parts {kind}", part
    if line.get("samples"):
        yield ("sets scores" if kind == "scores" else "sets means"), line["samples"]
    sharing = line.get("sharing")
    if not trained and kind in SHARED_KINDS and (line["bytes"] or line.get("begun") or sharing):
        yield "shared", sharing or (" ".join(map(str, place)) if kind == "masked" else line["sha256"])


class Counts:
    """What the lines of a log count, and where it ends: an SQLite database, by default one that is not on the disk.

    A message costs a few look-ups, however long the log is. Raises :class:`FedblendError` if it cannot be used.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        with self._told():
            self.db = sqlite3.connect(":memory:" if path is None else path, isolation_level=None)
            try:
                self.db.execute("CREATE TABLE IF NOT EXISTS counted (what, key, PRIMARY KEY (what, key)) WITHOUT ROWID")
                self.db.execute("CREATE TABLE IF NOT EXISTS ends (lines, start, size, last, chain)")
            except BaseException:
                self.db.close()
                raise

    def end(self) -> End | None:
        """Return where the log ended; ``None`` if nothing was counted yet."""
        rows = self._rows("SELECT * FROM ends")
        return End(*rows[0]) if rows else None

    def add(self, lines: Iterable[tuple[dict[str, Any], End]], end: End) -> End:
        """Count lines, all or none; note and return where they end: without any at ``end``."""
        with self._told(), self.db:
            self.db.execute("BEGIN IMMEDIATE")
            for line, end in lines:
                pairs = [(json.dumps(what), json.dumps(key)) for what, key in _counted(line, end)]
                self.db.executemany("INSERT OR IGNORE INTO counted VALUES (?, ?)", pairs)
            self.db.execute("DELETE FROM ends")
            row = (end.lines, end.start, end.size, end.last, end.chain)
            self.db.execute("INSERT INTO ends VALUES (?, ?, ?, ?, ?)", row)
        return end

    def keys(self, what: str) -> list[Any]:
        return [json.loads(key) for (key,) in self._rows("SELECT key FROM counted WHERE what = ?", what)]

    def number(self, what: str) -> int:
        return int(self._rows("SELECT COUNT(*) FROM counted WHERE what = ?", what)[0][0])

    def has(self, what: str, key: Any) -> bool:
        return bool(self._rows("SELECT 1 FROM counted WHERE what = ? AND key = ?", what, key))

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with self._told():
            return self.db.execute(query, [json.dumps(value) for value in values]).fetchall()

    def close(self) -> None:
        self.db.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise FedblendError(f"{self.path}: cannot be used: {error}; {UNWRITTEN}") from None
        except sqlite3.DatabaseError as error:
            raise FedblendError(
                f"{self.path}: is damaged: {error}; restore it from a copy, or remove it and run: fedblend site audit "
                "--accept"
            ) from None


class More(TypedDict, total=False):
    """What else a line states of a payload."""

    samples: str  # A keyed digest of the samples that it covers
    begun: bool  # Whether it is yet to be computed; it counts whether it leaves or not
    split: str  # The samples that a model is scored on
    sharing: str  # A keyed digest of a request to share and of its result


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

    def write(self, run: str, round: int, client: int, kind: str, facts: dict[str, Any]) -> None:
        """Write a line, and count it. Raises :class:`FedblendError` if it cannot be written."""
        if self.path is not None:
            with self.lock():
                line = _line(run, round, client, kind, facts)
                append_line(self.path, tagged(line, self._secret, self._end.chain), UNWRITTEN)
                self._count_new()

    def record_refused(self, run: str, round: int, client: int, kind: str, reason: str) -> None:
        """Record a payload that the server requested and the site refused."""
        self.write(run, round, client, kind, {"refused": printable(reason)})

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
                told = "this site's audit log is not as the site wrote it, and nothing leaves; the site's log states"
                raise FedblendError(f"{told} what to do") from None
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
            for line, end in self._chain():
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
            for one in self._chain():
                end = one[1]
            was = "its counter was lost" if known is None else f"{known.lines} had been counted"
            note = {"accepted": f"this site's user goes on with the {end.lines} lines before; {was}"}
            line = tagged(_line("", 0, 0, "gap", note), self._secret, end.content)
            append_line(self._path, line, UNWRITTEN)
            counts.add(self._chain(), end)

    def lines(self) -> list[dict[str, Any]]:
        """Return all lines, oldest first, whether or not they fit."""
        return [] if self.path is None else [line for line, _ in self._chain()]

    def _chain(self) -> Iterator[tuple[dict[str, Any], End]]:
        with open_log(self._path) as file:
            yield from read_chain(file, self._path, self._secret)

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
                raise AuditFault(self._path, f"line {self._end.lines}, the last one counted, is gone or changed")

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

    memory: Memory  # Holds the last round of each payload, until the SuperNode ends
    audit: AuditLog  # Holds all rounds, also after the SuperNode has ended, where the site has a log
    run: str
    round: int
    client: int
    kind: str
    part: str = ""  # Which of several payloads of the kind in a round

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

    def record_sent(self, tensors: Tensors, trained: bool, **more: Unpack[More]) -> None:
        """Record a payload that is about to leave; ``trained`` states whether training made it.

        Raises :class:`FedblendError` if the line cannot be written; the payload must not leave then.
        """
        payload = {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in tensors.items()}
        facts: dict[str, Any] = {"tensors": payload, "bytes": bytes_of(tensors), "sha256": digest_of(tensors)}
        told = {"trained": trained, "part": self.part, **more}
        facts |= {name: value for name, value in told.items() if value}
        self.audit.write(self.run, self.round, self.client, self.kind, facts)

    def count_refused(self, refusal: RefusedByPolicy, sharing: str, most: int) -> RefusedByPolicy:
        """Count a sharing that is refused, and return why; one too many is no more than that, and does not count."""
        with self.audit.lock():
            try:
                self.audit.check_sharings(sharing, None, most)
            except RefusedByPolicy as full:
                return full
            self.record_sent({}, False, sharing=sharing)
        return refusal

    def record_refused(self, reason: str) -> None:
        """Record that the site refused the payload."""
        self.audit.record_refused(self.run, self.round, self.client, self.kind, reason)

    def mark_sent(self, payload: str) -> None:
        """Note that the payload is about to leave."""
        self.memory.keep(f"sent-{payload}{self.part}", str(self.round), {})
