"""FLea: mixup with shared features, distillation from the global model, and features that say less of their inputs."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from fedblend.core.objective import Batch, Context, Net, Objective, StepPlan, Tensors
from fedblend.core.registry import Count, NonNegative, Positive, part
from fedblend.methods.objectives.fedmix import draw_entries
from fedblend.methods.requirements import require_classes

EPSILON = 1e-7  # Added under roots of distances and variances, whose slope at 0 has no bound (the authors' code)


@part("objective", "flea")
class FLea(Objective):
    r"""Mix a client's features with shared ones, and lower their distance correlation with inputs (FLea, Xia et al.
    2024).

    Features f are the hidden states after ``layer`` layers. Each sample (x_i, y_i) of a batch gets one shared feature
    (g_i, y'_i), and b_i from Beta(alpha, alpha):

        l(h(f_i), y_i)  +  l(h(b_i f_i + (1 - b_i) g_i), b_i y_i + (1 - b_i) y'_i)
        +  distillation KL(h_t(g_i) || h(g_i))  +  decorrelation DC(x, f)

    with the layers h after ``layer`` of the model in training, and h_t of the round's global model. DC is the distance
    correlation over the batch, from 0 (independent) to 1: with the matrices A of distances between inputs and B between
    features, both centred by row and column, DC^2 = mean(A B) / sqrt(mean(A^2) mean(B^2)). Gradients flow through f.

    Needs the sharing ``features`` of the same layer: features of single samples, with their targets, go to the server
    and to the other clients. DC makes inputs harder to rebuild from features; it gives no (epsilon, delta).

    The equation is that of the authors' code for images; as there, h_t is in evaluation mode. Here the clients of a
    round share before they train, by the round's model; in the paper the last round's clients share, by the same model,
    and the first round mixes nothing. The weight of DC is constant; the authors' begins at 3 and falls to 1 in 20
    rounds.
    """

    needs = ("x", "y")
    reads = ("hidden",)
    reads_start = True

    layer: Count = 1
    """Layers before the features; the sharing must have the same."""
    alpha: Positive = 2.0
    """Both parameters of the Beta distribution of b."""
    distillation: NonNegative = 1.0
    """Weight of the distillation from the global model."""
    decorrelation: NonNegative = 1.0
    """Weight of the distance correlation."""

    @property
    def numeric_inputs(self) -> bool:  # type: ignore[override]
        return self.decorrelation > 0

    def draw(self, rng: np.random.Generator, plan: StepPlan) -> dict[str, np.ndarray]:
        """``ratio`` float32 [steps, width] is b, and ``entry`` int64 [steps, width] the shared features."""
        shape = (len(plan.sizes), plan.width)
        ratio = rng.beta(self.alpha, self.alpha, shape).astype(np.float32)
        return {"ratio": ratio, "entry": draw_entries(rng, plan, shape, exclude_own=False)}

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        """Mean loss of the batch. Raises :class:`FedblendError` for data without classes."""
        require_classes(self, context.task)
        features, size, task = net(batch.x, 0, self.layer), len(batch.y), context.task
        entries = drawn["entry"][:size]
        shared, targets = (context.pool[name].index_select(0, entries) for name in ("x", "y"))
        ratio = drawn["ratio"][:size]
        share = ratio.reshape(-1, *[1] * (features.dim() - 1))
        mixed = share * features + (1 - share) * shared
        mixed_targets = ratio[:, None] * task.encode(batch.y) + (1 - ratio[:, None]) * targets
        outputs, of_mixed, of_shared = net(torch.cat([features, mixed, shared]), self.layer).chunk(3)
        with torch.no_grad():
            teacher = F.log_softmax(net.with_weights(context.start, training=False)(shared, self.layer), -1)
        divergence = (teacher.exp() * (teacher - F.log_softmax(of_shared, -1))).sum(-1).mean()
        correlation = distance_correlation(batch.x.flatten(1), features.flatten(1))
        loss = task.loss(outputs, batch.y) + task.loss(of_mixed, mixed_targets)
        return loss + self.distillation * divergence + self.decorrelation * correlation


def distance_correlation(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Distance correlation of n pairs of rows of a [n, p] and b [n, q] (Szekely, Rizzo and Bakirov 2007)."""
    a, b = _centred_distances(a), _centred_distances(b)
    covariance = (a * b).mean().clamp(min=0)
    variances = [((one * one).mean() + EPSILON).sqrt() for one in (a, b)]
    return ((covariance + EPSILON) / (variances[0] * variances[1])).sqrt()


def _centred_distances(x: torch.Tensor) -> torch.Tensor:
    """Distances of rows [n, n], less the means of their row and column, plus the mean of all."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x = x - x.mean(0)
    squares = x.square().sum(1)
    between = 1 - torch.eye(len(x), device=x.device, dtype=x.dtype)
    # Products of eight bits would be too rough, because squares of distances are differences.
    with torch.autocast(x.device.type, enabled=False):
        products = x @ x.T
    distances = (squares[:, None] + squares - 2 * products).clamp(min=EPSILON).sqrt() * between
    return distances - distances.mean(0, keepdim=True) - distances.mean(1, keepdim=True) + distances.mean()
