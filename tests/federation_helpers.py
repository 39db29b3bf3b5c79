"""What several tests of federation take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from helpers import engine_of, federation_of, run, same_up_to_rounding
from hypothesis import strategies as st

from fedblend import part
from fedblend.core.channel import Channel, Sent
from fedblend.core.engine import ClientUpdate, TrainTask
from fedblend.core.loop import RoundLoop
from fedblend.core.setup import Setup
from fedblend.core.state import RunState, to_tensors
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.experiment.fields import Method

BATCH_NORM = {"name": "module", "path": "helpers:BatchNormNet"}


DROPOUT = {"name": "mlp", "hidden": [12], "dropout": 0.5}


def train(made: Setup, clients: Iterable[int], round: int = 0) -> dict[int, ClientUpdate]:
    """Local training of some clients from a world's first weights, with what their sharing gives them."""
    fed = federation_of(made)
    start, sizes = fed.start()[0], made.sizes(0)
    state = fed.exchange.share_if_due(start, sizes)[0]
    task = TrainTask(round, start.weights, fed.exchange.pool_of(state), sizes)
    return {trained.client: trained for trained in fed.engine.train(task, clients)}


def with_parts(made: Setup, **parts: Any) -> Setup:
    """A world in which some parts of the experiment or of its method are these, which no registry has."""
    of_method = {name: part for name, part in parts.items() if name in Method.model_fields}
    rest = {name: part for name, part in parts.items() if name not in of_method}
    update = {"method": made.method.model_copy(update=of_method), **rest}
    return replace(made, experiment=made.experiment.model_copy(update=update))


def with_calls(engine: LoopEngine, **changed: Callable[..., Any]) -> LoopEngine:
    """Another engine like this one, with some of its calls changed."""
    made = copy.copy(engine)
    made.__dict__.update(changed)
    return made


FLOATS = st.floats(-1e6, 1e6, width=32)


ROWS = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.tuples(st.lists(FLOATS, min_size=n, max_size=n), st.integers(1, 500)), min_size=1, max_size=7)
)


def stacked_gives_the_loops_state(world: Setup, rounds: int, stack: int) -> None:
    """Assert that the stacked engine ends with the weights, and with what clients keep, of the loop engine.

    The bound is wider than rounding of a step: square roots near 0, as of variances and distances, enlarge it.
    """
    ended = []
    for engine in (LoopEngine(world), StackedEngine(world, stack=stack)):
        fed = federation_of(world)
        fed.engine = engine
        ended.append(run(fed, rounds)[0])
    loop, stacked = ended
    kept = to_tensors(loop.client_states), to_tensors(stacked.client_states)
    for wanted, made in ((loop.weights, stacked.weights), kept):
        assert made.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(made[name], tensor, rtol=1e-3, atol=1e-5)


def stacks_agree(made: Setup, rounds: int = 1, stack: int = 2, steps: int = 1000) -> tuple[RunState, RunState]:
    """Assert that stacks of clients give the reference engine's weights; the states of both."""
    loop, stacked = (run(RoundLoop(made, e), rounds)[0] for e in (engine_of(made), StackedEngine(made, stack=stack)))
    same_up_to_rounding(stacked.weights, loop.weights, steps=steps)
    return loop, stacked


@part("channel", "test-lossy")
class Lossy(Channel):
    """Loses what each of ``clients`` is sent or sends."""

    down: tuple[int, ...] = ()
    """Clients that hear nothing."""
    up: tuple[int, ...] = ()
    """Clients that are not heard."""

    def transmit(self, direction: str, sizes: Any, rng: Any, clients: Any = None) -> Any:
        """What it says."""
        return Sent(~np.isin(clients, getattr(self, direction)), np.full(len(sizes), 0.5))


def losing(**clients: list[int]) -> dict[str, Any]:
    """A channel that loses what these clients are sent (``down``) or send (``up``); half a second in each direction."""
    return {"name": "test-lossy", **clients}
