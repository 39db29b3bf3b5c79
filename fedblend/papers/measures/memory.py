"""What a training step keeps in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from fedblend.core.registry import part
from fedblend.papers.measures.base import CellRun, Measure

MEGABYTE = 10**6


@part("measure", "step-memory")
class StepMemory(Measure):
    """Tensors that a client's step keeps for its backward passes, weights among them, in MB (FedMix, appendix G).

    Counted as autograd saves them, each storage once, on made-up inputs of the data set's shape: so the number is the
    same on every device, needs no data, and leaves out what a device's libraries take for themselves.
    """

    trains = False

    def measured(self, seen: CellRun) -> float:
        """In 10^6 bytes, the most that is kept at once."""
        from fedblend.engines.autotune import seconds_a_step
        from fedblend.engines.loop import LoopEngine
        from fedblend.papers.synthetic import made_up
        from fedblend.runs.runner import one_thread

        with one_thread():
            engine = LoopEngine(made_up(seen.experiment), "cpu")
            return most_kept(lambda: seconds_a_step(engine, 1)) / MEGABYTE


def most_kept(work: Callable[[], object]) -> int:
    """The most bytes that autograd kept for backward passes at any time of some work; a shared storage counts once.

    >>> x = torch.zeros(250, requires_grad=True)
    >>> most_kept(lambda: x.exp().sum().backward())
    1000
    """
    held: Counter[int] = Counter()
    now = most = 0

    class Kept:
        """A saved tensor, which is counted for as long as the graph holds it."""

        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal now, most
            self.tensor = tensor
            storage = tensor.untyped_storage()
            self.place, self.size = storage.data_ptr(), storage.nbytes()
            if not held[self.place]:
                now += self.size
                most = max(most, now)
            held[self.place] += 1

        def __del__(self) -> None:
            nonlocal now
            held[self.place] -= 1
            if not held[self.place]:
                now -= self.size

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        work()
    return most
