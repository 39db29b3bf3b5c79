"""CCVR: the last layer is trained on features that are drawn from Gaussians, one for each class."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, Positive, part
from fedblend.core.server_step import ModelSpec, Refined, ServerContext, ServerStep, Tensors
from fedblend.methods.sharing.feature_statistics import combined
from fedblend.models.layers import last_layer


@part("server_step", "ccvr")
class CCVR(ServerStep):
    """Calibrate the last layer with virtual representations (Luo et al. 2021).

    The server combines the clients' statistics of features (sharing `feature-statistics`) into the mean mu_c and the
    covariance Sigma_c of each class over all clients, draws `per_class` features from N(mu_c, Sigma_c), and trains the
    last layer on them with cross-entropy and SGD, from the aggregate's. All other layers stay as they are. Rows of
    classes of which there are no statistics stay, too, and take no part in the loss.

    This happens in the rounds in which clients send statistics: by default the last one, so that only the model of the
    last round is a calibrated one, and a run that ends before (`target`, `convergence_tol`, a callback) has none. With
    `from_round` of the sharing, and in a run resumed with more rounds, the calibrated model is also what clients train
    in the next round, unlike in the paper.
    The paper draws features in proportion to a class's samples; here all classes have the same number. The paper's
    transformation of features (Tukey's ladder of powers) is left out.
    """

    reads = ("moments",)

    per_class: Count = 1000
    """Features drawn of each class."""
    epochs: Count = 10
    """Epochs over these features."""
    batch_size: Count = 64
    """Features in a batch."""
    lr: Positive | None = None
    """Learning rate of the last layer (default: the clients' learning rate in that round)."""

    def require_possible(self, spec: ModelSpec) -> None:
        """Raise :class:`FedblendError` for data without classes, and for models whose last layer is no dense one."""
        if spec.task.kind != "classification":
            raise FedblendError("method.server_step: 'ccvr' needs classes, but these data have none")
        name, layer = last_layer(spec.model)
        if not (isinstance(layer, nn.Linear) and layer.out_features == spec.task.outputs):
            raise FedblendError(
                f"method.server_step: 'ccvr' trains the model's last layer on features, but '{name}', the last layer "
                f"with weights, is a {type(layer).__name__}; valid: a model that ends in a dense layer with an output "
                f"for each of the {spec.task.outputs} classes"
            )

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        if server.pool is None or not len(server.pool):
            return dict(weights), {}
        labels, means, covariances = combined(server.pool.tensors)
        z = self._virtual(means, covariances, server)
        y = torch.arange(len(labels)).repeat_interleave(self.per_class)
        name, layer = last_layer(server.model)
        own = {f"{name}.{field}": weights[f"{name}.{field}"] for field, _ in layer.named_parameters()}
        trained = self._trained([tensor[labels] for tensor in own.values()], z, y, server)
        # index_copy makes new tensors: the aggregate may be used elsewhere.
        return {
            **weights,
            **{n: t.index_copy(0, labels, v) for (n, t), v in zip(own.items(), trained, strict=True)},
        }, {}

    def _virtual(self, means: torch.Tensor, covariances: torch.Tensor, server: ServerContext) -> torch.Tensor:
        """Features float32 [classes * per_class, d], class after class: mu_c + Sigma_c^(1/2) e, e from N(0, 1)."""
        classes, width = means.shape
        noise = torch.from_numpy(server.rng.standard_normal((classes, self.per_class, width)))
        if covariances.shape[1] == width:
            spread = noise * covariances.clamp(min=0).sqrt()[:, None]
        else:
            whole = means.new_zeros(classes, width, width)
            rows, columns = torch.triu_indices(width, width)
            whole[:, rows, columns] = whole[:, columns, rows] = covariances
            # The symmetric root does not depend on the signs of eigenvectors. Eigenvalues within rounding of 0 are 0,
            # because a root enlarges their rounding; so are negative ones, of what is no covariance.
            values, vectors = torch.linalg.eigh(whole)
            least = width * torch.finfo(torch.float32).eps * values[:, -1:]
            roots = values.where(values > least, 0.0).clamp(min=0).sqrt()
            spread = noise @ (vectors * roots[:, None] @ vectors.mT)
        return (means[:, None] + spread).flatten(0, 1).float()

    def _trained(
        self, layer: list[torch.Tensor], z: torch.Tensor, y: torch.Tensor, server: ServerContext
    ) -> list[torch.Tensor]:
        """The weight, and the bias if there is one, after SGD on the mean cross-entropy of batches."""
        lr = server.lr if self.lr is None else self.lr
        layer, target = [tensor.clone() for tensor in layer], F.one_hot(y, len(layer[0])).float()
        for _ in range(self.epochs):
            order = torch.from_numpy(server.rng.permutation(len(y)))
            for rows in order.split(self.batch_size):
                error = (F.linear(z[rows], *layer).softmax(1) - target[rows]) / len(rows)
                slopes = [error.T @ z[rows], error.sum(0)]
                for tensor, slope in zip(layer, slopes, strict=False):
                    tensor -= lr * slope
        return layer
