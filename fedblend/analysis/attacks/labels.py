"""Labels and inputs computed from the last layer's gradient, without a search."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fedblend.core.errors import FedblendError


def recover_input(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the input [I] of a biased linear layer from its gradients [O, I] and [O] for one sample: gW_i / gb_i.

    The result is exact, since gW_i = gb_i x for every output i. The output with the largest bias gradient is used. For
    several images the result is a mixture of their inputs. Raises :class:`FedblendError` for a zero bias gradient.
    """
    i = int(bias.abs().argmax())
    if not float(bias[i].abs()) > 0:
        raise FedblendError("bias: the gradient is zero everywhere, so no input follows; valid: nonzero")
    return weight[i] / bias[i]


def infer_labels(model: nn.Module, gradient: Mapping[str, torch.Tensor], count: int = 1) -> torch.Tensor:
    """Return labels int64 [count], sorted, from the last linear layer's gradient (iDLG, Zhao et al. 2020).

    The gradient at an output is the mean of p - y over the batch. For one image it is negative only at the true label,
    so the result is exact. Without a bias, the sum of a row of weights replaces the bias gradient; its sign is the same
    if the layer's inputs are not negative. For several images, the label of the most negative gradient is taken and
    1 / count is added to it, ``count`` times; this is exact while p is small compared with 1 / count. For an update
    over several steps the result is an estimate. Raises :class:`FedblendError` if the model ends in no linear layer.
    """
    last = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)][-1:]
    before = f"{last[0]}." if last and last[0] else ""
    if not last or f"{before}weight" not in gradient:
        raise FedblendError(
            "labels: cannot be inferred, because the model ends in no linear layer whose gradient was sent; "
            "give them, or use the attack 'dlg'"
        )
    bias = gradient.get(f"{before}bias")
    remaining = (gradient[f"{before}weight"].sum(1) if bias is None else bias).clone()
    # Without a bias the scale of the gradient is unknown; it is estimated from the negative rows.
    unit = 1 / count if bias is not None else float(remaining.clamp(max=0).abs().sum()) / count
    found = []
    for _ in range(count):
        found.append(int(remaining.argmin()))
        remaining[found[-1]] += unit
    return torch.tensor(sorted(found), device=remaining.device)
