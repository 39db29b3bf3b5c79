"""Membership advantage against shared entries and against a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import tiny_run
from helpers import iid, images, setup

from fedblend.analysis.advice import Limits, read_advice
from fedblend.analysis.privacy import membership
from fedblend.analysis.privacy.leak_report import leak_report
from fedblend.core.setup import Setup
from fedblend.experiment.config import resolve
from fedblend.experiment.make_setup import make_setup
from fedblend.runs import api, checkpoint
from fedblend.runs.directory import RunDirectory

GROUPS = [list(range(0, 20)), list(range(20, 40))]


def world(y: list[int], known: list[int], test: tuple[int, ...] = (0, 1), **changes: Any) -> Setup:
    """Two clients with 20 samples each of the classes ``y``; of the test samples half are of each class ``test``.

    A known sample has one bright pixel that tells its class; all other samples are black.
    """
    made = setup(images(n=60), groups=GROUPS, model={"name": "mlp", "hidden": []}, **changes)
    labels = torch.tensor(y + [0] * 20)
    x = torch.zeros_like(made.data.train.x)
    x.flatten(1)[known, labels[known]] = 255
    of_test = made.data.test
    blank = replace(of_test, x=torch.zeros_like(of_test.x), y=torch.tensor(test).repeat(len(of_test.y) // len(test)))
    return replace(made, data=replace(made.data, train=replace(made.data.train, x=x, y=labels), test=blank))


def model(made: Setup, reads: float = 0.0, says_0: float = 0.0) -> dict[str, torch.Tensor]:
    """A linear model that reads the class of known samples, or always says class 0."""
    weights = {name: torch.zeros_like(tensor) for name, tensor in made.weights().items()}
    for tensor in weights.values():
        if tensor.ndim == 2:
            tensor[:, :3] = reads * torch.eye(3)
        else:
            tensor[0] = says_0
    return weights


BOTH = [0, 1] * 20
HALF = np.array([10, 10])


def test_entries_give_their_members_away_as_far_as_they_are_like_them() -> None:
    made = setup(images(n=60), groups=GROUPS)
    raw = made.scale(made.data.train.x[torch.from_numpy(made.population.order)])

    assert membership.of_entries(made, raw) == 1.0
    assert abs(membership.of_entries(made, torch.full((1, *raw.shape[1:]), 1e6))) < 0.5


def test_a_model_gives_members_away_by_what_it_knows_of_them_alone() -> None:
    everyone, first = world(BOTH, known=list(range(40))), world(BOTH, known=GROUPS[0])
    # The model has small losses on class 0 alone. All samples of client 0, or all that had arrived, are of it.
    one_class, arrived = world([0] * 20 + [1] * 20, known=[]), world(([0] * 10 + [1] * 10) * 2, known=[])
    cases: dict[str, tuple[float, Setup, dict[str, float], dict[str, Any]]] = {
        "all classes are as likely": (0.0, everyone, {}, {}),
        "right on members alone": (1.0, everyone, {"reads": 9.0}, {}),
        "the client that trained": (1.0, first, {"reads": 9.0}, {"clients": {0}}),
        "a client that never trained": (0.0, first, {"reads": 9.0}, {"clients": {1}}),
        "a class that the clients have": (0.0, one_class, {"says_0": 5.0}, {"clients": {0}}),
        "a class of what had arrived": (0.0, arrived, {"says_0": 5.0}, {"sizes": HALF}),
    }
    for name, (wanted, made, knows, given) in cases.items():
        assert membership.of_model(made, model(made, **knows), **given) == wanted, name
    assert 0 < membership.of_model(first, model(first, reads=9.0), {0, 1}) < 1
    none_of_its_classes = world([2] * 20 + [1] * 20, known=GROUPS[0])
    assert np.isnan(membership.of_model(none_of_its_classes, model(none_of_its_classes, reads=9.0), {0}))


def test_others_are_what_the_clients_that_trained_hold_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may know people, and not which of their samples it was trained on: here all of client 0's."""
    monkeypatch.setattr(membership, "ENOUGH", 1)
    made = world(BOTH, known=GROUPS[0], holdout=0.2)  # clients hold out what they train on

    assert membership.of_model(made, model(made, reads=9.0), {0}) == 0.0


def test_the_leak_card_of_a_model_is_of_the_layers_that_left_and_of_the_clients_that_trained(tmp_path: Path) -> None:
    fields = {"rounds": 1, "holdout": 0.3, **iid(10, cohort=2)}
    runs = {method: tiny_run(tmp_path / method, method=method, **fields) for method in ("fedper", "fedavg")}
    cards = {method: leak_report(run).leaks[0] for method, run in runs.items()}

    made = make_setup(runs["fedper"].experiment())
    sent = made.shared(made.weights())
    assert 0 < len(sent) < len(made.weights())
    assert cards["fedper"].shape == f"{len(sent)} tensors, {sum(t.numel() for t in sent.values()):,} numbers"
    # Nobody has a whole model of the run.
    assert np.isnan(cards["fedper"].membership)
    state, cohort = checkpoint.read(tmp_path / "fedavg"), runs["fedavg"].records()[1].cohort
    plain = make_setup(runs["fedavg"].experiment())
    assert cards["fedavg"].membership == membership.of_model(plain, state.weights, cohort)
    assert cards["fedavg"].membership != membership.of_model(plain, state.weights)


def test_samples_that_had_not_arrived_are_no_members() -> None:
    made = world(BOTH, known=[*range(10), *range(20, 30)])
    arrived = made.scale(made.data.train.x[[*range(10), *range(20, 30)]])

    assert membership.of_model(made, model(made, reads=9.0), sizes=HALF) == 1.0
    assert membership.of_model(made, model(made, reads=9.0), {0}, HALF) == 1.0
    assert membership.of_model(made, model(made, reads=9.0)) < 1.0
    assert membership.of_entries(made, arrived, sizes=HALF) == 1.0
    assert np.isnan(membership.of_entries(made, arrived, sizes=0 * HALF)), "nobody shared"


@pytest.mark.parametrize("enough", [1, 200])
def test_samples_that_had_not_arrived_are_no_others_either(enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are samples that clients hold out, or test samples where these are few, whatever had arrived."""
    monkeypatch.setattr(membership, "ENOUGH", enough)
    made = setup(images(n=60), partition={"name": "iid", "clients": 2}, holdout=0.3)
    train, population = made.data.train.x, made.population
    sizes = population.sizes // 2

    def rows(x: torch.Tensor) -> set[tuple[float, ...]]:
        return {tuple(row) for row in x.flatten(1).tolist()}

    (members, _), (others, _) = membership._halves(made, sizes=sizes)

    arrived = torch.cat([made.samples(client, int(sizes[client]))[0] for client in (0, 1)])
    assert rows(members) <= rows(arrived)
    assert rows(others) <= rows(train[population.rows("holdout")] if enough == 1 else made.data.test.x)
    assert len(members) == len(others) > 1


def test_leak_cards_compare_samples_that_were_shared_or_trained_on(tmp_path: Path) -> None:
    """Each client has half of its samples when it shares, and others when it trains for the last time."""
    settings = {"method": "global-mixup", "unsafe": True, "holdout": 0.3, "rounds": 4, **iid(8, cohort=2)}
    run = tiny_run(tmp_path, arrival={"first": 0.5, "clients": 0.5, "portion": 0.2}, **settings)
    cards, state = {leak.kind: leak for leak in leak_report(run).leaks}, checkpoint.read(tmp_path)
    made = make_setup(run.experiment())
    used = np.zeros(8, np.int64)
    for record in run.records()[1:]:
        used[record.cohort] = made.sizes(record.round - 1)[record.cohort]
    assert (used < made.sizes(4)).any()
    assert (state.shared_sizes < made.population.sizes).all()
    assert cards["raw"].membership == 1.0
    assert cards["weights"].membership == membership.of_model(made, state.weights, np.flatnonzero(used), used)


def test_chance_is_zero_on_average() -> None:
    rng = np.random.default_rng(0)
    found = [membership.advantage(rng.random(40), rng.random(40)) for _ in range(300)]

    # Each has a deviation of about sqrt(2 * 0.25 / 40) at most, so their mean stays within five standard errors.
    assert abs(np.mean(found)) < 5 * np.sqrt(0.5 / 40 / 300)


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("vhl", None),
        ("statmix", "statistics"),
        ({"name": "statmix", "sharing": {"samples": "all"}}, "statistics"),
        ("virtual-seeds", "seeds"),
        ("virtual-xor", "seeds"),
        ("shared-set", "raw"),
    ],
)
def test_leak_cards_say_what_left_a_client_beside_its_model(method: Any, kind: str | None, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, method=method, unsafe=method == "shared-set", rounds=1)

    leaks = {leak.kind: leak for leak in leak_report(run).leaks}

    assert leaks.keys() - {"weights"} == ({kind} if kind else set())
    if kind == "statistics":
        shared = leaks[kind]
        assert shared.membership > (0.3 if isinstance(method, dict) else -1)
        assert "mean 1, std 1" in shared.shape
        assert np.isnan(shared.recognised), "statistics show no picture that could be recognised"
    if kind == "raw":
        assert (leaks[kind].recognised, leaks[kind].how) == (1.0, "raw samples")


def test_advice_says_who_receives_what_clients_share(tmp_path: Path) -> None:
    wanted = {"fedavg": (), "vhl": (), "statmix": ("statistics",), "virtual-seeds": ("seeds",)}
    runs = [tiny_run(tmp_path / method, method=method, rounds=1) for method in wanted]
    advice = read_advice(runs, "accuracy", True, Limits(), {})
    found = {option.method: (option.leaves, option.to_clients) for option in advice.options}
    assert found == {method: (leaves, bool(leaves)) for method, leaves in wanted.items()}
    strict = read_advice(runs, "accuracy", True, Limits(leaves=frozenset()), {})
    assert [bool(option.fault) for option in strict.options] == [bool(option.leaves) for option in strict.options]


@pytest.mark.parametrize(("sharing", "least", "most"), [("moments", 1.0, 1.0), ("secure-moments", 0.15, 0.9)])
def test_the_second_moment_of_fewer_samples_than_features_tells_them_all(sharing, least, most, tmp_path: Path) -> None:
    """20 samples of 36 random pixels span 20 dimensions, in which no other sample lies; 100 samples span them all."""
    made = {"name": "fed3r", "sharing": {"name": sharing, **({"clients": 5} if sharing != "moments" else {})}}
    file = tmp_path / "own.npz"
    rng = np.random.default_rng(0)
    draw = lambda n: {"x": rng.normal(size=(n, 36)).astype("float32"), "y": np.arange(n) % 2}  # noqa: E731
    train, test = draw(100), draw(400)
    np.savez(file, **train, **{f"{name}_test": value for name, value in test.items()})
    data = {"name": "npz", "path": str(file)}
    table = {"data": data, "scale": "none", "method": made, "rounds": 1, "partition": {"name": "iid", "clients": 5}}
    run = tmp_path / "run"
    api.run(resolve(table | {"model": {"name": "mlp", "hidden": []}, "train": {"cohort": 5, "lr": 0.1}}), run)

    found = {leak.kind: leak.membership for leak in leak_report(RunDirectory(run)).leaks}["statistics"]

    assert least <= found <= most
