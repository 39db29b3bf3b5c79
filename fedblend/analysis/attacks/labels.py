"""What can be read from the last layer's gradient without any search."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fedblend.core.errors import FedblendError


def recover_input(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The input of a biased linear layer from its gradients [O, I] and [O] for a batch of one: x = gW_i / gb_i, [I].

    It is exact, since gW_i = gb_i x for every output i; the one with the largest gradient is taken. For several
    images it gives a mixture of their inputs. Raises :class:`FedblendError` where the bias has no gradient.
    """
    i = int(bias.abs().argmax())
    if not float(bias[i].abs()) > 0:
        raise FedblendError("bias: its gradient is zero everywhere, so that no input can be read off; valid: any other")
    return weight[i] / bias[i]


def infer_labels(model: nn.Module, gradient: Mapping[str, torch.Tensor], count: int = 1) -> torch.Tensor:
    """Labels int64 [count], sorted, from the last linear layer's gradient (iDLG, Zhao et al. 2020).

    The gradient at an output is the mean of p - y over the batch, so for one image it is negative at the true label
    and nowhere else: exact. Without a bias the sum of a row of weights stands for it, whose sign is the same where
    what enters the layer is not negative. For several images one label after another is taken, each time the most
    negative, to which 1 / count is then given back: exact as long as p is small beside 1 / count. Of an update over
    several steps it is a guess. Raises :class:`FedblendError` where there is no linear layer.
    """
    last = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)][-1:]
    before = f"{last[0]}." if last and last[0] else ""
    if not last or f"{before}weight" not in gradient:
        raise FedblendError(
            "labels: they cannot be inferred, since the model ends in no linear layer whose gradient was sent; "
            "give them, or use the attack 'dlg'"
        )
    bias = gradient.get(f"{before}bias")
    left = (gradient[f"{before}weight"].sum(1) if bias is None else bias).clone()
    # Without a bias the unit is unknown; the most negative row stands for the labels it may hold.
    unit = 1 / count if bias is not None else float(left.clamp(max=0).abs().sum()) / count
    found = []
    for _ in range(count):
        found.append(int(left.argmin()))
        left[found[-1]] += unit
    return torch.tensor(sorted(found), device=left.device)
