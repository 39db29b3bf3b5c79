"""Small worlds made in memory, and what several test files ask of them."""

from __future__ import annotations

import copy
import functools
import inspect
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import nn

from fedblend.core.dataset import Dataset, Population, Samples
from fedblend.core.loop import RoundLoop
from fedblend.core.metric import Metric
from fedblend.core.objective import Batch, Context, Objective, Task
from fedblend.core.registry import build
from fedblend.core.setup import Setup
from fedblend.core.sharing import ClientData
from fedblend.core.state import RunState, to_tensors
from fedblend.data.scale import OneHot, Scaler
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.nets import EagerNet
from fedblend.engines.stacked.cuda_graphs import Work
from fedblend.experiment import presets
from fedblend.experiment.config import Experiment, resolve
from fedblend.experiment.make_setup import make_setup
from fedblend.models.layers import Staged
from fedblend.models.lstm import LSTMLayer

SMALL = {
    "data": "digits",
    "partition": {"name": "iid", "clients": 4},
    "model": {"name": "mlp", "hidden": [6]},
    "train": {"cohort": 2, "epochs": 1, "batch_size": 4, "lr": 0.1, "lr_decay": 1.0},
    "rounds": 2,
}
"""An experiment of a moment; ``data`` only names what the tests replace."""

RAGGED = [list(range(0, 9)), [9], list(range(10, 22)), list(range(22, 30)), list(range(30, 34)), list(range(34, 40))]
"""Nine samples, one, twelve, eight, four and six: so batches of four are full, short or absent."""


def examples(number: int) -> settings:
    """So many examples of a property, always the same ones, however slow the machine."""
    return settings(max_examples=number, deadline=None, derandomize=True)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let files grow to ``size`` bytes: the write that crosses it takes less, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Data ------------------------------------------------------------------------------------------------------


def images(
    n: int = 40, classes: int = 3, side: int = 4, seed: int = 0, client: np.ndarray | None = None, test: int = 12
) -> Dataset:
    """Random grey images of ``side`` x ``side``, whose class shows in their brightness."""
    rng = np.random.default_rng(seed)

    def half(count: int, owner: np.ndarray | None) -> Samples:
        y = np.arange(count) % classes
        x = rng.integers(0, 120, (count, 1, side, side)) + (y * (120 // classes))[:, None, None, None]
        return Samples(torch.from_numpy(x.astype(np.uint8)), torch.from_numpy(y.astype(np.int64)), owner)

    of_test = None if client is None else np.resize(np.unique(client), test)
    names = tuple("abcdefghij"[:classes])
    return Dataset("images", "image", half(n, client), half(test, of_test), names)


def numbers(n: int = 30, width: int = 5, outputs: int = 2, seed: int = 0) -> Dataset:
    """Random features with numbers to predict."""
    rng = np.random.default_rng(seed)
    slope = rng.standard_normal((width, outputs)).astype(np.float32)
    halves = []
    for count in (n, 8):
        x = rng.standard_normal((count, width)).astype(np.float32)
        y = x @ slope
        halves.append(Samples(torch.from_numpy(x), torch.from_numpy(y)))
    return Dataset("numbers", "features", *halves, ())


def labelled(n: int = 40, width: int = 5, labels: int = 3, seed: int = 0) -> Dataset:
    """Random features, each sample with any number of labels."""
    made = numbers(n, width, labels, seed)
    halves = (replace(half, y=(half.y > 0.3).float()) for half in (made.train, made.test))
    return Dataset("labelled", "features", *halves, (), labels=tuple("abcdefgh"[:labels]))


def tokens(n: int = 40, length: int = 5, vocabulary: int = 12, mask: bool = False, seed: int = 0) -> Dataset:
    """Random ids of tokens, whose first one tells the class; with ``mask``, padded, and the mask beside them."""
    rng = np.random.default_rng(seed)
    halves = []
    for count in (n, 12):
        x = torch.from_numpy(rng.integers(1, vocabulary, (count, length)))
        y = x[:, 0] % 3
        if mask:
            read = (torch.arange(length) < torch.from_numpy(rng.integers(1, length + 1, (count, 1)))).long()
            x = torch.stack([x * read, read], 1)
        halves.append(Samples(x, y))
    return Dataset("tokens", "tokens", *halves, ("a", "b", "c"))


# Experiments -----------------------------------------------------------------------------------------------


def experiment(**changes: Any) -> Experiment:
    """The small experiment with top-level fields replaced; a table for ``train`` only adds to it."""
    table = {**SMALL, **changes}
    table["train"] = {**SMALL["train"], **changes.get("train", {})}
    return resolve(table)


def iid(clients: int, cohort: int | None = None) -> dict[str, Any]:
    """Fields of so many clients that hold like data, of which ``cohort`` (default: all) train in a round."""
    return {"partition": {"name": "iid", "clients": clients}, "train": {"cohort": cohort or clients}}


def setup(data: Dataset | None = None, groups: Sequence[Sequence[int]] | None = None, **changes: Any) -> Setup:
    """A world on data in memory; ``groups`` says which training samples each client holds.

    With groups and ``holdout`` clients are tested on what they train on.
    """
    made = make_setup(experiment(**changes), data=data or images())
    if groups is not None:
        population = Population.of([np.asarray(g, np.int64) for g in groups])
        if made.experiment.holdout:
            population = replace(population, held_order=population.order, held_offsets=population.offsets)
        made = replace(made, population=population)
    return made


def needs_of(method: str) -> dict[str, Any]:
    """Fields of an experiment that a preset cannot do without, on small images."""
    personal = presets.FAMILIES["Personal models"]
    maps = ("fedbn", "fedfa", "fedprox+fedfa")
    norms = {"model": {"name": "cnn", "channels": [4], "norm": "group"}} if method in maps else {}
    # Otherwise that of one device, which real sites cannot test at others.
    each = {"evaluate_model": "each"} if method == "fedproto" else {}
    return norms | each | ({"holdout": 0.2} if method in personal else {})


def federation(data: Dataset | None = None, groups: Sequence[Sequence[int]] | None = None, **changes: Any) -> RoundLoop:
    """A federation of the small experiment, with the reference engine."""
    return federation_of(setup(data, groups, **changes))


def engine_of(made: Setup) -> LoopEngine:
    """The reference engine on a model of its own, so that the world's keeps its first weights."""
    return LoopEngine(replace(made, model=copy.deepcopy(made.model)))


def federation_of(made: Setup) -> RoundLoop:
    """A federation on a world, with the reference engine."""
    return RoundLoop(made, engine_of(made))


def run(fed: RoundLoop | Setup, rounds: int, state: RunState | None = None) -> tuple[RunState, list[dict[str, Any]]]:
    """Go on for ``rounds`` rounds from ``state`` (default: the start); the records of these rounds.

    A setup is run by the reference engine.
    """
    fed = federation_of(fed) if isinstance(fed, Setup) else fed
    state = fed.start()[0] if state is None else state
    records = []
    for _ in range(rounds):
        state, record = fed.round(state)
        records.append(record.as_dict())
    return state, records


# Models and losses -----------------------------------------------------------------------------------------


class BatchNormNet(nn.Module):
    """A network with buffers, to be named by its dotted path in an experiment."""

    def __init__(self, inputs: int = 16, outputs: int = 3) -> None:
        super().__init__()
        self.flat = nn.Flatten()
        self.norm = nn.BatchNorm1d(inputs)
        self.last = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.flat(x)))


class Words(nn.Module):
    """A mean of embeddings, read from ids of tokens that are converted to whole numbers."""

    def __init__(self, vocabulary: int = 12) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(vocabulary, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding(x.long()).mean(1))


class MaskedWords(Words):
    """The same for ids with their attention mask, [n, 2, T]: the mean is over the tokens to read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids, mask = x.unbind(1)
        return self.last((self.embedding(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class CategoryAndNumbers(Words):
    """The first of five columns is a category; the others are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, :1].clamp(min=0)) + self.numbers(x[:, 1:])


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


class StagedWords(Staged):
    """A staged model of tokens, whose hidden states are numbers."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Embedding(12, 6), _Mean()), nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 3)
        )


class RowsLSTM(nn.Module):
    """The LSTM written as cells, on the rows of a 4 x 4 image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(LSTMLayer(4, 5), LSTMLayer(5, 5, last_only=True), nn.Linear(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x[:, 0])


def tanh_net(inputs: int = 5, hidden: int = 7, outputs: int = 3, seed: int = 0) -> nn.Module:
    """A smooth network in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def linear_net(inputs: int = 5, outputs: int = 3, seed: int = 0) -> nn.Linear:
    """A linear (softmax regression) model in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(inputs, outputs).double()


def loss_of(
    objective: Objective,
    model: nn.Module,
    batch: Batch,
    task: Task,
    lam: float = 0.0,
    pool: Mapping[str, torch.Tensor] | None = None,
    entry: int = 0,
    **drawn: torch.Tensor,
) -> torch.Tensor:
    """An objective's loss on one batch, at ``lam`` and with one entry of the pool, in its precision."""
    context = Context(task, lambda x: x, dict(pool or {}))
    row = {"lam": torch.tensor(lam, dtype=batch.x.dtype), "entry": torch.tensor(entry), **drawn}
    return objective.loss(EagerNet(model), batch, row, context)


def weight_gradient(loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """The gradient of a loss with respect to all weights, as one vector; weights that take no part give 0."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, gradients, strict=True)]
    )


def finite_differences(loss: Callable[[], torch.Tensor], model: nn.Module, step: float = 1e-5) -> torch.Tensor:
    """Central differences of ``loss()`` in every weight of a float64 model, as one vector."""
    slopes = []
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        for i in range(len(flat)):
            before = flat[i].item()
            values = []
            for shifted in (before + step, before - step):
                flat[i] = shifted
                values.append(loss().item())
            flat[i] = before
            slopes.append((values[0] - values[1]) / (2 * step))
    return torch.tensor(slopes, dtype=torch.float64)


def local(
    x: torch.Tensor,
    y: torch.Tensor,
    task: Task,
    scale: Scaler | OneHot,
    seed: int = 0,
    minimum: int = 1,
    hidden: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
) -> ClientData:
    """What a client sees when asked to share."""
    return ClientData(x, y, task, scale, hidden or (lambda x, layer: x), np.random.default_rng(seed), minimum)


def metric(name: str, **options: Any) -> Metric:
    """A metric with its options."""
    made: Metric = build("metric", {"name": name, **options})
    return made


# Comparisons -----------------------------------------------------------------------------------------------


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As ``pytest.mark.parametrize``, in one test, for cases of milliseconds: the test names all cases that fail.

    The cases share the fixtures of the test.
    """

    rows = [{names: case} if isinstance(names, str) else dict(zip(names, case, strict=True)) for case in cases]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def of_all(**fixtures: Any) -> None:
            failed = []
            for given in rows:
                try:
                    test(**given, **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    failed.append(f"{given}: {type(error).__name__}: {error}")
            assert not failed, "\n\n".join(failed)

        signature = inspect.signature(test)
        left = [one for name, one in signature.parameters.items() if name not in rows[0]]
        of_all.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return of_all

    return decorate


def slow_except(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return parameters for ``parametrize``: those that are not ``quick`` run with the slow tests only.

    A tuple has a value for each of several arguments.
    """
    quick = list(quick)
    of_arguments = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [v if v in quick else pytest.param(*arguments, marks=pytest.mark.slow) for v, arguments in of_arguments]


def slow_after_first(values: Iterable[Any]) -> list[Any]:
    """Return parameters for ``parametrize``: all but the first run with the slow tests only."""
    values = list(values)
    return slow_except(values[:1], values)


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors are the same to the last bit, in whatever order they are named."""
    return set(a) == set(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def same_state(a: RunState, b: RunState) -> bool:
    """Whether two states are the same to the last bit."""
    return (
        (a.round, a.shared_round) == (b.round, b.shared_round)
        and same(a.weights, b.weights)
        and same(a.entries.tensors, b.entries.tensors)
        and same(a.server_state, b.server_state)
        and same(a.global_outputs, b.global_outputs)
        and same(to_tensors(a.client_states), to_tensors(b.client_states))
        and all(
            np.array_equal(u, v)
            for u, v in ((a.entries.owner, b.entries.owner), (a.has_pool, b.has_pool), (a.shared_sizes, b.shared_sizes))
        )
    )


def without_machine(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without the fields that differ between machines."""
    return [{k: v for k, v in record.items() if k != "machine"} for record in records]


# Kernels ------------------------------------------------------------


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers of a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class NoRecorder:
    """Runs the work every time: the recorder of tests without CUDA."""

    def warm(self, work: Work) -> None:
        """Run the work."""
        work()

    def record(self, work: Work) -> Work:
        """Return the work itself."""
        return work


def same_up_to_rounding(made: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], steps: int) -> None:
    """Assert that two runs of ``steps`` training steps differ by rounding only.

    A step rounds each number to its type's precision, relative to the largest number of its tensor: another order of
    summands, another instruction set or another size of stacks rounds otherwise. Over the steps these errors add up at
    most linearly; a mistake in what is computed is larger by orders of magnitude.
    """
    assert made.keys() == wanted.keys()
    for name, tensor in made.items():
        largest = float(wanted[name].abs().max()) if wanted[name].numel() else 0.0
        bound = steps * torch.finfo(tensor.dtype).eps * largest if tensor.is_floating_point() else 0
        torch.testing.assert_close(
            tensor, wanted[name], rtol=0, atol=bound, msg=lambda text, name=name: f"{name}: {text}"
        )
