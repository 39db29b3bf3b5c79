"""An attack on a client of a run from beginning to end, and what is kept of it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedblend.analysis.attacks.inversion import Progress, Reconstruction, invert, make_attack
from fedblend.analysis.attacks.metrics import ImageSimilarity, compare
from fedblend.analysis.attacks.pictures import draw_attack
from fedblend.analysis.attacks.search import Attack
from fedblend.analysis.attacks.setup import Attacker, AttackSetup, prepare
from fedblend.analysis.attacks.snapshot import RoundSnapshot, Watch
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.runs.directory import RunDirectory
from fedblend.runs.files import write_atomically, write_json

Labels = Literal["true", "inferred"]
"""Whether an attacker is told the labels, or finds them itself."""

FOLDER = "attacks"
"""Where in a run's folder attacks on it are kept, a folder each."""
TABLE, PICTURE = "attack.json", "images.png"
DEFINITIONS = "MSE on the model's scale; PSNR (dB) and SSIM (window 7) of pictures in [0, 1]; means over the images"


@dataclass(frozen=True)
class AttackResult:
    """An attack that was made: on what, with which settings, what it rebuilt, and how like the originals that is."""

    attack_setup: AttackSetup
    attack: str
    labels: Labels
    options: Attack
    rebuilt: Reconstruction
    similarity: ImageSimilarity
    seconds: float

    def table(self) -> dict[str, Any]:
        """All of it but the images, as plain data. An infinite PSNR (the very image) is ``None``."""
        attack_setup, found = self.attack_setup, self.similarity
        experiment = attack_setup.snapshot.setup.experiment
        order = found.rebuilt.tolist()
        return {
            "run": attack_setup.snapshot.run.path.name,
            "method": experiment.method.label or experiment.method.name,
            "data": attack_setup.snapshot.setup.data.name,
            "round": attack_setup.snapshot.round,
            "client": attack_setup.client,
            "drawn": attack_setup.drawn,
            "images": len(attack_setup.y),
            "steps": attack_setup.steps,
            "attacker": attack_setup.attacker,
            "attack": self.attack,
            "labels": self.labels,
            "options": asdict(self.options),
            "iterations": len(self.rebuilt.curve) - 1,
            "stopped": self.rebuilt.stopped,
            "cost": _json_number(self.rebuilt.cost),
            "costs": [_json_number(cost) for cost in self.rebuilt.costs],
            "definitions": DEFINITIONS,
            "mse": _json_number(found.mse.mean()),
            "psnr": _json_number(found.psnr.mean()),
            "ssim": _json_number(found.ssim.mean()),
            "each": [
                {
                    "label": int(label),
                    "rebuilt_as": int(self.rebuilt.y[row]),
                    **dict(zip(MEASURES, measured, strict=True)),
                }
                for label, row, measured in zip(attack_setup.y.tolist(), order, _measure_rows(found), strict=True)
            ],
            "seconds": round(self.seconds, 2),
        }

    def picture(self) -> bytes:
        """A PNG: each original beside what was rebuilt of it."""
        setup = self.attack_setup.snapshot.setup
        return draw_attack(self.attack_setup, self.rebuilt, self.similarity, setup.data.classes, self.title())

    def title(self) -> str:
        """What was attacked and how, in one line."""
        attack_setup = self.attack_setup
        run = attack_setup.snapshot.setup.experiment.method.label or attack_setup.snapshot.run.path.name
        return (
            f"{run}: client {attack_setup.client} at round {attack_setup.snapshot.round}, {self.attack}, "
            f"{_count_text(len(attack_setup.y), 'image')}, {_count_text(attack_setup.steps, 'step')}"
        )

    def write(self, folder: Path | str | None = None) -> Path:
        """Write ``attack.json`` and ``images.png`` into a folder, unless given one of the run's; returns it.

        Raises :class:`FedblendError` if that cannot be done.
        """
        path = Path(folder) if folder is not None else self.folder()
        make_folder(path)
        write_atomically(path / PICTURE, self.picture())
        write_json(path / TABLE, self.table())
        return path

    def folder(self) -> Path:
        """The attack's own folder in the run's: the same settings give the same one."""
        attack_setup = self.attack_setup
        words = [
            self.attack,
            f"round{attack_setup.snapshot.round}",
            f"client{attack_setup.client}",
            f"{len(attack_setup.y)}x{attack_setup.steps}",
        ]
        words += [attack_setup.attacker] + (["inferred"] if self.labels == "inferred" else [])
        return attack_setup.snapshot.run.path / FOLDER / "-".join(words)


MEASURES = ("mse", "psnr", "ssim")


def attack_run(
    run: Path | str | RunDirectory | RoundSnapshot,
    round: int,
    client: int,
    attack: str = "invgrad",
    *,
    images: int | None = None,
    steps: int | None = None,
    attacker: Attacker = "guesses",
    labels: Labels = "true",
    device: str | None = None,
    watch: Watch | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> AttackResult:
    """Attack what a client of a run sent after ``round`` rounds (0: for the untrained model).

    See :meth:`RoundSnapshot.load` and :func:`prepare` for how that is made again, and :func:`invert` for ``attack`` and
    its ``options``. With ``labels = "true"`` the attacker knows the labels. Starting points follow from the run's seed.

        attack_run("runs/quickstart/fedavg-seed0", 0, 3, images=4, steps=5, iterations=300).write()

    Raises :class:`FedblendError` for what cannot be attacked, and for unknown attacks and options.
    """
    if labels not in ("true", "inferred"):
        raise FedblendError(f"labels: {labels!r} is not valid; valid: true, inferred")
    made = make_attack(attack, options)  # before anything that takes long
    snapshot = run if isinstance(run, RoundSnapshot) else RoundSnapshot.load(run, round, watch)
    attack_setup = prepare(snapshot, client, images=images, steps=steps, attacker=attacker, device=device)
    rng = stream(snapshot.setup.experiment.seed, "attack", round, client)
    known = attack_setup.y if labels == "true" else None
    start = time.perf_counter()
    rebuilt = invert(
        attack_setup.victim,
        attack_setup.observed,
        attack_setup.x.shape,
        attack=made,
        labels=known,
        rng=rng,
        progress=progress,
    )
    seconds = time.perf_counter() - start
    similarity = compare(attack_setup.x, rebuilt.x, snapshot.setup.scale)
    return AttackResult(attack_setup, attack, labels, made, rebuilt, similarity, seconds)


def read_attacks(run: RunDirectory) -> list[dict[str, Any]]:
    """The tables of all attacks that are kept in a run's folder, in order of their folders.

    Raises :class:`FedblendError` for one that is damaged.
    """
    found = []
    for path in sorted((run.path / FOLDER).glob(f"*/{TABLE}")):
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            found.append(table | {name: float(table[name]) for name in ("mse", "ssim")})
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise FedblendError(f"{path}: is damaged: {error}; remove it, or make the attack again") from None
    return found


def make_folder(path: Path) -> None:
    """Make a folder. Raises :class:`FedblendError` if that cannot be done."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedblendError(f"--out {path}: cannot be used as a folder: {error.strerror}; name another") from None


def _measure_rows(found: ImageSimilarity) -> list[list[float | None]]:
    columns = np.stack([found.mse, found.psnr, found.ssim], 1)
    return [[_json_number(value) for value in row] for row in columns]


def _count_text(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _json_number(value: Any) -> float | None:
    """A number as JSON can hold it."""
    return float(value) if np.isfinite(value) else None
