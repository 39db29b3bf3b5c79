"""Slow clients and late uploads against the same federation in NumPy; own weights of clients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from baselines_helpers import GROUPS, ROUNDS, SIZES, TRAIN, Reference, descend, near
from federation_helpers import stacks_agree
from helpers import each, experiment, federation_of, images, run, setup

from fedblend.core.random import stream
from fedblend.core.setup import Work, work_of
from fedblend.experiment.privacy_facts import noise_facts

BATCHES = [math.ceil(n / 4) * 3 for n in SIZES]
"""Batches of each client in three epochs: 3, 9, 9 and 12."""
EPOCHS = {"epochs": 3, "cohort": 3}
SECONDS = [1.0, 1.0, 2.0, 3.0]
"""Within 9 seconds all 3 and 9 batches, and 4 of 9 and 3 of 12."""


def slow_setup(**slow: Any) -> Any:
    return setup(images(), GROUPS, slow=slow, train={**TRAIN, **EPOCHS}, min_uploads=0)


def works(made: Any, round: int = 0) -> list[Work]:
    return [work_of(made, round, client, n) for client, n in enumerate(SIZES)]


def test_work_by_the_deadline() -> None:
    on_time = [Work(3, seconds=3.0), Work(9, seconds=9.0)]
    found = works(slow_setup(seconds=SECONDS, deadline=9.0))
    assert found == [*on_time, Work(4, True, 0, 9.0), Work(3, True, 0, 9.0)]
    found = works(slow_setup(seconds=SECONDS, deadline=9.0, late="drop"))
    assert found == [*on_time, Work(9, True, None, 9.0), Work(12, True, None, 9.0)]
    # 18 seconds are two rounds, and 36 four.
    found = works(slow_setup(seconds=SECONDS, deadline=9.0, late="next-round"))
    assert found == [*on_time, Work(9, True, 1, 9.0), Work(12, True, 3, 9.0)]
    # Without a deadline a round waits for all; with less than a batch until it, nothing is sent.
    assert [one.seconds for one in works(slow_setup(seconds=SECONDS))] == [3.0, 9.0, 18.0, 36.0]
    assert works(slow_setup(seconds=SECONDS, deadline=1.5))[2] == Work(0, True, None, 1.5)
    assert works(slow_setup(seconds=[0.1] * 4, deadline=0.3))[0] == Work(3, seconds=pytest.approx(0.3))
    assert [one.batches for one in works(slow_setup(epochs=[1, 1, 2, 5]))] == [1, 3, 6, 12]
    steps = setup(images(), GROUPS, slow={"epochs": [1, 1, 2, 5]}, train={**TRAIN, **EPOCHS, "steps": 4})
    assert [one.batches for one in works(steps)] == [1, 1, 2, 4]


def test_a_share_of_the_clients_makes_any_number_of_epochs() -> None:
    made = slow_setup(share=0.6)
    counts = np.zeros(4)
    for round in range(800):
        for client, work in enumerate(works(made, round)):
            rng = stream(0, "slow", round, client)
            epochs = int(rng.integers(1, 4)) if rng.random() < 0.6 else 3
            assert work.batches == BATCHES[client] * epochs // 3
            assert work.is_late == (epochs < 3)
            counts[epochs] += 1
    assert np.abs(counts / counts.sum() - [0, 0.2, 0.2, 0.6]).max() < 0.02


def test_a_part_of_the_training_is_its_first_batches() -> None:
    part, whole = Reference(slow={"seconds": SECONDS, "deadline": 9.0}, train=EPOCHS), Reference(train=EPOCHS)
    x = whole.first
    for number, lr, cohort in whole.cohorts():
        x = whole.mean(cohort, [descend(x, whole.steps(k, number)[: [3, 9, 4, 3][k]], lr) for k in cohort])
    near(part.flat(part.trained().weights), x)
    stacks_agree(part.setup, 3)


def test_a_part_of_the_training_ends_with_a_step_on_the_batches_that_are_left() -> None:
    more = {**EPOCHS, "accumulate": 2}
    part, whole = Reference(slow={"seconds": SECONDS, "deadline": 9.0}, train=more), Reference(train=more)
    x = whole.first
    for number, lr, cohort in whole.cohorts():
        models = []
        for k in cohort:
            batches, of_epoch = whole.batches(k, number)[: [3, 9, 4, 3][k]], BATCHES[k] // 3
            epochs = [batches[i : i + of_epoch] for i in range(0, len(batches), of_epoch)]
            pairs = [epoch[i : i + 2] for epoch in epochs for i in range(0, len(epoch), 2)]
            models.append(descend(x, [whole.gradient(k, np.concatenate(pair)) for pair in pairs], lr))
        x = whole.mean(cohort, models)
    near(part.flat(part.trained().weights), x)


@pytest.mark.parametrize("late", ["partial", "drop"])
def test_fednova_counts_the_steps_that_were_made(late: str) -> None:
    """Wang et al. 2020, equation 7, with the tau_k of the batches by the deadline."""
    part = Reference(slow={"seconds": SECONDS, "deadline": 9.0, "late": late}, train=EPOCHS, method="fednova")
    whole = Reference(train=EPOCHS)
    x = whole.first
    for number, lr, cohort in whole.cohorts():
        counted = cohort if late == "partial" else [k for k in cohort if k < 2]
        steps = [whole.steps(k, number)[: [3, 9, 4, 3][k]] for k in counted]
        p, tau = whole.shares(counted), [len(one) for one in steps]
        moves = [(descend(x, one, lr) - x) / len(one) for one in steps]
        x = x + (p @ tau) * np.tensordot(p, moves, 1)
    near(part.flat(part.trained().weights), x)


def late_by_hand(whole: Reference, cohorts: list[list[int]], delay: list[int], a: float) -> np.ndarray:
    """FedBuff: a change that is s rounds late is added to the current model, times (1 + s)^-a."""
    x, coming = whole.first, []
    for (number, lr, _), cohort in zip(whole.cohorts(), cohorts, strict=True):
        changes = {k: descend(x, whole.steps(k, number), lr) - x for k in cohort}
        coming += [(number + delay[k], delay[k], k, change) for k, change in changes.items()]
        now = [(k, (1 + s) ** -a * change) for due, s, k, change in coming if due == number]
        if now:
            x = x + np.average([change for _, change in now], axis=0, weights=[SIZES[k] for k, _ in now])
    return x


@pytest.mark.parametrize("a", [0.5, 0.0])
def test_late_uploads_are_weighted_down(a: float) -> None:
    slow = {"seconds": SECONDS, "deadline": 9.0, "late": "next-round", "staleness": a}
    made = Reference(slow=slow, train={"epochs": 3, "cohort": 4}, rounds=ROUNDS)
    state, records = run(federation_of(made.setup), ROUNDS)
    # Clients 2 and 3 are busy for one round and for three.
    assert [record["cohort"] for record in records] == [[0, 1, 2, 3], [0, 1], [0, 1, 2], [0, 1]]
    assert [record.get("late") for record in records] == [[2, 3], None, [2], None]
    assert [record.get("stale") for record in records] == [None, [2], None, [2, 3]]
    assert [record["uploads"] for record in records] == [2, 3, 2, 4]
    whole = Reference(train={"epochs": 3, "cohort": 4})
    near(made.flat(state.weights), late_by_hand(whole, [r["cohort"] for r in records], [0, 0, 1, 3], a))
    assert not [name for name in state.server_state if name.startswith("late/")]
    stacks_agree(made.setup, ROUNDS)


def test_the_time_of_a_round_is_that_of_its_last_client_or_its_deadline() -> None:
    made = slow_setup(seconds=SECONDS, deadline=9.0)
    _, records = run(federation_of(made), 4)
    assert [r["computing"] for r in records] == [max((3.0, 9.0, 9.0, 9.0)[k] for k in r["cohort"]) for r in records]
    more = setup(images(), GROUPS, slow={"seconds": SECONDS}, train={**TRAIN, **EPOCHS}, compute_seconds=0.5)
    _, records = run(federation_of(more), 2)
    assert [r["computing"] for r in records] == [0.5 + max((3, 9, 18, 36)[k] for k in r["cohort"]) for r in records]


def test_own_weights_of_clients(tmp_path: Path) -> None:
    (tmp_path / "clients.csv").write_text("name,trust\na,4\nb,3\nc,2\nd,1\n")
    for by in ([4, 3, 2, 1], f"{tmp_path}/clients.csv:trust"):
        of = Reference(method={"aggregator": {"name": "mean", "by": by}})
        x = of.first
        for number, lr, cohort in of.cohorts():
            models = [descend(x, of.steps(k, number), lr) for k in cohort]
            x = np.average(models, axis=0, weights=[4 - k for k in cohort])
        near(of.flat(of.trained().weights), x)


NOISE = {"name": "noise", "clip": 1.0, "multiplier": 1.0, "side": "server"}


@each(
    ("changes", "keeps"),
    [
        ({}, False),
        ({"selection": "size"}, True),
        ({"selection": {"name": "list", "clients": [[0]]}}, True),
        ({"selection": {"name": "available", "trace": "x.csv"}}, True),
        ({"selection": "power-of-choice"}, "losses without noise decide which clients take part"),
        ({"selection": "loss"}, "losses without noise decide which clients take part"),
        (
            {"selection": {"name": "available", "trace": "x.csv", "among": "loss"}},
            "losses without noise decide which clients take part",
        ),
        ({"slow": {"share": 0.5}, "train": {"epochs": 2}}, False),
        ({"slow": {"late": "next-round"}}, "late uploads count in later rounds"),
    ],
)
def test_what_a_choice_of_clients_does_to_epsilon(changes: dict[str, Any], keeps: Any) -> None:
    """Noise gains by secret choices only where these are uniform; losses, which have no noise, leave no epsilon."""
    method = {"aggregator": {"name": "mean", "by": "clients"}}
    noise = noise_facts(experiment(**{"protection": NOISE, "method": method, **changes}))["weights"]
    if isinstance(keeps, str):
        assert isinstance(noise, str)
        assert keeps in noise
    else:
        assert isinstance(noise, dict)
        assert noise["keeps"] is keeps
