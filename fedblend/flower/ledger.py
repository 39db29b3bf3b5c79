"""What a site has shared, over all runs: the same request gets the same payload again, bit for bit.

A site that draws its groups or its noise anew for each request gives away its samples: thirty requests for means of 20
of 80 samples are 120 equations for 80 unknowns, and noise averages out.

The sets of samples that payloads covered are kept, too: the difference of two means, or of two scores, is that of the
samples that are in one of the sets only. So two sets must not differ in a few samples.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from fedblend.core.errors import FedblendError
from fedblend.core.files import sole_writer, write_atomically
from fedblend.core.paths import read_bytes
from fedblend.core.sharing import ClientData, Payload, Sharing
from fedblend.core.trees import add_prefix, digest_of, strip_prefix
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.parts import dump
from fedblend.flower.audit import AuditLog
from fedblend.flower.secrets import secret_generator, site_secret
from fedblend.flower.site import UNWRITTEN, RefusedByPolicy, Site

TAG_BYTES = 16  # Length of a sample's tag

COMPARED = ("means", "hidden-means", "statistics")
"""Kinds of shared payloads whose samples a site compares with those of earlier means."""


class SharingLedger:
    """The payloads that a site shared, and the secret that fixes its groups and its noise.

    Both are in a folder beside the audit log: ``audit.shared`` for ``audit.jsonl``. Only the site's user can read it.
    """

    def __init__(self, audit: AuditLog, sharings: int) -> None:
        self.audit, self.sharings, self.folder = audit, sharings, audit.folder

    def payload(
        self,
        sharing: Sharing,
        local: ClientData,
        about: Mapping[str, Any],
        covers: Callable[[np.ndarray, np.ndarray], None],
        counts: Callable[[str], None],
    ) -> Payload | None:
        """Return what the site shares of its samples; ``None`` where these are too few.

        A request for the same sharing of the same samples gets the payload that left before. Where samples were added
        since, means that left before stay as they are, and the samples that are in none of them make means of their
        own. ``about`` is what else the payload depends on, as JSON values. ``covers`` gets the tags and the labels of
        the samples that means or statistics are of; where entries are not by label, the labels are -1. ``counts`` gets
        a keyed digest of the request and the payload, of a request without one of all samples; that a site has too few
        tells of them, too. Raises :class:`RefusedByPolicy` if this would be one more than the site file allows
        (``sharings``).
        """
        secret, name = site_secret(self.folder), _name(sharing, local, about)
        tags = sample_tags(secret, local.x, local.y)
        known, payload = self._read(name)
        old = set(known)
        grows = sharing.shares_means and sharing.plan.who != "groups"
        if not (old <= set(tags) if grows else old == set(tags)):
            old, payload = set(), {}
        new = [row for row, tag in enumerate(tags) if tag not in old]
        key = hmac.digest(secret, name.encode() + b"".join(tags[row] for row in new), "sha256")
        fresh, used = _shared_once(sharing, local, new, key)
        if payload and fresh:
            payload = {n: torch.cat([payload[n], t]) for n, t in fresh.items()}
        payload = payload or fresh
        # Masked ones are counted before they are computed.
        if sharing.plan.who != "groups":
            self._count(secret, name, tags, local.minimum, payload, counts)
        if not payload:
            return None
        if sharing.bytes_kind in COMPARED and sharing.made_of != "sample":
            rows = np.flatnonzero(sharing.used(local))
            if grows:
                rows = np.union1d(np.setdiff1d(np.arange(len(tags)), new), used).astype(np.int64)
            by_label = sharing.made_of == "label" and local.task.kind == "classification"
            labels = local.y.numpy()[rows] if by_label else np.full(len(rows), -1)
            covers(_as_array([tags[row] for row in rows]), labels)
        if fresh:
            kept = [tags[row] for row in (used if grows else new)]
            self._write(name, [*(tag for tag in known if tag in old), *kept], payload)
        return payload

    def count_number(
        self, sharing: Sharing, local: ClientData, about: Mapping[str, Any], counts: Callable[[str], None]
    ) -> None:
        """Count a sharing of which only the number of entries leaves, as :meth:`payload` does of one without payload.

        With ``split = "class"`` such numbers tell the sizes of classes.
        """
        secret = site_secret(self.folder)
        tags = sample_tags(secret, local.x, local.y)
        self._count(secret, _name(sharing, local, about), tags, local.minimum, {}, counts)

    def _count(
        self, secret: bytes, name: str, tags: list[bytes], minimum: int, payload: Payload, counts: Callable[[str], None]
    ) -> None:
        # The server knows the number of samples, so that nothing of fewer than the minimum tells nothing.
        if payload or len(tags) >= minimum:
            result = digest_of(payload).encode() if payload else b"".join(tags)
            digest = hmac.digest(secret, f"{name} ".encode() + result, "sha256").hex()
            self.audit.check_sharings(digest, payload or None, self.sharings)
            counts(digest)

    def _read(self, name: str) -> tuple[list[bytes], Payload]:
        """Return the tags of the samples that a form covers, and its payload; empty where it was not shared."""
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            return [], {}
        table = _read_table(path, "restore it from a copy, or remove it", "tags")
        return [row.tobytes() for row in table["tags"].numpy()], strip_prefix("payload/", table)

    def _write(self, name: str, tags: list[bytes], payload: Payload) -> None:
        whole = add_prefix("payload/", {n: t.contiguous() for n, t in payload.items()})
        _write_table(self.folder / f"{name}.safetensors", {"tags": torch.from_numpy(_as_array(tags)), **whole})


def ledger_of(site: Site) -> SharingLedger | None:
    """Return the ledger of a site with a site file; without one a site shares as a simulation does."""
    return SharingLedger(AuditLog(site.audit), site.sharings) if site.has_file else None


def _name(sharing: Sharing, local: ClientData, about: Mapping[str, Any]) -> str:
    request = local.request and [local.request.wanted.tolist(), local.request.dummies.tolist()]
    form = {"sharing": dump(sharing), "minimum": local.minimum, "request": request, **about}
    return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()


def _shared_once(sharing: Sharing, local: ClientData, rows: list[int], key: bytes) -> tuple[Payload, list[int]]:
    """Return what a sharing makes of some samples with random numbers of ``key``, and those that it is made of."""
    if not rows:
        return {}, []
    some = torch.tensor(rows)
    fresh = replace(local, x=local.x[some], y=local.y[some], rng=secret_generator(key))
    payload = sharing.share(fresh)
    if not payload:
        return {}, []
    used = sharing.used(replace(fresh, rng=secret_generator(key)))
    return payload, np.array(rows)[used].tolist()


def _read_table(path: Path, remedy: str, *names: str) -> Payload:
    """Return a table of tensors with these and others. Raises :class:`FedblendError` if it is damaged."""
    content = read_bytes(path, remedy)
    try:
        table = safetensors.torch.load(content)
    except SafetensorError as error:
        raise FedblendError(f"{path}: is damaged: {error}; {remedy}") from None
    if missing := [name for name in names if name not in table]:
        raise FedblendError(f"{path}: is damaged: it has no '{missing[0]}'; {remedy}")
    return table


def _write_table(path: Path, table: Payload) -> None:
    with sole_writer(path.parent):
        write_atomically(path, safetensors.torch.save(table), UNWRITTEN)


def _as_array(tags: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(tags), np.uint8).reshape(-1, TAG_BYTES).copy()


def sample_tags(secret: bytes, x: torch.Tensor, y: torch.Tensor) -> list[bytes]:
    """Return a tag of each sample, by which the site finds it again and nobody else can."""
    inputs, targets = x.cpu().contiguous().numpy(), y.cpu().contiguous().numpy()
    content = (inputs[row].tobytes() + targets[row].tobytes() for row in range(len(targets)))
    return [hmac.digest(secret, sample, "sha256")[:TAG_BYTES] for sample in content]


class FewDiffer(RefusedByPolicy):
    """Payloads whose samples differ in a few from earlier ones'. By label this tells of labels, so that it counts."""


@dataclass(frozen=True, eq=False)
class SampleSet:
    """Samples by their tags, in groups of which each has a result of its own."""

    tags: np.ndarray  # A tag of each sample, uint8 [n, 16], that only the site can compute
    groups: np.ndarray  # The label of each sample, int64 [n], where a payload has a result of each label alone; else -1

    def digest(self, secret: bytes) -> str:
        """A digest of the set in any order, with the site's secret."""
        rows = sorted(f"{group} {tag.tobytes().hex()}" for group, tag in zip(self.groups, self.tags, strict=True))
        return hmac.digest(secret, " ".join(rows).encode(), "sha256").hex()

    def few_differing(self, other: SampleSet, fewest: int) -> int:
        """Return how many samples are in one of two sets only, if these are 1 to ``fewest`` - 1; else 0.

        Of two sets by label it is so for the samples of each label; of others for all samples together.
        """
        by_label = bool((self.groups >= 0).all() and (other.groups >= 0).all())
        counts = Counter(self._samples(by_label))
        counts.subtract(other._samples(by_label))
        differing: Counter[int] = Counter()
        for (group, _), number in counts.items():
            differing[group] += abs(number)
        return min((number for number in differing.values() if 0 < number < fewest), default=0)

    def _samples(self, by_label: bool) -> list[tuple[int, bytes]]:
        groups = self.groups.tolist() if by_label else [-1] * len(self.groups)
        return [(group, tag.tobytes()) for group, tag in zip(groups, self.tags, strict=True)]


class SampleSets:
    """The sets that a site's payloads covered, in the folder of its :class:`SharingLedger`."""

    def __init__(self, audit: AuditLog) -> None:
        self.audit, self.folder, self.secret = audit, audit.folder, site_secret(audit.folder)

    def of(self, engine: LoopEngine, rows: np.ndarray, fewest: int, by_label: bool) -> SampleSet:
        """Return the set of a site's samples ``rows``; ``by_label``: those of labels with ``fewest`` or more."""
        tags = _tags_of(self.secret, engine)
        if not by_label:
            return SampleSet(tags[rows], np.full(len(rows), -1))
        labels = engine.setup.data.train.y.numpy()[rows]
        enough = np.bincount(labels, minlength=1)[labels] >= fewest
        return SampleSet(tags[rows[enough]], labels[enough].astype(np.int64))

    def check(self, samples: SampleSet, kind: str, fewest: int) -> None:
        """Raise :class:`FewDiffer` if the set differs from an earlier one in 1 to ``fewest`` - 1 samples.

        Scores are compared with scores, and means and statistics of any kind with each other.
        """
        own = samples.digest(self.secret)
        for digest in sorted(self.audit.sets_sent(kind == "scores") - {own}):
            if samples.few_differing(self._read(digest), fewest):
                raise FewDiffer(
                    f"{kind}: they are of other samples than earlier ones: the difference would tell of fewer than "
                    f"{fewest} samples (min_mean in its file); valid: the samples of before (holdout, validation, and "
                    "the site's data)"
                )

    def keep(self, samples: SampleSet) -> str:
        """Write a set to the disk, and return its digest for the audit log."""
        digest = samples.digest(self.secret)
        path = self.folder / f"{digest}.samples"
        if not path.exists():
            table = {"tags": torch.from_numpy(samples.tags), "groups": torch.from_numpy(samples.groups)}
            _write_table(path, table)
        return digest

    def _read(self, digest: str) -> SampleSet:
        path = self.folder / f"{digest}.samples"
        remedy = "it has the samples that earlier payloads covered; restore it from a copy"
        table = _read_table(path, remedy, "tags", "groups")
        found = SampleSet(table["tags"].numpy(), table["groups"].numpy())
        if found.digest(self.secret) != digest:
            raise FedblendError(f"{path}: is damaged, or of another secret; restore the folder from a copy")
        return found


@functools.lru_cache(maxsize=4)
def _tags_of(secret: bytes, engine: LoopEngine) -> np.ndarray:
    train = engine.setup.data.train
    return _as_array(sample_tags(secret, train.x, train.y))
