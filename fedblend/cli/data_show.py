"""``fedblend data show``: draw a split and print its non-IID measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from fedblend.cli.arguments import Change
from fedblend.cli.console import Console
from fedblend.core.errors import FedblendError
from fedblend.data.measures import class_counts, noniid_measures
from fedblend.data.split_figure import draw_sizes, draw_split
from fedblend.experiment.setup import split
from fedblend.runs import api


def show_split(file: Path, changes: Sequence[Change], out: Path) -> None:
    """Draw the split of a file's first experiment and print its measures; in regression draw the clients' sizes.

    Raises :class:`FedblendError` if the picture cannot be written to ``out``.
    """
    experiment = next(iter(api.expand_file(file, changes, None).experiments.values()))
    data = experiment.data.load()
    population = split(experiment, data)
    title = f"{data.name}: {experiment.partition.name}, {len(population)} clients"
    counts = class_counts(population, data.train.y.numpy(), len(data.classes)) if data.classes else None
    try:
        if not out.suffix:
            # Matplotlib would append one, and so write another file than the one that is named.
            raise ValueError("it has no file extension")
        out.parent.mkdir(parents=True, exist_ok=True)
        if counts is None:
            draw_sizes(population.sizes, out, title)
        else:
            draw_split(counts, data.classes, out, title)
    except (OSError, ValueError) as error:
        raise FedblendError(f"--out {out}: cannot be written ({error}); name a file such as split.png") from None
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("measure")
    table.add_column("value", justify="right")
    sizes = population.sizes
    table.add_row("clients", str(len(population)))
    table.add_row("samples a client", f"{sizes.min()} to {sizes.max()}, mean {sizes.mean():.1f}")
    for name, value in noniid_measures(counts).items() if counts is not None else ():
        table.add_row(name, f"{value:.4f}")
    console = Console()
    console.print(table)
    console.print(f"Picture: {out}", highlight=False, soft_wrap=True)
