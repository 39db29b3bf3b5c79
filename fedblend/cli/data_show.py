"""``fedblend data show``: draw a split and print its non-IID measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedblend.analysis.plotting import DPI, head_figure, png_bytes
from fedblend.cli.arguments import Change
from fedblend.cli.console import Console, table
from fedblend.core.errors import FedblendError, legible, listed
from fedblend.core.files import write_atomically
from fedblend.data.measures import class_counts, noniid_measures
from fedblend.experiment.make_setup import split
from fedblend.report.figures import LETTERS, split_chart
from fedblend.runs import api
from fedblend.runs.runner import SPLIT_CLIENTS

MEANINGS = {"divergence": " (KL in nats; 0: alike)", "distance": " (to the whole; 0 to 2)"}


def show_split(file: Path, out: Path, changes: Sequence[Change] = ()) -> None:
    """Draw the split of a file's first experiment, as a report does, and print its measures."""
    experiment = next(iter(api.expand_file(file, changes, None).experiments.values()))
    data = experiment.data.load()
    population = split(experiment, data)
    names = population.names(data)
    title = f"{data.name}: {experiment.partition.name}, {len(population)} clients"
    title += f", the first {SPLIT_CLIENTS}" if len(population) > SPLIT_CLIENTS else ""
    counts = class_counts(population, data.train.y.numpy(), len(data.classes)) if data.classes else None
    record = {"sizes": population.sizes.tolist(), "names": names, "classes": data.classes}
    record |= {} if counts is None else {"counts": counts.tolist()}
    chart = split_chart({name: values[:SPLIT_CLIENTS] for name, values in record.items()}, "split", title)
    assert chart is not None
    head_figure(chart.figure, title, LETTERS)
    chart.figure.set_dpi(2 * DPI)
    try:
        if not out.suffix:
            raise ValueError("it has no file extension")
        picture = png_bytes(chart.figure, out.suffix[1:])
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
