"""``fedblend data show``: draw a split and print its non-IID measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedblend.cli.arguments import Change
from fedblend.cli.console import Console, table
from fedblend.core.errors import FedblendError, legible, listed
from fedblend.core.files import write_atomically
from fedblend.data.measures import class_counts, noniid_measures
from fedblend.experiment.make_setup import split
from fedblend.report.split_figure import draw_sizes, draw_split
from fedblend.runs import api

MEANINGS = {"divergence": " (KL in nats; 0: alike)", "distance": " (to the whole; 0 to 2)"}
"""What some of the measures mean."""


def show_split(file: Path, out: Path, changes: Sequence[Change] = ()) -> None:
    """Draw the split of a file's first experiment and print its measures; in regression draw the clients' sizes.

    Raises :class:`FedblendError` if the picture cannot be written to ``out``.
    """
    experiment = next(iter(api.expand_file(file, changes, None).experiments.values()))
    data = experiment.data.load()
    population = split(experiment, data)
    names = population.names(data)
    title = f"{data.name}: {experiment.partition.name}, {len(population)} clients"
    counts = class_counts(population, data.train.y.numpy(), len(data.classes)) if data.classes else None
    try:
        if not out.suffix:
            raise ValueError("it has no file extension")
        form = out.suffix[1:]
        picture = (
            draw_sizes(population.sizes, title, names, form)
            if counts is None
            else draw_split(counts, data.classes, title, names, form)
        )
        out.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise FedblendError(f"--out {out}: cannot be written ({error}); name a file such as split.png") from None
    write_atomically(out, picture)
    measures = table(["measure"], ["value"])
    sizes = population.sizes
    measures.add_row("a sample", "x".join(map(str, data.train.x.shape[1:])) + " numbers")
    if data.kind == "tokens":
        measures.add_row("largest id of a token", str(max(int(half.x.max()) for half in (data.train, data.test))))
    if data.classes:
        measures.add_row("classes", str(len(data.classes)))
    measures.add_row("clients", str(len(population)))
    measures.add_row("samples a client", f"{sizes.min()} to {sizes.max()}, mean {sizes.mean():.1f}")
    for name, value in noniid_measures(counts).items() if counts is not None else ():
        measures.add_row(name + MEANINGS.get(name, ""), f"{value:.4f}")
    console = Console()
    console.print(measures)
    if names:
        told = [f"{legible(name)} ({size} samples)" for name, size in zip(names, sizes, strict=True)]
        console.tell(f"Clients, from 0: {listed(told)}")
    for line in feature_lines(data.facts.get("table", {})):
        console.tell(line)
    console.tell(f"Picture: {out}")


def feature_lines(form: Mapping[str, Any]) -> list[str]:
    """How a table's columns become numbers, in one line for columns of numbers and one for columns of text."""
    if "text" in form:
        return [f"Texts: column {legible(form['text'])}, tokens by {legible(form['tokenizer'])}"]
    texts = form.get("categories", {})
    numbers = [legible(name) for name in form.get("columns", ()) if name not in texts]
    lines = [f"Columns of numbers: {listed(numbers)}"] if numbers else []
    if texts:
        lines.append(
            "Columns of text: "
            + "; ".join(f"{legible(name)} ({listed(list(map(legible, values)))})" for name, values in texts.items())
        )
    return lines
