"""What parts of several kinds require: data with classes, clients with enough samples, payloads of one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedblend.core.context import Scale, Task
from fedblend.core.errors import FedblendError, legible
from fedblend.core.part import Part
from fedblend.core.trees import Tensors
from fedblend.data.scale import Scaler


def refusal(part: Part, problem: str, valid: str) -> FedblendError:
    """The error of a part of a method that cannot be used, and what would be valid."""
    field = "terms" if part.kind == "term" else part.kind
    return FedblendError(f"method.{field}: '{part.name}' {problem}; valid: {valid}")


def require_classes(part: Part, task: Task, valid: str = "data with classes") -> None:
    """Raise :class:`FedblendError` for data without classes."""
    if task.kind != "classification":
        raise refusal(part, f"needs classes, but these data have none ({task.kind})", valid)


def require_numbers(part: Part, scale: Scale, valid: str = "images or features") -> None:
    """Raise :class:`FedblendError` for text."""
    if not isinstance(scale, Scaler):
        raise refusal(part, "needs images or features, but these data are text", valid)


def require_images(part: Part, shape: Sequence[int], valid: str) -> None:
    """Raise :class:`FedblendError` for samples of a ``shape`` that are no images."""
    if len(shape) != 3:
        problem = f"needs images (channels x height x width), but these samples are of shape {list(shape)}"
        raise refusal(part, problem, valid)


def require_held(sizes: np.ndarray, least: Mapping[str, int]) -> None:
    """Raise :class:`FedblendError` unless a client holds as many samples as the largest number in ``least``, by field.

    ``sizes`` int64 [clients] are the clients' samples at the start.
    """
    field, samples = max(least.items(), key=lambda one: one[1])
    held = int(sizes.max(initial=0))
    if held < samples:
        raise FedblendError(
            f"{field}: {samples} samples, but the largest client holds {held} at the start, so that no client would "
            f"share; valid: 1 to {held}"
        )


def fault_of_form(payload: Tensors, form: Mapping[str, tuple[object, ...]]) -> str | None:
    """Why tensors are not of the ``form``, which has the shape and the type of each by name; ``None`` if they are."""
    sent = {name: (*tensor.shape, tensor.dtype) for name, tensor in payload.items()}
    return None if sent == form else legible(f"it sent tensors of shapes {sent}, not of the shapes {dict(form)}")


def entries_in(payload: Tensors) -> int:
    """The number of rows of a payload's first tensor; 0 where there is none."""
    return next((tensor.shape[0] for tensor in payload.values() if tensor.dim()), 0)
