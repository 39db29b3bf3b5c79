"""Rounds: who takes part, in which batches, at which learning rate, by which steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from federation_helpers import BATCH_NORM, stacked_gives_the_loops_state, train, with_parts
from helpers import (
    each,
    engine_of,
    federation,
    federation_of,
    run,
    same,
    same_state,
    same_up_to_rounding,
    setup,
    slow_after_first,
    without_machine,
)

from fedblend.core.engine import TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.objective import Term
from fedblend.core.server_step import ServerStep
from fedblend.core.setup import cohort_of
from fedblend.engines.assignment import batches
from fedblend.engines.sgd import SGD
from fedblend.experiment.fields import Train

# Rounds and cohorts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("round", [0, 1, 7])
def test_the_learning_rate_decays_by_the_round(round: int) -> None:
    settings_ = {"cohort": 1, "batch_size": 40, "lr": 0.2, "lr_decay": 0.5}
    made = setup(groups=[range(10)], train=settings_)
    before = made.weights()

    upload = train(made, [0], round=round)[0].weights

    made.model.load_state_dict(before)
    x, y = made.samples(0, 10)
    loss = torch.nn.functional.cross_entropy(made.model(made.scale(x)), y)
    gradients = torch.autograd.grad(loss, list(made.model.parameters()))
    expected = {
        name: parameter.detach() - 0.2 * 0.5**round * gradient
        for (name, parameter), gradient in zip(made.model.named_parameters(), gradients, strict=True)
    }
    same_up_to_rounding(upload, expected, steps=4)


def test_every_start_is_the_same() -> None:
    made = setup(model=BATCH_NORM)
    fed = federation_of(made)
    first, record = fed.start()
    run(fed, 2, first)

    again, repeated = fed.start()
    beside, _ = federation_of(made).start()

    assert same_state(again, first)
    assert same_state(beside, first)
    assert without_machine([repeated.as_dict()]) == without_machine([record.as_dict()])


def test_cohorts_are_drawn_without_replacement_from_clients_that_hold_samples() -> None:
    groups = [[], range(3), [], range(3, 6), range(6, 9), range(9, 12), []]
    fed = federation(groups=groups, train={"cohort": 3})

    cohorts = [cohort_of(fed.setup, round).tolist() for round in range(400)]

    assert all(len(set(c)) == 3 and c == sorted(c) for c in cohorts)
    often = np.bincount(np.concatenate(cohorts), minlength=7) / 400
    assert often[[0, 2, 6]].tolist() == [0, 0, 0]
    assert np.abs(often[[1, 3, 4, 5]] - 0.75).max() < 0.08


@pytest.mark.parametrize("method", ["fedavg", "fedmix", "localmix"])
def test_a_client_with_fewer_samples_than_a_batch_trains(method: str) -> None:
    groups = [range(1), range(1, 4), range(4, 40)]
    fed = federation(groups=groups, method=method, train={"cohort": 3, "batch_size": 10})

    _, records = run(fed, 1)

    assert records[0]["uploads"] == 3
    uploads = train(fed.setup, range(3))
    assert all(not same(uploads[k].weights, fed.setup.weights()) for k in range(3))
    assert [uploads[k].samples for k in range(3)] == [1, 3, 36]


@pytest.mark.parametrize(
    ("last", "sizes"),
    [
        ("keep", {3: [3], 4: [4], 5: [4, 1], 8: [4, 4], 11: [4, 4, 3], 0: []}),
        ("drop", {3: [3], 4: [4], 5: [4], 8: [4, 4], 11: [4, 4], 0: []}),
        ("merge", {3: [3], 4: [4], 5: [5], 8: [4, 4], 11: [4, 7], 0: []}),
    ],
)
def test_a_smaller_last_batch_is_kept_dropped_or_merged(last: Any, sizes: dict[int, list[int]]) -> None:
    settings_ = Train(epochs=2, batch_size=4, last_batch=last)
    for n, wanted in sizes.items():
        order, bounds = batches(n, settings_, np.random.default_rng(n))
        rng = np.random.default_rng(n)
        drawn = np.concatenate([rng.permutation(n)[: sum(wanted)] for _ in range(2)])

        assert order.tolist() == drawn.tolist()
        assert np.diff(bounds).tolist() == wanted * 2
        assert settings_.batches_of(n) == 2 * len(wanted)


@pytest.mark.parametrize("method", slow_after_first(["fedmix", "localmix"]))
@pytest.mark.parametrize("last", slow_after_first(["merge", "drop"]))
def test_stacks_train_on_dropped_and_merged_batches_as_the_loop_does(method: str, last: str) -> None:
    groups = [range(2), range(2, 7), range(7, 18), range(18, 30), range(30, 40)]
    made = setup(groups=groups, method=method, train={"cohort": 5, "batch_size": 4, "last_batch": last})
    stacked_gives_the_loops_state(made, 2, 4)


def test_batch_norm_trains_where_a_rest_of_one_sample_is_dropped_or_merged() -> None:
    for last in ("drop", "merge"):
        made = setup(model=BATCH_NORM, groups=[range(11)], train={"cohort": 1, "batch_size": 5, "last_batch": last})
        assert not same(train(made, [0])[0].weights, made.weights())


@pytest.mark.parametrize(
    ("settings_", "samples", "words"),
    [
        ({"batch_size": 5}, 11, "train.last_batch = 'merge' or 'drop', train.steps, which draws"),
        ({"batch_size": 5, "last_batch": "merge"}, 1, "valid: train.steps, which draws"),
        ({"batch_size": 1, "last_batch": "merge"}, 11, "valid: train.batch_size from 2"),
    ],
)
def test_batch_norm_on_a_batch_of_one_sample_is_told_what_works(
    settings_: dict[str, Any], samples: int, words: str
) -> None:
    made = setup(model=BATCH_NORM, groups=[range(samples)], train={"cohort": 1, **settings_})
    with pytest.raises(FedblendError, match=rf"client 0 has in round 1; .*{words}.*, or group norm"):
        train(made, [0])


def test_epochs_are_epochs() -> None:
    made = setup(groups=[range(11)], train={"cohort": 1, "epochs": 3, "batch_size": 4})
    engine, steps = engine_of(made), []
    engine.model.register_forward_hook(lambda module, inputs, outputs: steps.append(len(outputs)))
    trained = next(engine.train(TrainTask(0, made.weights(), None, made.sizes(0)), [0]))
    assert steps == [4, 4, 3] * 3
    assert trained.samples == 11


def test_the_training_loss_is_a_mean_over_samples() -> None:
    made = setup(groups=[range(5)], train={"cohort": 1, "batch_size": 4, "lr": 1e-9})
    trained = train(made, [0])[0]
    x, y = made.samples(0, 5)
    expected = torch.nn.functional.cross_entropy(made.model(made.scale(x)), y)
    assert trained.loss == pytest.approx(expected.item(), rel=1e-5)


# SGD ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_sgd_is_torchs_sgd(momentum: float, decay: float) -> None:
    rng = torch.Generator().manual_seed(0)
    start = [torch.randn(3, 4, generator=rng), torch.randn(5, generator=rng)]
    steps = [[torch.randn(p.shape, generator=rng) for p in start] for _ in range(4)]
    ours, theirs = [p.clone() for p in start], [p.clone() for p in start]
    mine = SGD(ours, Train(lr=0.3, lr_decay=0.9, momentum=momentum, weight_decay=decay), round=2)
    reference = torch.optim.SGD(theirs, lr=0.3 * 0.9**2, momentum=momentum, weight_decay=decay)

    for gradients in steps:
        mine.step([g.clone() for g in gradients])
        for p, g in zip(theirs, gradients, strict=True):
            p.grad = g.clone()
        reference.step()

    same_up_to_rounding(*({str(i): p.detach() for i, p in enumerate(made)} for made in (ours, theirs)), steps=8)


def test_sgd_leaves_parameters_without_gradient_alone() -> None:
    params = [torch.ones(2), torch.ones(2)]
    optimizer = SGD(params, Train(lr=0.5, momentum=0.9, weight_decay=0.1), 0)

    optimizer.step([None, torch.ones(2)])
    optimizer.step([torch.ones(2), torch.ones(2)])

    # The first moves once by its first velocity; the second twice, by velocities v1 and 0.9 v1 + g2.
    v1 = 1 + 0.1
    w1 = 1 - 0.5 * v1
    v2 = 0.9 * v1 + 1 + 0.1 * w1
    torch.testing.assert_close(params[0], torch.full((2,), 1 - 0.5 * v1))
    torch.testing.assert_close(params[1], torch.full((2,), w1 - 0.5 * v2))


@pytest.mark.parametrize(("limit", "factor"), [(2.5, 0.5), (50.0, 1.0)])
def test_clipping_bounds_the_norm_over_all_parameters(limit: float, factor: float) -> None:
    params = [torch.zeros(1), torch.zeros(1)]
    SGD(params, Train(lr=1.0, clip_norm=limit), 0).step([torch.tensor([3.0]), torch.tensor([4.0])])
    torch.testing.assert_close(torch.cat(params), torch.tensor([-3.0 * factor, -4.0 * factor]), rtol=1e-5, atol=0)


def test_momentum_starts_anew_for_each_client_and_round() -> None:
    made = setup(train={"momentum": 0.9, "epochs": 2})
    first = train(made, [0, 1])
    again = train(made, [1])
    assert same(first[1].weights, again[1].weights)


# What a part returns at the server ------------------------------------------------------------------------


class ReturningStep(ServerStep):
    """A server step that returns ``made(weights)``."""

    name = "returning"

    def __init__(self, made: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        self.made = made

    def refine(self, weights: Any, server: Any) -> Any:
        return self.made(dict(weights))


class ReturningTerm(Term):
    """A term of no loss that does so after aggregation."""

    name = "returning"

    def __init__(self, made: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        self.made = made

    def loss(self, params: Any, net: Any, batch: Any, context: Any) -> Any:
        return torch.zeros(())

    def after_aggregation(self, weights: Any, state: Any, summary: Any) -> Any:
        return self.made(dict(weights))


PAIR = "where a pair is valid: the next model, and the part's table at the server (such as weights, {})"
TABLE = "valid: a dict of tensors by name"


@each(
    ("made", "told"),
    [
        (lambda weights: None, f"returned NoneType, {PAIR}"),
        (lambda weights: weights, f"returned dict, {PAIR}"),
        (
            lambda weights: ({**weights, "more": torch.zeros(1)}, {}),
            "returned what is no model: missing none, unknown ['more']",
        ),
        (
            lambda weights: ({name: tensor.flatten() for name, tensor in weights.items() if tensor.dim() > 1}, {}),
            "returned what is no model: missing ['stages.0.1.0.bias', 'stages.1.bias'], unknown none",
        ),
        (lambda weights: (weights, None), f"returned a table of type NoneType; {TABLE}"),
        (lambda weights: (weights, {"count": 1}), f"returned a table in which 'count' is int; {TABLE}"),
    ],
)
def test_what_a_part_returns_at_the_server_is_checked_in_its_own_round(made: Callable[..., Any], told: str) -> None:
    """A model without a tensor was evaluated with the tensor of the round before."""
    for where, parts in (
        ("method.server_step", {"server_step": ReturningStep(made)}),
        ("method.terms.0", {"terms": [ReturningTerm(made)]}),
    ):
        with pytest.raises(FedblendError) as error:
            run(with_parts(setup(rounds=2), **parts), 1)
        assert str(error.value) == f"{where}: 'returning' {told}"


def test_a_server_step_may_compute_in_float64() -> None:
    made, step = setup(), ReturningStep(lambda weights: ({n: t.double() for n, t in weights.items()}, {}))
    plain, _ = run(made, 2)
    wide, _ = run(with_parts(made, server_step=step), 2)
    assert same(plain.weights, wide.weights)
