"""Outputs up, models down: Mix2FLD's properties by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from federation_helpers import losing
from helpers import each, federation, federation_of, iid, images, linear_net, run, same, same_up_to_rounding, setup
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from fedblend.core.aggregator import WeightedUpload
from fedblend.core.engine import TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.objective import Batch, Context, Plain, Task
from fedblend.core.random import stream
from fedblend.core.server_step import ServerContext
from fedblend.core.setup import Setup, model_spec
from fedblend.core.sharing import Pool
from fedblend.core.state import ClientState
from fedblend.core.trees import bytes_of
from fedblend.engines.assignment import batches
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.nets import EagerNet
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.experiment.fields import Train
from fedblend.methods.objectives.terms import Distill
from fedblend.methods.server_steps.tuning import DistillToModel
from fedblend.methods.sharing.seeds import MixedSeeds
from fedblend.methods.uploads import LabelMeanAggregator, Outputs

CLASSES = 3
LINEAR = {"name": "mlp", "hidden": []}


@pytest.mark.parametrize("engine", [LoopEngine, StackedEngine])
@pytest.mark.parametrize("batch", [1, 4, 7])
def test_mean_outputs_are_those_of_each_step_before_its_own_update(engine: Any, batch: int) -> None:
    made = setup(images(), method="fd", model=LINEAR, train={"batch_size": batch, "epochs": 2}, scale="unit")
    task = TrainTask(0, made.weights(), None, made.sizes(0))

    results = list(engine(made).train(task, [0, 1, 2]))

    for result in results:
        order, bounds = batches(
            result.samples, made.training, stream(made.experiment.seed, "batches", 0, result.client)
        )
        x, y = made.samples(result.client, result.samples)
        x = made.scale(x).flatten(1)
        weight, bias = (t.clone() for t in made.weights().values())
        sums, counts = torch.zeros(CLASSES, CLASSES), torch.zeros(CLASSES)
        for a, b in pairwise(bounds):
            rows = torch.from_numpy(order[a:b])
            given = (x[rows] @ weight.T + bias).softmax(1)
            sums.index_add_(0, y[rows], given)
            counts.index_add_(0, y[rows], torch.ones(len(rows)))
            slope = (given - F.one_hot(y[rows], CLASSES)) / len(rows)
            weight, bias = weight - 0.1 * slope.T @ x[rows], bias - 0.1 * slope.sum(0)
        assert result.outputs is not None
        torch.testing.assert_close(result.outputs, sums / counts.clamp(min=1)[:, None], atol=1e-5, rtol=1e-4)


def test_a_label_that_a_client_never_saw_is_a_row_of_zeros_and_left_out_of_the_mean() -> None:
    a = torch.tensor([[0.8, 0.1, 0.1], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    b = torch.tensor([[0.6, 0.2, 0.2], [0.1, 0.9, 0.0], [0.0, 0.0, 0.0]])
    uploads: list[WeightedUpload] = [({"outputs": a}, 1.0), ({"outputs": b}, 99.0)]
    mean = LabelMeanAggregator().aggregate(uploads)["outputs"]
    torch.testing.assert_close(mean, torch.tensor([[0.7, 0.15, 0.15], [0.1, 0.9, 0.0], [0.0, 0.0, 0.0]]))


@each(
    ("rows", "fault"),
    [
        (torch.eye(3), None),
        (torch.zeros(3, 3), None),
        (torch.eye(3) * 2, "no distribution"),
        (torch.eye(3) - torch.ones(3, 3) / 3, "no distribution"),
        (torch.eye(2), "is of shape"),
        (torch.eye(3).double(), "is of type"),
        (torch.full((3, 3), torch.nan), "NaN"),
    ],
)
def test_outputs_that_are_no_distributions_are_refused(rows: torch.Tensor, fault: str | None) -> None:
    found = Outputs().fault({"outputs": rows}, {}, Task("classification", 3))
    assert (found is None) == (fault is None)
    assert fault is None or fault in str(found)


def test_the_gradient_at_the_logits_is_f_minus_l_plus_beta_f_minus_g() -> None:
    torch.manual_seed(0)
    net, teacher = linear_net(5, CLASSES).float(), torch.rand(CLASSES, CLASSES).softmax(1)
    batch = Batch(torch.randn(4, 5), torch.tensor([0, 2, 1, 2]))
    context = Context(Task("classification", CLASSES), lambda x: x, global_outputs={"outputs": teacher})

    class Given:
        """A net whose outputs are the leaf itself."""

        logits = net(batch.x).detach().requires_grad_()

        def __call__(self, x: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
            return self.logits

    given: Any = Given()
    loss = Plain().loss(given, batch, {}, context) + Distill(beta=0.3).loss({}, given, batch, context)
    (slope,) = torch.autograd.grad(loss, given.logits)

    said = given.logits.detach().softmax(1)
    wanted = (said - F.one_hot(batch.y, CLASSES)) + 0.3 * (said - teacher[batch.y])
    torch.testing.assert_close(slope, wanted / 4)


def test_before_the_server_has_outputs_nothing_is_added() -> None:
    batch = Batch(torch.randn(4, 5), torch.tensor([0, 2, 1, 2]))
    context = Context(Task("classification", CLASSES), lambda x: x)
    with torch.no_grad():
        assert float(Distill().loss({}, EagerNet(linear_net(5, CLASSES).float()), batch, context)) == 0.0


def test_in_federated_distillation_devices_keep_their_models_and_one_is_judged() -> None:
    made = setup(method="fd", train={"cohort": 4})
    fed = federation_of(made)
    first, _ = run(fed, 1)
    second, records = run(fed, 1, first)

    assert same(second.weights, made.weights())
    # What a device goes on from: its own model, and what the server has said meanwhile.
    device = fed.recorder.device
    own = {device: replace(first.client_states[device], outputs=first.global_outputs)}
    alone = next(LoopEngine(made).train(TrainTask(1, made.weights(), None, made.sizes(0), {}, own), [device]))
    for name, tensor in alone.weights.items():
        assert torch.equal(second.client_states[device].model[name], tensor)
    judged = fed.engine.score({n: t for n, t in alone.weights.items()})
    assert judged.right is not None
    assert records[-1]["accuracy"] == pytest.approx(judged.right.mean())


@each("seed", range(6))
def test_the_device_that_is_judged_trains_in_the_first_round(seed: int) -> None:
    fed = federation(method="fd", seed=seed, **iid(4, 1))
    state, _ = run(fed, 1)
    assert list(state.client_states) == [fed.recorder.device]


def test_without_distillation_devices_that_keep_their_models_train_alone() -> None:
    made = setup(method={"upload": "outputs", "stateful_clients": True}, train={"cohort": 4})
    state, _ = run(made, 2)
    engine, weights = LoopEngine(made), made.weights()
    for round in range(2):
        own = {0: ClientState(weights)}
        weights = next(engine.train(TrainTask(round, made.weights(), None, made.sizes(0), {}, own), [0])).weights

    assert all(torch.equal(state.client_states[0].model[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("engine", [LoopEngine, StackedEngine])
def test_a_device_whose_downlink_fails_goes_on_from_its_own_model(engine: Any) -> None:
    made = setup(channel=losing(down=[1]), train={"cohort": 4})
    first, _ = run(RoundLoop(made, engine(made)), 1)
    second, records = run(RoundLoop(made, engine(made)), 1, first)

    own = LoopEngine(made)
    task = TrainTask(0, made.weights(), None, made.sizes(0))
    once = next(own.train(task, [1])).weights
    table = {1: ClientState(once)}
    twice = next(own.train(TrainTask(1, first.weights, None, made.sizes(0), {}, table), [1])).weights
    same_up_to_rounding(second.client_states[1].model, twice, steps=20)
    assert records[-1]["uploads"] == 4


def test_a_device_whose_uplink_fails_is_left_out_and_keeps_what_it_learned() -> None:
    made = setup(channel=losing(up=[2]), train={"cohort": 4})
    state, records = run(made, 1)
    assert records[0]["lost"] == [2]
    assert records[0]["uploads"] == 3
    assert 2 in state.client_states


def test_a_round_in_which_nothing_arrives_changes_nothing_where_that_is_allowed() -> None:
    silent = losing(up=[0, 1, 2, 3])
    made = setup(channel=silent, train={"cohort": 4}, min_uploads=0)
    state, records = run(made, 1)
    assert same(state.weights, made.weights())
    assert records[0]["uploads"] == 0
    assert "train_loss" not in records[0]

    strict = setup(channel=silent, train={"cohort": 4})
    with pytest.raises(FedblendError, match="0 good uploads of 4, but min_uploads is 1"):
        run(strict, 1)
    some = setup(channel=losing(up=[2]), train={"cohort": 4}, min_uploads=4)
    told = r"^round 1: 3 good uploads of 4, but min_uploads is 4 \(client 2: lost by the channel\); earlier rounds"
    with pytest.raises(FedblendError, match=told):
        run(some, 1)
    # Without the means clients take no part.
    mix = {"name": "fedmix", "sharing": {"samples_per_mean": 2}}
    few = setup(method=mix, channel=losing(down=[1, 2, 3]), train={"cohort": 4}, min_uploads=4)
    told = r"^round 1: 1 good uploads of 1, but min_uploads is 4 \(1 clients took part\)"
    with pytest.raises(FedblendError, match=told):
        run(few, 1)


def test_the_time_of_a_round_is_that_of_the_slowest_transmissions_and_of_computing() -> None:
    made = setup(channel=losing(), compute_seconds=2.0)
    _, (record,) = run(made, 1)

    assert record["channel"] == {"down": 0.5, "up": 0.5 + 0.0}
    assert record["computing"] == 2.0
    measured = setup(channel=losing())
    _, (record,) = run(measured, 1)
    assert record["machine"]["computing"] > 0
    plain = setup()
    _, (record,) = run(plain, 1)
    assert "channel" not in record
    assert "computing" not in record["machine"]


@pytest.mark.slow
def test_what_is_lost_before_training_is_shared_again_until_it_arrives() -> None:
    made = setup(images(n=60), method="mix2fld", model=LINEAR, train={"cohort": 4}, channel=losing(up=[3]))
    state, records = run(made, 3)

    assert [record["shared"]["lost"] for record in records] == [[3]] * 3
    assert [record["shared"]["asked"] for record in records] == [4, 1, 1]
    assert set(state.entries.owner.tolist()) == {0, 1, 2}


SHORT = {"name": "mix2fld", "server_step": {"steps": 20}}


def test_a_seed_of_mnist_takes_6272_bits_and_its_labels() -> None:
    made = setup(images(n=80, side=28), method=SHORT, model=LINEAR)
    _, (record,) = run(made, 1)
    assert record["bytes_up"]["seeds"] == 4 * 10 * (6272 / 8 + 2)
    assert "seeds" not in record["bytes_down"]


def test_inversely_mixed_seeds_have_hard_labels_and_leave_the_range_of_pixels() -> None:
    made = setup(images(n=200, side=6), method={**SHORT, "sharing": {"samples": 40}}, model=LINEAR)
    fed = federation_of(made)
    state, _ = run(fed, 1)
    pool = fed.exchange.pool_of(state)

    assert pool.tensors["y"].dtype == torch.int64
    assert len(pool) == 160
    assert (pool.owner == -1).all()
    soft = RoundLoop(setup(images(n=200, side=6), method={**SHORT, "name": "mixfld"}, model=LINEAR), LoopEngine(made))
    state, _ = run(soft, 1)
    assert soft.exchange.pool_of(state).tensors["y"].unique().tolist() == pytest.approx([0.0, 0.1, 0.9])


def test_more_seeds_than_came_can_be_made() -> None:
    sharing = {"samples": 20, "generated": 50}
    made = setup(images(n=200), method={**SHORT, "sharing": sharing}, model=LINEAR)
    fed = federation_of(made)
    state, _ = run(fed, 1)
    assert len(fed.exchange.pool_of(state)) == 4 * 50


def test_a_mixture_that_is_not_undone_may_be_in_equal_parts() -> None:
    assert MixedSeeds(lam=0.5, inverse=False).lam == 0.5


def test_steps_are_drawn_with_replacement_and_of_full_batches() -> None:
    train = Train(batch_size=3, steps=100)
    order, bounds = batches(5, train, np.random.default_rng(0))
    assert len(order) == 300
    assert np.diff(bounds).tolist() == [3] * 100
    assert set(order.tolist()) == set(range(5))
    assert len(batches(0, train, np.random.default_rng(0))[0]) == 0


def test_a_run_stops_where_little_changes() -> None:
    made = setup(train={"lr": 1e-9}, convergence_tol=1e-3)
    _, records = run(made, 2)
    assert records[0]["converged"]
    assert records[0]["change"] < 1e-3

    restless = setup(train={"lr": 0.5}, convergence_tol=1e-9)
    _, records = run(restless, 2)
    assert not records[0]["converged"]

    quiet = setup(method="fd", train={"cohort": 4, "lr": 1e-9}, convergence_tol=0.5)
    _, records = run(quiet, 2)
    # There are no outputs to compare with after the first round.
    assert [r["converged"] for r in records] == [False, True]


@pytest.mark.parametrize(
    "method",
    [
        {"name": "feddm", "sharing": {"steps": 2}, "server_step": {"epochs": 1}},
        {"name": "server-means", "upload": "silent"},
    ],
    ids=["nothing", "silent"],
)
def test_where_clients_send_neither_models_nor_outputs_the_servers_model_is_compared(method: Any) -> None:
    made = setup(groups=[list(range(20)), list(range(20, 40))], method=method, convergence_tol=1e-9)
    loop = federation_of(made)
    first, _ = loop.round(loop.start()[0])
    second, record = loop.round(first)

    old, new = (torch.cat([t.flatten().double() for t in one.weights.values()]) for one in (first, second))
    assert record.change == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-12)
    assert record.change > 0
    assert not record.converged


def test_a_round_that_nothing_gets_through_is_not_taken_for_converged() -> None:
    channel = losing(up=[0, 1, 2, 3])
    made = setup(train={"cohort": 4}, channel=channel, min_uploads=0, convergence_tol=1e-3)
    _, records = run(made, 2)
    assert [(r["uploads"], r["change"], r["converged"]) for r in records] == [(0, 0.0, False)] * 2


def test_rounds_before_clients_train_are_not_taken_for_converged() -> None:
    method = {"upload": {"name": "model", "from_round": 3}}
    made = setup(method=method, convergence_tol=1e-3, train={"cohort": 2, "lr": 0.1}, rounds=3)
    _, records = run(made, 3)
    assert [(r.get("uploads"), r["converged"]) for r in records] == [(None, False), (None, False), (2, False)]
    assert [r["change"] > 0 for r in records] == [False, False, True]


def test_a_device_can_be_judged_in_any_method() -> None:
    made = setup(evaluate_model="device", train={"cohort": 4})
    fed = federation_of(made)
    state, records = run(fed, 1)
    right = fed.engine.score(state.client_states[fed.recorder.device].model).right

    assert right is not None
    assert records[0]["accuracy"] == pytest.approx(right.mean())
    plain = federation(train={"cohort": 4})
    assert bytes_of(run(plain, 1)[0].weights) == bytes_of(state.weights)


STEPS, SIZE, BETA, LR = 6, 2, 0.5, 0.2


def server_of(made: Setup, model: nn.Module, teacher: torch.Tensor, soft: bool = False) -> ServerContext:
    """A server with ten seeds, whose draws are always the same."""
    x, y = made.data.train.x[:10].float(), made.data.train.y[:10]
    pool = Pool({"x": x, "y": labels_of(made) if soft else y}, np.full(10, -1))
    known = vars(model_spec(made, model))
    return ServerContext(
        **known, round=0, lr=LR, rng=np.random.default_rng(5), global_outputs={"outputs": teacher}, pool=pool
    )


def labels_of(made: Setup) -> torch.Tensor:
    """Soft labels of the seeds, each of two classes."""
    hot = F.one_hot(made.data.train.y[:10], CLASSES).float()
    return 0.9 * hot + 0.1 * hot.roll(1, 1)


def by_autograd(made: Setup, teacher: torch.Tensor, soft: bool) -> dict[str, torch.Tensor]:
    """The same steps by the book: a module, its loss of two terms, backward."""
    weights = {name: t.clone().requires_grad_() for name, t in made.weights().items()}
    x, hard = made.scale(made.data.train.x[:10].float()), F.one_hot(made.data.train.y[:10], CLASSES).float()
    labels = labels_of(made) if soft else hard
    for rows in torch.from_numpy(np.random.default_rng(5).integers(10, size=(STEPS, SIZE))):
        log = F.log_softmax(functional_call(made.model, weights, (x[rows],)), -1)
        loss = -((labels[rows] + BETA * labels[rows] @ teacher) * log).sum(-1).mean()
        slopes = torch.autograd.grad(loss, list(weights.values()))
        weights = {
            name: (t - LR * slope).detach().requires_grad_()
            for (name, t), slope in zip(weights.items(), slopes, strict=True)
        }
    return {name: t.detach() for name, t in weights.items()}


@pytest.mark.parametrize(("engine", "soft"), [(LoopEngine, False), (StackedEngine, False), (LoopEngine, True)])
def test_the_steps_are_those_of_autograd(engine: Any, soft: bool) -> None:
    made = setup(images(n=20, classes=CLASSES, side=6), model="mix2fld-cnn", scale="unit")
    teacher = torch.rand(CLASSES, CLASSES, generator=torch.Generator().manual_seed(0)).softmax(1)
    before = {name: t.clone() for name, t in made.weights().items()}

    step = DistillToModel(steps=STEPS, batch_size=SIZE, beta=BETA)
    server = server_of(made, engine(made).server_model(), teacher, soft)
    got, _ = step.refine(made.weights(), server)

    wanted = by_autograd(made, teacher, soft)
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, atol=1e-5, rtol=1e-4)
        assert not torch.equal(got[name], before[name])
    assert same(made.weights(), before)
    empty = replace(server, pool=Pool({}, np.empty(0, np.int64)))
    assert same(DistillToModel().refine(before, empty)[0], before)


class Wavering(nn.Module):
    """A network whose work depends on the numbers that it sees, which no trace can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(x.flatten(1))
        return made * 2 if bool(x.mean() > 0.3) else made


def test_a_model_that_cannot_be_traced_is_converted_all_the_same() -> None:
    made = setup(images(n=20, classes=CLASSES), model={"name": "mlp", "hidden": []}, scale="unit")
    net, teacher = Wavering(), torch.full((CLASSES, CLASSES), 1 / CLASSES)
    weights = {name: t.detach().clone() for name, t in net.named_parameters()}
    server = server_of(made, net, teacher)
    x = server.scale(made.data.train.x[:10].float())
    assert {bool(one.mean() > 0.3) for one in x} == {True, False}
    server = ServerContext(**{**vars(server), "trained": list(weights)})

    got, _ = DistillToModel(steps=1).refine(weights, server)

    row = int(np.random.default_rng(5).integers(10, size=(1, 1))[0, 0])
    factor = 2 if bool(x[row].mean() > 0.3) else 1
    said = (factor * (x[row].flatten() @ weights["last.weight"].T + weights["last.bias"])).softmax(0)
    label = F.one_hot(made.data.train.y[row], CLASSES)
    slope = factor * ((said - label) + 0.01 * (said - 1 / CLASSES))
    torch.testing.assert_close(got["last.bias"], weights["last.bias"] - LR * slope)
