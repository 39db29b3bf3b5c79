"""What sites send beside uploads is not trusted either: entries and answers of unlike form are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fedblend.core.errors import FedblendError, legible
from fedblend.core.upload import is_finite
from fedblend.flower.messages import Tensors

LABELS = ("y", "dummies")
"""Tensors of what is shared that hold labels, where they hold whole numbers."""

Form = tuple[tuple[str, str, tuple[int, ...]], ...]


def form_of(payload: Tensors, rows: bool) -> Form | str:
    """Names, types and shapes of a payload; with ``rows`` without the first axis, which all tensors must share.

    A word about what is wrong where they do not.
    """
    if rows and any(tensor.dim() == 0 for tensor in payload.values()):
        return "a tensor without rows"
    lengths = {len(tensor) for tensor in payload.values()} if rows else set()
    if len(lengths) > 1:
        return f"tensors of {sorted(lengths)} rows; all must have as many"
    return tuple(sorted((n, str(t.dtype), tuple(t.shape)[1 if rows else 0 :]) for n, t in payload.items()))


def unlike(payloads: Mapping[int, Tensors], rows: bool) -> dict[int, str]:
    """Why some payloads cannot be used beside the others, by client: another form than most have, or none.

    Raises :class:`FedblendError` where two forms are equally frequent, so that nobody can say which is wrong.
    """
    forms = {client: form_of(payload, rows) for client, payload in payloads.items()}
    faults = {client: legible(f"it sent {form}") for client, form in forms.items() if isinstance(form, str)}
    count = Counter(form for form in forms.values() if not isinstance(form, str)).most_common(2)
    if len(count) == 2 and count[0][1] == count[1][1]:
        raise FedblendError(legible(f"sites disagree on the form of what they send: {count[0][0]} and {count[1][0]}"))
    for client, form in forms.items():
        if not isinstance(form, str) and form != count[0][0]:
            faults[client] = legible(f"it sent tensors of another form than most: {form}, not {count[0][0]}")
    return faults


def fault_of_shared(payload: Tensors, classes: int) -> str | None:
    """Why what a client shares cannot be used, whatever its form: numbers that are none, labels of no class."""
    for name, tensor in payload.items():
        if tensor.is_floating_point():
            if not is_finite(tensor):
                return legible(f"'{name}' holds NaN or infinity")
        elif name in LABELS and tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < classes:
            return f"'{name}' holds labels from {int(tensor.min())} to {int(tensor.max())}; valid: 0 to {classes - 1}"
    return None
