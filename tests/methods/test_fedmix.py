"""FedMix: what the paper's formula implies, asserted exactly where it can be."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch
from helpers import each, finite_differences, linear_net, loss_of, run, setup, tanh_net, weight_gradient
from objectives_helpers import CLASSES, NUMBERS, draws, mean_pool, random_pool
from torch import nn
from torch.nn import functional as F

from fedblend.core.loop import RoundLoop
from fedblend.core.objective import Batch, Context, Net, Plain, Task, Tensors
from fedblend.core.registry import part
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.nets import EagerNet
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.methods.objectives.fedmix import FedMix, NaiveMix

TASKS = [CLASSES, NUMBERS]


TAYLORS = ["algorithm", "proposition"]


def global_mixup(
    model: nn.Module, task: Task, batch: Batch, x: torch.Tensor, y: torch.Tensor, lam: float
) -> torch.Tensor:
    """Equation 3 averaged over raw samples, with targets mixed inside one loss."""
    own = batch.y if task.kind == "regression" else F.one_hot(batch.y, task.outputs).double()
    other = y if task.kind == "regression" else F.one_hot(y, task.outputs).double()
    losses = [
        task.loss(model((1 - lam) * batch.x + lam * xj), (1 - lam) * own + lam * yj)
        for xj, yj in zip(x, other, strict=True)
    ]
    return torch.stack(losses).mean()


def distances(objective: FedMix, task: Task, measure: str, seed: int) -> list[float]:
    """How far FedMix is from the averaged Global Mixup, as lambda halves."""
    model = tanh_net(seed=seed)
    batch = Batch(*draws(task, 4, 10 + seed))
    x, y = draws(task, 6, 20 + seed)
    found = []
    for lam in (0.02, 0.01, 0.005, 0.0025):
        near = loss_of(objective, model, batch, task, lam, mean_pool(task, x, y))
        exact = global_mixup(model, task, batch, x, y, lam)
        if measure == "loss":
            found.append(abs(float(near.detach() - exact.detach())))
        else:
            found.append(float((weight_gradient(near, model) - weight_gradient(exact, model)).norm()))
    return found


def ratios(values: list[float]) -> list[float]:
    return [a / b for a, b in itertools.pairwise(values)]


# The squared loss differs from Global Mixup's by a constant in the weights, so only gradients compare.
MEASURES = [(CLASSES, "loss"), (CLASSES, "gradient"), (NUMBERS, "gradient")]


@each("seed", [0, 1, 2])
@each("taylor", TAYLORS)
@each(("task", "measure"), MEASURES)
def test_fedmix_is_second_order_near_global_mixup(task: Task, measure: str, taylor: str, seed: int) -> None:
    objective = FedMix(taylor=taylor)
    found = ratios(distances(objective, task, measure, seed))
    assert all(3.6 < ratio < 4.4 for ratio in found), found


@each("lam", [0.3, 0.7])
@each("taylor", TAYLORS)
@each("task", TASKS)
def test_fedmix_is_its_three_terms_at_the_shrunk_input(task: Task, taylor: str, lam: float) -> None:
    model, batch, pool = tanh_net(), Batch(*draws(task, 4, 1)), random_pool(task)
    z, x_g, y_g, h = (1 - lam) * batch.x, pool["x"][0], pool["y"][0], 1e-5

    value = loss_of(FedMix(taylor=taylor), model, batch, task, lam, pool)

    # The mean inner product is the slope of the mean loss at z when every input moves along x_g.
    slope = (task.loss(model(z + h * x_g), batch.y) - task.loss(model(z - h * x_g), batch.y)) / (2 * h)
    factor = lam * (1 - lam) if taylor == "algorithm" else lam
    expected = (1 - lam) * task.loss(model(z), batch.y) + lam * task.loss(model(z), y_g) + factor * slope
    assert value.item() == pytest.approx(expected.item(), abs=1e-9)


@each("taylor", TAYLORS)
@each("weight", [0.0, 0.5, 2.0])
def test_taylor_weight_multiplies_the_third_term_alone(weight: float, taylor: str) -> None:
    model, batch, pool = tanh_net(), Batch(*draws(CLASSES, 4, 1)), random_pool(CLASSES)
    still = {**pool, "x": torch.zeros_like(pool["x"])}

    whole, weighted = (
        loss_of(FedMix(taylor=taylor, taylor_weight=w), model, batch, CLASSES, 0.3, pool) for w in (1.0, weight)
    )
    without = loss_of(FedMix(), model, batch, CLASSES, 0.3, still)

    assert weighted.item() == pytest.approx((without + weight * (whole - without)).item(), rel=1e-12)


@pytest.mark.parametrize("taylor", TAYLORS)
@pytest.mark.parametrize("make", [linear_net, tanh_net])
@pytest.mark.parametrize("task", TASKS)
def test_fedmix_gradient_matches_finite_differences(task: Task, make: type, taylor: str) -> None:
    model, batch, pool = make(), Batch(*draws(task, 4, 1)), random_pool(task)

    def value() -> torch.Tensor:
        return loss_of(FedMix(taylor=taylor), model, batch, task, 0.3, pool)

    gradient = weight_gradient(value(), model)

    torch.testing.assert_close(gradient, finite_differences(value, model), rtol=1e-6, atol=1e-8)


def test_averaging_twice_depends_on_the_batch_size() -> None:
    model, batch, pool = tanh_net(), Batch(*draws(CLASSES, 4, 1)), random_pool(CLASSES)
    copies = Batch(torch.cat([batch.x] * 2), torch.cat([batch.y] * 2))
    twice, none = FedMix(average="twice"), {**pool, "x": torch.zeros_like(pool["x"])}

    third = [
        (loss_of(twice, model, b, CLASSES, 0.2, pool) - loss_of(twice, model, b, CLASSES, 0.2, none)).item()
        for b in (batch, copies)
    ]

    assert third[0] == pytest.approx(2 * third[1], rel=1e-9)


def test_the_drawn_entry_is_the_one_used() -> None:
    model, batch, pool = tanh_net(), Batch(*draws(CLASSES, 4, 1)), random_pool(CLASSES, entries=3)
    chosen = loss_of(FedMix(), model, batch, CLASSES, 0.2, pool, entry=2)
    alone = loss_of(FedMix(), model, batch, CLASSES, 0.2, {n: t[2:] for n, t in pool.items()})
    assert torch.equal(chosen, alone)
    assert not torch.equal(chosen, loss_of(FedMix(), model, batch, CLASSES, 0.2, pool, entry=0))


@pytest.mark.parametrize("objective", [FedMix(), NaiveMix(), Plain()])
def test_one_forward_pass_a_batch(objective: FedMix) -> None:
    model, batch, pool = tanh_net(), Batch(*draws(CLASSES, 4, 1)), random_pool(CLASSES)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    value = loss_of(objective, model, batch, CLASSES, 0.2, pool)
    weight_gradient(value, model)
    assert len(calls) == 1


def test_one_dropout_mask_serves_all_three_terms() -> None:
    torch_state = torch.get_rng_state()
    first, last = tanh_net()[0], tanh_net()[2]
    batch, pool, lam = Batch(*draws(CLASSES, 4, 1)), random_pool(CLASSES), 0.3
    torch.manual_seed(3)
    mask = F.dropout(torch.ones(4, 7, dtype=torch.float64), 0.5)
    torch.manual_seed(3)

    value = loss_of(FedMix(), nn.Sequential(first, nn.Dropout(0.5), nn.Tanh(), last), batch, CLASSES, lam, pool)
    torch.set_rng_state(torch_state)

    z = ((1 - lam) * batch.x).requires_grad_()
    outputs = last(torch.tanh(first(z) * mask))
    own = CLASSES.loss(outputs, batch.y)
    (slope,) = torch.autograd.grad(own, z)
    third = lam * (1 - lam) * (slope * pool["x"]).sum()
    expected = (1 - lam) * own + lam * CLASSES.loss(outputs, pool["y"][0]) + third
    assert 0 < int((mask == 0).sum()) < mask.numel()
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)


def test_weights_keep_no_gradient_of_their_own() -> None:
    model, batch, pool = tanh_net(), Batch(*draws(CLASSES, 4, 1)), random_pool(CLASSES)
    loss_of(FedMix(), model, batch, CLASSES, 0.2, pool)
    assert all(p.grad is None for p in model.parameters())
    assert not batch.x.requires_grad


def parts_of(
    model: nn.Module, batch: Batch, task: Task, lam: float, pool: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Of each sample: its own share of the loss, the predicted one and the one at the mixed sample.

    And the entry's share at the samples, and at the mixed ones.
    """
    z = ((1 - lam) * batch.x).requires_grad_()
    outputs = model(z)
    losses = task.losses(outputs, batch.y)
    slopes = torch.autograd.grad(losses.sum(), z, create_graph=True)[0]
    own = (1 - lam) * losses
    predicted = own + lam * (1 - lam) * (slopes * pool["x"][0]).sum(1)
    mixed = model((1 - lam) * batch.x + lam * pool["x"][0])
    entrys = (lam * task.loss(one, pool["y"][0]) for one in (outputs, mixed))
    return own, predicted, (1 - lam) * task.losses(mixed, batch.y), *entrys


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("remedy", ["drop", "check"])
def test_a_remedy_takes_another_loss_for_the_samples_with_wrong_predictions_alone(task: Task, remedy: str) -> None:
    model, batch, pool, lam = tanh_net(seed=1), Batch(*draws(task, 40, 1)), random_pool(task), 0.4
    pool["x"] = 40 * pool["x"]
    own, predicted, actual, entrys, mixed = parts_of(model, batch, task, lam, pool)
    wrong, instead = (predicted <= 0, own) if remedy == "drop" else (predicted < actual, actual)
    assert 0 < wrong.sum() < len(wrong)

    made = loss_of(FedMix(lam=lam, remedy=remedy), model, batch, task, lam, pool)

    wanted = torch.where(wrong, instead, predicted).mean() + (entrys if remedy == "drop" else mixed)
    torch.testing.assert_close(made, wanted)
    torch.testing.assert_close(weight_gradient(made, model), weight_gradient(wanted, model))


@pytest.mark.parametrize("task", TASKS)
def test_the_second_order_term_is_half_of_the_hessians_product(task: Task) -> None:
    """Of a quadratic loss it is exact, and so predicts the loss at the mixed sample; of others up to third order."""
    model, batch, pool, lam = tanh_net(seed=1), Batch(*draws(task, 6, 1)), random_pool(task), 1e-3
    if task.kind == "regression":
        model, lam = torch.nn.Linear(5, task.outputs).double(), 0.4
    z, x_g = (1 - lam) * batch.x, pool["x"][0]

    made = loss_of(FedMix(remedy="second"), model, batch, task, lam, pool)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (1 - lam) * task.loss(model(x), batch.y)

    direction = lam * x_g.expand_as(z)
    hessian = torch.autograd.functional.vhp(loss, z, direction)[1]
    first = torch.autograd.functional.vjp(loss, z)[1]
    wanted = loss(z) + (first * direction).sum() + (hessian * direction).sum() / 2
    wanted = wanted + lam * task.loss(model(z), pool["y"][0])
    torch.testing.assert_close(made, wanted, rtol=1e-8, atol=1e-8)
    if task.kind == "regression":
        torch.testing.assert_close(made, loss(z + direction) + lam * task.loss(model(z), pool["y"][0]))


@each("options", [{}, {"average": "twice"}, {"remedy": "check"}, {"remedy": "drop"}])
def test_samples_that_the_taylor_term_predicts_below_0_are_counted(options: dict[str, str]) -> None:
    """The exact prediction, also where the loss divides the term twice."""
    model, batch, lam = tanh_net(), Batch(*draws(CLASSES, 40, 1)), 0.5
    pool = {name: 300 * tensor if name == "x" else tensor for name, tensor in random_pool(CLASSES).items()}
    x = ((1 - lam) * batch.x).requires_grad_()
    losses = F.cross_entropy(model(x), batch.y, reduction="none")
    (slopes,) = torch.autograd.grad(losses.sum(), x)
    failed = ((1 - lam) * losses + lam * (1 - lam) * (slopes * pool["x"][0]).sum(1) < 0).sum()
    context = Context(CLASSES, lambda x: x, pool, counts={"taylor_failed": torch.zeros(())})

    FedMix(**options).loss(
        EagerNet(model), batch, {"lam": torch.tensor(lam).double(), "entry": torch.tensor(0)}, context
    )

    assert 0 < failed < 40
    assert context.counts["taylor_failed"] == failed


@part("objective", "counts-zeros")
class CountsZeros(Plain):
    """Counts the samples of class 0."""

    measures = ("zeros",)

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        """The task's loss."""
        context.count("zeros", (batch.y == 0).sum())
        return super().loss(net, batch, drawn, context)

    def warning(self, measured: Mapping[str, float]) -> str:
        """In every round."""
        return f"{measured['zeros']:.3f} are zeros"


def test_engines_measure_the_same_share_which_warns_once_and_goes_on_after_a_resume() -> None:
    made = setup(method={"objective": "counts-zeros"}, train={"cohort": 3, "batch_size": 4})
    records = []
    for engine in (LoopEngine(made), StackedEngine(made, stack=2)):
        with pytest.warns(UserWarning, match=r"0\.\d+ are zeros") as warned:
            records.append(run(RoundLoop(made, engine), 4)[1])
        assert len(warned) == 1

    shares = [[record["measured"] for record in one] for one in records]
    assert shares[0] == shares[1]
    owned = [torch.cat([made.samples(k, int(made.sizes(0)[k]))[1] for k in one["cohort"]]) for one in records[0]]
    assert [one["zeros"] for one in shares[0]] == pytest.approx([float((y == 0).float().mean()) for y in owned])
    half, _ = run(RoundLoop(made, LoopEngine(made)), 2)
    assert [one["measured"] for one in run(RoundLoop(made, LoopEngine(made)), 2, half)[1]] == shares[0][2:]


def test_only_a_form_without_a_remedy_warns() -> None:
    words = "the Taylor prediction fails for 43 % of the samples: accuracy may collapse; see `fedmix-checked`"
    assert (
        FedMix().warning({"taylor_failed": 0.43}) == FedMix(average="twice").warning({"taylor_failed": 0.43}) == words
    )
    assert FedMix().warning({"taylor_failed": 0.1}) == FedMix(remedy="check").warning({"taylor_failed": 0.43}) == ""


def test_a_remedy_needs_predictions_of_losses() -> None:
    with pytest.raises(ValueError, match='remedy: "drop" needs predictions of losses'):
        FedMix(remedy="drop", average="twice")


@pytest.mark.parametrize("objective", [NaiveMix, FedMix])
def test_an_entry_for_each_sample_is_the_mean_of_one_batch_an_entry(objective: type) -> None:
    model, batch, pool = tanh_net(seed=1), Batch(*draws(CLASSES, 3, 1)), random_pool(CLASSES, 4)
    rows = [2, 0, 2]

    made = loss_of(objective(entries="sample"), model, batch, CLASSES, 0.2, pool, entry=[*rows, 3])

    single = [
        loss_of(objective(), model, Batch(batch.x[i : i + 1], batch.y[i : i + 1]), CLASSES, 0.2, pool, entry=row)
        for i, row in enumerate(rows)
    ]
    torch.testing.assert_close(made, torch.stack(single).mean())
