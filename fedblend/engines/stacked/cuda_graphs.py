"""Steps over tensors that stay where they are, replayed as CUDA graphs: one launch in place of a hundred.

A batch of ten keeps a GPU busy for less time than its operations take to be launched. So what a step works on has a
fixed place, into which each batch is copied; the first steps run as they are, with real batches, which is the warm-up
on a side stream that PyTorch asks for ("CUDA semantics", CUDA Graphs); then one is captured, and from then on replayed.
Where there is no CUDA the same work over the same tensors is simply done, so that tests reach all but the capture.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol

import torch

WARM_UP = 3
"""Times that a step runs as it is before it is captured, as in PyTorch's own example."""

Work = Callable[[], None]
"""Something done to tensors in place; it reads nothing but tensors that stay where they are, and constants."""


class Recorder(Protocol):
    """How work is run before it is recorded, and how it is recorded."""

    def warm(self, work: Work) -> None:
        """Do the work, as it is."""
        ...

    def record(self, work: Work) -> Work:
        """Something that does the same work again; recording does none of it."""
        ...


class NoRecorder:
    """Does the work every time: what is left where there is no CUDA."""

    def warm(self, work: Work) -> None:
        """Do it."""
        work()

    def record(self, work: Work) -> Work:
        """The work itself."""
        return work


class CudaRecorder:
    """Captures work as CUDA graphs, which share their memory: none reads what another has left there."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.refused = ""

    def warm(self, work: Work) -> None:
        """Do the work on the side stream on which it will be captured."""
        before = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(before)
        with torch.cuda.stream(self.stream):
            work()
        before.wait_stream(self.stream)

    def record(self, work: Work) -> Work:
        """A captured graph's replay; the work itself, with a warning, where CUDA does not take it."""
        if self.refused:
            return work
        graph = torch.cuda.CUDAGraph()
        try:
            # A stream of our own around it: where a capture fails, the inner one is not left again.
            with torch.cuda.stream(self.stream), torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                work()
        except RuntimeError as error:
            self.refused = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
            warnings.warn(f"a step cannot be a CUDA graph, so steps run one by one: {self.refused}", stacklevel=2)
            return work
        return graph.replay


def recorder_for(device: torch.device) -> Recorder:
    """What records on a device."""
    return CudaRecorder(device) if device.type == "cuda" else NoRecorder()


class Recorded:
    """Some work that is done many times: as it is at first, and then replayed."""

    def __init__(self, work: Work, recorder: Recorder) -> None:
        self.work, self.recorder = work, recorder
        self.done = 0
        self.replay: Work | None = None

    def __call__(self) -> None:
        """Do it once."""
        if self.replay is None and self.done < WARM_UP:
            self.recorder.warm(self.work)
        else:
            if self.replay is None:
                self.replay = self.recorder.record(self.work)
            self.replay()
        self.done += 1


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device; the host does not wait until it is there."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
