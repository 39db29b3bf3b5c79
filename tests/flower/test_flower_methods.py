"""Every method over Flower: the loop engine's weights, and the bytes that fedblend counts against those in messages."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_helpers import ALL, Nodes, by_loop, experiment, federate, is_loops, nodes, numbers_in
from flower_sites import audit, site_files, sites_with_data, task_of
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from helpers import each, needs_of, same, slow_except
from own_models import Backbone
from torch import nn

from fedblend import part
from fedblend.core.engine import TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.registry import build
from fedblend.core.selection import Selection, SelectionContext
from fedblend.core.sharing import Pool
from fedblend.core.state import to_tensors
from fedblend.experiment import presets
from fedblend.experiment.config import Experiment
from fedblend.experiment.make_setup import make_setup
from fedblend.flower import work
from fedblend.flower.app_folder import FederationLimits
from fedblend.flower.flower_engine import FlowerEngine
from fedblend.flower.messages import unpack
from fedblend.flower.requests import Share, read_request
from fedblend.flower.server import connect
from fedblend.flower.site import describe_setup
from fedblend.methods.aggregators.mean import SecureMean
from fedblend.runs.runner import FinishedRun

QUICK = {"distill-to-model": {"steps": 4}, "train-on-seeds": {"epochs": 2}, "aggenhance": {"steps": 3}}
QUICK["aggenhance-secure"] = QUICK["aggenhance"]
QUICK |= {
    "pfedme": {"steps": 2},
    "ccvr": {"per_class": 20},
    "matched-samples": {"steps": 2},
    "feature-statistics": {"min_samples": 2},
}
"""Options with which a part takes few steps or samples: this is no test of how well it does."""

DATA = {"partition": {"name": "dirichlet", "form": "client", "clients": 4, "alpha": 5.0}, "fraction": 0.2}
DATA["train"] = {"cohort": 3, "epochs": 1, "batch_size": 50, "lr": 0.1}
ADAM = {"optimizer": {"name": "adam", "eps": 0.1, "beta1": 0.8}}
FLIPS = {"name": "sign-flip", "share": 0.25, "factor": 100.0}


def quick(method: str, **changes: Any) -> Experiment:
    given: dict[str, Any] = {"name": method}
    for field in ("server_step", "sharing", "personal"):
        if (name := presets.presets()[method][1].get(field, {}).get("name")) in QUICK:
            given[field] = QUICK[name]
    # Unsafe simulations share means of single samples within a class too, which sites refuse.
    of_classes = ("virtual-means", "server-means", "server-matched", "feddm")
    safe = {"unsafe": False} if method.endswith(of_classes) else {}
    return experiment(given, **{**DATA, **needs_of(method), **safe, **changes})


def size_of(message: Message) -> int:
    """Bytes of a message with all that it consists of, as Flower writes it."""
    return sum(len(thing.deflate()) for thing in get_all_nested_objects(message).values())


OF_EACH_KIND = ("fedavg", "fedmix", "fedmix-hidden", "scaffold", "ditto", "fedper", "fedproto", "mix2fld")
"""For each kind of message a method that sends it."""


@pytest.mark.parametrize("method", slow_except(OF_EACH_KIND, presets.presets()))
def test_every_method_gives_the_loops_weights_and_byte_counts(method: str, tmp_path: Path) -> None:
    gives_what_the_loop_gives(quick(method), nodes(), tmp_path)


class OtherEverywhere(Backbone):
    """Weights from a file that differs between machines."""

    files = itertools.count()

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        nn.init.constant_(self.body[1].bias, next(self.files))


def backbone(method: str, path: str = "own_models:Backbone") -> Experiment:
    """An experiment with a frozen backbone, for digits."""
    trainable = ["lora_B", "last"] if path == "own_models:Adapted" else []
    return quick(method, model={"name": "module", "path": path, "arguments": {"outputs": 10}, "trainable": trainable})


WITH_MODELS = [("fedavg", "Backbone"), ("moon", "Adapted")]
ALSO_WITH = [("scaffold", "Backbone"), *((method, "Adapted") for method in ("fedadam", "ditto", "fedper", "pfedme"))]


@pytest.mark.parametrize(("method", "model"), slow_except(WITH_MODELS, [*WITH_MODELS, *ALSO_WITH]))
def test_frozen_tensors_do_not_travel(method: str, model: str, tmp_path: Path) -> None:
    path, allow = f"own_models:{model}", ["weights", "scores", "loss", "extras"]
    asked, grid = backbone(method, path), Nodes(site_files(tmp_path, 4, trusted=[path], allow=allow))
    gives_what_the_loop_gives(asked, grid, tmp_path / "run")
    if model == "Adapted":  # two rounds of three clients; B of 6 x 2 twice, and a head of 6 x 10 with its bias
        numbers = 2 * 6 * 2 + (0 if method == "fedper" else 6 * 10 + 10)
        assert grid.exchanged() == [2 * 3 * 4 * numbers] * 2


def test_a_site_with_other_frozen_tensors_is_told(tmp_path: Path) -> None:
    path = f"{__name__}:OtherEverywhere"
    grid = Nodes(site_files(tmp_path, 4, trusted=[path]))
    with pytest.raises(FedblendError, match=r"tensors of module that are not trained differ from the server's"):
        federate(grid, backbone("fedavg", path), tmp_path / "run")


def test_a_run_with_frozen_tensors_that_sites_lack_ends(tmp_path: Path) -> None:
    setup = make_setup(backbone("fedavg"))
    engine = FlowerEngine(setup, None)  # type: ignore[arg-type]
    task = TrainTask(0, {n: t + 1 for n, t in setup.weights().items()}, None, setup.sizes(0))
    with pytest.raises(FedblendError, match="its tensors that are not trained differ from those that it is built with"):
        engine.collect(task, [0], [])


def gives_what_the_loop_gives(asked: Experiment, grid: Nodes, folder: Path) -> FinishedRun:
    """Assert the loop engine's weights and records, and that the bytes in messages are those that it counts."""
    state, records = by_loop(asked)

    finished = federate(grid, asked, folder)

    assert same(finished.state.weights, state.weights)
    assert same(finished.state.server_state, state.server_state)
    ours = finished.directory.metrics()
    alike = ("loss", "accuracy", "per_class", "train_loss", "cohort", "bytes_up", "bytes_down")
    alike += ("shared", "asked", "late", "uploads")
    if asked.evaluates_each:
        # Sites tell how many of their samples are right, and no more.
        alike = ("accuracy", "clients", *alike[3:])
    if isinstance(asked.method.aggregator, SecureMean):
        # Keys are sent beside, and no site states its loss.
        alike = tuple(field for field in alike if field not in ("train_loss", "bytes_up", "bytes_down"))
    for a, b in zip(ours, records, strict=True):
        assert {k: a.get(k) for k in alike} == {k: b.get(k) for k in alike}
    counted = [sum(sum(one[way].values()) for one in ours) for way in ("bytes_down", "bytes_up")]
    assert counted == grid.exchanged()
    assert not sum(numbers_in(sent) for one in grid.kept if one[1] == "query.hello" for sent in one[2:])
    # A selection is the server's own: sites need not trust it.
    assert {unpack(message.content)[0]["experiment"]["selection"] for _, _, message, _ in grid.kept} == {"uniform"}
    return finished


@part("selection", "last-first")
class LastFirst(Selection):
    """Takes the last clients."""

    def choose(self, context: SelectionContext) -> Any:
        return context.clients[-context.number :]


CHOICES = {"power": {"name": "power-of-choice", "candidates": 3}, "loss": "loss", "own": f"{__name__}:LastFirst"}
AS_BY_LOOP: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        f"sites chosen by {name}": ("fedavg", {"selection": one, "rounds": 3, "train": {**ALL, "cohort": 2}})
        for name, one in CHOICES.items()
    },
    **{
        f"slow sites, {late}": ("fedavg", {"slow": {"epochs": [1, 2, 1.5, 2], "late": late}, "rounds": 3})
        for late in ("partial", "drop", "next-round")
    },
    "pictures": ("fedmix", {"train": {**DATA["train"], "augment": ["random-crop", "horizontal-flip"]}}),
    "a kept optimizer": ("fedavg", {"rounds": 3, "train": {**DATA["train"], **ADAM, "optimizer_state": "keep"}}),
    "means that stay": ({"name": "fedmix", "sharing": "local-means"}, {}),
    "a median of scaffold": ({"name": "scaffold", "aggregator": "median"}, {"adversary": FLIPS}),
    "personal models": ("ditto", {"evaluate_model": "each", "holdout": 0.2}),
    "a personal model that is made after training": (
        {"name": "pfedme", "personal": {"steps": 1}},
        {"train": ALL, "rounds": 3},
    ),
    "masked sums of shared layers": ({"name": "fedper", "aggregator": "secure-mean"}, {"train": ALL, "holdout": 0.2}),
    "own layers with scaffold": ({"name": "scaffold", "personal": "fedper"}, {"holdout": 0.2}),
}


@pytest.mark.parametrize("case", slow_except([*AS_BY_LOOP][:-3], AS_BY_LOOP))
def test_what_is_beside_a_method_is_as_by_the_loop(case: str, tmp_path: Path) -> None:
    method, changes = AS_BY_LOOP[case]
    train = {"train": {**ALL, "epochs": 2}} if "slow" in changes else {}
    asked = experiment(method, **{**DATA, **train, **changes})
    kept = gives_what_the_loop_gives(asked, nodes(), tmp_path).state.client_states
    assert all(name.endswith("/kept") for name in to_tensors(kept)), "what clients keep stays at their sites"


@pytest.mark.slow
def test_samples_with_several_labels_are_learned_over_flower(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((80, 3))
    path = tmp_path / "labels.npz"
    np.savez(path, x=x, y=(x[:, :2] > 0.3).astype(int), labels=np.array(["a", "b"]))
    data = {"name": "npz", "path": str(path)}
    fields = {"holdout": 0.25, "validation": {"clients": 0.25}, "metrics": ["hamming-loss"]}
    asked = experiment("naivemix", data=data, partition={"name": "iid", "clients": 4}, **fields)
    allow = ["weights", "means", "scores", "metrics"]
    grid = Nodes(site_files(tmp_path, 4, trusted=[str(path)], allow=allow, min_mean=2))
    finished = federate(grid, asked, tmp_path / "run")
    is_loops(finished, asked)
    assert set(finished.directory.metrics()[-1]["validation"]["clients"]["metrics"]) == {"hamming-loss"}


def round_of(hidden: list[int]) -> list[tuple[int, str, Message, Message]]:
    """The messages of a first round of FedMix with a model of this size."""
    grid = nodes()
    made, sites = connect(
        grid, make_setup(quick("fedmix", model={"name": "mlp", "hidden": hidden})), FederationLimits(deadline=5)
    )
    federation = RoundLoop(made, FlowerEngine(made, sites))
    federation.round(federation.start()[0])
    return grid.kept


def test_uncounted_bytes_do_not_grow_with_the_model() -> None:
    small, large = (
        [(size_of(part), numbers_in(part)) for one in round_of(hidden) if one[1] == "train" for part in one[2:]]
        for hidden in ([8, 7], [80, 70])
    )
    for one, other in zip(small, large, strict=True):
        assert other[1] > 10 * one[1]
        # But for the digits in which sizes are written.
        assert abs((other[0] - other[1]) - (one[0] - one[1])) < 40


IID = {"partition": {"name": "iid", "clients": 4}}
"""Every site holds every label."""


def test_a_server_with_its_own_data_requests_labels_from_each_site(tmp_path: Path) -> None:
    asked = quick("xormixfl", **IID)
    setup = make_setup(asked)
    wanted = setup.requests(setup.sizes(0))
    grid = nodes()

    finished = federate(grid, asked, tmp_path)

    told = {c: unpack(m.content)[0]["request"] for c, kind, m, _ in grid.kept if kind == "query.share"}
    assert told == {
        client: {"wanted": one.wanted.tolist(), "dummies": one.dummies.tolist()} for client, one in wanted.items()
    }
    # Client 0 is the server: it is asked for nothing.
    assert set(told) == {1, 2, 3}
    seeds = [unpack(m.content)[1]["y"].tolist() for _, kind, _, m in grid.kept if kind == "query.share"]
    assert sum(map(len, seeds)) == len(finished.state.entries) > 0


def test_a_site_sends_at_most_max_seeds(tmp_path: Path) -> None:
    asked = quick("xormixfl", **IID)
    setup = make_setup(asked)
    wanted = setup.requests(setup.sizes(0))
    most = int(wanted[1].wanted.sum())
    configs = site_files(tmp_path, 4, allow=["seeds"], max_seeds=most)
    (tmp_path / "site-2.toml").write_text('allow = ["seeds"]\nmax_seeds = 1\naudit = "audit-2.jsonl"\n')
    (tmp_path / "site-3.toml").write_text('audit = "audit-3.jsonl"\n')

    finished = federate(Nodes(configs), asked, tmp_path / "run")

    assert np.unique(finished.state.entries.owner).tolist() == [1]
    assert [line["kind"] for line in audit(tmp_path, 1)] == ["seeds"]
    assert "gives 1 (max_seeds in its file)" in audit(tmp_path, 2)[0]["refused"]
    assert "lets no seeds out" in audit(tmp_path, 3)[0]["refused"]


@each(
    "asked",
    [
        {"wanted": [1] * 9, "dummies": [0]},
        {"wanted": [-1] + [0] * 9, "dummies": [0]},
        {"wanted": [1.5] + [0] * 9, "dummies": [0]},
        {"wanted": [1] * 10, "dummies": [10]},
        {"wanted": [True] + [0] * 9, "dummies": [0]},
        {"wanted": [1] * 10},
        [1, 2],
    ],
)
def test_an_invalid_request_is_refused(asked: Any) -> None:
    here = task_of(quick("xormixfl"), 1)
    told = {"experiment": {}, "setup": describe_setup(here.setup), "client": 1, "round": 0, "request": asked}
    with pytest.raises(FedblendError, match="a request that is none"):
        work.request_of(here, read_request(Share, told, {}))


def test_noise_on_dummies_is_drawn_from_system_entropy_and_the_rest_from_the_stream(tmp_path: Path) -> None:
    for offset in (0, 9):
        asked = quick("xormixfl")
        method = asked.method.model_copy(update={"sharing": build("sharing", {"name": "xor-seeds", "offset": offset})})
        asked = asked.model_copy(update={"method": method})
        first, second = (
            federate(nodes(), asked, tmp_path / f"{offset}{run_}").state.entries.tensors["seeds"] for run_ in "ab"
        )
        assert torch.equal(first, second) == (offset == 0)


def seeds_of(*pools: Pool) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(pool.tensors["seeds"] for pool in pools), strict=True))


def test_the_server_uses_the_experiments_samples_where_sites_have_their_own(tmp_path: Path) -> None:
    asked = quick("xormixfl", fraction=1.0)
    # No site is client 0, which is the server, and none is waited for.
    grid = Nodes(sites_with_data(tmp_path, asked, allow=["seeds"])[1:])

    finished = federate(grid, asked, tmp_path / "run")

    # Sites with site files choose the samples of their seeds by their secrets, so the loop is given the same seeds.
    for name, tensor in by_loop(asked, finished.state.entries)[0].weights.items():
        assert torch.equal(finished.state.weights[name], tensor), name
    assert any(not torch.equal(*pair) for pair in seeds_of(by_loop(asked)[0].entries, finished.state.entries))
    with pytest.raises(FedblendError, match=r"method\.sharing\.server: client 0 is the server"):
        federate(Nodes(sites_with_data(tmp_path, asked, allow=["seeds"])), asked, tmp_path / "other")
