"""FedNova: normalised averaging of clients that make different numbers of steps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from fedblend.core.aggregator import Aggregator, LocalWork, Tensors, WeightedUpload
from fedblend.core.optimizer import Training
from fedblend.core.registry import part
from fedblend.methods.aggregators.mean import Sums, WeightedMean


@part("aggregator", "fednova")
class FedNova(Aggregator):
    """Average the clients' changes, each divided by how far equal gradients would have moved it (Wang et al. 2020).

    A client's change w_k - w = -eta G_k a_k is a weighted sum of its tau_k gradients, the columns of G_k. With p_k =
    n_k / sum n over the round's good uploads, the server sets (equation 7)

        w <- w + tau_eff sum_k p_k (w_k - w) / |a_k|_1,    tau_eff = sum_k p_k |a_k|_1

    - plain SGD: a_k = (1, ..., 1), |a_k|_1 = tau_k;
    - momentum rho: |a_k|_1 = (tau_k - rho (1 - rho^tau_k) / (1 - rho)) / (1 - rho);
    - proximal terms mu: |a_k|_1 = (1 - (1 - alpha)^tau_k) / alpha with alpha = eta mu;
    - both: the sum of the weights that the recursion of SGD gives to the gradients, mu's pull being part of these.

    With this tau_eff clients of equal steps give FedAvg's mean, whatever their SGD; the authors' code takes sum_k p_k
    tau_k with proximal terms, and with momentum besides an |a_k|_1 that is not that of its steps. ``server_step = {name
    = "fedavgm", beta = 0, lr = ...}`` scales the step. The server computes a_k from the client's number of samples, so
    that nothing is sent beside the model. Other terms and weight decay count as part of the gradient. Buffers are
    averaged with the weights p_k / |a_k|_1 and are not scaled: running statistics must not be extrapolated.

    Often wrong elsewhere: tau_eff is left out, so that the model moves by about one step in a round. Epochs stand in
    place of the steps tau_k. Momentum and proximal terms are ignored in a_k. p_k are shares of all clients, although
    only a cohort takes part, so that the update shrinks, or clients count alike. The learning rate in a_k is the first
    one, where it decays. (Refused: other optimisers, momentum that is kept from round to round, learning rates that
    change within a round, and accumulated gradients, whose a_k is another.)
    """

    def require_training(self, train: Training, phases: int, mu: float) -> None:
        """Raise ``ValueError`` unless a_k is known: plain SGD, whose state does not last."""
        plain = train.optimizer.steps == "sgd" and not train.schedule_in_round and train.accumulate == 1
        if not plain or train.optimizer_state != "reset":
            raise ValueError(
                f"method.aggregator: '{self.name}' computes how far the steps of SGD move a client; valid: "
                "train.optimizer sgd with its state reset, without schedule_in_round, accumulate 1"
            )
        if (train.momentum or mu) and phases > 1:
            raise ValueError(
                f"method.aggregator: '{self.name}' does not know how momentum and proximal terms act in several steps "
                "a batch; valid: neither, or another aggregator"
            )

    def for_round(self, work: LocalWork) -> NormalisedMean:
        return NormalisedMean(work)


class NormalisedMean(Aggregator):
    """FedNova's mean in one round."""

    def __init__(self, work: LocalWork) -> None:
        self.work = work

    def weigh(self, client: int, samples: int) -> float:
        """n_k / |a_k|_1; 0 of a client without a step on what is shared."""
        norm = self.norm(client, samples)
        return samples / norm if norm else 0.0

    def partial(self, uploads: Iterable[WeightedUpload]) -> Sums:
        return WeightedMean().partial(uploads)

    def unrounded(self, partial: Sums) -> Sums:
        return partial.unrounded()

    def norm(self, client: int, samples: int) -> float:
        """|a_k|_1 of a client with ``samples`` samples: how far gradients of 1 move it, in learning rates."""
        rho, pull = self.work.momentum, self.work.lr * self.work.mu
        # A step takes (velocity v, moved m, 1) to v' = rho v - pull m + 1, m' = m + v'. Powers, not steps: a site may
        # state any number of samples.
        step = np.array([[rho, -pull, 1.0], [rho, 1.0 - pull, 1.0], [0.0, 0.0, 1.0]])
        return float(np.linalg.matrix_power(step, self.work.steps_of(client, samples))[1, 2])

    def finish(self, partial: Sums, weights: Tensors) -> dict[str, torch.Tensor]:
        if not partial.weight:  # no client made a step on what is shared
            return dict(weights)
        mean, good = partial.mean(), self.work.good
        # tau_eff sum_k p_k / |a_k|_1; the mean is over p_k / |a_k|_1.
        factor = sum(n * self.norm(k, n) for k, n in good) * partial.weight / sum(n for _, n in good) ** 2
        start = {name: weights[name].to(mean[name].device) for name in self.work.trained}
        moved = {name: w + factor * (mean[name] - w) for name, w in start.items()}
        return mean | {name: tensor.to(mean[name].dtype) for name, tensor in moved.items()}
