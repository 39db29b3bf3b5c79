"""What attacks must satisfy exactly, and that they rebuild what the literature says they rebuild."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from federation_helpers import BATCH_NORM
from helpers import each, examples, federation_of, images, setup
from hypothesis import given
from hypothesis import strategies as st
from own_models import Attentive
from torch import nn
from torch.nn import functional as F

from fedblend.analysis.attacks import outcome
from fedblend.analysis.attacks.attack_setup import prepare
from fedblend.analysis.attacks.image_similarity import compare, match, mse, psnr, ssim
from fedblend.analysis.attacks.inversion import (
    DLG,
    IDLG,
    InvGrad,
    cosine_distance,
    infer_labels,
    invert,
    make_attack,
    squared_distance,
    total_variation,
)
from fedblend.analysis.attacks.snapshot import RoundSnapshot
from fedblend.analysis.attacks.victim import Steps, Victim
from fedblend.core.context import Context, StepPlan, Task
from fedblend.core.engine import TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.setup import Setup
from fedblend.core.sharing import gather
from fedblend.data.loaders.small import Digits
from fedblend.data.scale import Scaler
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.sgd import SGD
from fedblend.experiment.config import resolve

UNIT = Scaler("unit", False, *(torch.tensor(v).view(1, 1, 1) for v in (1 / 255, 0.0, 1 / 255, 0.0)))
STANDARD = Scaler("standard", False, *(torch.tensor(v).view(1, 1, 1) for v in (1 / 64, -0.8, 1 / 255, 0.0)))
"""Pictures less their mean 0.2, in units of their deviation 64 / 255."""


def context(classes: int = 10, scale: Scaler = UNIT) -> Context:
    return Context(Task("classification", classes), scale)


def seeded(make: Any, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def perceptron(inputs: int = 64, classes: int = 10, seed: int = 0, hidden: int = 32) -> nn.Module:
    """A smooth network in float64."""
    return seeded(
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, hidden), nn.Sigmoid(), nn.Linear(hidden, classes)
        ).double(),
        seed,
    )


def convnet(classes: int = 10) -> nn.Module:
    """Two convolutions with ReLUs, and a linear layer."""
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(16 * 64, classes),
        )
    )  # fmt: skip


def digits(count: int = 1, first: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Real digits of different classes, in [0, 1]."""
    data = Digits().load().train
    return data.x[first : first + count].to(dtype) / 255, data.y[first : first + count]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


STEPS = {
    "gradient": None,
    "one step": Steps(0.1, 1),
    "three steps": Steps(0.1, 3, momentum=0.9, weight_decay=0.01, clip_norm=0.5),
    "two batches": Steps(0.1, [[0, 1], [2, 3], [1, 3]]),
}


@pytest.mark.parametrize("steps", STEPS)
def test_the_cost_at_the_true_images_is_zero(steps: str) -> None:
    victim = Victim(perceptron(), context(), steps=STEPS[steps])
    x, y = digits(4)
    observed = victim.observe(x, y)

    for attack in (InvGrad(), DLG()):
        assert attack.distance(victim, observed, x, y).item() == pytest.approx(0.0, abs=1e-12)
        soft = F.one_hot(y, 10).double()
        assert attack.distance(victim, observed, x, soft).item() == pytest.approx(0.0, abs=1e-12)
        assert attack.distance(victim, observed, x.flip(3), y).item() > 1e-6


@each("method", ["fedavg", "fedprox", "fedmix", "fedprox+fed-augmix", "fedmix-hidden", "localmix"])
def test_unrolled_steps_are_what_a_client_really_sends(method: str) -> None:
    hard = {"epochs": 2, "batch_size": 3, "momentum": 0.9, "weight_decay": 1e-2, "clip_norm": 0.5, "lr": 0.02}
    made = setup(method=method, model={"name": "mlp", "hidden": [7, 5]}, scale="standard", train=hard)
    engine, start, sizes, client = LoopEngine(made), made.weights(), made.sizes(0), 2
    parts = made.experiment.method
    pool = gather(dict(engine.share(0, start, range(4), sizes))) if parts.sharing.plan.active else None
    task = TrainTask(0, start, pool, sizes)
    one = engine.assign(task, client)
    (trained,) = engine.train(task, [client])
    x, y = made.samples(client, one.samples)
    order = [one.order[a:b].tolist() for a, b in zip(one.bounds[:-1], one.bounds[1:], strict=True)]

    victim = Victim(
        made.model,
        Context(made.task, made.scale, one.pool.tensors, start),
        parts.objective,
        [(f"terms.{i}", term) for i, term in enumerate(parts.terms)],
        {name: torch.from_numpy(array) for name, array in one.drawn.items()},
        Steps(0.02, order, momentum=0.9, weight_decay=1e-2, clip_norm=0.5),
    )
    sent, observed = victim.observe(made.scale(x), y), victim.update_of(trained.weights)

    assert cosine_distance(sent, observed).item() < 1e-6
    for name, tensor in observed.items():
        torch.testing.assert_close(sent[name], tensor, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("model", [perceptron(hidden=5), seeded(lambda: Attentive(outputs=10).double())])
def test_what_is_sent_can_be_differentiated_through_all_steps(model: nn.Module) -> None:
    victim = Victim(model, context(), steps=Steps(0.5, 3, momentum=0.5))
    x, y = digits(2)
    observed = victim.observe(*digits(2, 7))
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(squared_distance(victim.sent(x, y), observed), x)
    x = x.detach()
    way, h = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 1e-5

    ahead, behind = (squared_distance(victim.sent(x + sign * h * way, y), observed).item() for sign in (1, -1))

    assert (gradient * way).sum().item() == pytest.approx((ahead - behind) / (2 * h), rel=1e-6)


def test_known_augmentations_can_be_attacked_through() -> None:
    """The gradient with respect to the images takes the way through the views too."""
    made = setup(images(side=8), method="fed-augmix")
    objective = made.experiment.method.objective
    x, y = made.scale(made.data.train.x[:2]), made.data.train.y[:2]
    drawn = {n: torch.from_numpy(a) for n, a in objective.draw(rng(), StepPlan(np.array([2]), 2, 0)).items()}
    victim = Victim(made.model, Context(made.task, made.scale), objective, drawn=drawn)
    observed = victim.observe(x, y)

    assert InvGrad().distance(victim, observed, x, y).item() == pytest.approx(0.0, abs=1e-6)
    moved = (x + 0.3).requires_grad_()
    (gradient,) = torch.autograd.grad(InvGrad().distance(victim, observed, moved, y), moved)
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().max()) > 0


def untrained(made: Setup) -> RoundSnapshot:
    """The first round, without a run."""
    loop = federation_of(made)
    begun = loop.begin_round(loop.start()[0])
    return RoundSnapshot(None, made, 0, begun.task, tuple(begun.cohort))


CLIPPED: dict[str, dict[str, Any]] = {
    "gaussian": {},
    "laplace": {"distribution": "laplace", "clip": 1.0},
    "gradients": {"on": "gradients", "clip": 0.5},
    "noise at the server": {"multiplier": 1.0, "side": "server"},
    "no update is that long": {"clip": 1e3},
}


@each("model", [{"name": "mlp", "hidden": [7]}, BATCH_NORM])
@each("options", CLIPPED.values())
def test_clipping_is_repeated(options: dict[str, Any], model: dict[str, Any]) -> None:
    """The clipped norm is of all that is sent, also of batch norm's running means."""
    protection = {"name": "noise", "clip": 0.05, **options}
    made = setup(images(), model=model, train={"lr": 0.1, "batch_size": 4}, protection=protection)

    snapshot = untrained(made)
    attack = prepare(snapshot, snapshot.cohort[0], attacker="knows", images=4, steps=2)

    norm = torch.cat([t.flatten() for t in attack.observed.values()]).norm()
    for cost in (InvGrad(), DLG()):
        found = cost.distance(attack.victim, attack.observed, attack.x, attack.y).item()
        assert found == pytest.approx(0.0, abs=1e-6 * (1 if cost.cost == "cosine" else float(norm) ** 2))
    x = (attack.x + 0.1).requires_grad_()
    (gradient,) = torch.autograd.grad(DLG().distance(attack.victim, attack.observed, x, attack.y), x)
    assert bool(gradient.isfinite().all())


@examples(30)
@given(st.integers(0, 9), st.integers(0, 1000), st.booleans())
def test_the_label_of_one_image_is_read_off_exactly(label: int, seed: int, bias: bool) -> None:
    model = seeded(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10, bias=bias)).double(), seed
    )
    x = torch.from_numpy(rng(seed).random((1, 1, 8, 8)))

    sent = Victim(model, context()).observe(x, torch.tensor([label]))

    if float(sent["3.weight"].abs().max()) > 0:  # some hidden unit is awake
        assert infer_labels(model, sent).tolist() == [label]


@each("labels", [[3, 1, 4, 1], [5, 5, 5, 5], [0, 9, 2, 7]])
@each("steps", [None, Steps(0.01, 2)])
def test_labels_of_several_images_are_read_off_an_untrained_model(labels: list[int], steps: Steps | None) -> None:
    x, _ = digits(4)
    victim = Victim(perceptron(), context(), steps=steps)
    sent = victim.observe(x, torch.tensor(labels))

    rebuilt = invert(victim, sent, x.shape, InvGrad(iterations=1), rng=rng())

    assert rebuilt.y.tolist() == sorted(labels)


def test_dlg_finds_image_and_label_together() -> None:
    x, y = digits(1, 3)
    victim = Victim(perceptron(), context())

    rebuilt = invert(victim, victim.observe(x, y), x.shape, DLG(iterations=40, restarts=2), rng=rng())

    assert rebuilt.y.tolist() == y.tolist()
    assert mse(x, rebuilt.x)[0] < 1e-4
    assert rebuilt.curve[-1] < 1e-4 * rebuilt.curve[0]


@pytest.mark.slow
def test_idlg_reads_the_label_and_finds_the_image() -> None:
    x, y = digits(1, 5)
    victim = Victim(perceptron(), context(), steps=Steps(0.1, 1))

    rebuilt = invert(victim, victim.observe(x, y), x.shape, IDLG(iterations=60, restarts=2), rng=rng())

    assert rebuilt.y.tolist() == y.tolist()
    assert psnr(x, rebuilt.x)[0] > 30


@pytest.mark.slow
@pytest.mark.parametrize("steps", [None, Steps(0.05, 3)])
def test_invgrad_rebuilds_a_digit(steps: Steps | None) -> None:
    x, y = digits(1, dtype=torch.float32)
    victim = Victim(convnet(), context(), steps=steps)

    rebuilt = invert(victim, victim.observe(x, y), x.shape, InvGrad(iterations=250), labels=y, rng=rng())

    found = compare(x, rebuilt.x, UNIT)
    assert found.psnr[0] > 20
    assert found.ssim[0] > 0.8
    assert rebuilt.cost < 0.05 * rebuilt.curve[0]


def small(**options: Any) -> dict[str, Any]:
    x, y = digits(1)
    victim = Victim(perceptron(hidden=4), context(scale=STANDARD))
    given = {"victim": victim, "observed": victim.observe(x, y), "shape": x.shape, "labels": y, "rng": rng()}
    return {**given, "attack": InvGrad(), **options}


def test_the_best_starting_point_is_kept() -> None:
    rebuilt = invert(**small(attack=InvGrad(restarts=4, iterations=5)))

    assert len(rebuilt.costs) == 4
    assert len(set(rebuilt.costs)) == 4
    assert rebuilt.cost == min(rebuilt.costs) == rebuilt.costs[rebuilt.restart]
    assert len(rebuilt.curve) == 6
    assert rebuilt.curve.min() == rebuilt.cost
    alone = small()
    cost = InvGrad().distance(alone["victim"], alone["observed"], rebuilt.x, alone["labels"])
    assert rebuilt.cost == pytest.approx((cost + 1e-6 * total_variation(rebuilt.x)).item(), rel=1e-9)


def test_an_interrupted_attack_keeps_its_best_image() -> None:
    def interrupt(restart: int, iteration: int, cost: torch.Tensor) -> None:
        if (restart, iteration) == (1, 3):
            raise KeyboardInterrupt

    rebuilt = invert(**small(attack=InvGrad(restarts=3, iterations=8), progress=interrupt))

    assert rebuilt.stopped
    assert len(rebuilt.costs) == 2
    assert len(rebuilt.curve) == (9, 4)[rebuilt.restart]
    assert rebuilt.cost == min(rebuilt.costs)


def test_boxed_images_are_pictures() -> None:
    low, high = (float(STANDARD.from_unit(torch.tensor(unit)).squeeze()) for unit in (0.0, 1.0))

    made = small()
    box = (torch.tensor(low).double(), torch.tensor(high).double())
    x = 3 * torch.from_numpy(rng(1).standard_normal(tuple(made["shape"])))

    def seen(boxed: bool) -> torch.Tensor:
        attack = InvGrad(iterations=30, lr=1.0, boxed=boxed)
        found = attack.search(made["victim"], made["observed"], x, made["labels"], box)
        return torch.stack([images.clone() for images, _, _ in found])

    assert low == pytest.approx(-0.8)
    assert (float(seen(True).min()), float(seen(True).max())) == (box[0], box[1])
    assert float(seen(False).min()) < low
    rebuilt = invert(**small(attack=InvGrad(iterations=3, lr=5.0)))
    assert low <= float(rebuilt.x.min()) < float(rebuilt.x.max()) <= high


def test_invgrads_steps_are_signed_and_decay() -> None:
    made = small()
    x = torch.zeros(made["shape"], dtype=torch.float64) + 0.3
    attack = InvGrad(iterations=16, boxed=False, lr=0.1)

    points = [i[0].clone() for i in attack.search(made["victim"], made["observed"], x, made["labels"], None)]

    longest = [float((b - a).abs().max()) for a, b in pairwise(points)]
    # Adam's step is the learning rate while the signs stay, and never much more.
    assert torch.allclose((points[1] - points[0]).abs(), torch.tensor(0.1, dtype=torch.float64), atol=1e-6)
    for number, length in enumerate(longest):
        rate = 0.1 * 0.1 ** sum(number >= at for at in (6, 10, 14))
        assert 0.1 * rate < length < 1.2 * rate, number


def test_cost_and_total_variation_are_their_definitions() -> None:
    a = {"u": torch.tensor([3.0, 0.0]), "v": torch.tensor([[4.0]])}
    b = {"u": torch.tensor([0.0, 2.0]), "v": torch.tensor([[1.0]])}
    picture = torch.tensor([[0.0, 1.0, 1.0], [2.0, 1.0, 0.0]]).view(1, 1, 2, 3)

    assert squared_distance(a, b).item() == 9 + 4 + 9
    assert cosine_distance(a, b).item() == pytest.approx(1 - 4 / (5 * math.sqrt(5)))
    assert cosine_distance(a, {name: 7 * t for name, t in a.items()}).item() == pytest.approx(0, abs=1e-6)
    assert total_variation(picture).item() == pytest.approx((2 + 0 + 1) / 3 + (1 + 0 + 1 + 1) / 4)


def test_steps_clip_decay_and_remember_as_the_engines_do() -> None:
    model, (x, y) = perceptron(hidden=3), digits(2)
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "clip_norm": 0.2}
    train = resolve({"data": "digits", "partition": {"name": "iid", "clients": 1}, "train": settings}).train
    sent = Victim(model, context(), steps=Steps(batches=4, **settings)).observe(x, y)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    params = list(model.parameters())
    optimizer = SGD(params, train, 0)
    for _ in range(4):
        optimizer.step(torch.autograd.grad(F.cross_entropy(model(x), y), params))

    for name, param in model.named_parameters():
        torch.testing.assert_close(sent[name], (param - before[name]).detach(), rtol=1e-10, atol=1e-14)


@examples(20)
@given(st.integers(0, 1000))
def test_psnr_of_one_channel_follows_from_mse_on_the_models_scale(seed: int) -> None:
    pictures = torch.from_numpy(rng(seed).random((2, 3, 1, 8, 8)))
    original, rebuilt = (STANDARD.from_unit(p) for p in pictures)
    deviation = 64 / 255

    found = compare(original, rebuilt, STANDARD)

    assert found.psnr == pytest.approx(-10 * np.log10(found.mse * deviation**2), rel=1e-5)


def test_the_same_picture_is_like_itself() -> None:
    x, _ = digits(3)
    found = compare(x, x.clone(), UNIT)

    assert found.mse.tolist() == [0, 0, 0]
    assert found.psnr.tolist() == [math.inf] * 3
    assert found.ssim == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("shape", [(1, 7, 7), (1, 28, 28), (3, 32, 19)])
def test_ssim_is_that_of_scikit_image(shape: tuple[int, int, int]) -> None:
    metrics = pytest.importorskip("skimage.metrics")
    smooth = F.avg_pool2d(torch.from_numpy(rng(1).random((4, shape[0], shape[1] + 4, shape[2] + 4))), 5, stride=1)
    noisy = (smooth + 0.2 * torch.from_numpy(rng(2).random((4, *shape)))).clamp(0, 1)
    constants = torch.ones(1, *shape), torch.zeros(1, *shape)

    for one, other in ((smooth, noisy), constants):
        expected = [
            metrics.structural_similarity(a, b, win_size=7, data_range=1.0, channel_axis=0)
            for a, b in zip(one.numpy(), other.numpy(), strict=True)
        ]
        # scikit-image keeps float32 images in float32; these are float64, except for the constants.
        assert ssim(one, other) == pytest.approx(expected, rel=1e-6 if one.dtype == torch.float32 else 1e-11)


def test_without_scipy_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = r'needs the package scipy.*pip install "\.\[analysis\]"'
    with pytest.raises(FedblendError, match=told):
        match(torch.zeros(2, 1, 7, 7), torch.zeros(2, 1, 7, 7))
    with pytest.raises(FedblendError, match=told):  # before it reads the run
        outcome.attack_run("no-run", 0, 0)


@examples(20)
@given(st.permutations(range(5)), st.integers(0, 1000))
def test_rebuilt_images_are_matched_in_whatever_order_they_come(order: list[int], seed: int) -> None:
    original = torch.from_numpy(rng(seed).random((5, 1, 8, 8)))
    noise = 0.05 * torch.from_numpy(rng(seed + 1).random((5, 1, 8, 8)))
    rebuilt = (original + noise)[torch.tensor(order)]

    assert [order[row] for row in match(original, rebuilt)] == list(range(5))
    assert compare(original, rebuilt, UNIT).mse.max() < 0.01


def test_matching_is_one_to_one_and_least_in_sum() -> None:
    # Both originals are nearest to the first rebuilt image, which only one may have.
    original = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)
    rebuilt = torch.tensor([0.6, 3.0]).view(2, 1, 1, 1)

    assert match(original, rebuilt).tolist() == [0, 1]
    assert match(original.flip(0), rebuilt).tolist() == [1, 0]


def observing(change: Any) -> dict[str, Any]:
    made = small()
    return {**made, "observed": change(made["observed"])}


BIAS = "1.bias"


@each(
    ("call", "told"),
    [
        (lambda: invert(**small(shape=(1, 64))), "shape: [1, 64] is not valid"),
        (
            lambda: invert(**small(labels=torch.tensor([1, 2]))),
            "labels: torch.int64 of shape [2] is not valid; valid: integers of shape",
        ),
        (lambda: invert(**small(labels=torch.tensor([1.0]))), "labels: torch.float32"),
        (lambda: invert(**observing(lambda o: {n: o[n] for n in o if n != BIAS})), "observed: '1.bias' is missing"),
        (lambda: invert(**observing(lambda o: o | {BIAS: torch.zeros(3)})), "'1.bias' has shape [3]; valid: [4]"),
        (lambda: invert(**observing(lambda o: o | {BIAS: o[BIAS] * math.nan})), "'1.bias' contains NaN or infinity"),
        (lambda: make_attack("invgrd", {}), "unknown attack 'invgrd' (did you mean 'invgrad'?)"),
        (lambda: make_attack("invgrad", {"iterations": 0}), "attack invgrad.iterations: 0 is not valid"),
        (lambda: make_attack("invgrad", {"step": 1}), "attack invgrad.step"),
        (lambda: Steps(0, 1), "steps.lr: 0"),
        (lambda: Steps(0.1, 0), "steps.batches: 0"),
        (lambda: infer_labels(nn.Flatten(), {}), "ends in no linear layer"),
        (lambda: ssim(*torch.zeros(2, 1, 1, 6, 9)), "images: shape [1, 6, 9] is too small for SSIM's windows of 7 x 7"),
        (lambda: mse(torch.zeros(1, 1, 8, 8), torch.zeros(2, 1, 8, 8)), "images: shapes [1, 1, 8, 8] and [2, 1, 8, 8]"),
    ],
)
def test_mistakes_are_told(call: Any, told: str) -> None:
    with pytest.raises(FedblendError, match=re.escape(told)):
        call()


@pytest.mark.parametrize("method", ["fedavg", "fedmix", "flea"])
def test_an_attacker_who_knows_all_repeats_the_clients_update(method: str) -> None:
    """FLea reads the round's first weights; the attacker has these."""
    made = setup(images(), method=method, model={"name": "mlp", "hidden": [8, 6]}, unsafe=True)
    snapshot = untrained(made)
    attack = prepare(snapshot, snapshot.cohort[0], attacker="knows")

    repeated = attack.victim.observe(attack.x, attack.y)

    for name, sent in attack.observed.items():
        assert (repeated[name] - sent).norm() < 1e-4 * sent.norm()


@each(
    ("field", "value", "reason"),
    [
        ("optimizer", "adam", "the attack repeats steps of SGD with one learning rate in a round and one batch a step"),
        ("schedule_in_round", {"name": "cosine"}, "the attack repeats steps of SGD with one learning rate in a round"),
        ("accumulate", 2, "the attack repeats steps of SGD with one learning rate in a round and one batch a step"),
        ("augment", ["horizontal-flip"], "the attack repeats steps on pictures as they are; valid: a run without it"),
        ("optimizer_state", "keep", "the attack begins without momentum; valid: reset"),
    ],
)
def test_what_an_attack_cannot_repeat_is_refused_by_its_own_field(field: str, value: Any, reason: str) -> None:
    snapshot = untrained(setup(images(), train={field: value, "momentum": 0.9 * (value == "keep")}))
    with pytest.raises(FedblendError, match=re.escape(f"train.{field}: {reason}")):
        prepare(snapshot, snapshot.cohort[0], images=2)
