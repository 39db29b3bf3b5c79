"""A part that takes another's place keeps the options that the user had set, wherever fields are changed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from helpers import each

from fedblend.core.errors import FedblendError
from fedblend.experiment.changes import change_field
from fedblend.experiment.study import expand
from fedblend.runs import api

CLASSES = {"name": "classes", "clients": 20, "classes_per_client": 3}
FILE: dict[str, Any] = {"data": "digits", "model": "mlp", "partition": CLASSES}
LEFT_OUT = "^partition: 'dirichlet' does not take classes_per_client = 3, which is left out$"


def one_change(before: dict[str, Any], path: str, value: Any) -> tuple[dict[str, Any], list[str]]:
    """The table after a change, and what was said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        change_field(before, path, value)
    return before, [str(one.message) for one in said]


@each(
    ("before", "path", "value", "after", "left_out"),
    [
        (CLASSES, "partition", "dirichlet", {"name": "dirichlet", "clients": 20}, "classes_per_client = 3"),
        (CLASSES, "partition.name", "dirichlet", {"name": "dirichlet", "clients": 20}, "classes_per_client = 3"),
        (
            CLASSES,
            "partition",
            {"name": "dirichlet", "clients": 7, "alpha": 0.1},
            {"name": "dirichlet", "clients": 7, "alpha": 0.1},
            "classes_per_client = 3",
        ),
        (CLASSES, "partition", "classes", CLASSES, ""),
        (CLASSES, "partition", {"clients": 7}, {**CLASSES, "clients": 7}, ""),
        ("iid", "partition", "dirichlet", {"name": "dirichlet"}, ""),
        # Of the same name, but not valid there: a list, another word, a number out of range.
        ({"name": "mlp", "hidden": [9]}, "model", "lstm", {"name": "lstm"}, "hidden = [9]"),
        ({"name": "dirichlet", "form": "client"}, "partition", "mix2fld", {"name": "mix2fld"}, "form = 'client'"),
        # Texts name files and columns of a data set; numbers are the user's.
        (
            {"name": "npz", "path": "a.npz", "test_share": 0.3},
            "data",
            "table",
            {"name": "table", "test_share": 0.3},
            "path = 'a.npz'",
        ),
        # A part that requires an option, and one inside another.
        ({"name": "mlp", "dropout": 0.5}, "model", {"name": "module", "path": "a:B"}, None, "dropout = 0.5"),
        (
            {"objective": {"name": "augmix", "base": {"name": "fedmix", "lambda": 0.3}}},
            "method.objective.base",
            "naivemix",
            {"objective": {"name": "augmix", "base": {"name": "naivemix", "lambda": 0.3}}},
            "",
        ),
        # The part of a preset has no name in the file.
        (
            {"name": "fedmix", "objective": {"lambda": 0.3, "remedy": "check"}},
            "method.objective",
            "naivemix",
            {"name": "fedmix", "objective": {"name": "naivemix", "lambda": 0.3}},
            "remedy = 'check'",
        ),
        ({"epochs": 4}, "train", {"lr": 0.5}, {"epochs": 4, "lr": 0.5}, ""),
        (
            {"epochs": 4, "optimizer": {"name": "adam", "beta1": 0.8}},
            "train.optimizer",
            "adamw",
            {"epochs": 4, "optimizer": {"name": "adamw", "beta1": 0.8}},
            "",
        ),
    ],
)
def test_options_that_both_parts_have_are_kept_and_others_named(
    before: Any, path: str, value: Any, after: Any, left_out: str
) -> None:
    field = path.split(".")[0]

    made, said = one_change({field: before}, path, value)

    assert made == {field: after or value}
    part = path.removesuffix(".name")
    name = value if isinstance(value, str) else value.get("name")
    assert said == ([f"{part}: '{name}' does not take {left_out}, which is left out"] if left_out else [])


MINE = {"name": "fedmix", "label": "mine", "objective": {"lambda": 0.2, "remedy": "check"}, "stateful_clients": False}


@pytest.mark.parametrize(
    ("name", "objective", "left_out"),
    [
        ("fedprox+fedmix", {"lambda": 0.2, "remedy": "check"}, "label = 'mine'"),
        ("naivemix", {"lambda": 0.2}, "label = 'mine', objective = {'remedy': 'check'}"),
        ("fedavg", None, "label = 'mine', objective = {'lambda': 0.2, 'remedy': 'check'}"),
    ],
)
def test_another_method_keeps_the_options_that_its_parts_have(name: str, objective: Any, left_out: str) -> None:
    made, said = one_change({"method": MINE}, "method", name)

    assert made == {"method": {"name": name} | ({"objective": objective} if objective else {})}
    assert said == [f"method: '{name}' does not take {left_out}, which is left out"]


def test_the_command_line_keeps_the_number_of_clients(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(tomli_w.dumps(FILE))

    with pytest.warns(UserWarning, match=LEFT_OUT):
        (made,) = api.expand_file(path, [("partition", "dirichlet")], None).experiments.values()

    assert made.partition.clients == 20


@pytest.mark.parametrize("word", ["grid", "variants"])
def test_a_study_keeps_the_number_of_clients(word: str) -> None:
    study = {
        "grid": {"partition": ["classes", {"name": "dirichlet", "alpha": 0.1}]},
        "variants": [{"partition": {"name": "dirichlet", "alpha": 0.1}, "method": "fedmix"}],
    }

    with pytest.warns(UserWarning, match=LEFT_OUT):
        made = expand({**FILE, "method": "fedavg", word: study[word]}).experiments.values()

    assert [(one.partition.name, one.partition.clients) for one in made] == [("classes", 20), ("dirichlet", 20)]


def test_a_change_leaves_shared_tables_alone() -> None:
    change_field({"partition": CLASSES}, "partition.clients", 3)

    assert CLASSES["clients"] == 20


@pytest.mark.parametrize(("path", "said"), [("partition", "partition.name: unknown"), ("data.name", "data.name: unk")])
def test_an_unknown_part_is_named_with_its_field(path: str, said: str) -> None:
    with pytest.raises(FedblendError, match=f"^{said}"):
        change_field(dict(FILE), path, "no such part")
