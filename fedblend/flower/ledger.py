"""What a site has shared, over all runs: the same request gets the same payload again, bit for bit.

A site that draws its groups or its noise anew for each request gives away its samples: thirty requests for means of 20
of 80 samples are 120 equations for 80 unknowns, and noise averages out.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from fedblend.core.errors import FedblendError
from fedblend.core.paths import read_bytes
from fedblend.core.registry import dump
from fedblend.core.sharing import ClientData, Payload, Sharing
from fedblend.core.trees import add_prefix, strip_prefix
from fedblend.flower.audit import AuditLog
from fedblend.flower.secrets import secret_generator
from fedblend.flower.site import UNWRITTEN, Site
from fedblend.runs.files import TEMPORARY, sole_writer, write_atomically

KEY_BYTES = 32
"""Length of a site's secret."""

TAG_BYTES = 16
"""Length of a sample's tag."""

COMPARED = ("means", "hidden-means", "statistics")
"""Kinds of shared payloads whose samples a site compares with those of earlier means."""


class SharingLedger:
    """The payloads that a site shared, and the secret that fixes its groups and its noise.

    Both are in a folder beside the audit log: ``audit.shared`` for ``audit.jsonl``. Only the site's user can read it.
    """

    def __init__(self, audit: AuditLog, sharings: int) -> None:
        assert audit.path is not None
        self.audit, self.sharings = audit, sharings
        self.folder = audit.path.with_suffix(".shared")

    def payload(
        self,
        sharing: Sharing,
        local: ClientData,
        about: Mapping[str, Any],
        covers: Callable[[np.ndarray, np.ndarray], None],
    ) -> Payload | None:
        """Return what the site shares of its samples; ``None`` where these are too few.

        A request for the same sharing of the same samples gets the payload that left before. Where samples were added
        since, means that left before stay as they are, and the samples that are in none of them make means of their
        own. ``about`` is what else the payload depends on, as JSON values. ``covers`` gets the tags and the labels of
        the samples that means or statistics are of; where entries are not by label, the labels are -1. Raises
        :class:`RefusedByPolicy` if the payload would be one more than the site file allows (``sharings``).
        """
        secret = self.secret()
        tags = sample_tags(secret, local.x, local.y)
        request = local.request and [local.request.wanted.tolist(), local.request.dummies.tolist()]
        form = {"sharing": dump(sharing), "minimum": local.minimum, "request": request, **about}
        name = hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()
        known, payload = self._read(name)
        old = set(known)
        grows = sharing.shares_means and not sharing.secure_aggregated
        if not (old <= set(tags) if grows else old == set(tags)):
            old, payload = set(), {}
        new = [row for row, tag in enumerate(tags) if tag not in old]
        key = hmac.digest(secret, name.encode() + b"".join(tags[row] for row in new), "sha256")
        fresh, used = _shared_once(sharing, local, new, key)
        if payload and fresh:
            payload = {n: torch.cat([payload[n], t]) for n, t in fresh.items()}
        payload = payload or fresh
        if not payload:
            return None
        # Masked ones are counted before they are computed.
        if not sharing.secure_aggregated:
            self.audit.check_sharings(payload, self.sharings)
        if sharing.bytes_kind in COMPARED and not sharing.single_samples:
            rows = np.flatnonzero(sharing.used(local))
            if grows:
                rows = np.union1d(np.setdiff1d(np.arange(len(tags)), new), used).astype(np.int64)
            by_label = sharing.by_label and local.task.kind == "classification"
            covers(
                _as_array([tags[row] for row in rows]), local.y.numpy()[rows] if by_label else np.full(len(rows), -1)
            )
        if fresh:
            kept = [tags[row] for row in (used if grows else new)]
            self._write(name, [*(tag for tag in known if tag in old), *kept], payload)
        return payload

    def secret(self) -> bytes:
        """Return the site's secret, which is drawn at its first use.

        Raises :class:`FedblendError` if others can read its file, or if it is damaged.
        """
        path = self.folder / "key"
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if not path.exists():
                with sole_writer(self.folder):
                    _create_once(path, secrets.token_bytes(KEY_BYTES))
            mode = path.stat().st_mode
        except OSError as error:
            raise FedblendError(f"{path}: cannot be used as this site's secret: {error.strerror}") from None
        secret = read_bytes(path, "it is this site's secret; restore it from a copy")
        if mode & 0o077:
            raise FedblendError(f"{path}: other users can read this site's secret; run: chmod 600 {path}")
        if len(secret) != KEY_BYTES:
            raise FedblendError(
                f"{path}: is damaged: {len(secret)} bytes, not {KEY_BYTES}; restore it from a copy. Without a copy, "
                "remove it; the next sharing then counts as a new one"
            )
        return secret

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


def _create_once(path: Path, content: bytes) -> None:
    """Create a file that only its owner can read, whole or not at all; leave one that another process created."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
