"""Gradient inversion of a run's clients."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, part
from fedblend.papers.measures.base import CellRun, Measure


@part("measure", "attack")
class AttackFigure(Measure):
    """An attack on clients after the run's last round (0 rounds: on the untrained model), mean over their images.

    Each of the first clients that hold a batch is attacked once (:func:`attack_run`). The images are written next to
    the numbers; ``picture`` is the first client's.
    """

    figure: Literal["mse", "psnr", "ssim", "cost", "picture"] = "mse"
    """Mean squared error on normalised data, PSNR in dB on [0, 1], SSIM in per cent, the attack's own cost, or the
    picture."""
    clients: Count = 100
    """Clients that are attacked."""
    images: Count = 4
    """Images that a client trains on."""
    local_steps: Count = 5
    """Steps on these images."""
    iterations: Count = 2500
    """Iterations of the attack."""

    def measured(self, cell: CellRun) -> float | str:
        how = self._how()
        # The folder of single attacks does not depend on the number of clients: each client is attacked only once.
        folder = cell.work_folder("attack", how)
        found = cell.cached("attacks", {**how, "clients": self.clients}, lambda _: self._attack(cell, folder))
        if self.figure == "picture":
            return (folder / f"client{found['clients'][0]}" / "images.png").relative_to(cell.folder).as_posix()
        return float(found[self.figure]) * (100 if self.figure == "ssim" else 1)

    def _how(self) -> dict[str, Any]:
        """Options of the attack. As in the papers, the attacker assumes cross-entropy alone (``plain``)."""
        how: dict[str, Any] = {"attack": "invgrad", "attacker": "plain"}
        return how | {"images": self.images, "steps": self.local_steps, "iterations": self.iterations}

    def _attack(self, cell: CellRun, folder: Path) -> dict[str, Any]:
        import numpy as np

        from fedblend.analysis.attacks.snapshot import RoundSnapshot
        from fedblend.runs.directory import RunDirectory
        from fedblend.runs.runner import one_thread

        assert cell.run is not None
        with one_thread():
            snapshot = RoundSnapshot.load(RunDirectory(cell.run), cell.outcome.round)
            chosen = np.flatnonzero(snapshot.task.sizes >= self.images)[: self.clients].tolist()
            if not chosen:
                raise FedblendError(f"no client holds {self.images} images to attack")
            tables = []
            for number, client in enumerate(chosen):
                cell.on_step("clients attacked", number, len(chosen))
                tables.append(self._attack_client(snapshot, client, folder / f"client{client}"))
        means = {
            name: math.fsum(_number(table, name) for table in tables) / len(tables)
            for name in ("mse", "psnr", "ssim", "cost")
        }
        return {**means, "clients": chosen, "by_client": {name: [t[name] for t in tables] for name in means}}

    def _attack_client(self, snapshot: Any, client: int, folder: Path) -> dict[str, Any]:
        """The table of one client's attack, read from its folder or made now."""
        from fedblend.analysis.attacks.outcome import attack_run

        path = folder / "attack.json"
        if not path.is_file():
            attack = attack_run(snapshot, snapshot.round, client, **self._how())
            if attack.rebuilt.stopped:
                raise KeyboardInterrupt
            attack.write(folder)
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return table


def _number(table: Mapping[str, Any], name: str) -> float:
    """A number of a client's table, which has ``None`` for one that is not finite: a PSNR with an exact image."""
    value = table[name]
    if value is None:
        return math.inf if name == "psnr" and table["mse"] is not None else math.nan
    return float(value)
