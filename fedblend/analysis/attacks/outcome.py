"""An attack on a client of a run from beginning to end, and what is kept of it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedblend.analysis.attacks.inversion import Progress, Rebuilt, invert, named_attack
from fedblend.analysis.attacks.metrics import Likeness, compare
from fedblend.analysis.attacks.pictures import draw
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
class Attacked:
    """An attack that was made: on what, with which settings, what it rebuilt, and how like the originals that is."""

    scene: AttackSetup
    attack: str
    labels: Labels
    options: Attack
    rebuilt: Rebuilt
    likeness: Likeness
    seconds: float

    def table(self) -> dict[str, Any]:
        """All of it but the images, as plain data. An infinite PSNR (the very image) is ``None``."""
        scene, found = self.scene, self.likeness
        experiment = scene.moment.setup.experiment
        order = found.rebuilt.tolist()
        return {
            "run": scene.moment.run.path.name,
            "method": experiment.method.label or experiment.method.name,
            "data": scene.moment.setup.data.name,
            "round": scene.moment.round,
            "client": scene.client,
            "drawn": scene.drawn,
            "images": len(scene.y),
            "steps": scene.steps,
            "attacker": scene.attacker,
            "attack": self.attack,
            "labels": self.labels,
            "options": asdict(self.options),
            "iterations": len(self.rebuilt.curve) - 1,
            "stopped": self.rebuilt.stopped,
            "cost": _number(self.rebuilt.cost),
            "costs": [_number(cost) for cost in self.rebuilt.costs],
            "definitions": DEFINITIONS,
            "mse": _number(found.mse.mean()),
            "psnr": _number(found.psnr.mean()),
            "ssim": _number(found.ssim.mean()),
            "each": [
                {
                    "label": int(label),
                    "rebuilt_as": int(self.rebuilt.y[row]),
                    **dict(zip(MEASURES, measured, strict=True)),
                }
                for label, row, measured in zip(scene.y.tolist(), order, _rows(found), strict=True)
            ],
            "seconds": round(self.seconds, 2),
        }

    def picture(self) -> bytes:
        """A PNG: each original beside what was rebuilt of it."""
        setup = self.scene.moment.setup
        return draw(self.scene, self.rebuilt, self.likeness, setup.data.classes, self.title())

    def title(self) -> str:
        """What was attacked and how, in one line."""
        scene = self.scene
        run = scene.moment.setup.experiment.method.label or scene.moment.run.path.name
        return (
            f"{run}: client {scene.client} at round {scene.moment.round}, {self.attack}, "
            f"{_counted(len(scene.y), 'image')}, {_counted(scene.steps, 'step')}"
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
        scene = self.scene
        words = [self.attack, f"round{scene.moment.round}", f"client{scene.client}", f"{len(scene.y)}x{scene.steps}"]
        words += [scene.attacker] + (["inferred"] if self.labels == "inferred" else [])
        return scene.moment.run.path / FOLDER / "-".join(words)


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
) -> Attacked:
    """Attack what a client of a run sent after ``round`` rounds (0: for the untrained model).

    See :meth:`RoundSnapshot.of` and :func:`prepare` for how that is made again, and :func:`invert` for ``attack`` and
    its ``options``. With ``labels = "true"`` the attacker knows the labels. Starting points follow from the run's seed.

        attack_run("runs/quickstart/fedavg-seed0", 0, 3, images=4, steps=5, iterations=300).write()

    Raises :class:`FedblendError` for what cannot be attacked, and for unknown attacks and options.
    """
    if labels not in ("true", "inferred"):
        raise FedblendError(f"labels: {labels!r} is not valid; valid: true, inferred")
    made = named_attack(attack, options)  # before anything that takes long
    moment = run if isinstance(run, RoundSnapshot) else RoundSnapshot.of(run, round, watch)
    scene = prepare(moment, client, images=images, steps=steps, attacker=attacker, device=device)
    rng = stream(moment.setup.experiment.seed, "attack", round, client)
    known = scene.y if labels == "true" else None
    start = time.perf_counter()
    rebuilt = invert(scene.victim, scene.observed, scene.x.shape, attack=made, labels=known, rng=rng, progress=progress)
    seconds = time.perf_counter() - start
    likeness = compare(scene.x, rebuilt.x, moment.setup.scale)
    return Attacked(scene, attack, labels, made, rebuilt, likeness, seconds)


def attacks_on(run: RunDirectory) -> list[dict[str, Any]]:
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


def _rows(found: Likeness) -> list[list[float | None]]:
    columns = np.stack([found.mse, found.psnr, found.ssim], 1)
    return [[_number(value) for value in row] for row in columns]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _number(value: Any) -> float | None:
    """A number as JSON can hold it."""
    return float(value) if np.isfinite(value) else None
