"""The commands that run, compare and show: what each prints and writes."""

import itertools
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import PNG, TINY, contents, finish, here, records, refused, start_process, succeeded, words_of, write
from helpers import largest_file

import fedblend
from fedblend.cli.arguments import parse_change
from fedblend.core.errors import FedblendError
from fedblend.experiment.config import as_table, resolve
from fedblend.runs import api
from fedblend.runs.directory import RunDirectory, locked_study

pytestmark = pytest.mark.usefixtures("elsewhere")


STUDY = {
    "methods": ["fedavg", {"name": "fedmix", "label": "ours"}],
    "seeds": [0, 1],
    "grid": {"train.lr": [0.05, 0.1]},
    "rounds": 1,
}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study's folder: two methods, two seeds and two learning rates, one round each."""
    folder = tmp_path_factory.mktemp("study")
    succeeded(here("run", write(folder / "study.toml", STUDY), "--out", folder / "out", "--jobs", 1))
    return folder / "out"


def test_a_study_has_a_run_for_each_method_seed_and_cell(study):
    found = {path.name: tomllib.loads((path / "config.toml").read_text()) for path in study.iterdir() if path.is_dir()}
    wanted = itertools.product(("fedavg", "ours"), ("0.05", "0.1"), (0, 1))
    assert set(found) == {f"{label}-lr-{lr}-seed{seed}" for label, lr, seed in wanted}
    for slug, table in found.items():
        assert table["method"]["label"] == slug.rpartition("-seed")[0].replace("-lr-", " lr=")
        assert table["seed"] == int(slug[-1])
        assert f"lr-{table['train']['lr']}-" in slug
        assert table["method"]["objective"]["name"] == ("plain" if "fedavg" in slug else "fedmix")
        assert resolve(table).rounds == 1
    assert (study / "report.html").is_file()
    assert (study / "report.png").is_file()


def test_options_of_run_change_the_experiment():
    file = write(Path("tiny.toml"))
    words = ("--set", "rounds=1", "--set", "train.lr = 0.2", "--set", "method=fedmix", "--set", "model.hidden=[4]")
    succeeded(here("run", file, *words, "--seeds", "3,5", "--engine", "loop", "--jobs", 1, "--out", "out"))
    assert sorted(p.name for p in Path("out").iterdir() if p.is_dir()) == ["fedmix-seed3", "fedmix-seed5"]
    made = tomllib.loads(Path("out/fedmix-seed5/config.toml").read_text())
    assert (made["rounds"], made["train"]["lr"], made["train"]["cohort"], made["seed"]) == (1, 0.2, 2, 5)
    assert (made["model"]["hidden"], made["engine"]) == ([4], "loop")


def test_none_removes_an_optional_field_and_is_plain_text_elsewhere():
    changes = {
        "partition": {"name": "iid", "clients": 4, "samples": 10},
        "train": {"steps": 3, "clip_norm": 1.0},
        "arrival": {"first": 0.2},
        "grid": {"target": [0.1, 0.2]},
        "methods": [{"name": "fedmix", "sharing": {"noise": 0.5}}],
        "protection": {"name": "prune", "keep": 0.5},
    }
    file = write(Path("tiny.toml"), changes)

    def changed(*words):
        study = fedblend.runs.api.expand_file(file, [parse_change(word) for word in words], None)
        return as_table(next(iter(study.experiments.values())))

    plain = changed("target=none")
    assert "target" not in plain
    assert "samples" not in changed("partition.samples=none")["partition"]
    assert changed("partition.samples=none", "partition.samples=7")["partition"]["samples"] == 7
    assert "samples" not in changed("partition.samples=7", "partition.samples=none")["partition"]
    without = changed("train.steps=none")["train"]
    assert {name: value for name, value in plain["train"].items() if name not in without} == {"steps": 3}
    assert "arrival" not in changed("arrival=none")
    assert changed("protection=none")["protection"] == {"name": "none"}
    assert changed("name=none")["name"] == "none"
    assert changed('start="none"')["start"] == "none"
    assert "start" not in changed("start=none")
    # The file alone is not valid: steps = -3.
    file = write(Path("tiny.toml"), {"train": {"steps": -3}})
    assert "steps" not in changed("train.steps=none")["train"]


@pytest.mark.parametrize(("given", "word"), [({"seeds": [0, 1]}, "seed=7"), ({"seed": 3}, "seeds=[7]")])
def test_the_command_lines_seed_or_seeds_replace_those_of_the_file(given, word):
    file = write(Path("tiny.toml"), given)
    study = api.expand_file(file, [parse_change(word)], None)
    assert [one.seed for one in study.experiments.values()] == [7]


def test_a_value_of_the_command_line_is_for_variants_too():
    variants = [{"method": "fedprox", "rounds": 3, "train": {"lr": 0.5}}, {"method": "naivemix"}]
    file = write(Path("tiny.toml"), {"variants": variants, "rounds": 2})

    study = fedblend.runs.api.expand_file(file, [("train.lr", 0.01), ("rounds", 1)], None)

    assert {(one.train.lr, one.rounds) for one in study.experiments.values()} == {(0.01, 1)}
    variants = [{"method": "fedprox", "target": 0.5, "scale": "symmetric", "train": {"lr": 0.5, "steps": 3}}]
    other = write(Path("other.toml"), {"variants": variants, "target": 0.4, "train": {"steps": 2}})
    study = api.expand_file(other, [("train.steps", None), ("target", None), ("scale", None)], None)
    found = {(one.train.steps, one.target, one.scale.name) for one in study.experiments.values()}
    assert (len(study.experiments), found) == (1, {(None, None, "none")})
    assert study.experiments["fedprox-seed0"].train.lr == 0.5
    with pytest.raises(FedblendError, match=r"method\.label: variants of this file have methods of their own"):
        fedblend.runs.api.expand_file(file, [("method.label", "a")], None)
    file = write(Path("tiny.toml"), {"grid": {"partition": [{"name": "iid", "clients": 3}]}})
    with pytest.raises(FedblendError, match=r"partition\.clients: the grid of this file replaces 'partition'"):
        fedblend.runs.api.expand_file(file, [("partition.clients", 5)], None)


@pytest.mark.slow
def test_one_run_is_resumed_without_its_neighbours(monkeypatch):
    for name in ("one", "größe 2"):
        fedblend.run(resolve({**TINY, "rounds": 1}), out=Path("runs") / name)
    before = contents(Path("runs/one"))
    with locked_study(Path("runs")):  # another process runs the neighbours
        succeeded(here("resume", "runs/größe 2"))
    monkeypatch.chdir("runs/größe 2")
    succeeded(here("resume", "."))
    assert not Path("study.json").exists()
    assert not Path("../study.json").exists()
    assert contents(Path("../one")) == before


def test_a_run_prints_progress_and_ends_with_a_table_and_a_report():
    outcome = succeeded(here("run", write(Path("tiny.toml"))))
    run = Path("runs/tiny/fedavg-seed0")
    assert f"fedavg-seed0: round {TINY['rounds']}/{TINY['rounds']}" in outcome.err
    assert re.search(r"accuracy 0\.\d{3}", outcome.err)
    final = json.loads(records(run)[-1])["accuracy"]
    assert f"{100 * final:.1f}" in outcome.out
    assert "Report: runs/tiny/report.html" in outcome.out
    facts = json.loads((run / "facts.json").read_text())
    assert facts["command"] == "fedblend run tiny.toml"
    assert set(facts["versions"]) >= {"fedblend", "python", "torch", "numpy"}
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in facts["data"]["files"].values())
    assert facts["model"]["parameters"] == 64 * 8 + 8 + 8 * 10 + 10
    split = json.loads((run / "split.json").read_text())
    assert np.array(split["counts"]).sum() == facts["data"]["train"]
    assert {path.suffix for path in run.iterdir()} <= {".toml", ".json", ".jsonl", ".safetensors", ".lock"}


def test_a_warning_is_one_line_without_its_place_in_the_source():
    file = write(Path("tiny.toml"), {"partition": {"name": "classes", "classes_per_client": 3}, "rounds": 1})
    outcome = succeeded(here("run", file, "--set", "partition=iid", "--seeds", "0,1", "--jobs", 1, "--out", "out"))
    lines = [line for line in outcome.err.splitlines() if "warning" in line.lower()]
    told = "partition: 'iid' does not take classes_per_client = 3, which is left out"
    assert lines == [f"fedblend: warning: {told}"]
    assert ".py" not in outcome.err


@pytest.mark.slow
def test_a_resumed_run_shows_no_round_again():
    file = write(Path("tiny.toml"), {"rounds": 3})
    succeeded(here("run", file, "--out", "out"))
    for order in (("resume", "out"), ("run", file, "--resume", "--out", "out", "--set", "rounds=2")):
        again = succeeded(here(*order))
        assert re.findall(r"round \S+", again.err) == ["round 3/3"]
    assert "status done, round 3 of 3" in words_of(succeeded(here("inspect", "out")).out)
    more = succeeded(here("run", file, "--resume", "--out", "out", "--set", "rounds=4"))
    assert re.findall(r"round \S+", more.err) == ["round 3/4", "round 4/4"]


def test_compare_shows_every_label_once(study):
    shown = re.split("─+", words_of(succeeded(here("compare", study)).out))[1]  # the rows of the first columns
    # Long labels may wrap, but not be cut off: cut labels of different runs can be equal.
    for label in ("fedavg", "ours"):
        assert shown.count(label) == 2
    for lr in ("lr=0.05", "lr=0.1"):
        assert shown.count(lr) == 2, shown


def test_compare_names_runs_that_were_never_started(study):
    Path("copy").mkdir()
    shutil.copytree(study, "copy/study")
    gone = sorted(path for path in Path("copy/study").iterdir() if RunDirectory.is_run(path))[-1]
    shutil.rmtree(gone)

    printed = words_of(succeeded(here("compare", "copy")).out)

    assert f"Not begun: {gone.name}; start with: fedblend resume copy/study" in printed


def test_a_done_run_without_its_records_is_refused(study):
    shutil.copytree(study, "copy")
    run = next(path for path in sorted(Path("copy").iterdir()) if RunDirectory.is_run(path))
    (run / "metrics.jsonl").unlink()

    for command in ("compare", "report"):
        refused(here(command, run), "metrics.jsonl: is missing or empty, though the run is done")


def test_runs_come_in_the_order_of_their_file():
    file = write(Path("tiny.toml"), {"methods": ["naivemix", "fedavg", "fedmix"], "rounds": 0})
    succeeded(here("run", file, "--out", "out", "--jobs", 1))
    for order in ("compare", "inspect"):
        shown = re.findall(r"naivemix|fedavg|fedmix", succeeded(here(order, "out")).out)
        assert list(dict.fromkeys(shown)) == ["naivemix", "fedavg", "fedmix"]


@pytest.mark.slow
def test_all_runs_below_a_folder_are_found_at_any_depth():
    for method, folder in (("fedmix", "runs"), ("fedavg", "runs/one"), ("naivemix", "runs/old/two")):
        file = write(Path("tiny.toml"), {"method": method, "rounds": 0})
        succeeded(here("run", file, "--out", folder, *(["--resume"] if Path(folder).exists() else [])))
    Path("runs/round").symlink_to(Path("runs").absolute())
    for order in ("compare", "inspect"):
        shown = re.findall(r"naivemix|fedavg|fedmix", succeeded(here(order, "runs")).out)
        assert list(dict.fromkeys(shown)) == ["fedmix", "naivemix", "fedavg"]


def test_a_baseline_that_is_no_method_and_one_for_sites_are_refused(study):
    for order in (("compare", study), ("report", study, "--out", "page.html")):
        refused(here(*order, "--baseline", "fedprox"), "baseline: 'fedprox' is none of these runs' methods; valid: fed")
    assert not Path("page.html").exists()
    both = here("compare", study, "--sites", "--baseline", "fedavg lr=0.05")
    refused(both, "baseline: goes with the table of results, not with --sites")
    assert "to ours lr=0.05" in words_of(succeeded(here("compare", study, "--baseline", "ours lr=0.05")).out)


def test_inspect_prints_status_costs_and_configuration(study):
    shown = succeeded(here("inspect", study / "ours-lr-0.1-seed0")).out
    words = words_of(shown)
    for text in ("status done, round 1 of 1", "MB, means 0.00", "peak memory", "lambda = 0.1"):
        assert text in words
    table = tomllib.loads(shown[shown.index("name = ") :])
    assert resolve(table) == resolve(tomllib.loads((study / "ours-lr-0.1-seed0/config.toml").read_text()))
    every = succeeded(here("inspect", study)).out
    assert (every.count("status "), every.count("train.lr"), every.count("[partition]")) == (8, 8, 1)


def test_data_show_tells_how_the_columns_of_a_table_become_numbers():
    rows = [f"{20 + i},{'fm'[i % 2]},{i % 3},h{i % 4}" for i in range(40)]
    Path("p.csv").write_text("\n".join(["age,s[red]ex,ill,site", *rows]))
    data = {"name": "table", "path": "p.csv", "target": "ill", "client": "site"}
    printed = words_of(
        succeeded(here("data", "show", write(Path("p.toml"), {"data": data, "partition": "natural"}))).out
    )
    for words in (
        "a sample 3 numbers",
        "classes 3",
        "0: h0 (8 samples), h1 (8 samples)",
        "Columns of numbers: age",
        "Columns of text: s[red]ex (f, m)",
    ):
        assert words in printed


def test_data_show_draws_the_split_and_prints_its_measures():
    split = {"partition": {"name": "classes", "clients": 5, "classes_per_client": 2}}
    file = write(Path("tiny.toml"), split)
    outcome = succeeded(here("data", "show", file, "--set", "partition.clients=10", "--out", "split.png"))
    assert Path("split.png").read_bytes().startswith(PNG)
    printed = words_of(outcome.out)
    assert "clients 10" in printed
    assert "classes_mean 2.0000" in printed
    assert "samples a client" in printed
    assert "Picture: split.png" in printed
    assert not Path("runs").exists()


def test_a_picture_of_a_split_that_finds_no_space_leaves_the_previous_one():
    file = write(Path("tiny.toml"), {})
    Path("split.png").write_bytes(PNG)
    with largest_file(1000):
        outcome = here("data", "show", file, "--out", "split.png")
    refused(outcome, "split.png", "could not be written", "repeat the command")
    assert Path("split.png").read_bytes() == PNG


@pytest.mark.slow
def test_the_command_is_a_module_too(tmp_path):
    done = finish(start_process([sys.executable, "-m", "fedblend", "run", "missing.toml"], tmp_path))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("fedblend: error: missing.toml: ")
