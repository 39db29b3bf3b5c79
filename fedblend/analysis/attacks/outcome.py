"""A complete attack on a client of a run, and its files: measures and images."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedblend.analysis import plotting
from fedblend.analysis.attacks.attack_setup import Attacker, AttackSetup, prepare
from fedblend.analysis.attacks.image_similarity import ImageSimilarity, compare, require_scipy
from fedblend.analysis.attacks.inversion import ATTACKS, Attack, Progress, Reconstruction, invert, make_attack
from fedblend.analysis.attacks.snapshot import RoundSnapshot, Watch
from fedblend.core.errors import FedblendError, counted
from fedblend.core.files import write_atomically, write_json
from fedblend.core.random import stream
from fedblend.runs.directory import RunDirectory

Labels = Literal["true", "inferred"]
"""Whether the attacker has the true labels or infers them."""

PAIRS = 4  # Pairs of images in a row
SHOWN = 32  # Largest number of original images in the figure; the table has all
SIDE = 1.25  # Side of an image in inches
FOLDER = "attacks"  # Folder in a run's folder that has one folder for each attack
TABLE, PICTURE = "attack.json", "images.png"
DEFINITIONS = "MSE on the model's scale; PSNR (dB) and SSIM (window 7) of pictures in [0, 1]; means over the images"


@dataclass(frozen=True)
class AttackResult:
    """A finished attack: its setup and settings, the rebuilt images and their similarity to the originals."""

    attack_setup: AttackSetup
    attack: str
    labels: Labels
    options: Attack
    rebuilt: Reconstruction
    similarity: ImageSimilarity
    seconds: float

    def table(self) -> dict[str, Any]:
        """Return everything except the images, as plain data. An infinite PSNR (equal images) is ``None``."""
        attack_setup, similarity = self.attack_setup, self.similarity
        experiment = attack_setup.snapshot.setup.experiment
        by_name = [("mse", similarity.mse), ("psnr", similarity.psnr), ("ssim", similarity.ssim)]
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
            **{name: _json_number(of.mean()) for name, of in by_name},
            "each": [
                {
                    "label": label,
                    "rebuilt_as": int(self.rebuilt.y[row]),
                    **{n: _json_number(of[k]) for n, of in by_name},
                }
                for k, (label, row) in enumerate(zip(attack_setup.y.tolist(), similarity.order.tolist(), strict=True))
            ],
            "seconds": round(self.seconds, 2),
        }

    def picture(self) -> bytes:
        """Return a PNG: each original next to its rebuilt image."""
        setup = self.attack_setup.snapshot.setup
        return draw_attack(self.attack_setup, self.rebuilt, self.similarity, setup.data.classes, self.title())

    def title(self) -> str:
        """Return run, client, round, attack, images and steps in one line."""
        attack_setup = self.attack_setup
        run = attack_setup.snapshot.setup.experiment.method.label or attack_setup.snapshot.run.path.name
        return (
            f"{run}: client {attack_setup.client} at round {attack_setup.snapshot.round}, {self.attack}, "
            f"{counted(len(attack_setup.y), 'image')}, {counted(attack_setup.steps, 'step')}"
        )

    def write(self, folder: Path | str | None = None) -> Path:
        """Write ``attack.json`` and ``images.png`` into ``folder`` (default: :meth:`folder`) and return it.

        Raises :class:`FedblendError` if writing fails.
        """
        path = Path(folder) if folder is not None else self.folder()
        make_folder(path)
        write_atomically(path / PICTURE, self.picture())
        write_json(path / TABLE, self.table())
        return path

    def folder(self) -> Path:
        """Return the attack's default folder in the run's folder; it depends on the settings only."""
        attack_setup = self.attack_setup
        words = [self.attack, f"round{attack_setup.snapshot.round}", f"client{attack_setup.client}"]
        words += [f"{len(attack_setup.y)}x{attack_setup.steps}", attack_setup.attacker]
        words += ["inferred"] if self.labels == "inferred" else []
        words += changed_options(self.attack, asdict(self.options), "")
        return attack_setup.snapshot.run.path / FOLDER / "-".join(words)


def changed_options(attack: str, options: Mapping[str, Any], between: str = " ") -> list[str]:
    """Return an attack's options that differ from its defaults, as words such as ``restarts 4``."""
    default = asdict(ATTACKS[attack]()) if attack in ATTACKS else {}
    return [
        f"{name}{between}{value:g}" if isinstance(value, float) else f"{name}{between}{str(value).lower()}"
        for name, value in sorted(options.items())
        if name not in default or default[name] != value
    ]


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
    """Attack the update of a client of a run after ``round`` rounds (0: on the untrained model).

    :meth:`RoundSnapshot.load` and :func:`prepare` repeat the client's work; :func:`invert` explains ``attack`` and its
    ``options``. With ``labels = "true"`` the attacker has the labels. Starting points depend on the run's seed.

        attack_run("runs/quickstart/fedavg-seed0", 0, 3, images=4, steps=5, iterations=300).write()

    Raises :class:`FedblendError` for runs that cannot be attacked, for unknown attacks and options, and without scipy.
    """
    if labels not in ("true", "inferred"):
        raise FedblendError(f"labels: {labels!r} is not valid; valid: true, inferred")
    # Bad options and a missing package are refused before the slow part.
    search = make_attack(attack, options)
    require_scipy()
    snapshot = run if isinstance(run, RoundSnapshot) else RoundSnapshot.load(run, round, watch)
    made = prepare(snapshot, client, images=images, steps=steps, attacker=attacker, device=device)
    rng = stream(snapshot.setup.experiment.seed, "attack", round, client)
    known = made.y if labels == "true" else None
    start = time.perf_counter()
    rebuilt = invert(made.victim, made.observed, made.x.shape, search, labels=known, rng=rng, progress=progress)
    seconds = time.perf_counter() - start
    similarity = compare(made.x, rebuilt.x, snapshot.setup.scale)
    return AttackResult(made, attack, labels, search, rebuilt, similarity, seconds)


def read_attacks(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the tables of all attacks in a run's folder, in order of their folders. Raises :class:`FedblendError`."""
    found = []
    for path in sorted((run.path / FOLDER).glob(f"*/{TABLE}")):
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            found.append(table | {name: float(table[name]) for name in ("mse", "ssim")})
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise FedblendError(f"{path}: is damaged: {error}; remove it, or repeat the attack") from None
    return found


def make_folder(path: Path) -> None:
    """Create a folder. Raises :class:`FedblendError` if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedblendError(f"--out {path}: cannot be used as a folder: {error.strerror}; name another") from None


def _json_number(value: Any) -> float | None:
    """Return a number, or ``None`` if it is not finite (JSON has no infinity)."""
    return float(value) if np.isfinite(value) else None


def draw_attack(
    attack_setup: AttackSetup, rebuilt: Reconstruction, similarity: ImageSimilarity, classes: Sequence[str], title: str
) -> bytes:
    """Return a PNG of pairs: an original with its class, and its rebuilt image with PSNR (dB) and SSIM."""
    scale = attack_setup.snapshot.setup.scale
    originals = scale.to_unit(attack_setup.x.detach().cpu())[:SHOWN]
    rebuilt_images = scale.to_unit(rebuilt.x.detach().cpu())[torch.from_numpy(similarity.order)][:SHOWN]
    columns, rows = 2 * min(PAIRS, len(originals)), -(-len(originals) // PAIRS)
    figure = plotting.blank_figure(max(5.4, SIDE * columns + 0.3), (SIDE + 0.3) * rows + 0.5)
    plotting.head_figure(figure, title, 9)
    for k in range(len(originals)):
        label, guess = int(attack_setup.y[k]), int(rebuilt.y[similarity.order[k]])
        caption = f"{similarity.psnr[k]:.1f} dB, SSIM {similarity.ssim[k]:.2f}"
        caption = caption if guess == label else f"{caption}\nas {classes[guess]}"
        cell = 2 * k + 1
        _show(figure.add_subplot(rows, columns, cell), originals[k], f"original: {classes[label]}")
        _show(figure.add_subplot(rows, columns, cell + 1), rebuilt_images[k], caption)
    cut = f"the first {SHOWN} of {len(attack_setup.y)} images; " if len(attack_setup.y) > SHOWN else ""
    note = f"{cut}left: original, right: rebuilt; cost {rebuilt.cost:.3g}"
    figure.supxlabel(note, fontsize=8, color=plotting.MUTED, x=0.01, ha="left")
    return plotting.png_bytes(figure)


def _show(axes: Any, image: torch.Tensor, text: str) -> None:
    """Draw one image [C, H, W] in [0, 1]. Unless it has one or three channels, their mean is drawn."""
    pixels = image.numpy() if len(image) in (1, 3) else image.mean(0, keepdim=True).numpy()
    shown = pixels[0] if len(pixels) == 1 else np.moveaxis(pixels, 0, -1)
    axes.imshow(shown, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xlabel(text, fontsize=7, color=plotting.INK, parse_math=False)
    plotting.hide_frame(axes)
