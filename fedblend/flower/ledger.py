"""What a site has shared, over all runs: the same request gets the same payload again, bit for bit.

A site that draws its groups or its noise anew for each request gives away its samples: thirty requests for means of 20
of 80 samples are 120 equations for 80 unknowns, and noise averages out.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from fedblend.experiment.parts import dump
from fedblend.flower.audit import AuditLog
from fedblend.flower.secrets import secret_generator, site_secret
from fedblend.flower.site import UNWRITTEN, Site

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
        secret, name = self.secret(), _name(sharing, local, about)
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
            covers(
                _as_array([tags[row] for row in rows]), local.y.numpy()[rows] if by_label else np.full(len(rows), -1)
            )
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
        secret = self.secret()
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

    def secret(self) -> bytes:
        """Return the site's secret (:func:`~fedblend.flower.secrets.site_secret`)."""
        return site_secret(self.folder)

    def _read(self, name: str) -> tuple[list[bytes], Payload]:
        """Return the tags of the samples that a form covers, and its payload; empty where it was not shared."""
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            return [], {}
        content = read_bytes(path, "restore it from a copy, or remove it")
        try:
            table = safetensors.torch.load(content)
            known = table["tags"].numpy()
        except (SafetensorError, KeyError) as error:
            raise FedblendError(f"{path}: is damaged: {error}; restore it from a copy, or remove it") from None
        return [row.tobytes() for row in known], strip_prefix("payload/", table)

    def _write(self, name: str, tags: list[bytes], payload: Payload) -> None:
        table = {"tags": torch.from_numpy(_as_array(tags))} | add_prefix(
            "payload/", {n: t.contiguous() for n, t in payload.items()}
        )
        with sole_writer(self.folder):
            write_atomically(self.folder / f"{name}.safetensors", safetensors.torch.save(table), UNWRITTEN)


def ledger_of(site: Site) -> SharingLedger | None:
    """Return the ledger of a site with a site file; without one a site shares as a simulation does."""
    return SharingLedger(AuditLog(site.audit), site.sharings) if site.has_file else None


def _name(sharing: Sharing, local: ClientData, about: Mapping[str, Any]) -> str:
    """Return a digest of all that a server chooses of a sharing."""
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


def _as_array(tags: list[bytes]) -> np.ndarray:
    """Return tags as uint8 [n, 16]."""
    return np.frombuffer(b"".join(tags), np.uint8).reshape(-1, TAG_BYTES).copy()


def sample_tags(secret: bytes, x: torch.Tensor, y: torch.Tensor) -> list[bytes]:
    """Return a tag of each sample, by which the site finds it again and nobody else can."""
    inputs, targets = x.cpu().contiguous().numpy(), y.cpu().contiguous().numpy()
    content = (inputs[row].tobytes() + targets[row].tobytes() for row in range(len(targets)))
    return [hmac.digest(secret, sample, "sha256")[:TAG_BYTES] for sample in content]
