"""Adam and AdamW for one client and for a stack of clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from fedblend._kernels.lowrank import Weights
from fedblend.core.optimizer import Training
from fedblend.engines.sgd import (
    ClientOptimizer,
    Gradient,
    ProximalStep,
    StackedOptimizer,
    broadcast,
    clipped_by_client,
    keep_inactive,
    sum_of_products,
)


class Adam(ClientOptimizer):
    """Adam for one client, as ``torch.optim.Adam`` and ``AdamW`` define it.

    Each parameter counts its own steps. ``torch.optim`` itself is not used here, because its first step imports
    PyTorch's compiler.
    """

    def __init__(self, params: Sequence[torch.Tensor], train: Training, round: int) -> None:
        super().__init__(params, train, round)
        self.means, self.squares = ([torch.zeros_like(p) for p in self.params] for _ in range(2))
        self.steps = [0] * len(self.params)

    def _update(self, used: list[int], grads: list[torch.Tensor]) -> None:
        decay, rule = self.train.weight_decay, self.train.optimizer
        params, means, squares = ([ts[i] for i in used] for ts in (self.params, self.means, self.squares))
        if decay and rule.decoupled:
            torch._foreach_mul_(params, 1 - self.lr * decay)
        elif decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        for i in used:
            self.steps[i] += 1
        torch._foreach_lerp_(means, grads, 1 - rule.beta1)
        torch._foreach_mul_(squares, rule.beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - rule.beta2)
        divisors = torch._foreach_sqrt(squares)
        torch._foreach_div_(divisors, [math.sqrt(1 - rule.beta2 ** self.steps[i]) for i in used])
        torch._foreach_add_(divisors, rule.eps)
        torch._foreach_addcdiv_(params, means, divisors, [-self.lr / (1 - rule.beta1 ** self.steps[i]) for i in used])

    def state(self) -> dict[str, list[torch.Tensor]]:
        steps = [torch.tensor(float(t)) for t in self.steps]
        return {"exp_avg": self.means, "exp_avg_sq": self.squares, "step": steps}

    def load(self, state: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self.means, self.squares = ([t.clone() for t in state[key]] for key in ("exp_avg", "exp_avg_sq"))
        self.steps = [int(t) for t in state["step"]]


class StackedAdam(StackedOptimizer):
    """Adam for a stack of K clients, with tensors [K, ...], as ``torch.optim.Adam`` defines it for each client.

    Clients count their own steps, for each parameter.
    """

    @torch.no_grad()
    def step(
        self,
        params: Sequence[Weights],
        state: Sequence[torch.Tensor],
        gradients: Sequence[Gradient],
        active: torch.Tensor | None = None,
        proximal: ProximalStep | None = None,
        factor: torch.Tensor | None = None,
    ) -> None:
        """Update parameters [K, ...] and state in place; a client whose ``active``, bool [K], is false does not change.

        ``state`` holds the means of gradients, those of squared gradients [K, ...], and the numbers of steps [K], each
        for all parameters. ``factor`` float32 [K] multiplies the learning rate.
        """
        train, rule, n = self.train, self.train.optimizer, len(params)
        used = [i for i, g in enumerate(gradients) if g is not None]
        if not used:
            return
        grads = [sum_of_products(g) if isinstance(g, tuple) else g for g in gradients if g is not None]
        tensors = [p for i in used if isinstance(p := params[i], torch.Tensor)]  # low-rank ones are plain SGD's
        means, squares, steps = ([state[k * n + i] for i in used] for k in range(3))
        if train.clip_norm is not None:
            grads = clipped_by_client(grads, train.clip_norm)
        lr: float | torch.Tensor = self.lr if self.rate is None else -self.rate
        lr = lr if factor is None else lr * factor
        if train.weight_decay and not rule.decoupled:
            grads = list(torch._foreach_add(grads, tensors, alpha=train.weight_decay))
        counts = [t + 1 for t in steps]
        new_means = list(torch._foreach_lerp(means, grads, 1 - rule.beta1))
        new_squares = list(torch._foreach_mul(squares, rule.beta2))
        torch._foreach_addcmul_(new_squares, grads, grads, 1 - rule.beta2)
        moved = []
        for param, mean, square, count in zip(tensors, new_means, new_squares, counts, strict=True):
            # In float64: 1 - beta2^t of a first step would lose four digits.
            t = count.double()
            length = (lr / (1 - rule.beta1**t)).to(param.dtype)
            root = (1 - rule.beta2**t).sqrt().to(param.dtype)
            start = param
            if train.weight_decay and rule.decoupled:
                shrunk = 1 - lr * train.weight_decay
                start = param * (
                    broadcast(shrunk, param) if isinstance(shrunk, torch.Tensor) and shrunk.dim() else shrunk
                )
            divisor = square.sqrt() / broadcast(root, param) + rule.eps
            moved.append(start - broadcast(length, param) * (mean / divisor))
        for old, new in ((tensors, moved), (means, new_means), (squares, new_squares), (steps, counts)):
            torch._foreach_copy_(old, keep_inactive(active, new, old))
