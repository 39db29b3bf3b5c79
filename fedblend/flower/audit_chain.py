"""The chain of an audit log's lines, and what they count, which a site keeps apart from the log.

Each line ends in its tag, HMAC-SHA256 with the site's secret of the previous line's tag and its own text. So who lacks
the secret can neither change, remove nor add lines unseen. Lines of version 0.2 have no tag: the first tag after them
covers the SHA-256 of all their bytes. So does that of a line that accepts a gap (:meth:`AuditLog.accept`).
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
import sqlite3
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter

from fedblend.core.errors import FedblendError
from fedblend.core.files import without_waiting
from fedblend.core.payload import PAYLOAD_KINDS
from fedblend.core.registry import LARGEST_INT, explain
from fedblend.flower.site import UNWRITTEN

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


_LINE: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        Annotated[_Refused, Tag("refused")] | Annotated[_Accepted, Tag("accepted")] | Annotated[_Sent, Tag("sent")],
        Discriminator(lambda line: next((kind for kind in ("refused", "accepted") if kind in line), "sent")),
    ]
)


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
    start: int = 0
    """Where its last line begins, in bytes."""
    size: int = 0
    last: bytes = hashlib.sha256().digest()
    """The SHA-256 of its last line."""
    chain: bytes = hashlib.sha256().digest()
    """The tag of its last line; without tags the SHA-256 of all lines."""
    content: bytes = hashlib.sha256().digest()
    """The SHA-256 of all lines, where all were read."""
    misfit: int = 0
    """The first line that does not fit, counted from 1, unless a later line accepts it; 0 if all fit."""


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
        _LINE.validate_python(line)
    except pydantic.ValidationError as error:
        raise FedblendError(
            f"{path}: line {number}: {explain(error)}; the file is damaged, or no audit log; {COUNTED}"
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
        with self._told():
            row = self.db.execute("SELECT * FROM ends").fetchone()
        return None if row is None else End(*row)

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
        with self._told():
            rows = self.db.execute("SELECT key FROM counted WHERE what = ?", [json.dumps(what)])
            return [json.loads(key) for (key,) in rows]

    def number(self, what: str) -> int:
        with self._told():
            (found,) = self.db.execute("SELECT COUNT(*) FROM counted WHERE what = ?", [json.dumps(what)]).fetchone()
        return int(found)

    def has(self, what: str, key: Any) -> bool:
        with self._told():
            pair = [json.dumps(what), json.dumps(key)]
            return self.db.execute("SELECT 1 FROM counted WHERE what = ? AND key = ?", pair).fetchone() is not None

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
