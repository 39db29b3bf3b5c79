"""The sets of samples that payloads of a site covered, over all runs: two sets must not differ in a few samples.

The difference of two means, or of two scores, is that of the samples that are in one of the sets only.
"""

from __future__ import annotations

import functools
import hmac
from collections import Counter
from dataclasses import dataclass

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from fedblend.core.errors import FedblendError
from fedblend.core.files import sole_writer, write_atomically
from fedblend.core.paths import read_bytes
from fedblend.engines.loop_engine import LoopEngine
from fedblend.flower.audit import AuditLog
from fedblend.flower.ledger import SharingLedger, sample_tags
from fedblend.flower.site import UNWRITTEN, RefusedByPolicy


class FewDiffer(RefusedByPolicy):
    """Payloads whose samples differ in a few from earlier ones'. By label this tells of labels, so that it counts."""


@dataclass(frozen=True, eq=False)
class SampleSet:
    """Samples by their tags, in groups of which each has a result of its own."""

    tags: np.ndarray
    """A tag of each sample, uint8 [n, 16], that only the site can compute."""
    groups: np.ndarray
    """The label of each sample, int64 [n], where a payload has a result of each label alone; else -1."""

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
        ledger = SharingLedger(audit, 0)
        self.audit, self.folder, self.secret = audit, ledger.folder, ledger.secret()

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
            with sole_writer(self.folder):
                write_atomically(path, safetensors.torch.save(table), UNWRITTEN)
        return digest

    def _read(self, digest: str) -> SampleSet:
        path = self.folder / f"{digest}.samples"
        content = read_bytes(path, "it has the samples that earlier payloads covered; restore it from a copy")
        try:
            table = safetensors.torch.load(content)
            found = SampleSet(table["tags"].numpy(), table["groups"].numpy())
        except (SafetensorError, KeyError) as error:
            raise FedblendError(f"{path}: is damaged: {error}; restore it from a copy") from None
        if found.digest(self.secret) != digest:
            raise FedblendError(f"{path}: is damaged, or of another secret; restore the folder from a copy")
        return found


@functools.lru_cache(maxsize=4)
def _tags_of(secret: bytes, engine: LoopEngine) -> np.ndarray:
    train = engine.setup.data.train
    return np.frombuffer(b"".join(sample_tags(secret, train.x, train.y)), np.uint8).reshape(len(train.y), -1).copy()
