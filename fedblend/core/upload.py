"""The base class of uploads, the checks that an upload passes before it is used, and the count of its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from fedblend.core.errors import FedblendError, legible
from fedblend.core.part import Part
from fedblend.core.trees import Tensors

if TYPE_CHECKING:
    from fedblend.core.aggregator import Aggregator
    from fedblend.core.context import Task
    from fedblend.core.state import RunState


def fault_of(upload: Tensors, like: Tensors) -> str | None:
    """Why an upload is refused (names, shapes, dtypes, finiteness), or ``None`` if it is good."""
    if set(upload) != set(like):
        missing, extra = sorted(set(like) - set(upload)), sorted(set(upload) - set(like))
        return legible(f"its tensors are not the model's: missing {missing or 'none'}, unknown {extra or 'none'}")
    for name, tensor in upload.items():
        if tensor.shape != like[name].shape:
            return f"'{name}' is of shape {list(tensor.shape)}, the model's of {list(like[name].shape)}"
        if tensor.dtype != like[name].dtype:
            return f"'{name}' is of type {tensor.dtype}, the model's of {like[name].dtype}"
    if not all_finite(upload.values()):
        for name, tensor in upload.items():
            if tensor.is_floating_point() and not is_finite(tensor):
                return f"'{name}' holds NaN or infinity (a learning rate, or inputs, too large?)"
    return None


def form_fault(made: Any, like: Tensors) -> str:
    """Why something is not tensors of the names and shapes of ``like``; empty if it is."""
    if not isinstance(made, Mapping):
        return f"{type(made).__name__}, where a dict of tensors by name is valid"
    if set(made) != set(like):
        missing, extra = sorted(set(like) - set(made)), sorted(set(made) - set(like), key=str)
        return legible(f"missing {missing or 'none'}, unknown {extra or 'none'}")
    for name, tensor in made.items():
        if not isinstance(tensor, torch.Tensor) or tensor.shape != like[name].shape:
            shape = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            return f"'{name}' is {shape}, where {list(like[name].shape)} is valid"
        if like[name].is_floating_point() and not tensor.is_floating_point():
            return f"'{name}' has whole numbers ({tensor.dtype}), where {like[name].dtype} is valid"
    return ""


def as_model_and_table(
    made: Any, like: Tensors, slot: str, part: Part
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The next model, in the types of ``like``, and the table of a part that returned both at the server.

    Raises :class:`FedblendError` that names the part if ``made`` is no such pair.
    """
    if fault := _pair_fault(made, like):
        raise FedblendError(f"method.{slot}: '{part.name}' returned {fault}")
    weights, table = made
    return {name: weights[name].to(tensor.dtype) for name, tensor in like.items()}, dict(table)


def _pair_fault(made: Any, like: Tensors) -> str:
    """Why something is not a pair of a model like ``like`` and a table of tensors; empty if it is."""
    if not (isinstance(made, tuple) and len(made) == 2):
        return (
            f"{type(made).__name__}, where a pair is valid: the next model, and the part's table at the server (such "
            "as weights, {})"
        )
    weights, table = made
    if fault := form_fault(weights, like):
        return f"what is no model: {fault}"
    if not isinstance(table, Mapping):
        return f"a table of type {type(table).__name__}; valid: a dict of tensors by name"
    for name, tensor in table.items():
        if not isinstance(tensor, torch.Tensor):
            return f"a table in which '{name}' is {type(tensor).__name__}; valid: a dict of tensors by name"
    return ""


def as_state_and_extras(
    made: Any, like: Tensors, slot: str, part: Part
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A part's table at the client, and what it sends beside the model as ``like`` names it, both on the CPU.

    Raises :class:`FedblendError` that names the part if ``made`` is no such pair.
    """
    where = f"method.{slot}: after_training of '{part.name}'"
    if not (isinstance(made, tuple) and len(made) == 2 and all(isinstance(table, Mapping) for table in made)):
        found = f"({', '.join(type(one).__name__ for one in made)})" if isinstance(made, tuple) else type(made).__name__
        raise FedblendError(
            f"{where} returned {found}, where a pair of dicts is valid: what the part keeps at the client, "
            "and what it sends beside the model (such as {}, {})"
        )
    state, sent = made
    if wrong := [name for name, tensor in {**state, **sent}.items() if not isinstance(tensor, torch.Tensor)]:
        raise FedblendError(f"{where} returned no tensor as {', '.join(map(str, wrong))}; valid: torch tensors")
    if set(sent) != set(like):
        valid = "the names of its table at the server" if like else 'nothing, unless the part has exchanges = "extras"'
        names = f"missing {sorted(set(like) - set(sent)) or 'none'}, unknown {sorted(set(sent) - set(like)) or 'none'}"
        raise FedblendError(f"{where} sends other tensors beside the model: {names}; valid: {valid}")
    on_cpu = [{name: tensor.cpu() for name, tensor in table.items()} for table in made]
    return on_cpu[0], on_cpu[1]


def as_kept(name: str, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """An aggregated tensor in the type and on the device of the model's, where the server works.

    A running variance below 0, from noise or an attack, is 0.
    """
    kept = tensor.to(like)
    return kept.clamp(min=0) if name.endswith("running_var") else kept


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether the sums of all floating tensors are finite, with one host synchronisation for all of them."""
    sums = [tensor.sum() for tensor in tensors if tensor.is_floating_point()]
    if not sums:
        return True
    return bool(torch.isfinite(torch.stack([total.to(sums[0]) for total in sums])).all())


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no number is NaN or infinite."""
    # One of these makes the sum so too, and a sum is cheaper than looking at each; it may also overflow by itself.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def squares_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the sum of each tensor's squares is finite: in float32 no number is beyond 1e19, and none is NaN."""
    flat = [t.flatten() if t.dtype.itemsize > 2 else t.flatten().float() for t in tensors if t.is_floating_point()]
    return all_finite([one.dot(one) for one in flat])


def finite_fault(tensors: Tensors) -> str | None:
    """Return what is wrong with a payload or an answer that holds NaN or infinity, or ``None``."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"'{name}' holds NaN or infinity"
    return None


class Upload(Part):
    """Base of all uploads. ``bytes_kind`` is the word under which bytes are counted."""

    renamed: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("is_model", "watches", "embeds"), 'content = "outputs", or another word'),
        "trains": 'content = "nothing" and no payload, where clients do not train',
    }
    bytes_kind: str = "weights"
    content: str = "model"
    """The "model" after training, of which the aggregate is the next model; or mean "outputs" by label, which engines
    record while clients train; mean "embeddings" by class, which engines compute after it; or "nothing". Means the
    server passes to the server step and to the clients of the next round.
    """

    @property
    def trains(self) -> bool:
        """Whether clients train; not where the content is "nothing" and the part defines no payload."""
        return self.content != "nothing" or type(self).payload is not Upload.payload

    @property
    def is_model(self) -> bool:
        """Whether clients send a model."""
        return self.content == "model"

    def features(self, model: nn.Module, sample: torch.Tensor) -> int:
        """Numbers of the embedding of one input, where clients send mean embeddings; else 0."""
        return 0

    def require_possible(self, task: Task) -> None:
        """Raise :class:`FedblendError` if the upload cannot be made for this task."""

    def trains_in(self, round: int) -> bool:
        """Whether clients train and send something in a round, counted from 0."""
        return self.trains

    def payload(self, weights: Tensors, outputs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """At a client: the payload, from its weights after training and its mean outputs by label [C, C].

        Where clients send mean embeddings, these are the outputs, [C, features].
        """
        raise TypeError(f"{type(self).__name__} defines no payload")

    def like(self, weights: Tensors, task: Task) -> Tensors:
        """Tensors with the names, shapes and types of a good payload."""
        raise TypeError(f"{type(self).__name__} defines no like")

    def fault(self, payload: Tensors, weights: Tensors, task: Task) -> str | None:
        """Why a payload cannot be used, or ``None`` if it can."""
        return fault_of(payload, self.like(weights, task))

    def change(self, before: RunState, after: RunState, trained: Sequence[str]) -> float:
        """How far a round moved the model, |w - w'| / |w'| over the ``trained`` tensors (Mix2FLD, section II)."""
        old, new = (torch.cat([one.weights[name].flatten() for name in trained])[None] for one in (before, after))
        return relative_change(old, new)

    def aggregator(self, chosen: Aggregator) -> Aggregator:
        """The aggregator of such payloads; ``chosen`` is the method's aggregator of models."""
        return chosen


def relative_change(old: torch.Tensor, new: torch.Tensor) -> float:
    """The largest |new - old| / |old| of any row; 0 where both are 0."""
    old, new = old.double(), new.double()
    return float(((new - old).norm(dim=1) / old.norm(dim=1)).nan_to_num(nan=0.0, posinf=torch.inf).max())
