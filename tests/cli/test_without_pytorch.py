"""Commands that list, write files, or read runs work where PyTorch and other large packages cannot be imported."""

import json
import os
import subprocess
import sys

import pytest
from cli_helpers import Outcome, finish, here, start_process, succeeded, write
from test_help import COMMANDS

from fedblend.core import registry
from fedblend.experiment import index, presets

pytestmark = pytest.mark.slow

LARGE = ("torch", "pandas", "matplotlib", "sklearn", "skimage", "flwr")

PROGRAM = """
import contextlib, importlib.abc, io, json, sys

LARGE, commands = json.load(sys.stdin)
tried = []

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in LARGE:
            tried.append(name)
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
from fedblend.cli import main

outcomes = []
for words in commands:
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["fedblend", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    outcomes.append((code, out.getvalue(), err.getvalue(), tried[:]))
    tried.clear()
json.dump(outcomes, sys.stdout)
"""

OWN = '''
from pathlib import Path

from fedblend import part
from fedblend.methods.sharing import Raw

Path(__file__).with_name("imported").touch()

@part("sharing", "eager")
class Eager(Raw):
    """Raw samples, by a class of the user's own."""
'''

STUDY = {
    "methods": [
        "fedavg",
        "fedmix",
        "global-mixup",
        {"name": "naivemix", "label": "noisy means", "sharing": {"multiplier": 2.0}},
        {"name": "naivemix", "label": "means without noise"},
    ],
    "protection": {"name": "noise", "clip": 1.0, "multiplier": 8.0},
    "unsafe": True,
    "rounds": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the runs of five methods, and one run with a sharing of the user's own."""
    made = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        succeeded(here("run", write(made / "study.toml", STUDY), "--out", "runs", "--jobs", 1))
        (made / "eager_part.py").write_text(OWN, encoding="utf-8")
        method = {"name": "global-mixup", "label": "own", "sharing": "eager_part:Eager"}
        changes = {"method": method, "unsafe": True, "rounds": 1}
        succeeded(here("run", write(made / "own.toml", changes), "--out", "runs/own"))
        (made / "imported").unlink(missing_ok=True)  # absent where this process has imported the part before
    return made


def without_large_packages(commands, folder):
    """The outcome of each command in a process where large packages cannot be imported, and those it tried."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([LARGE, commands]),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "COLUMNS": "150"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [(Outcome(code, out, err), tried) for code, out, err, tried in json.loads(done.stdout)]


def test_commands_that_train_nothing_print_the_same_without_pytorch(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "150")
    groups = {command.split()[0] for command in COMMANDS if " " in command}
    words = ["methods", "parts", "datasets", "models", "partitions", *index.index().tables, *registry.MODULES]
    runs = sorted(str(path.parent.relative_to(folder)) for path in folder.rglob("config.toml"))
    assert len(runs) == 6
    commands = [
        ["--help"],
        ["--version"],
        *([*command.split(), "--help"] for command in (*COMMANDS, *groups)),
        ["list"],
        *(["list", word] for word in (*words, *presets.presets(), "means", "digits", "fedmx")),
        *(["new", method, "digits"] for method in (*presets.presets(), "fedmx")),
        *(["new", "fedmix", dataset] for dataset in (*index.index().parts["dataset"], "mnist5")),
        ["compare", "runs"],
        ["compare", "runs/own", "runs/fedavg-seed0"],
        ["compare", "runs", "--sites"],
        ["compare", "nowhere"],
        ["inspect", *runs],
        ["inspect", "nowhere"],
    ]

    for words, (outcome, tried) in zip(commands, without_large_packages(commands, folder), strict=True):
        assert tried == [], words
        with_all = here(*words)
        assert (outcome.code, outcome.err) == (with_all.code, with_all.err), words
        # The first line of a help has the name of the program that was started.
        first = 1 if words[-1] == "--help" else 0
        assert outcome.out.splitlines()[first:] == with_all.out.splitlines()[first:], words


def test_reading_runs_imports_no_part_of_the_users_own(folder):
    (compared, _), (inspected, _) = without_large_packages([["compare", "runs"], ["inspect", "runs/own"]], folder)

    assert not (folder / "imported").exists()
    # The run's facts state what only the part's class knows.
    assert "! own: breaks privacy, it shares raw samples" in compared.out
    assert "! global-mixup: breaks privacy, it shares raw samples" in compared.out
    assert compared.out.count("breaks privacy") == 2
    assert 'name = "eager_part:Eager"' in inspected.out


def test_epsilon_is_stated_without_the_parts_that_add_noise(folder):
    pytest.importorskip("dp_accounting")
    ((inspected, _),) = without_large_packages([["inspect", "runs/noisy-means-seed0"]], folder)

    privacy = next(line for line in inspected.out.splitlines() if line.startswith("privacy"))
    assert "means, for a sample: (" in privacy
    assert "weights and means, for a sample: (" in privacy


RUN = """
import json, sys
import fedblend

names = set(json.loads(sys.argv[1]))
seen = []

def first_record(record):
    seen.append(sorted({name.partition(".")[0] for name in sys.modules} & names))

partition, model = {"name": "iid", "clients": 10}, {"name": "mlp", "hidden": [4]}
experiment = fedblend.Experiment(data="digits", partition=partition, model=model, method="fedmix", rounds=1)
result = fedblend.run(experiment, sys.argv[2], on_round=first_record)
assert list(result.metrics["round"]) == [0, 1]
print(json.dumps(seen))
"""


def test_a_run_makes_its_rounds_before_it_imports_packages_for_tables_and_figures(tmp_path):
    large = [name for name in LARGE if name != "torch"]
    words = [json.dumps([*large, "scipy"]), str(tmp_path / "run")]
    done = succeeded(finish(start_process([sys.executable, "-c", RUN, *words])))

    assert json.loads(done.out) == [[], []]
