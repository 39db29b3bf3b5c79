"""What a site keeps of its sharings, over runs whose samples differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedblend.core.objective import Task
from fedblend.core.sharing import ClientData, Payload
from fedblend.flower.audit import AuditLog
from fedblend.flower.ledger import SharingLedger
from fedblend.methods.sharing.moments import Moments


def test_sums_are_of_the_samples_that_a_site_has_now(tmp_path: Path) -> None:
    """Means stay where samples are added; sums of all samples are made anew."""
    x, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2

    def local(rows: int) -> ClientData:
        model: Any = nn.Linear(3, 2)
        rng, task = np.random.default_rng(0), Task("classification", 2)
        return ClientData(x[:rows], y[:rows], task, lambda x: x, lambda x, layer: x, rng, 1, model=model)  # type: ignore

    def shared(rows: int) -> Payload | None:
        ledger = SharingLedger(AuditLog(tmp_path / "audit.jsonl"), 10)
        return ledger.payload(sharing, local(rows), {}, lambda tags, labels: None, lambda digest: None)

    sharing = Moments(min_samples=1)
    for rows in (6, 6, 8):
        found, wanted = shared(rows), sharing.share(local(rows))
        assert found
        assert wanted
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), rows
