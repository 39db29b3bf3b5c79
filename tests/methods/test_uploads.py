"""Uploads: what is refused, what is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from federation_helpers import train, with_calls
from helpers import each, engine_of, federation, images, run, same, setup, slow_except

from fedblend.core.engine import ClientUpdate, TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.setup import Setup
from fedblend.core.state import ClientState
from fedblend.core.trees import bytes_of
from fedblend.core.upload import fault_of
from fedblend.methods.aggregators.mean import WeightedMean


def damaging(made: Setup, damage: Callable[[ClientUpdate], ClientUpdate]) -> RoundLoop:
    """A federation whose clients' uploads are changed by ``damage`` on the way."""
    engine = engine_of(made)

    def train_(task: TrainTask, clients: Iterable[int]) -> Iterator[ClientUpdate]:
        for trained in engine.train(task, clients):
            yield damage(trained)

    return RoundLoop(made, with_calls(engine, train=train_))


LIKE = {"w": torch.zeros(2, 3), "n": torch.tensor(4)}


@each(
    ("upload", "told"),
    [
        ({"w": torch.zeros(2, 3)}, "missing ['n'], unknown none"),
        ({**LIKE, "extra": torch.zeros(1)}, "missing none, unknown ['extra']"),
        ({**LIKE, "w": torch.zeros(3, 2)}, "'w' is of shape [3, 2], the model's of [2, 3]"),
        ({**LIKE, "w": torch.zeros(2, 3).double()}, "'w' is of type torch.float64, the model's of torch.float32"),
        ({**LIKE, "n": torch.tensor(4.0)}, "'n' is of type torch.float32"),
        (
            {**LIKE, "w": torch.full((2, 3), torch.nan)},
            "'w' holds NaN or infinity (a learning rate, or inputs, too large?)",
        ),
        ({**LIKE, "w": torch.tensor([[0, 0, 0], [0, 0, -torch.inf]])}, "'w' holds NaN or infinity"),
    ],
)
def test_uploads_that_are_not_the_models_are_refused(upload: dict[str, torch.Tensor], told: str) -> None:
    assert told in str(fault_of(upload, LIKE))


def test_sound_uploads_pass_whatever_the_order_of_names() -> None:
    assert fault_of(dict(reversed(list(LIKE.items()))), LIKE) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda upload: {n: t * torch.nan for n, t in upload.items()},
        lambda upload: {n: t.double() for n, t in upload.items()},
        lambda upload: dict(list(upload.items())[1:]),
        lambda upload: {n: t[None] for n, t in upload.items()},
    ],
    ids=["NaN", "type", "names", "shape"],
)
def test_refused_uploads_are_recorded_and_left_out(damage: Callable[[dict], dict]) -> None:
    made = setup(train={"cohort": 4})
    fed = damaging(made, lambda t: replace(t, weights=damage(t.weights)) if t.client == 1 else t)

    state, records = run(fed, 1)

    good = train(made, [0, 2, 3])
    expected = WeightedMean().aggregate((t.weights, float(t.samples)) for t in good.values())
    assert same(state.weights, expected)
    assert [refused["client"] for refused in records[0]["refused"]] == [1]
    assert records[0]["uploads"] == 3
    assert records[0]["cohort"] == [0, 1, 2, 3]
    assert records[0]["train_loss"] == pytest.approx(np.mean([t.loss for t in good.values()]))


@pytest.mark.parametrize(("bad", "enough"), [(0, True), (1, True), (2, False), (4, False)])
def test_too_few_good_uploads_stop_the_run(bad: int, enough: bool) -> None:
    made = setup(train={"cohort": 4}, min_uploads=3)
    fed = damaging(made, lambda t: replace(t, weights={}) if t.client < bad else t)

    if enough:
        assert run(fed, 1)[1][0]["uploads"] == 4 - bad
    else:
        with pytest.raises(
            FedblendError, match=rf"round 1: {4 - bad} good uploads of 4, but min_uploads is 3 .clients 0, 1"
        ):
            run(fed, 1)


def test_an_exception_in_training_names_client_round_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = setup()
    engine = engine_of(made)
    monkeypatch.setattr(engine, "_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        next(engine.train(TrainTask(4, made.weights(), None, made.sizes(0)), [2]))
    assert caught.value.__notes__ == ["while training client 2 in round 5, batch 1"]


S = 4 * (16 * 6 + 6 + 6 * 3 + 3)
"""Bytes of the small experiment's model."""
MEAN = 4 * (16 + 3)
LENET = 4 * 61_706
LINEAR, DEEP = ({"name": "mlp", "hidden": hidden} for hidden in ([], [5]))
FIVE = {"partition": {"name": "iid", "clients": 5}}
XOR = {"data": images(n=60), "model": LINEAR}
XOR["partition"] = {"name": "counts", "counts": [[6, 6, 2], [6, 6, 5], [6, 6, 3]]}
QUICK = {"networks": "random", "steps": 4, "per_class": 2, "batch_size": 3}
MATCHED = {"groups": [range(12), range(12, 20), range(20, 40)]}
SYNTHETIC = 3 * 3 * 2 * MEAN
"""Of three clients, two samples of each of three classes."""
HIDDEN = {"name": "fedmix-hidden", "sharing": {"layer": 1}, "objective": {"layer": 1}}


@each(
    ("changes", "up", "down"),
    [
        *(
            ({"method": method, "train": {"cohort": 3}, "holdout": 0.2}, [{"weights": 3 * S}], [{"weights": 3 * S}])
            for method in ("feddyn", "moon", "ditto", "fedadam")
        ),
        (
            {"method": "scaffold", "train": {"cohort": 3}},
            [{"weights": 3 * S, "extras": 3 * S}],
            [{"weights": 3 * S, "extras": 3 * S}],
        ),
        (
            {"method": "fedproto", "model": DEEP},
            [{"prototypes": 2 * 4 * 3 * 5}] * 2,
            [{}, {"prototypes": 2 * 4 * 3 * 5}],
        ),
        # 32 bits for each of 100 outputs.
        (
            {"data": images(classes=10), "method": "fd", "model": LINEAR, "train": {"cohort": 4}},
            [{"outputs": 4 * 32 * 100 / 8}] * 2,
            [{}, {"outputs": 4 * 32 * 100 / 8}],
        ),
        (
            {
                "data": images(40, classes=10, side=28),
                "model": "lenet5",
                "method": "fedmix",
                "train": {"batch_size": 10},
            },
            [{"weights": 2 * LENET, "means": 4 * 4 * (28 * 28 + 10)}],
            [{"weights": 2 * LENET, "means": 2 * 4 * 4 * (28 * 28 + 10)}],
        ),
        (
            {"method": {"name": "fedmix", "sharing": {"server_average": 2}}, **FIVE},
            [{"weights": 2 * S, "means": 5 * MEAN}],
            [{"weights": 2 * S, "means": 2 * 3 * MEAN}],
        ),
        # Hidden means are made again every round, by all four clients, which receive its model once.
        (
            {"method": HIDDEN},
            [{"weights": 2 * S, "hidden-means": 4 * 4 * (6 + 3)}] * 2,
            [{"weights": 4 * S, "hidden-means": 2 * 4 * 4 * (6 + 3)}] * 2,
        ),
        # 40 samples of 16 pixels in one byte each, and labels of 8 bytes.
        (
            {"method": "global-mixup", "unsafe": True},
            [{"weights": 2 * S, "raw": 40 * (16 + 8)}],
            [{"weights": 2 * S, "raw": 2 * 40 * (16 + 8)}],
        ),
        ({"method": "xormixfl", **XOR}, [{"seeds": 4 * (16 + 1 + 1)}], [{}]),
        ({"method": {"name": "mixfl", "sharing": {"equal_parts": True}}, **XOR}, [{"seeds": 4 * (16 + 1 + 2)}], [{}]),
        (
            {"method": {"name": "server-matched", "sharing": QUICK}, **MATCHED},
            [{"weights": 2 * S, "synthetic": SYNTHETIC}, {"weights": 2 * S}],
            [{"weights": 2 * S}] * 2,
        ),
        (
            {
                "method": {
                    "name": "virtual-means",
                    "sharing": {"name": "matched-samples", "networks": "random", **QUICK},
                },
                **MATCHED,
            },
            [{"weights": 2 * S, "synthetic": SYNTHETIC}],
            [{"weights": 2 * S, "synthetic": 2 * SYNTHETIC}],
        ),
    ],
)
def test_bytes_by_hand(changes: Any, up: list[dict[str, int]], down: list[dict[str, int]]) -> None:
    _, records = run(setup(**changes), len(up))
    assert [record["bytes_up"] for record in records] == up
    assert [record["bytes_down"] for record in records] == down


def test_the_untrained_model_costs_nothing() -> None:
    _, record = federation(method="fedmix").start()
    assert record.round == 0
    assert record.bytes_up == record.bytes_down == {}
    assert 0 <= record.accuracy <= 1


def test_refused_uploads_are_counted_as_they_were_sent() -> None:
    made = setup(train={"cohort": 4})
    fed = damaging(
        made, lambda t: replace(t, weights={n: w.double() for n, w in t.weights.items()}) if t.client == 0 else t
    )
    _, records = run(fed, 1)
    assert records[0]["bytes_up"]["weights"] == 5 * bytes_of(made.weights())


DIVERGE = ["fedavg", "scaffold", "feddyn", "moon", "fedper", "ditto", "fd"]


@pytest.mark.parametrize("method", slow_except(["fedavg", "scaffold", "fedper", "fd"], DIVERGE))
def test_a_client_that_diverges_once_takes_part_again(method: str) -> None:
    groups = [list(range(i, i + 10)) for i in range(0, 40, 10)]
    made = setup(groups=groups, method=method, train={"cohort": 4}, holdout=0.2)
    engine = engine_of(made)

    def diverging(task: TrainTask, clients: Iterable[int]) -> Iterator[ClientUpdate]:
        for trained in engine.train(task, clients):
            if task.round == 1 and trained.client == 2:
                state = ClientState.from_tensors({n: t * np.nan for n, t in trained.state.to_tensors().items()})
                broken = {name: torch.full_like(tensor, np.nan) for name, tensor in trained.weights.items()}
                outputs = None if trained.outputs is None else trained.outputs * np.nan
                trained = replace(trained, weights=broken, state=state, outputs=outputs)
            yield trained

    _, records = run(RoundLoop(made, with_calls(engine, train=diverging)), 4)

    assert [[one["client"] for one in record.get("refused", [])] for record in records] == [[], [2], [], []]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_mean_outputs_are_distributions_in_every_precision(precision: str) -> None:
    few = [list(range(i, i + 3)) for i in range(0, 12, 3)]
    fed = federation(groups=few, method="fd", precision=precision, train={"cohort": 4, "batch_size": 2, "lr": 1.0})
    assert [record["uploads"] for record in run(fed, 3)[1]] == [4, 4, 4]
