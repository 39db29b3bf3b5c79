"""The reference of every field: it agrees with the code, and pages are made from it."""

from __future__ import annotations

import doctest
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import here, refused, succeeded
from helpers import each, slow_except
from script_helpers import ROOT, blocks, script, text

import fedblend
from fedblend.core import registry
from fedblend.core.errors import FedblendError
from fedblend.core.registry import build
from fedblend.core.sharing import ClientData, Sharing, SharingPlan
from fedblend.experiment import index, presets
from fedblend.experiment.config import TABLES, Experiment
from fedblend.experiment.options import (
    class_options,
    descriptions,
    field_paths,
    index_of_code,
    kind_entries,
    part_entry,
    table_entries,
)
from fedblend.experiment.study import expand

PAGE = "docs/configuration.md"
REFERENCE = script("docs/site/reference.py")

ENTRIES = [*table_entries(), *(entry for kind in registry.MODULES for entry in kind_entries(kind))]
"""Everything that has options."""


def test_examples_of_the_reference_give_what_they_show() -> None:
    assert not doctest.testmod(REFERENCE).failed


@pytest.mark.slow
def test_the_page_begins_with_links_to_all_tables_and_parts() -> None:
    begin, _, rest = REFERENCE.filled(text(PAGE)).partition("## How a file is laid out")
    links = set(re.findall(r"\]\((\S+?)\)", begin))
    heads = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^##+ (.+)$", rest, re.M)]
    parts = {
        f"reference/{kind}.md#{name}"
        for kind, page in REFERENCE.part_pages().items()
        for name in re.findall("^## `(.+)`", page, re.M)
    }
    assert parts == {link for link in links if link.startswith("reference/") and "#" in link}
    assert {link[1:] for link in links if link.startswith("#")} <= set(heads)


@pytest.mark.slow
def test_each_family_of_methods_has_a_page_that_says_what_leaves_a_client() -> None:
    texts = [text(path) for path in ROOT.glob("docs/methods/*.md")]
    families = [name for text in texts for name in re.findall(r"<!-- methods: (.+) -->", text)]
    assert sorted(families) == sorted(set(presets.families()) - {"With FedProx's term"})

    rows = "".join(map(REFERENCE.filled, texts)).splitlines()
    leaves = {row.split("`")[1]: row.split(" | ")[-1].rstrip(" |") for row in rows if row.startswith("| `")}
    told = {
        "fedavg": "`weights`, each round",
        "global-mixup": "`raw`, once; `weights`, each round",
        "fedmix-hidden": "`hidden-means`, each round; `weights`, each round",
        "local-means": "`weights`, each round",
        "prior-samples": "`raw`, once; `weights`, each round",
        "aggenhance-secure": "`weights`, each round; `answers`, each round",
        "xormixfl": "`seeds`, once",
        "standalone": "nothing",
    }
    assert {name: leaves[name] for name in told} == told


def test_the_index_is_read_from_its_file_and_made_anew_for_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = index_of_code()
    monkeypatch.setattr(index, "FILE", tmp_path / "index.json")
    for code, kept in (("1", True), ("1", True), ("2", True), ("3", False)):
        monkeypatch.setattr(index, "_digest_of_code", lambda code=code: code)
        if not kept:
            monkeypatch.setattr(index, "FILE", tmp_path / "no folder" / "index.json")
        assert index.index.__wrapped__() == made
        assert not kept or json.loads(index.FILE.read_text())["code"] == code
    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]


@each("entry", ENTRIES)
def test_every_option_has_a_description_a_type_and_a_default(entry: Any) -> None:
    assert entry.summary.strip()
    for option in entry.options:
        assert re.fullmatch(r"[A-Z].*\.", option.text), f"{entry.name}.{option.name}: {option.text!r}"
        assert option.type
        assert option.default


def test_options_are_those_of_the_code() -> None:
    of_table = {entry.name: [o.name for o in entry.options] for entry in table_entries()}
    assert of_table == {name: list(cls.model_fields) for name, cls in {"experiment": Experiment, **TABLES}.items()}
    for kind in registry.MODULES:
        for name, cls in registry.known(kind).items():
            spelled = [registry.FILE_WORDS.get(field, field) for field in registry.fields_of(cls)]
            assert [o.name for o in part_entry(cls).options] == spelled, name


def test_types_ranges_and_defaults_in_words() -> None:
    shown = {o.name: (o.type, o.default) for o in part_entry(registry.find("sharing", "means")).options}
    assert shown["samples_per_mean"] == ('whole number from 1, or "all"', '"all"')
    assert shown["refresh"] == ("number from 0 to 1", "not given")
    assert shown["split"] == ('"random" or "class"', '"random"')
    shown = {o.name: (o.type, o.default) for entry in table_entries() for o in entry.options}
    assert shown["lr_decay"] == ("number above 0, at most 1", "0.999")
    assert shown["momentum"] == ("number from 0, below 1", "0.0")
    assert shown["data"] == ("dataset", "required")
    assert shown["terms"] == ("list of terms", "[]")
    assert shown["train"] == ("table", "its defaults")
    assert shown["unsafe"] == ("true or false", "false")
    (counts,) = class_options(registry.find("partition", "counts"))
    assert (counts.type, counts.default) == ("list of lists of whole numbers", "required")
    assert class_options(registry.find("model", "module"))[1].default == "{}"
    assert class_options(registry.find("model", "mlp"))[0].type == "list of whole numbers from 1"


def test_the_listed_ranges_are_those_that_are_checked() -> None:
    needed = {
        "path": "x",
        "dataset": "x",
        "counts": [[1]],
        "clients": [[0]],
        "trace": "x",
        "target": "y",
        "of": "digits",
        "model": "efficientnet-lite0",
    }
    tried = 0
    for entry in (entry for kind in registry.MODULES for entry in kind_entries(kind)):
        given = {o.name: needed[o.name] for o in entry.options if o.default == "required"}
        for option in entry.options:
            for bound in re.findall(r"above ([-\d.]+)", option.type):
                tried += 1
                with pytest.raises(FedblendError, match=rf"{option.name}: {float(bound)} is not valid"):
                    build(entry.kind, {"name": entry.name, **given, option.name: float(bound)})
    assert tried >= 5


def test_inherited_fields_keep_their_descriptions_and_a_class_without_source_has_none() -> None:
    assert descriptions(registry.find("objective", "fedmix"))["lam"].startswith("Mixing ratio")
    assert descriptions(registry.find("objective", "fedmix"))["taylor"].startswith("Coefficient c")
    made: dict[str, Any] = {}
    exec("class Typed:\n    x: int = 0\n    '''A number.'''", made)
    assert descriptions(made["Typed"]) == {}


def test_every_kind_has_a_place_in_a_file() -> None:
    assert set(field_paths()) == set(registry.MODULES)
    assert (field_paths()["dataset"], field_paths()["sharing"], field_paths()["term"]) == (
        "data",
        "method.sharing",
        "method.terms",
    )


def test_the_files_on_the_page_are_valid() -> None:
    made = [expand(tomllib.loads(block)) for block in blocks(PAGE, "toml")]
    assert [len(study.experiments) for study in made] == [3, 24]
    assert {e.train.lr for e in made[0].experiments.values()} == {0.05}
    labels = {e.method.label for e in made[1].experiments.values()}
    assert "fedmix, lambda 0.2 lr=0.01 alpha=0.1" in labels


def test_top_level_fields_below_a_table_are_refused() -> None:
    lines = blocks(PAGE, "toml")[0].splitlines()
    wrong = "\n".join([*lines[5:], *lines[:5]])
    with pytest.raises(FedblendError, match=r"train\.name: unknown key"):
        expand(tomllib.loads(wrong))


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def test_list_prints_the_options_of_a_method_with_the_values_of_the_preset() -> None:
    shown = succeeded(here("list", "naivemix-hidden")).out
    assert "method naivemix-hidden: NaiveMix on hidden states" in shown
    assert re.search(r'^form +"fedmix" or "naivemix" +"naivemix" +The loss on the hidden states\.', shown, re.M)
    assert "sharing hidden-means: " in shown
    assert shown.count("objective hidden-mix: ") == 1


@pytest.mark.parametrize("name", slow_except(["fedmix", "fedprox+fedmix"], presets.presets()))
def test_list_prints_every_method(name: str) -> None:
    assert f"method {name}: " in succeeded(here("list", name)).out


ONE_A_KIND = [*{entry.kind: entry for entry in ENTRIES}.values()]


@pytest.mark.parametrize("entry", slow_except(ONE_A_KIND, ENTRIES), ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_list_prints_every_option_of_every_name(entry: Any) -> None:
    shown = succeeded(here("list", entry.name)).out
    assert entry.summary in shown
    for option in entry.options:
        assert re.search(rf"^{option.name} .*{re.escape(option.text)}", shown, re.M), option.name


def test_list_shows_the_path_of_a_part_as_a_file_needs_it() -> None:
    shown = succeeded(here("list", "fedblend.methods.objectives.fedmix:FedMix")).out
    assert 'method.objective.name = "fedblend.methods.objectives.fedmix:FedMix"' in shown


def test_list_shows_a_sharing_whose_options_must_be_given() -> None:
    @fedblend.part("sharing", "required")
    class Required(Sharing):
        """Shares something."""

        size: int

        @property
        def plan(self) -> SharingPlan:
            return SharingPlan("inputs")

        def share(self, local: ClientData) -> None: ...

    del registry._registry["sharing"]["required"]
    assert [option.name for option in part_entry(Required).options] == ["size"]


def test_list_prints_all_parts_of_a_kind() -> None:
    shown = succeeded(here("list", "objective")).out
    # Other tests declare parts in this process; a command lists the package's own.
    for name in [name for name, cls in registry.known("objective").items() if registry.is_own(cls)]:
        assert f"objective {name}: " in shown
    assert "It has no options." in shown


@pytest.mark.parametrize(
    ("word", "near"), [("trian", "train"), ("fedmx", "fedmix"), ("objectives", "objective"), ("dirichelt", "dirichlet")]
)
def test_list_suggests_the_nearest_word(word: str, near: str) -> None:
    refused(here("list", word), word, f"did you mean '{near}'?")
