"""Who takes part in a round, and which client's model stands for all where clients keep theirs."""

from __future__ import annotations

import numpy as np

from fedblend.random import stream
from fedblend.world import World


def cohort_of(world: World, round: int) -> np.ndarray:
    """The clients of a round: uniform without replacement among those that hold samples, in order."""
    rng = stream(world.experiment.seed, "cohort", round)
    holding = np.flatnonzero(world.population.sizes)
    return np.sort(rng.choice(holding, world.experiment.train.cohort, replace=False, shuffle=False))


def reference_device(world: World) -> int:
    """The client whose model is evaluated where clients keep theirs: one of the first cohort, by the seed.

    Of another the model would be the untrained one until a round takes it.
    """
    return int(stream(world.experiment.seed, "device").choice(cohort_of(world, 0)))
