"""Last layers from what clients shared: trained on Gaussian features (CCVR), or solved from sums of features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from fedblend.core.errors import FedblendError
from fedblend.core.optimizer import Training
from fedblend.core.registry import Count, Float, NonNegative, Positive, part
from fedblend.core.server_step import ModelSpec, Refined, ServerContext, ServerStep, Tensors
from fedblend.methods.requirements import refusal, require_classes
from fedblend.methods.sharing.features import combined, width_of
from fedblend.methods.sharing.moments import projection, unpacked
from fedblend.models.layers import last_layer

RIDGES = tuple(10.0**power for power in range(-5, 1))  # Ridges to choose from, as parts of the mean eigenvalue of G


class HeadStep(ServerStep):
    """Base of the steps that set the last layer, a dense one with an output for each class."""

    def require_possible(self, spec: ModelSpec) -> None:
        """Raise :class:`FedblendError` for data without classes, and for models that end in no dense layer."""
        require_classes(self, spec.task)
        name, layer = last_layer(spec.model)
        if not (isinstance(layer, nn.Linear) and layer.out_features == spec.task.outputs):
            problem = f"sets the last layer with weights, but '{name}' is a {type(layer).__name__}"
            valid = f"a model that ends in a dense layer with an output for each of the {spec.task.outputs} classes"
            raise refusal(self, problem, valid)


@part("server_step", "ccvr")
class CCVR(HeadStep):
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


@part("server_step", "closed-head")
class ClosedHead(HeadStep):
    """Set the last layer to the solution of one linear system, in the first round (sharing `moments`).

    With n_c, s_c the count and the sum of features of class c over all clients, mu_c = s_c / n_c, N samples, and
    G = sum f f^T, the layer W f + b is, by ``head``:

    - ``ridge`` (Fed3R, Fanì et al. 2024): the columns of (A + lambda I)^-1 S, with A and S the sums of (f, 1)(f, 1)^T
      and of (f, 1) by class: ridge regression on one-hot targets, the same for any split of the samples.
    - ``lda``: W_c = Sigma^-1 mu_c, b_c = log(n_c / N) - mu_c W_c / 2, with Sigma = (G - sum n_c mu_c mu_c^T) / (N - C)
      shrunk to (1 - a) Sigma + a tr(Sigma) / d I: linear discriminant analysis.
    - ``ncm`` (FedNCM, Legate et al. 2023): W_c = mu_c / |mu_c|, b = 0. It needs no G.
    - ``cof`` (FedCOF 2025): W = G'^-1 [n_c mu_c], with G' = sum (n_c - 1) Sigma_c + N mu mu^T, and Sigma_c estimated
      from clients' means: Sigma_c = sum_k n_kc (mu_kc - mu_c)(mu_kc - mu_c)^T / (K_c - 1) + gamma I. It needs no G.
    - ``softmax``: softmax regression over some rounds. The layer moves by k (A + lambda I)^-1 R, with R = sum of
      (y - p)(f, 1)^T, minus the gradient of the cross-entropy, and k the least of C and ``step``. In the first round
      the layer is 0, so that p = 1 / C and R follows from the sums. Later R is N over the learning rate times the
      clients' mean change, which each makes by one step of SGD on all its samples (``upload = { name = "model",
      from_round = 2 }``). With all clients in each round, and no other trained layer, the result is the same for any
      split. The Hessian is the sum of (diag p - p p^T) (x) (f, 1)(f, 1)^T: A / C along p = 1 / C, and nowhere above
      A / 2 (Böhning 1992), so that no step of length 2 raises the loss.

    All are solved in float64. Each class's (W_c, b_c) of ``ridge``, ``ncm`` and ``cof`` is divided by its length and by
    ``temperature``. A class without samples has no weights, and the lowest of all offsets less 10.

    In later rounds the other heads stay, so that a method whose clients train from round 2 on (``upload = { name =
    "model", from_round = 2 }``) begins with this head.
    """

    reads = ("sums",)
    needs_pool = True

    head: Literal["ridge", "lda", "ncm", "cof", "softmax"] = "ridge"
    """The kind of head."""
    ridge: NonNegative | None = None
    """The factor lambda over the mean eigenvalue of G, at least that of the noise (default: of 1e-5 to 1 the one of
    least error by generalised cross-validation, Golub, Heath and Wahba 1979, which needs the sums alone).
    """
    shrinkage: Annotated[Float, Field(ge=0, le=1)] = 0.05
    """Share a of the identity in the covariance of ``lda``."""
    gamma: Positive = 1.0
    """Variance that ``cof`` adds in all directions."""
    temperature: Positive = 0.1
    """Divides the outputs of normalised heads."""
    step: Positive = 8.0
    """Largest length of a step of ``softmax``; where the loss rises, a smaller one, down to 2."""

    def require_training(self, train: Training, largest: int) -> None:
        """Raise :class:`FedblendError` for ``softmax`` where a client's change is not one gradient of its samples."""
        one_step = train.optimizer.steps == "sgd" and not (train.momentum or train.weight_decay or train.steps)
        if self.head == "softmax" and not (one_step and train.batches_of(largest) == 1):
            raise FedblendError(
                f"method.server_step: '{self.name}' takes clients' changes for gradients; valid: SGD with train.epochs "
                f"= 1 and train.batch_size = {largest} or more, without train.steps, momentum, weight_decay"
            )

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        """The aggregate with the new last layer; keeps the chosen ``ridge``."""
        if server.pool is None or (server.round and self.head != "softmax"):
            return dict(weights), dict(server.state)
        tensors = server.pool.tensors
        if self.head in ("ridge", "lda", "softmax") and "gram" not in tensors:
            raise FedblendError(
                f"method.sharing.gram: 'none', but the head '{self.head}' needs second moments; valid: shared, or the "
                "heads ncm and cof"
            )
        total, kept = Sums.of(tensors), dict(server.state)
        if self.head in ("ridge", "softmax") and not kept:
            ridge = self.ridge if self.ridge is not None else total.least_error()
            kept = {"ridge": torch.tensor(ridge, dtype=torch.float64)}
        if self.head == "ridge":
            w, b = total.ridge(float(kept["ridge"]), total.by_class)
        elif self.head == "softmax":
            length = min(len(total.counts), self.step)
            w, b = total.ridge(float(kept["ridge"]), length * self._residuals(weights, total, server))
        elif self.head == "lda":
            w, b = total.lda(self.shrinkage)
        elif self.head == "ncm":
            w, b = total.means, total.counts * 0
        else:
            w, b = _cof(tensors["sums"].double(), self.gamma)
        if self.head not in ("lda", "softmax"):
            norm = (w.square().sum(1) + b.square()).sqrt().clamp(min=1e-12) * self.temperature
            w, b = w / norm[:, None], b / norm
        if not server.round:
            absent = total.counts < 0.5
            w, b = w.masked_fill(absent[:, None], 0.0), b.where(~absent, b.min() - 10)
        width = width_of(server.model)
        if w.shape[1] != width:
            w = w @ projection(width, w.shape[1]).T
        name, layer = last_layer(server.model)
        new = {f"{name}.weight": w} | ({} if layer.bias is None else {f"{name}.bias": b})
        if server.round:
            new = {n: server.start[n].to(t) + t for n, t in new.items()}
        return {**weights, **{n: t.to(weights[n]) for n, t in new.items()}}, kept

    def _residuals(self, weights: Tensors, total: Sums, server: ServerContext) -> torch.Tensor:
        """R, float64 [C, d + 1]: from the sums in the first round, later from the clients' mean change."""
        if not server.round:
            return total.by_class - total.by_class.sum(0) / len(total.counts)
        name, layer = last_layer(server.model)
        names = (f"{name}.{field}" for field, _ in layer.named_parameters())
        w, *rest = ((weights[n] - server.start[n]).to(total.counts) for n in names)
        b = rest[0] if rest else total.counts * 0
        if w.shape[1] != total.by_class.shape[1] - 1:
            w = w @ projection(w.shape[1], total.by_class.shape[1] - 1)
        return total.counts.sum() / server.lr * torch.cat([w, b[:, None]], 1)


@dataclass(frozen=True)
class Sums:
    """Sums over all entries, float64."""

    by_class: torch.Tensor
    """(f, 1) by class, [C, d + 1]."""
    gram: torch.Tensor | None
    """f f^T, [d, d]."""
    noise: float
    """Standard deviation of the noise on numbers of ``gram``."""

    @classmethod
    def of(cls, tensors: Tensors) -> Sums:
        gram = unpacked(tensors["gram"]) if "gram" in tensors else None
        noise = tensors["noise"].double().square().sum().sqrt() if "noise" in tensors else 0.0
        return cls(tensors["sums"].double().sum(0), gram, float(noise))

    @property
    def counts(self) -> torch.Tensor:
        """Samples of each class, [C]."""
        return self.by_class[:, -1]

    @property
    def means(self) -> torch.Tensor:
        """Mean features of each class, [C, d]."""
        return self.by_class[:, :-1] / self.counts.clamp(min=1)[:, None]

    def ridge(self, part: float, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``targets`` times (A + lambda I)^-1, lambda: ``part`` of the mean eigenvalue, or the noise's largest."""
        a = self.augmented()
        solved = torch.linalg.solve(a + self.factor(a, part) * torch.eye(len(a), dtype=a.dtype), targets.T)
        return solved[:-1].T, solved[-1]

    def factor(self, a: torch.Tensor, part: float) -> float:
        """The lambda that is added to the augmented moment ``a``."""
        return max(part * float(a.diagonal()[:-1].mean()), math.sqrt(2 * (len(a) - 1)) * self.noise)

    def least_error(self) -> float:
        """The ridge of least error by generalised cross-validation: |Y - X W|^2 / (1 - tr H / N)^2.

        With A = U diag(v) U^T and B = U^T S, the error |Y - X W|^2 = N - sum (v + 2 lambda) / (v + lambda)^2 B^2, and
        the trace of the hat matrix H = X (A + lambda I)^-1 X^T is sum v / (v + lambda).
        """
        a, total = self.augmented(), float(self.counts.sum())
        values, vectors = torch.linalg.eigh(a)
        values, explained = values.clamp(min=0), (vectors.T @ self.by_class.T).square().sum(1)

        def error(part: float) -> float:
            raised = values + (added := self.factor(a, part))
            residual = total - float(((values + 2 * added) / raised.square() * explained).sum())
            return residual / (1 - float((values / raised).sum()) / total) ** 2

        return min(RIDGES, key=error)

    def augmented(self) -> torch.Tensor:
        """The sum of (f, 1)(f, 1)^T, [d + 1, d + 1]."""
        assert self.gram is not None
        last = self.by_class.sum(0)
        return torch.cat([torch.cat([self.gram, last[:-1, None]], 1), last[None]])

    def lda(self, share: float) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.gram is not None
        means, counts = self.means, self.counts.clamp(min=0)
        total, width = counts.sum(), len(self.gram)
        within = (self.gram - (counts[:, None] * means).T @ means) / (total - len(counts)).clamp(min=1)
        eye = torch.eye(width, dtype=within.dtype)
        if self.noise:
            values, vectors = torch.linalg.eigh(within)
            within = vectors * values.clamp(min=math.sqrt(2 * width) * self.noise / float(total)) @ vectors.T
        sigma = (1 - share) * within + share * within.trace() / width * eye
        w = torch.linalg.solve(sigma, means.T).T
        return w, (counts.clamp(min=1) / total.clamp(min=1)).log() - (means * w).sum(1) / 2


def _cof(sums: torch.Tensor, gamma: float) -> tuple[torch.Tensor, torch.Tensor]:
    """FedCOF's W [C, d] and b = 0, from each entry's sums [entries, C, d + 1]."""
    counts, total = sums[..., -1], sums.sum(0)
    n, means = total[:, -1], total[:, :-1] / total[:, -1:].clamp(min=1)
    width = means.shape[1]
    apart = sums[..., :-1] / counts.clamp(min=1)[..., None] - means
    entries = (counts > 0).sum(0)
    scale = (n - 1).clamp(min=0) / (entries - 1).clamp(min=1)
    weighed = (counts * scale).sqrt()[..., None] * apart
    flat = weighed.reshape(-1, width)
    overall = total[:, :-1].sum(0) / n.sum().clamp(min=1)
    a = flat.T @ flat + (n - 1).clamp(min=0).sum() * gamma * torch.eye(width, dtype=sums.dtype)
    a += n.sum() * torch.outer(overall, overall)
    return torch.linalg.solve(a, total[:, :-1].T).T, n * 0
