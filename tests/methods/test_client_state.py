"""Methods whose clients or server keep a state of their own: every engine, every resume, and with mixing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from federation_helpers import BATCH_NORM, with_parts
from helpers import each, images, run, same_up_to_rounding, setup, slow_except

from fedblend.core.engine import TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.objective import Objective, Personal, Plain, Term
from fedblend.core.setup import Setup
from fedblend.core.state import ClientState, to_tensors
from fedblend.engines import autotune, loop_engine
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine

TRAIN = {"cohort": 3}
HOLDOUT = 0.2
"""Methods that keep layers at clients are tested there."""


@pytest.mark.parametrize(
    "method", slow_except(["scaffold", "fedper"], ["scaffold", "fedper", "moon", "ditto", "pfedme"])
)
@pytest.mark.usefixtures("all_timed")
def test_the_engine_is_chosen_by_trials_that_have_the_states(method: Any) -> None:
    made = setup(method=method, train=TRAIN, ranks=1, holdout=HOLDOUT)
    plan = autotune.plan_engine(made, 1, 1000)
    assert "stacked" in plan.why
    assert not autotune.unstackable(made)


def test_what_is_sent_beside_a_model_takes_time_on_the_air(monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(tensor.numel() * 4 for tensor in setup().weights().values())
    sent: dict[str, list[int]] = {"up": [], "down": []}

    transmit = Setup.transmit

    def noted(setup: Any, direction: str, purpose: str, sizes: Any, *rest: Any) -> Any:
        sent[direction] += sizes.tolist()
        return transmit(setup, direction, purpose, sizes, *rest)

    monkeypatch.setattr(Setup, "transmit", noted)
    run_costs("scaffold")
    assert sent == {"up": 3 * [2 * size], "down": 3 * [2 * size]}

    sent["up"].clear()
    up, _ = run_costs("fedavg", protection={"name": "prune", "keep": 0.1})
    assert sent["up"] == 3 * [round(0.1 * size / 4) * (4 + 4)]
    assert up["weights"] == sum(sent["up"])


def run_costs(method: Any, **changes: Any) -> tuple[dict[str, int], dict[str, int]]:
    made = setup(method=method, train=TRAIN, holdout=HOLDOUT, **changes)
    _, (record,) = run(made, 1)
    return record["bytes_up"], record["bytes_down"]


def test_a_full_gradient_with_batch_norm_has_no_rest_of_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_engine, "SCORE_BATCH", 4)
    term = {"name": "scaffold", "option": "I"}
    method = {"name": "scaffold", "terms": [term]}
    made = setup(images(), [list(range(5))], method=method, model=BATCH_NORM, train={"cohort": 1})
    weights = made.weights()

    gradient = LoopEngine(made).full_gradient(0, 0, 5, weights)

    assert all(torch.isfinite(tensor).all() for tensor in gradient.values())


class Counting(Objective):
    """The task's loss and a penalty that grows by the client's count, which each step renews."""

    name, tracks = "counting", True
    renewed: Any = staticmethod(lambda count: {"count": count + 1})

    def init_client_state(self, spec: Any, weights: Any) -> Any:
        return {"count": torch.ones(())}

    def loss(self, net: Any, batch: Any, drawn: Any, context: Any) -> Any:
        count = context.client_state.get("count", torch.zeros(()))
        for name, tensor in self.renewed(count).items():
            context.renew(name, tensor)
        penalty = torch.stack([w.square().sum() for w in net.weights.values()]).sum()
        return context.task.loss(net(batch.x), batch.y) + 0.01 * count * penalty


def with_objective(objective: Any, **parts: Any) -> Setup:
    """A world with an objective, and other parts, that no registry has."""
    return with_parts(setup(train=TRAIN), objective=objective, **parts)


@pytest.mark.parametrize("personal", ["none", "ditto"])
def test_what_an_objective_keeps_is_of_the_global_models_training(personal: str) -> None:
    """The loop engine trained personal models with the count, stacks without it: weights differed by 0.28."""
    made = with_parts(setup(method={"personal": personal}, train=TRAIN), objective=Counting())
    (loop, _), (stacked, _) = (run(RoundLoop(made, e), 3) for e in (LoopEngine(made), StackedEngine(made, stack=2)))
    assert all(float(kept.parts["objective/count"]) > 1 for kept in loop.client_states.values())
    same_up_to_rounding(to_tensors(stacked.client_states), to_tensors(loop.client_states), steps=1000)


class Scaled(Personal):
    """The global model's weights as trained, times the objective's count."""

    name, keeps = "scaled", "personal"

    def after_training(self, spec: Any, training: Any) -> Any:
        return {name: tensor * training.client_state["count"] for name, tensor in training.weights.items()}


def test_a_personal_model_may_be_made_of_what_the_objective_keeps() -> None:
    made = with_objective(Counting(), personal=Scaled())
    task = TrainTask(0, made.weights(), None, made.sizes(0))
    task = replace(task, client_states={k: ClientState(parts={"objective/count": torch.ones(())}) for k in range(3)})

    for engine in (LoopEngine(made), StackedEngine(made)):
        for update in engine.train(task, [0, 1, 2]):
            count = update.state.parts["objective/count"]
            assert count > 1
            for name, tensor in update.weights.items():
                assert torch.equal(update.state.personal[name], tensor * count)


def test_what_a_step_renews_keeps_its_type() -> None:
    """It became float64 in the loop engine only."""
    made = with_objective(counting(renewed=lambda count: {"count": count.double() + 1}))
    for engine in (LoopEngine(made), StackedEngine(made, stack=2)):
        state, _ = run(RoundLoop(made, engine), 1)
        assert {kept.parts["objective/count"].dtype for kept in state.client_states.values()} == {torch.float32}


def test_the_servers_table_keeps_its_types() -> None:
    """Sums of extras are float64; as a table they made each upload of the next round a bad one."""

    class Summing(Counting):
        exchanges = "extras"

        def init_server_state(self, spec: Any, weights: Any) -> Any:
            return {"total": torch.zeros(())}

        def after_training(self, spec: Any, training: Any) -> Any:
            return dict(training.client_state), {"total": torch.ones(())}

        def after_aggregation(self, weights: Any, state: Any, summary: Any) -> Any:
            return weights, {"total": state["total"] + summary.extras["total"]}

    made = with_objective(Summing())
    state, _ = run(RoundLoop(made, LoopEngine(made)), 2)
    assert state.server_part("objective")["total"].dtype == torch.float32
    assert float(state.server_part("objective")["total"]) == 2 * made.training.cohort


def counting(**changes: Any) -> Counting:
    """The objective with something wrong."""
    made = Counting()
    vars(made).update(changes)
    return made


class Nothing(Term):
    """A term without a loss."""

    name = "nothing"

    def loss(self, params: Any, net: Any, batch: Any, context: Any) -> Any:
        return None


class Adding(Term):
    """A term that renews what it keeps in its steps."""

    name = "adding"

    def init_client_state(self, spec: Any, weights: Any) -> Any:
        return {"count": torch.ones(())}

    def loss(self, params: Any, net: Any, batch: Any, context: Any) -> Any:
        context.renew("count", context.client_state["count"] + 1)
        return torch.zeros(())


NOT_TRACKED = (
    "method: a step renews 'count' at the client, which only an objective with tracks = True may; a term renews what "
    "it keeps in after_training"
)
PAIR = (
    "where a pair of dicts is valid: what the part keeps at the client, and what it sends beside the model (such as "
    "{}, {})"
)
NUMBER = "valid: a tensor of one number (shape [])"
AFTER = "method.objective: after_training of 'counting'"
SENDS = f"{AFTER} sends other tensors beside the model"
DRAW = "method.objective: draw of 'counting' returned"
ROWS = "valid: a NumPy array with one row for each of the 3 steps"


@each(
    ("objective", "message"),
    [
        (
            counting(after_training=lambda *_: ({"count": 1.0}, {})),
            f"{AFTER} returned no tensor as count; valid: torch tensors",
        ),
        (counting(tracks=False), NOT_TRACKED),
        ([Adding()], NOT_TRACKED),
        (
            counting(renewed=lambda count: {"counts": count}),
            "method.objective: a step renews 'counts', which init_client_state did not return; valid: count",
        ),
        (
            counting(renewed=lambda count: {"count": count.reshape(1)}),
            "method.objective: a step renews 'count' of shape [] by a tensor of shape [1]; valid: the same shape",
        ),
        (counting(after_training=lambda *given: {}), f"{AFTER} returned dict, {PAIR}"),
        (counting(after_training=lambda *given: ({}, None)), f"{AFTER} returned (dict, NoneType), {PAIR}"),
        (
            counting(after_training=lambda *given: ({}, {"count": torch.ones(())})),
            f"{SENDS}: missing none, unknown ['count']; valid: nothing, unless the part has exchanges = \"extras\"",
        ),
        (
            counting(
                exchanges="extras",
                init_server_state=lambda *given: {"sum": torch.ones(())},
                after_training=lambda *given: ({}, {"count": torch.ones(())}),
            ),
            f"{SENDS}: missing ['sum'], unknown ['count']; valid: the names of its table at the server",
        ),
        (counting(draw=lambda *given: {"share": 0.5}), f"{DRAW} 'share' as float; {ROWS}"),
        (counting(draw=lambda *given: {"share": np.ones((1, 2))}), f"{DRAW} 'share' as shape [1, 2]; {ROWS}"),
        (counting(draw=lambda *given: None), f"{DRAW} NoneType; valid: a dict of NumPy arrays by name"),
        ([Nothing()], "method.terms 'nothing': its loss is NoneType; " + NUMBER),
        (counting(loss=lambda *given: None), "method.objective: its loss is NoneType; " + NUMBER),
        (
            counting(loss=lambda net, batch, drawn, context: net(batch.x)[:, :1].square().sum(1)[:1]),
            "method.objective: its loss is a tensor of shape [1]; " + NUMBER,
        ),
    ],
)
@each("engine", [LoopEngine, StackedEngine])
def test_what_a_part_does_wrong_at_a_client_is_said(engine: Any, objective: Any, message: str) -> None:
    """What was renewed in vain was lost without a word; the others ended in errors of the engine's own code."""
    made = with_objective(Plain(), terms=objective) if isinstance(objective, list) else with_objective(objective)
    with pytest.raises(FedblendError) as error:
        run(RoundLoop(made, engine(made)), 1)
    assert str(error.value) == message


def test_a_loss_that_does_not_depend_on_the_weights_is_told() -> None:
    made = with_objective(counting(loss=lambda net, batch, *given: net(batch.x).sum().detach()))
    with pytest.raises(FedblendError, match=r"^method\.objective: its loss does not depend on the weights; valid: "):
        run(made, 1)
