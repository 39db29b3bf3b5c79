"""A server that lies to a site: the weights that it sends, another experiment than the agreed one, endless work."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_helpers import here, refused, succeeded
from flower_helpers import ALL, LINEAR, NOISE, TOLD, weights_of
from flower_sites import OwnSite
from helpers import each
from models_helpers import SMALL, built
from test_lying_queries import DEEP
from torch import nn

from fedblend.cli.federation import init_site, write_app_folder
from fedblend.core import registry
from fedblend.core.trees import Tensors, add_prefix
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import Experiment, as_table, resolve
from fedblend.experiment.make_setup import make_setup
from fedblend.experiment.toml_tables import write_toml
from fedblend.flower import limits, model_check
from fedblend.flower.limits import AT_SERVER, AT_SITES, NOT_AGREED, agreed_digest
from fedblend.flower.model_check import check_model, steps
from fedblend.flower.site import RefusedByPolicy, describe_setup, read_site


def asked_of(site: OwnSite, **changes: Any) -> Experiment:
    return site.experiment(**{"method": "fedavg", "model": DEEP, "train": ALL, "rounds": 3, **changes})


def trained(site: OwnSite, asked: Experiment, weights: Tensors, round: int = 0) -> str:
    """Why a site does not train these weights, or nothing."""
    fields, tensors = site.trained(asked, weights=weights, round=round)
    return "" if tensors else fields["fault"]


def imprinting(weights: Tensors, name: str, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """The weights with a layer that divides samples into bins by their sum, times ``factor``."""
    rows = weights[f"{name}.weight"]
    ladder = {"weight": factor * torch.ones_like(rows), "bias": -factor * torch.linspace(0, 9, len(rows))}
    return {**weights, **add_prefix(f"{name}.", ladder)}


def test_a_site_does_not_train_a_model_that_separates_samples_by_parallel_rows(site: OwnSite) -> None:
    asked = asked_of(site)
    weights = make_setup(asked).weights()
    for wrong in (imprinting(weights, "stages.0.1.0"), imprinting(weights, "stages.0.1.0", -0.01)):
        assert "'stages.0.1.0.weight' has" in trained(site, asked, wrong)
    # Neither is a round used up, nor does anything leave.
    assert [("refused" in line, line.get("begun")) for line in site.log()] == [(True, None)] * 2
    assert trained(site, asked, weights) == ""
    for _ in range(300):
        with pytest.raises(RefusedByPolicy):
            check_model(wrong)


def test_parallel_rows_count_where_their_thresholds_differ() -> None:
    direction, ladder = torch.randn(20, generator=torch.Generator().manual_seed(0)), torch.arange(6.0)
    sizes = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0, 6.0])
    rows = sizes[:, None] * direction
    assert steps(rows, ladder * sizes * direction.norm()) == 5
    # What strong weight decay makes: multiples of one row and its bias.
    assert steps(rows, sizes) == 0
    assert steps(torch.zeros(6, 20), ladder) == 0
    # Of few inputs random rows are parallel by chance.
    assert steps(rows[:, :7], ladder) == 0
    check_model({"a.weight": rows, "norm.weight": ladder, "norm.bias": ladder, "head.weight": rows})


def test_rows_that_are_not_parallel_separate_samples_too(tmp_path: Path) -> None:
    # What the check does not promise: each row finds the samples that are farthest in a random direction.
    site = OwnSite(tmp_path, allow=["weights"])
    asked = asked_of(site, model={"name": "mlp", "hidden": [400]}, train={**ALL, "batch_size": 80, "lr": 8.0})
    rng = torch.Generator().manual_seed(1)
    alike = torch.rand(1000, 256, generator=rng)
    weights = make_setup(asked).weights()
    rows, bias, out, _ = weights
    weights[rows] = torch.randn(400, 256, generator=rng) / 16
    weights[bias] = -(alike @ weights[rows].T).quantile(1 - 1 / 80, 0)
    weights[out] = (torch.arange(10.0) - 4.5)[:, None].expand(10, 400) / 10

    _, tensors = site.reply("train", asked, tensors=add_prefix("weights/", weights), **TOLD)

    step = {name: tensors[name].double() - weights[name].double() for name in (rows, bias)}
    moved = step[bias].abs() > 1e-6
    rebuilt = step[rows][moved] / step[bias][moved, None]
    away = torch.cdist(rebuilt, torch.from_numpy(site.x[:80]).flatten(1).double(), p=torch.inf)
    assert len(set(away.argmin(1)[away.amin(1) < 1e-3].tolist())) > 40


SHAPES: dict[str, tuple[int, ...]] = {"lstm": (20, 30), "cnn1d": (3, 64), "mlp": (64,)}


@pytest.mark.slow
@each("name", [name for name in registry.known("model") if name != "module"])
def test_first_weights_of_all_models_are_trained(name: str) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        check_model(registry.build("model", {"name": name}).build(SHAPES.get(name, (3, 32, 32)), 10).state_dict())


def descend(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int, decay: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=decay)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


MORE = {
    "mlp": ({"name": "mlp"}, (20,)),
    "lenet5": ({"name": "lenet5"}, (1, 16, 16)),
    "lstm": ({"name": "lstm"}, (4, 9)),
}


@pytest.mark.slow
@each(("spec", "shape"), [*SMALL.values(), *MORE.values()])
def test_trained_weights_of_all_models_are_trained_on(spec: Any, shape: tuple[int, ...]) -> None:
    model = built(spec, shape).float()
    descend(model, torch.randn(96, *shape), torch.arange(96) % 3, epochs=6, decay=0.01)
    check_model(model.state_dict())


@pytest.mark.slow
def test_weights_that_strong_weight_decay_makes_parallel_are_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    y = torch.arange(320) % 2
    x = torch.randn(320, 30) + 1.5 * (2 * y[:, None] - 1) * torch.rand(30)
    model = registry.build("model", "mlp").build((30,), 2)
    descend(model, x, y, epochs=100, decay=0.05)
    check_model(model.state_dict())
    monkeypatch.setattr(model_check, "STEP", 0.0)
    with pytest.raises(RefusedByPolicy, match=r"'stages.0.1.0.weight' has \d\d+ pairs of parallel rows"):
        check_model(model.state_dict())


def test_a_site_takes_part_in_the_agreed_experiment_only(site: OwnSite) -> None:
    asked = asked_of(site)
    site.write(agreed=agreed_digest(asked))
    other = asked_of(site, train={**ALL, "lr": 0.2})
    weights = make_setup(asked).weights()
    why = f"this experiment is {agreed_digest(other)}, and this site takes part in {agreed_digest(asked)} only"
    assert why in trained(site, other, weights)
    assert why in site.reply("query.hello", other)[0]["fault"]
    assert [why in line["refused"] for line in site.log()] == [True, True]
    assert trained(site, asked, weights) == ""


def test_first_weights_are_those_of_the_agreed_experiment_and_later_ones_the_servers_choice(site: OwnSite) -> None:
    asked = asked_of(site)
    chosen = make_setup(asked_of(site, seed=1)).weights()
    assert trained(site, asked, chosen) == ""
    site.write(agreed=agreed_digest(asked), audit="other.jsonl")
    assert "of the first round is not that of the agreed experiment" in trained(site, asked, chosen)
    # Other processors draw other last digits.
    weights = {name: tensor * (1 + 1e-6) for name, tensor in make_setup(asked).weights().items()}
    assert trained(site, asked, weights) == ""
    assert trained(site, asked, chosen, round=1) == ""


CHANGES: dict[str, Any] = {
    "seed": 7,
    "rounds": 4,
    "start": "another-run",
    "model": {"name": "mlp", "hidden": [9]},
    "scale": {"name": "none"},
    "partition": {"name": "iid", "clients": 5},
    "protection": NOISE,
    "holdout": 0.1,
    "precision": "bfloat16",
    "train": {**ALL, "weight_decay": 0.1},
    "method": {"name": "fedprox"},
    "policy": {"min_mean": 3},
}


def test_what_sites_follow_is_in_the_digest_of_an_experiment(site: OwnSite) -> None:
    for field, value in CHANGES.items():
        assert agreed_digest(asked_of(site, **{field: value})) != agreed_digest(asked_of(site)), field


def test_what_the_server_alone_reads_is_not_in_the_digest_of_an_experiment(site: OwnSite) -> None:
    asked = asked_of(site)
    changes = {"name": "other", "eval_every": 2, "device": "cuda", "engine": "loop", "checkpoint_every": 3}
    table = as_table(asked) | changes | {"data": {"name": "npz", "path": "/elsewhere.npz"}}
    assert agreed_digest(resolve(table)) == agreed_digest(asked)
    assert set(NOT_AGREED) <= {*AT_SITES, *AT_SERVER}


def test_a_check_prints_the_digest_of_an_experiment_and_refuses_another_one(tmp_path: Path) -> None:
    site, file = OwnSite(tmp_path), tmp_path / "experiment.toml"
    asked = asked_of(site)
    file.write_text(write_toml(as_table(asked)))
    check = ("site", "check", tmp_path / "site.toml", "--experiment", file)
    line = f'agreed = "{agreed_digest(asked)}"'
    assert line in succeeded(here(*check)).out
    # The server's app has the same digest.
    write_app_folder(asked, tmp_path / "app", tmp_path / "run", 0, None)
    assert line in succeeded(here(*check[:-1], tmp_path / "app" / "experiment.toml")).out
    site.write(agreed=agreed_digest(asked))
    assert "no fault found" in succeeded(here(*check)).out
    file.write_text(write_toml(as_table(asked_of(site, seed=1))))
    refused(here(*check), f"takes part in {agreed_digest(asked)} only")
    site.write(agreed="sha256:123")
    refused(here(*check), "agreed")


def mlp(*hidden: int) -> dict[str, Any]:
    return {"model": {"name": "mlp", "hidden": list(hidden)}}


ENDLESS: list[tuple[dict[str, Any], str]] = [
    (mlp(10**6, 10**6), "model: it has more than 100,000,000 numbers"),
    (mlp(46_000, 46_000), "model: it has more than 100,000,000 numbers"),
    (mlp(2**62), "model: mlp is too large"),
    (mlp(*[2] * 10_000), "model: it has more than 2,000 trained tensors"),
    ({"model": {"name": "lstm", "layers": 10**9, "hidden": 1}}, "model: it has more than 2,000"),
    ({"train": ALL | {"epochs": 10**9}}, "train.epochs: this makes 2,000,000,000 batches in one training"),
    ({"train": ALL | {"epochs": 2**62}}, "train.epochs: this makes 9,223,372,036,854,775,808 batches"),
    ({"train": ALL | {"steps": 2**62}}, "train.steps: this makes 4,611,686,018,427,387,904 batches"),
    ({"train": ALL | {"steps": 2, "batch_size": 2**62}}, "samples in the batches of one training"),
    ({"rounds": 2**62}, "rounds: this makes 4,611,686,018,427,387,904 rounds; valid: 1,000,000 at most"),
    ({"clients": 10**18}, "setup.clients: 1000000000000000000 is not valid"),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["query.hello", "query.share", "train"])
def test_a_site_refuses_endless_work(kind: str, site: OwnSite) -> None:
    site.x = site.x[:, 0]  # a shape that each of the models takes
    site.hold(80)
    shutil.copy(site.folder / "own.npz", site.folder / "server.npz")
    plain = asked_of(site, model=LINEAR)
    setup, tensors = describe_setup(make_setup(plain)), weights_of(plain) if kind == "train" else {}
    for change, why in ENDLESS:
        told = {"setup": setup | change} if "clients" in change else {"experiment": as_table(plain) | change}
        assert why in site.reply(kind, plain, tensors=tensors, **{"setup": setup, **told})[0]["fault"], why
    assert site.left() == []


def test_a_site_files_own_bounds_hold(tmp_path: Path) -> None:
    site = OwnSite(tmp_path, max_weights=2000, max_steps=3)
    asked = asked_of(site, train={**ALL, "epochs": 2})
    weights = make_setup(asked).weights()
    assert "more than 2,000 numbers (max_weights in its site file)" in trained(site, asked, weights)
    site.write(max_weights=2146, max_steps=3)
    assert sum(tensor.numel() for tensor in weights.values()) == 2146
    assert "makes 4 batches in one training (max_steps in its site file); valid: 3" in trained(site, asked, weights)
    site.write(max_weights=2146, max_steps=4)
    assert trained(site, asked, weights) == ""


def test_work_that_takes_too_long_ends_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each look at the clock takes a second.
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    made: list[int] = []
    step = LoopEngine._step
    monkeypatch.setattr(LoopEngine, "_step", lambda self, *args: made.append(len(made)) or step(self, *args))
    site = OwnSite(tmp_path, max_seconds=5)
    asked = asked_of(site, train={**ALL, "epochs": 50})
    why = trained(site, asked, make_setup(asked).weights())
    assert why == "the work of one message takes more than 5 seconds (max_seconds in its site file)"
    # The sixth was not finished.
    assert len(made) == 6
    assert [line.get("begun") or line["refused"] for line in site.log()] == [True, why]


def test_a_new_site_file_has_the_bounds(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    init_site(path, None, 2)
    bounds = ("max_seconds", "max_weights", "max_steps")
    plain = read_site(path)
    path.write_text("\n".join(line.removeprefix("# ") if line.startswith("# max_") else line for line in path.open()))
    written = read_site(path)
    assert (
        [getattr(written, name) for name in bounds] == [getattr(plain, name) for name in bounds] == [3600, 10**8, 10**5]
    )
    assert plain.agreed is None
