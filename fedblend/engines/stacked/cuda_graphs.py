"""Training steps captured and replayed as CUDA graphs: one launch in place of a hundred.

A batch of ten samples keeps a GPU busy for less time than the launches of its operations take. A graph reads and writes
fixed addresses, so each batch is copied into fixed tensors. The first steps run uncaptured, on real batches and a side
stream: the warm-up that PyTorch requires ("CUDA semantics", CUDA Graphs). The next step is captured, and all later ones
are replayed. Without CUDA the same work runs uncaptured on the same tensors, so tests cover all but the capture.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol

import torch

WARM_UP = 3
"""Uncaptured runs of a step before its capture, as in PyTorch's own example."""

Work = Callable[[], None]
"""A function that changes tensors in place; it reads only constants and tensors with fixed addresses."""


class Recorder(Protocol):
    """Runs work before its capture, and captures it."""

    def warm(self, work: Work) -> None:
        """Run the work uncaptured."""
        ...

    def record(self, work: Work) -> Work:
        """Capture the work without running it, and return the replay."""
        ...


class CudaRecorder:
    """Captures work as CUDA graphs with one memory pool: no graph reads what another left in the pool."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.refused = ""
        """CUDA's reason for refusing a capture; empty where every capture worked."""

    def warm(self, work: Work) -> None:
        """Run the work on the side stream of the later capture."""
        before = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(before)
        with torch.cuda.stream(self.stream):
            work()
        before.wait_stream(self.stream)

    def record(self, work: Work) -> Work:
        """Return a captured graph's replay; the work itself, with a warning, where CUDA refuses the capture."""
        if self.refused:
            return work
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer stream context is ours: a failed capture does not leave the inner one.
            with torch.cuda.stream(self.stream), torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                work()
        except RuntimeError as error:
            self.refused = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
            warnings.warn(f"CUDA cannot capture a step, so steps run without graphs: {self.refused}", stacklevel=2)
            return work
        return graph.replay


class RecordedWork:
    """Work that runs many times: :data:`WARM_UP` times uncaptured, then as replays of its capture."""

    def __init__(self, work: Work, recorder: Recorder) -> None:
        self.work, self.recorder = work, recorder
        self.warm_runs = 0
        self.replay: Work | None = None

    def __call__(self) -> None:
        """Run the work once."""
        if self.replay is None and self.warm_runs < WARM_UP:
            self.recorder.warm(self.work)
            self.warm_runs += 1
            return
        if self.replay is None:
            self.replay = self.recorder.record(self.work)
        self.replay()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device; copies from the host to a GPU are asynchronous."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
