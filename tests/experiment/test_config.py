"""Experiments as data: read, checked, written out, read back."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pydantic
import pytest
from helpers import SMALL, each, examples
from hypothesis import given
from hypothesis import strategies as st

from fedblend.core.errors import FedblendError
from fedblend.experiment.config import Experiment, as_table, resolve
from fedblend.experiment.fields import Train
from fedblend.experiment.parts import has_option
from fedblend.experiment.presets import FAMILIES, WITH_PROXIMAL, presets
from fedblend.experiment.study import expand as expand_study
from fedblend.experiment.toml_tables import parse_value, read_toml, set_field, write_toml
from fedblend.methods.objectives.fedmix import FedMix, HiddenMix, NaiveMix
from fedblend.methods.objectives.terms import Proximal
from fedblend.methods.sharing.means import HiddenMeans, LocalMeans, SharedMeans

BASE = {"data": "digits", "partition": "iid"}
RAW = ("global-mixup", "shared-set", "fld", "prior-samples")
UNSAFE = {*RAW, *(f"fedprox+{name}" for name in RAW)}

RICH: dict[str, dict[str, Any]] = {
    "options": {
        "name": "a run",
        "seed": 7,
        "target": 0.8,
        "fraction": 0.5,
        "holdout": 0.25,
        "train": {"lr": 1e-5, "clip_norm": 2, "momentum": 0.9, "weight_decay": 1e-4},
        "partition": {"name": "classes", "clients": 12, "samples": 30},
        "scale": {"name": "unit", "invert": False},
        "policy": {"min_mean": 5},
        "min_uploads": 3,
    },
    "method with options": {
        "method": {
            "name": "fedprox+fedmix",
            "label": "mine",
            "sharing": {"samples_per_mean": 5, "noise": 0.1, "refresh": 0.5},
            "objective": {"lambda": 0.05, "taylor": "proposition"},
            "terms": [{"name": "proximal", "mu": 0.001}],
        },
        "arrival": {"first": 0.2},
    },
    "method of parts": {"method": {"sharing": "noise", "objective": "fedmix", "terms": "proximal"}},
    "own module": {
        "model": {
            "name": "module",
            "path": "helpers:BatchNormNet",
            "arguments": {"inputs": 16, "deep": {"er": [1]}},
        }
    },
}


def preset(name: str) -> Experiment:
    return resolve({**BASE, "method": name, "unsafe": name in UNSAFE})


@each("case", RICH)
def test_an_experiment_written_to_a_toml_file_reads_back_the_same(case: str, tmp_path: Path) -> None:
    made = resolve({**BASE, **RICH[case]})
    path = tmp_path / "experiment.toml"
    table = as_table(made)

    path.write_text(write_toml(table), encoding="utf-8")

    assert resolve(read_toml(path)) == made
    assert as_table(resolve(table)) == table


@each("method", sorted(presets()))
def test_every_method_written_out_reads_back_the_same_and_only_raw_samples_need_unsafe(method: str) -> None:
    if method in UNSAFE:
        with pytest.raises(FedblendError, match="unsafe = true"):
            resolve({**BASE, "method": method})
    made = resolve({**BASE, "method": method, "unsafe": method in UNSAFE})

    assert resolve(tomllib.loads(write_toml(as_table(made)))) == made
    assert made.method.name == method


def test_a_table_holds_every_field_but_those_that_are_none() -> None:
    table = as_table(resolve(BASE))

    optional = "eval_samples target arrival slow stack ranks memory_format evaluate_model convergence_tol"
    assert set(Experiment.model_fields) - set(table) == {*optional.split(), "compute_seconds", "start"}
    assert set(Train.model_fields) - set(table["train"]) == {"clip_norm", "schedule", "schedule_in_round", "steps"}


@each(("clients", "train", "cohort"), [(4, {}, 4), (10, {}, 10), (40, {}, 10), (4, {"cohort": 7}, 7)])
def test_fewer_clients_than_the_default_cohort_all_train(clients: int, train: dict[str, int], cohort: int) -> None:
    table = {**BASE, "partition": {"name": "iid", "clients": clients}, "train": train}
    assert resolve(table).train.cohort == cohort


def test_the_defaults_are_the_papers() -> None:
    made = resolve(BASE)

    assert (made.train.lr, made.train.lr_decay, made.train.momentum) == (0.01, 0.999, 0.0)
    assert (made.train.batch_size, made.train.cohort, made.train.epochs) == (10, 10, 2)
    assert (FedMix().taylor, FedMix().average, FedMix().exclude_own) == ("algorithm", "sample", False)
    assert (SharedMeans().samples_per_mean, SharedMeans().noise, SharedMeans().server_average) == ("all", 0.0, 1)


def test_an_experiment_is_the_same_from_python_and_from_data() -> None:
    from_python = Experiment(data="digits", partition="iid", method="fedmix", train=Train(lr=0.3))

    assert from_python == resolve({**BASE, "method": "fedmix", "train": {"lr": 0.3}})


def test_values_cannot_be_changed() -> None:
    made = resolve(BASE)

    with pytest.raises(pydantic.ValidationError, match="frozen"):
        made.seed = 3
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        made.train.lr = 3


def test_reading_leaves_the_table_and_the_presets_as_they_were() -> None:
    table = {**BASE, "method": {"name": "fedmix", "objective": {"lambda": 0.2}, "sharing": "raw"}, "unsafe": True}
    before = repr((table, presets()))

    with pytest.raises(FedblendError, match="'raw' shares raw samples"):
        resolve(table)
    resolve({**table, "method": {**table["method"], "sharing": "means"}})

    assert repr((table, presets())) == before


@each(
    "name",
    [n for family in WITH_PROXIMAL for n, (_, spec) in FAMILIES[family].items() if spec.get("upload") != "nothing"],
)
def test_methods_that_train_clients_exist_with_the_proximal_term(name: str) -> None:
    with_term = preset("fedprox" if name == "fedavg" else f"fedprox+{name}").method

    alone = preset(name).method
    assert with_term.terms == (*alone.terms, Proximal())
    assert (with_term.sharing, with_term.objective) == (alone.sharing, alone.objective)


def test_options_are_laid_over_a_preset_and_another_part_replaces_the_presets() -> None:
    given = {"name": "naivemix-hidden", "objective": {"lambda": 0.3, "layer": 1}, "sharing": {"layer": 1}}
    changed = resolve({**BASE, "method": given}).method
    given = {"name": "fedmix", "objective": {"name": "naivemix"}, "sharing": {"name": "local-means", "noise": 0.2}}
    replaced = resolve({**BASE, "method": given}).method

    assert (changed.objective, changed.sharing) == (HiddenMix(0.3, layer=1, form="naivemix"), HiddenMeans(layer=1))
    assert (replaced.objective, replaced.sharing) == (NaiveMix(), LocalMeans(noise=0.2))


def test_terms_may_be_one_or_several() -> None:
    one = resolve({**BASE, "method": {"terms": {"name": "proximal", "mu": 1}}}).method.terms
    two = resolve({**BASE, "method": {"terms": ["proximal", {"name": "proximal", "mu": 1}]}}).method.terms

    assert one == (Proximal(mu=1),)
    assert two == (Proximal(), Proximal(mu=1))
    assert resolve({**BASE, "method": {"name": "fedprox", "terms": []}}).method.terms == ()


@each(
    ("changes", "told", "mended"),
    [
        (
            {"method": {"sharing": "raw", "objective": "naivemix"}},
            "unsafe: false does not allow 'raw'",
            {"unsafe": True, "method": "global-mixup"},
        ),
        (
            {"method": {"name": "fedmix", "sharing": {"samples_per_mean": 1}}},
            "method.sharing.samples_per_mean: 1 would send raw samples",
            {"unsafe": True},
        ),
        (
            {"method": {"objective": "fedmix"}},
            "method.sharing: 'none' shares nothing, but method.objective 'fedmix' reads the model's inputs or samples",
            {"method": {"objective": "fedmix", "sharing": "noise"}},
        ),
        (
            {"method": {"name": "fedmix+fed-augmix", "sharing": "raw"}, "unsafe": True},
            "method.sharing: 'raw' shares raw samples, but method.objective 'augmix' reads the model's inputs or",
            {"method": "fedmix+fed-augmix", "unsafe": True},
        ),
        (
            {"method": {"name": "global-mixup", "sharing": "means"}, "unsafe": True},
            "method.sharing: 'means' shares the model's inputs, but method.objective 'global-mixup' reads raw samples;",
            {"method": "global-mixup", "unsafe": True},
        ),
        (
            {"method": {"name": "fedprox+aggenhance-secure", "upload": "silent"}},
            "method.server_step: 'aggenhance-secure' works with the clients' models, but method.upload 'silent' sends",
            {"method": "fedprox+aggenhance-secure"},
        ),
        (
            {"method": {"name": "fedavg", "sharing": "means"}},
            "method.sharing: 'means' shares data that neither the objective 'plain' nor the server step 'none' reads",
            {"method": "naivemix"},
        ),
        (
            {"method": {"name": "aggenhance", "sharing": "xor-seeds"}},
            "nor the server step 'aggenhance' reads; valid: none, or one that reads seeds",
            {"method": {"sharing": "xor-seeds", "server_step": "train-on-seeds"}},
        ),
        (
            {"method": {"name": "fedmix-hidden", "sharing": {"layer": 1}}},
            "method.sharing.layer: 1 and method.objective.layer: 2 differ",
            {"method": {"name": "fedmix-hidden", "sharing": {"layer": 1}, "objective": {"layer": 1}}},
        ),
        (
            {"method": {"sharing": "hidden-means", "objective": "fedmix"}},
            "'hidden-means' shares hidden states, but method.objective 'fedmix' reads the model's inputs",
            {"method": {"sharing": "means", "objective": "fedmix"}},
        ),
        (
            {"method": {"sharing": "means", "objective": "hidden-mix"}},
            "'means' shares the model's inputs, but method.objective 'hidden-mix' reads hidden states",
            {"method": {"sharing": "hidden-means", "objective": "hidden-mix"}},
        ),
        (
            {"min_uploads": 3, "train": {"cohort": 2}},
            "min_uploads: 3 is more than train.cohort: 2",
            {"min_uploads": 2},
        ),
    ],
)
def test_fields_that_do_not_agree_are_told(changes: dict[str, Any], told: str, mended: dict[str, Any]) -> None:
    with pytest.raises(FedblendError) as error:
        resolve({**BASE, **changes})

    assert told in str(error.value)
    assert "\n" not in str(error.value)
    assert isinstance(resolve({**BASE, **changes, **mended}), Experiment)


def test_a_file_with_a_byte_order_mark_is_read_and_one_in_utf_16_is_told_so(tmp_path: Path) -> None:
    path, text = tmp_path / "a.toml", 'name = "café"\r\nrounds = 3\r\n'
    path.write_bytes(text.encode("utf-8-sig"))
    assert read_toml(path) == {"name": "café", "rounds": 3}

    for order in ("le", "be"):
        path.write_bytes(f"\ufeff{text}".encode(f"utf-16-{order}"))
        with pytest.raises(FedblendError) as error:
            read_toml(path)
        told = f"{path}: is UTF-16; save it as UTF-8; give the path of a TOML file"
        assert str(error.value) == told


@each(
    ("before", "path", "value", "after"),
    [
        ({"seed": 1}, "seed", 3, {"seed": 3}),
        ({}, "train.lr", 0.5, {"train": {"lr": 0.5}}),
        ({"train": {"lr": 0.1, "epochs": 2}}, "train.lr", 0.5, {"train": {"lr": 0.5, "epochs": 2}}),
        ({"method": "fedmix"}, "method.label", "x", {"method": {"name": "fedmix", "label": "x"}}),
        (
            {"method": "fedmix"},
            "method.objective.lambda",
            0.2,
            {"method": {"name": "fedmix", "objective": {"lambda": 0.2}}},
        ),
        (
            {"method": {"objective": "fedmix"}},
            "method.objective.lambda",
            0.2,
            {"method": {"objective": {"name": "fedmix", "lambda": 0.2}}},
        ),
        ({"seed": 3}, "seed.x", 1, {"seed": {"x": 1}}),
        ({"method": "moon"}, "method.terms.moon.mu", 1, {"method": {"name": "moon", "terms": {"moon": {"mu": 1}}}}),
        (
            {"method": {"terms": ["moon", {"name": "proximal", "mu": 3}]}},
            "method.terms.proximal.mu",
            1,
            {"method": {"terms": [{"name": "moon"}, {"name": "proximal", "mu": 1}]}},
        ),
    ],
)
def test_a_field_is_set_by_its_path(before: dict, path: str, value: Any, after: dict) -> None:
    set_field(before, path, value)

    assert before == after


def test_fields_of_a_preset_are_set_and_a_term_is_found_by_its_name() -> None:
    table: dict[str, Any] = {**BASE, "method": "fedprox+fedmix"}

    set_field(table, "method.objective.lambda", 0.2)
    set_field(table, "method.terms.proximal.mu", 0.25)
    made = resolve(table)

    assert (made.method.terms, made.method.objective) == ((Proximal(mu=0.25),), FedMix(lam=0.2))
    assert has_option(made, "method.terms.proximal.mu")
    assert not has_option(made, "method.terms.moon.mu")


def test_a_term_that_is_not_there_is_refused() -> None:
    for name, terms, message in (
        ("moon", {"proximal": {"mu": 1}}, "method.terms.proximal: there is no such part here; valid: moon"),
        ("moon", {"moon": {"nu": 1}}, "nu"),
        ("fedavg", {"moon": {"mu": 1}}, "method.terms"),
    ):
        with pytest.raises(FedblendError, match=re.escape(message)):
            resolve({**BASE, "method": {"name": name, "terms": terms}})
    with pytest.raises(FedblendError, match="no part 'moon' in the list terms"):
        set_field({"terms": ["proximal"]}, "terms.moon.mu", 1)


@each(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ('"0.1"', "0.1"),
        ('{name = "fedmix", lambda = 0.2}', {"name": "fedmix", "lambda": 0.2}),
        ("fedprox+fedmix", "fedprox+fedmix"),
        ("a/path with spaces.npz", "a/path with spaces.npz"),
        ("", ""),
        ("[1, 2", "[1, 2"),
    ],
)
def test_values_of_the_command_line(text: str, value: Any) -> None:
    read = parse_value(text)

    assert read == value
    assert type(read) is type(value)


@given(value=st.one_of(st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.booleans()))
@examples(60)
def test_values_printed_are_values_read(value: Any) -> None:
    text = write_toml({"value": value}).removeprefix("value = ").strip()

    assert parse_value(text) == value


@each(
    ("method", "name"),
    [
        ({}, "fedavg"),
        ({"label": "ours"}, "fedavg"),
        ({"terms": ["proximal"]}, "fedprox"),
        ({"objective": "fedmix", "sharing": "means"}, "fedmix"),
        ({"objective": {"name": "fedmix", "lambda": 0.77}, "sharing": "means"}, "custom"),
        ({"name": "fedmix", "objective": "plain", "sharing": "none"}, "fedmix"),
    ],
)
def test_a_method_without_a_name_is_named_after_the_preset_with_its_parts(method: dict[str, Any], name: str) -> None:
    assert resolve({**SMALL, "method": method}).method.name == name
    assert resolve(as_table(resolve({**SMALL, "method": method}))).method.name == name


def test_a_file_of_variants_with_methods_runs_these_only() -> None:
    variants = [{"method": "fedavg"}, {"method": {"name": "fedavg", "label": "one local step"}, "train": {"steps": 1}}]

    assert list(expand_study({**SMALL, "variants": variants}).experiments) == ["fedavg-seed0", "one-local-step-seed0"]
    with pytest.raises(FedblendError, match="two runs would both be called 'fedavg-seed0'"):
        expand_study({**SMALL, "variants": [{"method": "fedmix"}, {"rounds": 1}]})
    both = expand_study({**SMALL, "grid": {"rounds": [1]}, "variants": [{"method": "fedmix"}]})
    assert list(both.experiments) == ["fedavg-rounds-1-seed0", "fedmix-seed0"]


def test_cells_of_a_grid_whose_names_are_alike_or_too_long_have_labels_of_their_own() -> None:
    def labels(grid: dict[str, list[Any]], **more: Any) -> list[str]:
        return [one.method.label for one in expand_study({**SMALL, "grid": grid, **more}).experiments.values()]

    step = [{"name": "step", "every": 10}, {"name": "step", "every": 20}]
    counts = [[[given] * 10] * 10 for given in (10, 11)]

    assert labels({"partition": [{"name": "iid", "clients": 2}, "natural"]}, data="toy") == [
        "fedavg partition=iid",
        "fedavg partition=natural",
    ]
    assert labels({"train.schedule": step}) == ["fedavg schedule=step every=10", "fedavg schedule=step every=20"]
    assert labels({"partition.counts": counts, "train.lr": [0.1]}, partition="counts") == [
        "fedavg counts=#1 lr=0.1",
        "fedavg counts=#2 lr=0.1",
    ]
    # One folder would be of both.
    assert labels({"name": ["a b", "a-b"]}) == ["fedavg name=#1", "fedavg name=#2"]
    mixed = [{"name": "fedmix", "objective": {"lambda": lam}} for lam in (0.05, 0.2)]
    assert labels({}, methods=mixed) == ["fedmix lambda=0.05", "fedmix lambda=0.2"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"grid": {"train.lr": [0.1, 0.2, 0.1]}},
            "grid: train.lr: 0.1 is listed twice; write a list of different values",
        ),
        (
            {"methods": [{"name": "fedavg", "label": "a" * 197}], "grid": {"train.lr": [0.1]}},
            "grid: a run's label of its method and fields has 204 characters",
        ),
        (
            {"methods": ["fedavg", "fedavg"], "grid": {"train.lr": [0.1]}},
            "methods and grid: two runs would both be called 'fedavg-lr-0.1-seed0'; give them labels of their own",
        ),
    ],
)
def test_labels_of_a_grid_that_cannot_be_name_the_grid(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(FedblendError, match=f"^{re.escape(told)}"):
        expand_study({**{key: value for key, value in SMALL.items() if key != "method"}, **changes})


def test_a_grid_over_a_method_without_a_name_is_labelled_by_the_name_of_its_parts() -> None:
    study = expand_study({**SMALL, "grid": {"train.lr": [0.1], "method.aggregator": ["mean", "median"]}})

    assert list(study.experiments) == ["fedavg-lr-0.1-aggregator-mean-seed0", "custom-lr-0.1-aggregator-median-seed0"]
