"""What gradient inversion rebuilds of a run's clients."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, part
from fedblend.papers.measures.base import CellRun, Measure


@part("measure", "attack")
class AttackFigure(Measure):
    """An attack on clients after the run's last round (0 rounds: on the untrained model), mean over their images.

    Each of the first clients that hold a batch is attacked once (:func:`attack_run`); the images stay
    beside the numbers. ``picture`` gives the first client's.
    """

    figure: Literal["mse", "psnr", "ssim", "cost", "picture"] = "mse"
    """Mean squared error on normalised data, PSNR in dB on [0, 1], SSIM in per cent, the attack's own cost, or the
    picture."""
    attack: Literal["invgrad", "dlg", "idlg"] = "invgrad"
    """The attack."""
    clients: Count = 100
    """Clients that are attacked."""
    images: Count = 4
    """Images that a client trains on."""
    local_steps: Count = 5
    """Steps on these images."""
    iterations: Count = 2500
    """Iterations of the attack."""
    attacker: Literal["guesses", "plain", "knows"] = "plain"
    """What the attacker knows of the objective (``fedblend attack``); plain cross-entropy is what papers assume."""

    def measured(self, seen: CellRun) -> float | str:
        """In the figure's unit."""
        how = {
            "attack": self.attack,
            "images": self.images,
            "steps": self.local_steps,
            "iterations": self.iterations,
            "attacker": self.attacker,
        }
        # However many clients are attacked, each is so in the same way, and only once.
        each = seen.place("attack", how)
        found = seen.once("attacks", {**how, "clients": self.clients}, lambda _: self._attack(seen, each))
        if self.figure == "picture":
            return (each / f"client{found['clients'][0]}" / "images.png").relative_to(seen.folder).as_posix()
        return float(found[self.figure]) * (100 if self.figure == "ssim" else 1)

    def _attack(self, seen: CellRun, place: Path) -> dict[str, Any]:
        import numpy as np

        from fedblend.analysis.attacks.snapshot import RoundSnapshot
        from fedblend.runs.directory import RunDirectory
        from fedblend.runs.runner import one_thread

        assert seen.run is not None
        with one_thread():
            moment = RoundSnapshot.of(RunDirectory(seen.run), seen.outcome.round)
            chosen = np.flatnonzero(moment.task.sizes >= self.images)[: self.clients].tolist()
            if not chosen:
                raise FedblendError(f"no client holds {self.images} images to attack")
            tables = []
            for number, client in enumerate(chosen):
                seen.tick("clients attacked", number, len(chosen))
                tables.append(self._one(moment, client, place / f"client{client}"))
        # An image rebuilt to the last bit has no PSNR.
        means = {
            name: math.fsum(values) / len(values) if values else math.inf
            for name in ("mse", "psnr", "ssim", "cost")
            for values in [[table[name] for table in tables if table[name] is not None]]
        }
        return {**means, "clients": chosen, "by_client": {name: [t[name] for t in tables] for name in means}}

    def _one(self, moment: Any, client: int, place: Path) -> dict[str, Any]:
        """One client's attack: what is kept, or made now."""
        from fedblend.analysis.attacks.outcome import attack_run

        kept = place / "attack.json"
        if not kept.is_file():
            made = attack_run(
                moment,
                moment.round,
                client,
                self.attack,
                images=self.images,
                steps=self.local_steps,
                attacker=self.attacker,
                iterations=self.iterations,
            )
            if made.rebuilt.stopped:
                raise KeyboardInterrupt
            made.write(place)
        table: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        return table

    def steps(self, experiment: Any) -> float:
        """An iteration goes through the local steps forwards and, twice, backwards."""
        return 3.0 * self.clients * self.iterations * self.local_steps
