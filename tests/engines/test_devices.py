"""Tensors of a GPU never meet tensors of the CPU: on machines without a GPU, with a second device that is emulated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import images, needs_of, run, same, setup
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fedblend.core.engine import TrainTask
from fedblend.core.loop import RoundLoop
from fedblend.core.state import RunState
from fedblend.engines.loop import LoopEngine

T, CPU, GPU = torch.Tensor, torch.device("cpu"), torch.device("cuda", 0)
ACROSS = (T.copy_, T.__setitem__, T.__getitem__)
"""Operations whose result is on the device of their first tensor, also beside tensors of another one."""
ABOUT = (T.numel, T.untyped_storage, T.__len__, T.dim, T.size, T.is_floating_point, T.element_size)


class TwoDevices(TorchFunctionMode):
    """Marks the storages of tensors that are moved or made on ``cuda``, which stay on the CPU, and of all results.

    An operation on tensors of both devices raises :class:`RuntimeError`, except where CUDA allows it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.marked: dict[int, torch.UntypedStorage] = {}

    def on_gpu(self, tensor: torch.Tensor) -> bool:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or not tensor.numel():
            return False
        return tensor.untyped_storage().data_ptr() in self.marked

    def mark(self, made: Any) -> Any:
        for tensor in tree_leaves(made):
            if isinstance(tensor, T) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                self.marked[storage.data_ptr()] = storage
        return made

    def move(self, tensor: torch.Tensor, *target: Any, **options: Any) -> torch.Tensor:
        wanted, kinds = GPU if self.on_gpu(tensor) else CPU, []
        for one in (*target, options.pop("device", None)):
            if isinstance(one, T):
                wanted = GPU if self.on_gpu(one) else CPU
                kinds.append(one.dtype)
            elif isinstance(one, torch.device | str):
                wanted = torch.device(one)
            elif one is not None:
                kinds.append(one)
        moved = T.to(tensor, *(kinds or [tensor.dtype]), **options)
        if (wanted.type == "cuda") != self.on_gpu(tensor) and moved is tensor:
            moved = tensor.clone()
        return self.mark(moved) if wanted.type == "cuda" else moved

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if getattr(func, "__name__", "") == "__get__" and func.__self__ is T.device:
            return GPU if self.on_gpu(args[0]) else CPU
        if getattr(func, "__name__", "") == "__get__" or func in ABOUT:
            return func(*args, **options)
        if func is T.to:
            return self.move(*args, **options)
        if func is T.cpu:
            return self.move(args[0], CPU)
        is_made_there = options.get("device") is not None and torch.device(options["device"]).type == "cuda"
        if is_made_there:
            options["device"] = CPU
        tensors = [one for one in tree_leaves((args, options)) if isinstance(one, T)]
        marks = [self.on_gpu(one) for one in tensors]
        if func is T.numpy and marks[0]:
            raise RuntimeError("numpy() of a tensor on the GPU")
        # Tensors without dimensions may be of the CPU; those inside vmap and grad are not followed.
        plain = (t for t, mark in zip(tensors, marks, strict=True) if not mark and t.dim() and t.numel())
        if func not in ACROSS and any(marks) and not all(map(torch._C._functorch.is_functorch_wrapped_tensor, plain)):
            raise RuntimeError(f"{func.__name__}: tensors of two devices")
        result = func(*args, **options)
        return self.mark(result) if is_made_there or (marks[0] if func in ACROSS else any(marks)) else result


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoDevices]:
    """Both devices; a module that is moved is marked where it is."""
    mode, plain = TwoDevices(), nn.Module.to

    def to(module: nn.Module, *target: Any, **options: Any) -> nn.Module:
        if target and target[0] == torch.device("cuda"):
            mode.mark([*module.parameters(), *module.buffers()])
            return module
        return plain(module, *target, **options)

    monkeypatch.setattr(nn.Module, "to", to)
    return mode


def tensors_of(state: RunState) -> list[torch.Tensor]:
    tables = (state.weights, state.server_state, state.global_outputs, *state.client_states.values())
    return [tensor for table in tables for tensor in table.values()]


@pytest.mark.parametrize(
    "method",
    [
        *("fedavg", "fedprox+fedmix", "fd", "scaffold", "feddyn", "fednova", "fedavgm", "fedadam", "ditto", "fedrep"),
        *("aggenhance", "server-means"),
        {"name": "fedavg", "aggregator": "median"},
        {"name": "fedavg", "aggregator": "secure-mean"},
    ],
    ids=str,
)
def test_the_server_and_what_clients_keep_are_on_the_cpu(method: Any, devices: TwoDevices) -> None:
    needs = needs_of(method) if isinstance(method, str) else {}
    own = {} if method == "fd" else {"convergence_tol": 1e-9}
    train = {"cohort": 3, "epochs": 1, "batch_size": 4}
    made = setup(images(), method=method, model={"name": "mlp", "hidden": [5]}, train=train, **needs, **own)
    wanted, _ = run(RoundLoop(made, LoopEngine(made)), 2)

    with devices:
        state, _ = run(RoundLoop(made, LoopEngine(made, "cuda")), 2)

    assert devices.marked
    assert not any(map(devices.on_gpu, tensors_of(state)))
    assert same(state.weights, wanted.weights)


def test_uploads_are_on_the_device_as_a_whole_also_what_is_not_trained(devices: TwoDevices) -> None:
    made = setup(images(side=8), model={"name": "module", "path": "own_models:Frozen"})
    task = TrainTask(0, made.weights(), None, made.sizes(0))

    with devices:
        sums = LoopEngine(made, "cuda").collect(task, [0, 1, 2], ()).partial.tensors

    assert made.frozen
    assert {name: devices.on_gpu(tensor) for name, tensor in sums.items()} == dict.fromkeys(made.weights(), True)
