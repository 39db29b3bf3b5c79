"""``fedblend privacy samples``: print and draw the sample privacy of Mixup and inverse Mixup (Mix2FLD)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from fedblend.analysis.attacks.outcome import make_folder
from fedblend.analysis.privacy.mixup_privacy import LAMBDAS, Mixtures, MixupPrivacy, make_mixtures, measure_mixtures
from fedblend.analysis.privacy.sample_figures import draw_mixtures
from fedblend.cli.arguments import Change
from fedblend.cli.console import Console, table
from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError
from fedblend.experiment.make_setup import split
from fedblend.runs import api


def show_samples(
    file: Path,
    samples: int,
    devices: int,
    repeats: int,
    changes: Sequence[Change] = (),
    lambdas: Sequence[float] = LAMBDAS,
    out: Path | None = None,
    coordinated: bool = False,
) -> None:
    """Print the sample privacy of Mixup and Mix2up by lambda, on the data and the split of a file's first experiment.

    Each of ``devices`` mixes ``samples`` samples; the numbers are means over ``repeats`` draws. With ``coordinated``
    the devices mix labels that match. ``out`` is a folder for pictures of the first draw, one for each lambda.
    """
    experiment = next(iter(api.expand_file(file, changes, None).experiments.values()))
    data = experiment.data.load()
    population = split(experiment, data)
    seed = experiment.seed
    draws = [make_mixtures(data, population, seed, repeat, devices, samples, coordinated) for repeat in range(repeats)]
    rows = measure_mixtures(draws, lambdas)
    if out is not None:
        _draw(out, draws[0], data, lambdas)
    console = Console()
    console.print(
        f"{data.name}: {samples} samples, {devices} devices; natural logarithms of Euclidean distances between stored "
        f"values, means over {repeats} draws; recognised: the nearest raw sample of all is one of those mixed"
    )
    console.print(_table(rows))
    repeated = sum(mixtures.pairs.repeated for mixtures in draws)
    if repeated:
        console.print(
            f"Of {samples * repeats} inversely mixed-up samples {repeated} repeat a pair: too few mixtures match "
            "(with --coordinated all match)."
        )
    if out is not None:
        console.tell(f"Pictures: {out}")


def _table(rows: Sequence[MixupPrivacy]) -> Table:
    measures = [f"{method}: {name}" for method in ("Mixup", "Mix2up") for name in ("smallest", "mean", "recognised")]
    made = table([], ["lambda", *measures])
    for row in rows:
        made.add_row(
            f"{row.lam:g}",
            f"{row.mixup_smallest:.3f}",
            f"{row.mixup_mean:.3f}",
            f"{row.mixup_recognised:.0%}",
            f"{row.mix2up_smallest:.3f}",
            f"{row.mix2up_mean:.3f}",
            f"{row.mix2up_recognised:.0%}",
        )
    return made


def _draw(out: Path, mixtures: Mixtures, data: Dataset, lambdas: Sequence[float]) -> None:
    if data.kind != "image":
        raise FedblendError(f"--out {out}: '{data.name}' holds {data.kind}, not pictures to draw; leave out --out")
    make_folder(out)
    for lam in lambdas:
        title = f"{data.name}: Mixup and inverse Mixup at lambda = {lam:g}"
        draw_mixtures(mixtures, data.classes, lam, out / f"lambda-{lam:g}.png", title)
