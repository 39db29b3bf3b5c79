"""Data, models and objectives of the user's own, in a file and from Python."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_helpers import PNG, TINY, call, here, lines_of, records, refused, status, succeeded, words_of, write
from helpers import linear_net, loss_of, weight_gradient
from safetensors.torch import load_file
from torch import nn

import fedblend
from fedblend.core import registry
from fedblend.core.context import Batch, Task
from fedblend.core.objective import Plain

ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.slow
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


@pytest.mark.slow
def test_data_of_one_class_run_with_a_warning() -> None:
    rng = np.random.default_rng(0)
    for y, told in ((np.zeros(60, int), 1), (np.arange(60) % 2, 0)):
        np.savez("own.npz", x=rng.standard_normal((60, 6)), y=y)
        file = write(Path("own.toml"), {"data": {"name": "npz", "path": "own.npz"}, "rounds": 0})
        shown = words_of(succeeded(here("run", file, "--out", f"out{told}")).out)
        assert shown.count("all samples are of one class, '0': there is nothing to classify") == told
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
from fedblend.core.objective import Objective
from fedblend.core.registry import NonNegative

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_configuration_that_a_run_kept_runs_again(own: Path) -> None:
    # As the report gives it, "one method at a time"; parts of one's own lie neither here nor beside that file.
    succeeded(call("run", own, "--out", "out", "--set", "rounds=1"))
    succeeded(call("run", "out/flooded-seed0/config.toml", "--seeds", "0,1", "--out", "again", "--jobs", 2))
    assert records(Path("again/flooded-seed0")) == records(Path("out/flooded-seed0"))
    assert status(Path("again/flooded-seed1"))["state"] == "done"


def kept_path(run: str) -> str:
    """The path of the data in the configuration that a run kept."""
    return tomllib.loads((Path(run) / "config.toml").read_text())["data"]["path"]


@pytest.mark.slow
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
    assert kept_path("one/fedavg-seed0") == str(there)
    succeeded(here("data", "show", file))
    succeeded(here("run", file, "--set", "data.path=b.npz", "--out", "two"))
    assert kept_path("two/fedavg-seed0") == str(here_)
    succeeded(here("run", file, "--set", "data.path=~/home.npz", "--out", "three"))
    assert kept_path("three/fedavg-seed0") == str(tmp_path / "home.npz")
    grid = write(tmp_path / "project" / "g.toml", {"grid": {"data.path": ["data/a.npz"]}, "data": {"name": "npz"}})
    assert next(iter(fedblend.runs.api.expand_file(grid, [], None).experiments.values())).data.path == str(there)
    made = fedblend.Experiment(**{**TINY, "data": {"name": "npz", "path": "b.npz"}})
    assert made.data.path == str(here_)
    # From wherever a run goes on, it finds its data.
    monkeypatch.chdir(tmp_path)
    succeeded(here("run", file, "--resume", "--set", "rounds=2", "--out", "elsewhere/one"))
    succeeded(here("resume", "elsewhere/one"))
    assert lines_of(Path("elsewhere/one/fedavg-seed0")) == 3


def test_parts_of_ones_own_are_checked_like_any(own: Path) -> None:
    refused(here("run", own, "--set", "method.objective.level=-1"), "objective.level: -1", "greater than or equal to 0")
    refused(here("run", own, "--set", "method.objective.levle=1"), "objective.levle", "'level'")
    refused(here("run", own, "--set", "method.objective.name=own_flooding:Floodin"), "own_flooding:Floodin")
    refused(
        here("run", own, "--set", "method.objective.name=own_net:TestNet"),
        "own_net:TestNet",
        "is no part of the kind 'objective'",
    )
    refused(here("run", own, "--set", "model=own_net:TestNet"), 'or give {name = "module", path = "own_net:TestNet"}')
    refused(here("run", own, "--set", "model.path=own_nett:TestNet"), "model.path", "own_nett")


@pytest.mark.slow
def test_the_methods_and_the_callback_of_the_page_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "adding-a-method.md").read_text(encoding="utf-8")
    python, (first, more, _) = (re.findall(rf"^```{word}\n(.*?)^```", text, re.M | re.S) for word in ("python", "toml"))
    assert len(python) == 5
    for block in python:
        name = re.findall(r"^class (\w+)", block, re.M)[-1]
        module = re.search(rf'"(\w+):{name}"', text)
        assert module, f"the page no longer names the module of {name}"
        (tmp_path / f"{module[1]}.py").write_text(block)
    callbacks = 'callbacks = [{ name = "my_module:Enough", accuracy = 0.01 }]\n'
    file = tmp_path / "methods.toml"
    file.write_text(callbacks + first.replace("methods = [\n", more.removesuffix("]\n")))

    told = succeeded(here("run", file, "--jobs", 1, "--out", "out"))

    runs = [path.parent for path in Path("out").rglob("metrics.jsonl")]
    assert told.out.startswith("1 0.")
    assert len(runs) == 6
    assert {status(run)["reason"] for run in runs} == {"ended by enough"}
    assert len({json.loads(records(run)[-1])["loss"] for run in runs}) == 6, "a method does what another does"


class SAM(Plain):
    """FedSAM: the loss at w + rho g / |g|, with g the gradient at w and rho = 0.05."""

    def loss(self, net, batch, drawn, context):
        def at(weights):
            return context.task.loss(net.with_weights(weights)(batch.x), batch.y)

        g = torch.func.grad(at)({name: w.detach() for name, w in net.weights.items()})
        norm = torch.stack([t.square().sum() for t in g.values()]).sum().sqrt()
        return at({name: w + (0.05 * g[name] / norm).detach() for name, w in net.weights.items()})


def test_a_loss_may_differentiate_by_weights() -> None:
    model, task = linear_net(), Task("classification", 3)
    x, y = (
        torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 1, 2, 0]),
    )
    gradient = weight_gradient(task.loss(model(x), y), model)
    shifted = copy.deepcopy(model)
    with torch.no_grad():
        for one, part in zip(shifted.parameters(), (gradient / gradient.norm()).split([15, 3]), strict=True):
            one += 0.05 * part.view_as(one)

    loss = loss_of(SAM(), model, Batch(x, y), task)

    assert loss.item() == pytest.approx(task.loss(shifted(x), y).item(), rel=1e-12)
    wanted = weight_gradient(task.loss(shifted(x), y), shifted)
    assert torch.allclose(weight_gradient(loss, model), wanted, rtol=1e-12)


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget, after the test, the partitions that it declares."""
    monkeypatch.setitem(registry._registry, "partition", dict(registry.known("partition")))


@pytest.mark.usefixtures("kinds")
def test_a_partition_that_returns_lists_is_told_what_to_return() -> None:
    @fedblend.part("partition", "lists")
    class Lists:
        def split(self, labels, classes, seed, natural):
            return [[0, 1], [2]]

    experiment = fedblend.Experiment(**{**TINY, "partition": Lists()})
    with pytest.raises(fedblend.FedblendError, match=r"^partition Lists: split must return a Population, not a list; "):
        fedblend.run(experiment, out="out")
    assert not Path("out").exists()


class OwnNet(nn.Flatten):
    """A module in place of a model."""


@pytest.mark.parametrize("model", [OwnNet, OwnNet(), [OwnNet]])
def test_a_module_in_place_of_a_model_is_told_the_line_to_write(model: object) -> None:
    line = f'model = {{"name": "module", "path": "{__name__}:OwnNet"}}'
    with pytest.raises(fedblend.FedblendError) as error:
        fedblend.Experiment(**{**TINY, "model": model})
    assert (line in str(error.value)) == (not isinstance(model, list))


def test_a_module_that_no_file_holds_is_told_to_be_put_into_one() -> None:
    class Inside(nn.Flatten):
        """No path leads here."""

    for model, name in ((Inside, "Inside"), (nn.Sequential(), "Net")):
        line = f'write model = {{"name": "module", "path": "my_parts:{name}"}}'
        with pytest.raises(fedblend.FedblendError) as error:
            fedblend.Experiment(**{**TINY, "model": model})
        assert f"put the class in a file, such as my_parts.py, and {line}" in str(error.value)


def test_a_result_is_shown_in_one_line(tmp_path: Path) -> None:
    result = fedblend.run(fedblend.Experiment(**{**TINY, "rounds": 1}), out=tmp_path / "out")
    accuracy = result.metrics["accuracy"].iloc[-1]
    assert repr(result) == f"Result({str(tmp_path / 'out')!r}, method='fedavg', rounds=1, accuracy={accuracy:.4f})"
    without = dataclasses.replace(result, metrics=result.metrics.drop(columns="accuracy"))
    assert repr(without).endswith(f"rounds=1, loss={result.metrics['loss'].iloc[-1]:.4g})")
    bare = dataclasses.replace(result, metrics=result.metrics[["method", "round"]])
    assert repr(bare).endswith("rounds=1)")


def test_resuming_nothing_or_fewer_rounds_gives_the_warning_of_the_command_line(tmp_path: Path) -> None:
    experiment = fedblend.Experiment(**{**TINY, "rounds": 2})
    with pytest.warns(UserWarning, match="out: nothing to resume; the run starts from round 0"):
        fedblend.run(experiment, out=tmp_path / "out", resume=True)
    fewer = experiment.model_copy(update={"rounds": 1})
    with pytest.warns(UserWarning, match="out: has 2 rounds already, more than rounds = 1; all are kept"):
        result = fedblend.run(fewer, out=tmp_path / "out", resume=True)
    assert result.metrics["round"].tolist() == [0, 1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fedblend.run(experiment, out=tmp_path / "out", resume=True)


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
    with pytest.raises(fedblend.FedblendError, match=r"out: already holds files; give resume=True to go on with"):
        fedblend.run_study(table, out=tmp_path / "out", jobs=1)


@pytest.mark.slow
def test_a_field_set_on_the_command_line_is_varied_no_more(tmp_path: Path) -> None:
    grid = {"train.lr": [0.01, 0.03], "train.epochs": [1, 2]}
    file = write(tmp_path / "file.toml", {"rounds": 1, "seeds": [0, 1], "grid": grid})
    succeeded(here("run", file, "--set", "train.lr=0.1", "--set", "seed=5", "--out", tmp_path / "out"))
    made = [tomllib.loads((run / "config.toml").read_text()) for run in (tmp_path / "out").iterdir() if run.is_dir()]
    found = sorted((one["train"]["lr"], one["train"]["epochs"], one["seed"]) for one in made)
    assert found == [(0.1, 1, 5), (0.1, 2, 5)]
