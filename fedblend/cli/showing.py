"""What the commands that show runs, splits and new files do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedblend.core import registry
from fedblend.core.errors import FedblendError
from fedblend.experiment import presets
from fedblend.experiment.config import as_table
from fedblend.experiment.tables import write_toml
from fedblend.runs import api, checkpoint
from fedblend.runs.directory import RunDirectory, find_runs
from fedblend.runs.groups import Group, read

USUAL_PARTITION = {
    "shakespeare": 'name = "natural"   # one client a speaking role\nclients = 20',
    "npz": 'name = "iid"\nclients = 20',
    "toy": 'name = "natural"   # the data\'s own clients: D1, D2 and D3',
    "femnist": 'name = "natural"   # one client a writer',
    "leaf-shakespeare": 'name = "natural"   # one client a speaking role\nclients = 20',
    "har": 'name = "natural"   # one client a person',
    "heart": 'name = "natural"   # one client a hospital',
}
DATA_OPTIONS = {
    "shakespeare": "roles = 20\nmax_samples = 250    # of each role: minutes, not hours\n",
    "npz": 'path = "data.npz"    # beside this file; arrays x, y and, if the data has them, client and split\n',
    "hub": 'dataset = "ylecun/mnist"    # a name of https://huggingface.co/datasets, or a folder of Parquet files\n',
    "image-folder": 'path = "pictures"    # beside this file: train/CLASS/*.png and test/CLASS/*.png, or CLASS/*.png\n',
    **dict.fromkeys(
        ("cifar10", "cifar100", "emnist", "fer2013", "voc2007", "heart", "leaf-shakespeare"),
        '# folder = "DATA"    # where the files lie, beside this file; else they are looked for under $FEDBLEND_DATA\n',
    ),
    **dict.fromkeys(
        ("femnist", "har"),
        '# path = "DATA"    # where the data lie, beside this file; else they are looked for under $FEDBLEND_DATA\n',
    ),
}
USUAL_MODEL = {
    "shakespeare": 'name = "lstm"\nhidden = 64           # smaller than the paper\'s 256, for a short run',
    "leaf-shakespeare": 'name = "lstm"\nhidden = 64           # smaller than the paper\'s 256, for a short run',
    "npz": 'name = "mlp"',
    "heart": 'name = "mlp"\nhidden = [16]',
    "har": 'name = "cnn1d"',
    "cifar10": 'name = "cnn"',
    "cifar100": 'name = "cnn"',
    "voc2007": 'name = "cnn"\nchannels = [16, 64, 256]    # AggEnhance, section 4.2',
    "fer2013": 'name = "cnn"\nchannels = [16, 32, 64, 64]    # AggEnhance, section 4.2\nnorm = "group"',
    "digits": 'name = "mlp"',
    "toy": 'name = "mlp"\nhidden = []           # a linear model: its boundary is a line',
}
USUAL_COHORT = {"toy": 3, "heart": 4}
TEXT = "lr = 4.0             # text needs large steps, with clipped gradients\nclip_norm = 1.0"
USUAL_LEARNING = {"shakespeare": TEXT, "leaf-shakespeare": TEXT}


def _is_unsafe(method: Mapping[str, Any]) -> bool:
    """Whether a part of a method gives raw samples away."""
    found = [registry.find(kind, spec["name"]) for kind, spec in method.items() if isinstance(spec, Mapping)]
    return any(getattr(cls, flag, False) for cls in found for flag in ("unsafe", "breaks_privacy"))


def new_file(method: str, dataset: str) -> str:
    """A commented experiment file for a method and a data set. Raises on unknown names."""
    made = presets.expand({"name": method}, "method")
    registry.find("dataset", dataset, "dataset")
    unsafe = "unsafe = true   # this method gives raw samples away: an upper bound, not for real data\n"
    partition = USUAL_PARTITION.get(
        dataset,
        'name = "classes"   # each client holds few classes: far from IID\nclients = 20\nclasses_per_client = 2',
    )
    options = DATA_OPTIONS.get(dataset, "")
    learning = USUAL_LEARNING.get(dataset, "lr = 0.01")
    return f"""# {method} on {dataset}. Run it with: fedblend run FILE
name = "{method}-{dataset}"
rounds = 20
seed = 0             # or several: seeds = [0, 1, 2]
eval_every = 1
target = 0.7         # "rounds to reach" in tables
{unsafe if _is_unsafe(made) else ""}
[data]               # fedblend list datasets
name = "{dataset}"
{options}
[partition]          # who holds what: fedblend list partitions
{partition}

[model]              # fedblend list models
{USUAL_MODEL.get(dataset, 'name = "lenet5"')}

[train]              # local SGD at lr * lr_decay^round
cohort = {USUAL_COHORT.get(dataset, 5)}           # clients a round
epochs = 2
batch_size = 10
{learning}
lr_decay = 0.999

[method]             # fedblend list methods; its parts can be changed: objective.lambda = 0.1
name = "{method}"
"""


def inspect(paths: list[Path]) -> None:
    """Print each run's status, costs and configuration."""
    console = Console()
    for run in find_runs(paths):
        console.rule(str(run.path), align="left")
        for name, value in _summary(run).items():
            console.print(f"{name:<14}{value}", highlight=False, soft_wrap=True)
        console.print()
        console.print(write_toml(as_table(run.experiment())), highlight=False, soft_wrap=True, markup=False)


def _summary(run: RunDirectory) -> dict[str, str]:
    from fedblend.report.guarantees import guarantees

    outcome = read(run)
    records, facts = outcome.records, outcome.facts
    totals: dict[str, dict[str, int]] = {"up": {}, "down": {}}
    seconds: dict[str, float] = {}
    for record in records:
        for direction, kinds in totals.items():
            for kind, number in record[f"bytes_{direction}"].items():
                kinds[kind] = kinds.get(kind, 0) + number
        for phase, time in record["machine"]["seconds"].items():
            seconds[phase] = seconds.get(phase, 0.0) + time
    last: dict[str, Any] = next((r for r in reversed(records) if "loss" in r), {})
    claims = [f"{one.what}, for {one.unit}: {one.text}" for one in guarantees([Group(outcome.label, [outcome])])]
    scores = [f"{k} {last[k]:.4f}" for k in ("accuracy", "loss") if k in last]

    def megabytes(kinds: dict[str, int]) -> str:
        return ", ".join(f"{kind} {number / 1e6:.2f} MB" for kind, number in kinds.items()) or "none"

    return {
        "status": f"done, round {outcome.round} of {outcome.rounds}" if outcome.finished else outcome.standing,
        "checkpoint": f"round {kept}" if (kept := checkpoint.round_of(run.path)) is not None else "none that is sound",
        "result": ", ".join(scores) or "none yet",
        **({"privacy": "; ".join(claims)} if claims else {}),
        "sent up": megabytes(totals["up"]),
        "sent down": megabytes(totals["down"]),
        "seconds": ", ".join(f"{phase} {time:.1f}" for phase, time in seconds.items()) or "none",
        "peak memory": f"{max((r['machine']['peak_memory'] for r in records), default=0) / 1e6:.0f} MB",
        "clients": json.dumps(facts.get("clients", {})),
        "versions": json.dumps(facts.get("versions", {})),
    }


def show_data(file: Path, changes: Sequence[tuple[str, Any]], out: Path) -> None:
    """Draw the split of a file's first experiment and print its measures; of regression, the clients' sizes."""
    from fedblend.data.measures import class_counts, noniid_measures
    from fedblend.data.partitions import prepare
    from fedblend.data.split_figure import draw_sizes, draw_split

    experiment = next(iter(api.expand_file(file, changes, None).experiments.values()))
    data = experiment.data.load()
    population = prepare(experiment.partition, data, experiment.seed, experiment.fraction, experiment.holdout)
    title = f"{data.name}: {experiment.partition.name}, {len(population)} clients"
    counts = class_counts(population, data.train.y.numpy(), len(data.classes)) if data.classes else None
    with _writable(out):
        if counts is None:
            draw_sizes(population.sizes, out, title)
        else:
            draw_split(counts, data.classes, out, title)
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


@contextmanager
def _writable(out: Path) -> Iterator[None]:
    """Make the folder of a picture. Raises :class:`FedblendError` if the picture cannot be written inside."""
    try:
        if not out.suffix:
            # Matplotlib would add one, and so write another file than the one that is named.
            raise ValueError("it ends in no format")
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, ValueError) as error:
        raise FedblendError(f"--out {out}: cannot be written ({error}); name a file such as split.png") from None
