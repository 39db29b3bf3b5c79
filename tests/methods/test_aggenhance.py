"""AggEnhance's properties (oracles), on cases small enough to work by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import each, federation, images, run, same, setup
from torch import nn
from torch.nn import functional as F

from fedblend._kernels.operators import Convolution, are_usable
from fedblend.core.context import Task
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.server_step import ServerContext
from fedblend.data.scale import Scaler
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.methods.server_steps.aggenhance import AggEnhance, SecureAggEnhance, ballots, beginning, elect, search
from fedblend.methods.server_steps.tuning import PriorSamples, augmented, logits, ready

CLASSES = 3
UNIT = Scaler("unit", False, *(torch.tensor([[[v]]]) for v in (1 / 255, 0.0, 1 / 255, 0.0)))


def server(
    models: list[dict[str, torch.Tensor]], model: nn.Module, step: AggEnhance | None = None, **changes: Any
) -> ServerContext:
    """A server step's view of a round, on points of 1 x 2 x 2, with the clients' models."""
    made = ServerContext(
        round=0,
        model=model.eval(),
        trained=[name for name, _ in model.named_parameters()],
        shape=(1, 2, 2),
        scale=UNIT,
        task=Task("classification", CLASSES),
        lr=0.1,
        rng=np.random.default_rng(0),
    )
    uploads = dict(enumerate(models))
    ask = lambda question: list((step or AggEnhance()).respond(uploads, question, made).values())  # noqa: E731
    return replace(made, **{"query": ask, **changes})


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, CLASSES))


def convolution() -> nn.Module:
    """Layers that fedblend's kernels compute."""
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3, CLASSES))


def weights(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "1.weight": scale * torch.randn(CLASSES, 4, generator=draw),
        "1.bias": scale * torch.randn(CLASSES, generator=draw),
    }


def stacked(models: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([one[name] for one in models]) for name in models[0]}


@each(
    ("keep", "labels", "rounds"),
    [({}, [0, 1, 2] * 3, [0, 0, 0, 1, 1, 1, 2, 2, 2]), ({"keep": 4}, [2, 0, 1, 2], [1, 2, 2, 2])],
)
def test_every_round_adds_one_point_a_class_in_the_order_of_the_classes(keep: Any, labels: Any, rounds: Any) -> None:
    """A queue keeps the newest ones."""
    state, _ = run(federation(method={"server_step": {"name": "aggenhance", "steps": 2, "epochs": 1, **keep}}), 3)
    kept = state.server_part("server_step")
    assert (len(kept["points"]), kept["labels"].tolist(), kept["rounds"].tolist()) == (len(labels), labels, rounds)


def test_kernels_find_the_points_and_votes_of_pytorchs_layers() -> None:
    draw = torch.Generator().manual_seed(0)
    made = [convolution()]
    made += [copy.deepcopy(made[0]) for _ in range(2)]
    for model in made:
        for tensor in model.parameters():
            nn.init.normal_(tensor, generator=draw)
    view = server([], made[0])
    models = [dict(model.named_parameters()) for model in made]
    models = [{name: tensor.detach() for name, tensor in one.items()} for one in models]
    begin = torch.rand(CLASSES, 1, 2, 2, generator=draw)

    found = search(stacked(models), begin, view, 5, 0.1)
    votes = ballots(models, found, view)

    assert isinstance(ready(view).model[0], Convolution if are_usable(torch.device("cpu")) else nn.Conv2d)
    assert isinstance(view.model[0], nn.Conv2d)
    for model, points in zip(made, found, strict=True):
        wanted = begin.clone()
        for _ in range(5):
            moving = wanted.requires_grad_()
            loss = F.cross_entropy(model(moving), torch.arange(CLASSES), reduction="sum")
            wanted = (wanted - 0.1 * torch.autograd.grad(loss, moving)[0]).clamp(0, 1).detach()
        torch.testing.assert_close(points, wanted, rtol=1e-4, atol=1e-5)
    for model, vote in zip(made, votes, strict=True):
        chances = torch.stack([model(points).softmax(1) for points in found])
        own, best = chances.diagonal(dim1=1, dim2=2), chances.argmax(2) == torch.arange(CLASSES)
        torch.testing.assert_close(vote, torch.where(best, own, 0.0), rtol=1e-4, atol=1e-5)


def test_votes_by_hand() -> None:
    # Two models, two classes, inputs of one pixel: logits are (0, a x) and (0, b x).
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2))
    one = {"1.weight": torch.tensor([[0.0], [2.0]]), "1.bias": torch.tensor([0.0, -1.0])}
    two = {"1.weight": torch.tensor([[0.0], [4.0]]), "1.bias": torch.tensor([0.0, -1.0])}
    view = server([one, two], model, task=Task("classification", 2), shape=(1, 1, 1))
    points = torch.tensor([[0.0, 1.0], [0.4, 0.3]]).view(2, 2, 1, 1, 1)

    def chance(z: float) -> float:
        return 1 / (1 + math.exp(-z))

    wanted = [
        # Class 0 at 0: both say so, with 1 - sigma(-1). Class 1 at 1: sigma(1) and sigma(3).
        [2 * (1 - chance(-1)), chance(1) + chance(3)],
        # Class 0 at .4: model one only (-.2 against .6). Class 1 at .3: model two only (-.4 against .2).
        [1 - chance(-0.2), chance(0.2)],
    ]
    score = sum(ballots([one, two], points, view))

    torch.testing.assert_close(score, torch.tensor(wanted))
    assert elect(points, score).flatten().tolist() == [0.0, 1.0]


def test_the_first_of_level_points_is_elected() -> None:
    points = torch.arange(6.0).view(3, 2, 1, 1, 1)
    assert elect(points, torch.tensor([[1.0, 0.0], [1.0, 2.0], [0.0, 2.0]])).flatten().tolist() == [0.0, 3.0]


def test_the_search_begins_half_way_to_the_last_points() -> None:
    last = torch.full((CLASSES, 1, 2, 2), 0.5)
    state = {"points": torch.cat([torch.zeros(CLASSES, 1, 2, 2), last])}
    fresh = beginning(server([], linear()))
    later = beginning(server([], linear(), state=state))

    torch.testing.assert_close(later, (last + fresh) / 2)
    assert float(fresh.min()) >= 0
    assert float(fresh.max()) < 1


@pytest.mark.parametrize("build", [linear, convolution])
def test_tuning_is_plain_sgd_on_all_points_by_their_worth(build: Callable[[], nn.Module]) -> None:
    model, draw = build(), torch.Generator().manual_seed(5)
    mean = {name: torch.randn(t.shape, generator=draw) for name, t in model.state_dict().items()}
    points = torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 1, 2, 0])
    view = server([], model, round=2)

    worth = torch.tensor([0.25, 0.25, 0.5, 1.0])
    tuned = AggEnhance(epochs=1, batch_size=4, lr=0.3).tune(mean, points, labels, worth, view)

    leaves = {name: t.clone().requires_grad_() for name, t in mean.items()}
    each = F.cross_entropy(logits(view, leaves, points), labels, reduction="none")
    loss = (each * worth).sum() / 2.0
    for (name, leaf), slope in zip(leaves.items(), torch.autograd.grad(loss, list(leaves.values())), strict=True):
        torch.testing.assert_close(tuned[name], leaf.detach() - 0.3 * slope)


def test_a_point_weighs_less_with_every_round() -> None:
    points = torch.rand(2, 1, 2, 2, generator=torch.Generator().manual_seed(1)).repeat(2, 1, 1, 1)[:CLASSES]
    state = {"points": points, "labels": torch.arange(CLASSES), "rounds": torch.zeros(CLASSES, dtype=torch.int64)}
    seen = {}

    class Spy(AggEnhance):
        def tune(self, weights: Any, points: Any, labels: Any, worth: torch.Tensor, server: ServerContext) -> Any:
            seen["worth"] = worth
            return dict(weights)

    step = Spy(steps=1, decay=0.5)
    step.refine(weights(1), server([weights(1)], linear(), step, round=2, state=state))

    assert seen["worth"].tolist() == [0.25] * CLASSES + [1.0] * CLASSES


@pytest.mark.slow
@pytest.mark.parametrize("engine", [LoopEngine, StackedEngine])
def test_clients_make_the_points_that_the_server_would_have_made(engine: type[LoopEngine]) -> None:
    options = {"steps": 5, "epochs": 2}
    settings = {"train": {"cohort": 4}, "model": "lenet5"}
    open_world = setup(images(side=14), method={"server_step": {"name": "aggenhance", **options}}, **settings)
    veiled = setup(images(side=14), method={"server_step": {"name": "aggenhance-secure", **options}}, **settings)

    seen, _ = run(open_world, 2)
    unseen, records = run(RoundLoop(veiled, engine(veiled)), 2)

    torch.testing.assert_close(
        unseen.server_part("server_step")["points"], seen.server_part("server_step")["points"], atol=1e-4, rtol=1e-3
    )
    for name, tensor in seen.weights.items():
        torch.testing.assert_close(unseen.weights[name], tensor, atol=1e-4, rtol=1e-3)
    # Down: where to begin, and all clients' points, to each of four; up: a client's points, and its votes.
    point = CLASSES * 14 * 14 * 4
    assert records[0]["bytes_down"]["questions"] == 4 * point + 4 * (4 * point)
    assert records[0]["bytes_up"]["answers"] == 4 * point + 4 * (4 * CLASSES * 4)


def test_adams_points_are_those_of_pytorch() -> None:
    model, begin = linear().eval(), torch.rand(CLASSES, 1, 2, 2, generator=torch.Generator().manual_seed(3))
    weights = {name: 5 * tensor.detach()[None] for name, tensor in model.named_parameters()}
    spec = server([], model)

    found = search(weights, begin, spec, 20, 0.05, adam=True)[0]

    points = begin.clone().requires_grad_()
    adam = torch.optim.Adam([points], 0.05)
    for _ in range(20):
        adam.zero_grad()
        outputs = logits(spec, {name: tensor[0] for name, tensor in weights.items()}, points)
        F.cross_entropy(outputs, torch.arange(CLASSES), reduction="sum").backward()
        adam.step()
        with torch.no_grad():
            points.clamp_(0, 1)
    torch.testing.assert_close(found, points.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["aggenhance", "aggenhance-secure"])
def test_the_record_has_the_shares_of_interior_points(name: str) -> None:
    options = {"name": name, "steps": 30, "step_size": 5.0}
    made = setup(images(side=14), method={"server_step": options}, train={"cohort": 4}, model="lenet5")

    records = run(RoundLoop(made, LoopEngine(made)), 2)[1]

    for record in records:
        assert record["measured"].keys() == {"interior_own", "interior_global"}
        assert all(0 <= share <= 1 for share in record["measured"].values())
    assert records[-1]["measured"]["interior_own"] > 0


def test_answers_of_the_wrong_form_count_for_nothing() -> None:
    good = torch.full((CLASSES, 1, 2, 2), 0.5)

    def ask(question: Any) -> list[dict[str, torch.Tensor]]:
        if "begin" in question:
            return [{"points": good}, {"points": torch.ones(2)}, {"nonsense": good}, {"points": good.double()}]
        assert question["points"].shape == (1, CLASSES, 1, 2, 2)
        return [{"scores": torch.full((1, CLASSES), 1e9)}, {"scores": torch.ones(7)}, {}]

    best = SecureAggEnhance().best(good, server([], linear(), query=ask))
    assert best is not None
    assert torch.equal(best, good)
    # With no answers the aggregate stays.
    assert SecureAggEnhance().best(good, server([], linear())) is None
    refined, kept = SecureAggEnhance().refine(weights(3), server([], linear()))
    assert same(refined, weights(3))
    assert kept == {}


def test_real_samples_one_of_each_class_and_the_same_in_every_round() -> None:
    made = setup(method={"server_step": {"name": "prior-samples", "per_class": 2}}, unsafe=True)

    x, y = made.prior(2)
    again, _ = made.prior(2)

    assert y.tolist() == [0, 0, 1, 1, 2, 2]
    assert torch.equal(x, again)
    where = [(made.data.train.x == one).flatten(1).all(1).nonzero().flatten().tolist() for one in x]
    assert all(any(made.data.train.y[i] == label for i in rows) for rows, label in zip(where, y, strict=True))
    plain, _ = run(federation(unsafe=True), 2)
    tuned, _ = run(made, 2)
    assert not same(tuned.weights, plain.weights)


def test_augmentation_moves_and_mirrors_and_does_nothing_else() -> None:
    picture = torch.zeros(200, 1, 12, 12)
    picture[:, 0, 6, 4] = 1.0

    moved = augmented(picture, np.random.default_rng(0))

    assert moved.shape == picture.shape
    assert moved.sum((1, 2, 3)).eq(1).all()
    rows, columns = moved[:, 0].flatten(1).argmax(1) // 12, moved[:, 0].flatten(1).argmax(1) % 12
    assert set(rows.tolist()) == set(range(2, 11))
    # Column 4, or mirrored 7, each moved by -4 to 4; what leaves the picture is gone.
    assert set(columns.tolist()) == set(range(12))


def test_augmentation_needs_pictures() -> None:
    known = server([], linear(), shape=(4,))
    with pytest.raises(
        FedblendError, match=r"server_step.augment: true needs images, but these data are of shape \[4\]"
    ):
        PriorSamples(augment=True).require_possible(known)
    PriorSamples().require_possible(known)


def test_one_clients_vote_counts_one_at_most() -> None:
    bad, good = torch.zeros(CLASSES, 1, 2, 2), torch.ones(CLASSES, 1, 2, 2)
    honest = {"scores": torch.stack([torch.zeros(CLASSES), torch.full((CLASSES,), 0.6)])}
    liar = {"scores": torch.stack([torch.full((CLASSES,), 1e9), torch.full((CLASSES,), -1e9)])}

    def ask(question: Any) -> list[dict[str, torch.Tensor]]:
        return [{"points": bad}, {"points": good}] if "begin" in question else [liar, honest, honest]

    best = SecureAggEnhance().best(good, server([], linear(), query=ask))

    assert best is not None
    assert torch.equal(best, good)


def tuned(decay: float, rounds: list[int], batch: int) -> dict[str, torch.Tensor]:
    """Weights that were 0, tuned on dark points of class 0, made in these rounds, and a bright one of class 1."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}
    points = torch.cat([torch.full((len(rounds) - 1, 1, 2, 2), 0.1), torch.ones(1, 1, 2, 2)])
    labels = torch.tensor([0] * (len(rounds) - 1) + [1])
    state = {"points": points, "labels": labels, "rounds": torch.tensor(rounds)}
    step = AggEnhance(decay=decay, epochs=3, batch_size=batch, lr=0.5)
    worth = decay ** (max(rounds) - state["rounds"])
    return step.tune(zeros, points, labels, worth, server([], linear(), step, round=max(rounds), state=state))


def test_old_points_move_the_model_less_also_in_batches_of_their_own() -> None:
    plain, decayed = (tuned(decay, [0] * 32 + [4], batch=1) for decay in (1.0, 0.01))
    assert plain["1.bias"][0] > plain["1.bias"][1]
    assert decayed["1.bias"][1] > decayed["1.bias"][0]


def test_weights_that_vanish_leave_the_model_finite() -> None:
    decayed = tuned(0.01, [0] * 32 + [200], batch=8)
    assert all(tensor.isfinite().all() for tensor in decayed.values())


def test_the_servers_own_samples_are_neither_held_out_nor_for_validation() -> None:
    made = setup(images(), holdout=0.5, validation={"server": 0.2}, method="prior-samples", unsafe=True)
    own = made.data.train.x[made.population.order]
    x, _ = made.prior(100)
    assert len(x) == len(own) < len(made.data.train)
    assert {one.numpy().tobytes() for one in x} == {one.numpy().tobytes() for one in own}
