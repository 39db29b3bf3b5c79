"""What ``fedblend privacy`` prints and draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedblend.analysis.privacy.mixup import Mixtures, MixupPrivacy, make_mixtures, measure_mixtures
from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError
from fedblend.data.partitions import prepare
from fedblend.runs import api


def parse_lambdas(text: str) -> list[float]:
    """``0.1,0.4`` as a list of mixing ratios above 0 and below 1. Raises :class:`FedblendError` for anything else."""
    try:
        lambdas = [float(word) for word in text.split(",")]
    except ValueError:
        lambdas = []
    if not lambdas or not all(0 < lam < 1 for lam in lambdas):
        raise FedblendError(
            f"--lambdas {text!r} is not valid: write numbers above 0 and below 1 with commas, such as 0.1,0.4"
        )
    return lambdas


def show_samples(
    file: Path,
    changes: Sequence[tuple[str, Any]],
    lambdas: Sequence[float],
    samples: int,
    devices: int,
    repeats: int,
    out: Path | None,
    coordinated: bool = False,
) -> None:
    """Print the sample privacy of Mixup and Mix2up by lambda, for the data and the split of a file's first experiment.

    ``out`` is a folder for pictures of the first draw, one for each lambda.
    """
    experiment = next(iter(api.expand_file(file, changes, None).experiments.values()))
    data = experiment.data.load()
    population = prepare(experiment.partition, data, experiment.seed, experiment.fraction, experiment.holdout)
    drawn = [
        make_mixtures(data, population, experiment.seed, one, devices, samples, coordinated) for one in range(repeats)
    ]
    rows = measure_mixtures(drawn, lambdas)
    if out is not None:
        _draw(out, drawn[0], data, lambdas)
    console = Console()
    console.print(
        f"{data.name}: {samples} samples, {devices} devices; natural logarithms of Euclidean distances between stored "
        f"values, means over {repeats} draws; recognised: the nearest of all raw samples is one it was made of",
        highlight=False,
    )
    console.print(_table(rows))
    repeated = sum(one.pairs.repeated for one in drawn)
    if repeated:
        console.print(
            f"Of {samples * repeats} inversely mixed-up samples {repeated} repeat a pair: too few mixtures match "
            "(--coordinated lets all match).",
            highlight=False,
        )
    if out is not None:
        console.print(f"Pictures: {out}", highlight=False, soft_wrap=True)


def _table(rows: Sequence[MixupPrivacy]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("lambda", justify="right")
    for what in ("Mixup", "Mix2up"):
        for measured in ("smallest", "mean", "recognised"):
            table.add_column(f"{what}: {measured}", justify="right")
    for row in rows:
        table.add_row(
            f"{row.lam:g}",
            f"{row.mixup_smallest:.3f}",
            f"{row.mixup_mean:.3f}",
            f"{row.mixup_recognised:.0%}",
            f"{row.mix2up_smallest:.3f}",
            f"{row.mix2up_mean:.3f}",
            f"{row.mix2up_recognised:.0%}",
        )
    return table


def _draw(out: Path, one: Mixtures, data: Dataset, lambdas: Sequence[float]) -> None:
    from fedblend.analysis.privacy.figures import draw_mixtures

    if data.kind != "image":
        raise FedblendError(
            f"--out {out}: '{data.name}' holds {data.kind}, of which there are no pictures; leave it out"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        for lam in lambdas:
            title = f"{data.name}: Mixup and inverse Mixup at lambda = {lam:g}"
            draw_mixtures(one, data.classes, lam, out / f"lambda-{lam:g}.png", title)
    except OSError as error:
        raise FedblendError(f"--out {out}: cannot be written ({error}); name a folder") from None
