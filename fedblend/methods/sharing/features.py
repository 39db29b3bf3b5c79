"""Features: hidden states of single samples, and statistics of features by class."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn

from fedblend.core.context import ModelSpec, Scale
from fedblend.core.registry import Count, Float, part
from fedblend.core.sharing import ClientData, Payload, Request, Sharing, SharingPlan
from fedblend.methods.requirements import entries_in, fault_of_form, require_held
from fedblend.models.layers import last_layer, with_features

CHUNK = 500  # Samples in one forward pass


def width_of(model: nn.Module) -> int:
    """The number of features, the inputs of the last layer."""
    return model.get_parameter(f"{last_layer(model)[0]}.weight").shape[1]


@torch.no_grad()
def features_of(model: nn.Module, scale: Scale, x: torch.Tensor, chunk: int) -> torch.Tensor:
    """Features of stored samples, float64 [n, d], computed for ``chunk`` samples at a time."""
    device = next(model.parameters()).device
    return torch.cat([with_features(model, scale(part).to(device))[1].cpu() for part in x.split(chunk)]).double()


@part("sharing", "features")
class Features(Sharing):
    """Share hidden states after ``layer`` layers of single samples, with their targets (FLea, Xia et al. 2024).

    The clients of a round share ``fraction`` of their samples before they train, by the round's global model; the pool
    holds nothing of earlier rounds. A client shares the same samples in each of its rounds, evenly spaced among its
    samples. No mean hides a sample: whoever has the model can compare the features of candidates with those shared, and
    rebuild inputs where the layers lose little. The objective ``flea`` needs features.
    """

    plan = SharingPlan("hidden", "each-round", "cohort", sees_model=True)
    bytes_kind = "features"

    layer: Count = 1
    """Layers before the hidden states; the objective must have the same."""
    fraction: Annotated[Float, Field(gt=0, le=1)] = 0.1
    """Share of a client's samples that are shared, at least one sample."""

    def most_entries(self, samples: int, minimum: int, request: Request | None = None) -> int:
        """``fraction`` of the samples, rounded down, but one at least."""
        return min(samples, max(1, int(self.fraction * samples)))

    def share(self, local: ClientData) -> Payload | None:
        """Hidden states x [n, ...] and targets y [n, outputs], one-hot where they are classes."""
        samples = len(local.y)
        if not samples:
            return None
        count = self.most_entries(samples, local.minimum)
        rows = torch.arange(count) * samples // count
        return {"x": local.hidden(local.scale(local.x[rows]), self.layer), "y": local.task.encode(local.y[rows])}


@part("sharing", "feature-statistics")
class FeatureStatistics(Sharing):
    """Share the number, the mean and the covariance of each class's features (CCVR, Luo et al. 2021).

    Features are the inputs of the model's last layer, d numbers a sample, under the aggregate at the end of the round.
    For class c a client k sends N_ck, mu_ck = (1 / N_ck) sum_i z_i, and the unbiased covariance Sigma_ck =
    1 / (N_ck - 1) sum_i (z_i - mu_ck)(z_i - mu_ck)^T, 0 for a single sample. All clients that hold samples receive the
    model for it, whatever the size of the cohort. The server step `ccvr` needs these statistics.

    A class takes 16 + 4 (d + d (d + 1) / 2) bytes: of the symmetric covariance one half is sent. With d = 84 (lenet5)
    these are 14,632 bytes, with d = 512 (resnet18) 527,376. With `covariance = "diagonal"` they are 16 + 8 d: 688 and
    4,112.

    The mean and the covariance of n <= d samples give their features up to a rotation, and exactly where these are not
    negative (see `moments`). A class of fewer than `min_samples` samples, or than `policy.min_mean`, is left out.
    """

    bytes_kind = "statistics"
    made_of = "label"

    covariance: Literal["full", "diagonal"] = "full"
    """Whole covariances as in the paper, or the variances of single features."""
    min_samples: Count = 10
    """Fewest samples of a class of which a client sends statistics; the paper has no such bound (1)."""
    from_round: Count | None = None
    """First round at whose end clients share, counted from 1 (default: the last round of the run, as in the paper)."""

    @property
    def plan(self) -> SharingPlan:  # type: ignore[override]
        last = self.from_round is None
        return SharingPlan("moments", "after-last-round" if last else "after-rounds", to="server", sees_model=True)

    def shares_in(self, round: int, rounds: int) -> bool:
        return round + 1 >= (self.from_round or rounds)

    def require_possible(self, sizes: np.ndarray, minimum: int) -> None:
        """Raise :class:`FedblendError` if no client has enough samples."""
        require_held(sizes, {"method.sharing.min_samples": self.min_samples, "policy.min_mean": minimum})

    def most_entries(self, samples: int, minimum: int, request: Request | None = None) -> int:
        return samples // max(self.min_samples, minimum)

    @torch.no_grad()
    def share(self, local: ClientData) -> Payload | None:
        """Labels y and counts, int64 [n], and means [n, d] and packed covariances [n, p], float32."""
        assert local.model is not None
        counts, enough = self._counts(local)
        labels = torch.nonzero(enough)[:, 0]
        if not len(labels):
            return None
        features = features_of(local.model, local.scale, local.x, CHUNK)
        of_class = [features[local.y == label] for label in labels]
        means = torch.stack([z.mean(0) for z in of_class])
        covariances = [self._covariance(z - mean) for z, mean in zip(of_class, means, strict=True)]
        return {
            "y": labels,
            "count": counts[labels],
            "mean": means.float(),
            "covariance": torch.stack(covariances).float(),
        }

    def used(self, local: ClientData) -> np.ndarray:
        enough: np.ndarray = self._counts(local)[1][local.y].numpy()
        return enough

    def _counts(self, local: ClientData) -> tuple[torch.Tensor, torch.Tensor]:
        """The number of samples of each class, and whether these are enough."""
        counts = torch.bincount(local.y, minlength=local.task.outputs)
        return counts, counts >= max(self.min_samples, local.minimum)

    def _covariance(self, centred: torch.Tensor) -> torch.Tensor:
        """The packed covariance of features [n, d] with mean 0."""
        divisor = max(1, len(centred) - 1)
        if self.covariance == "diagonal":
            return centred.square().sum(0) / divisor
        rows, columns = torch.triu_indices(centred.shape[1], centred.shape[1])
        return (centred.T @ centred / divisor)[rows, columns]

    def fault(self, payload: Payload, samples: int, spec: ModelSpec) -> str | None:
        """Why statistics are not those of ``samples`` samples in the model's classes and features, or ``None``."""
        width = width_of(spec.model)
        size = width if self.covariance == "diagonal" else width * (width + 1) // 2
        n, whole, real = entries_in(payload), torch.int64, torch.float32
        form = {"y": (n, whole), "count": (n, whole), "mean": (n, width, real), "covariance": (n, size, real)}
        if fault := fault_of_form(payload, form):
            return fault
        label, count = payload["y"], payload["count"]
        if len(label.unique()) < n or bool(((label < 0) | (label >= spec.task.outputs)).any()):
            return f"'y' holds no different labels from 0 to {spec.task.outputs - 1}"
        if bool(((count < 1) | (count > samples)).any()) or int(count.sum()) > samples:
            return f"'count' holds no numbers of {samples} samples"
        diagonal = torch.eq(*torch.triu_indices(width, width)) if self.covariance == "full" else slice(None)
        if bool((payload["covariance"][:, diagonal] < 0).any()):
            return "'covariance' holds negative variances"
        return None


def combined(entries: Payload) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The statistics of all clients' samples from those of each client (CCVR, Luo et al. 2021).

    N_c = sum_k N_ck, mu_c = sum_k N_ck mu_ck / N_c, and Sigma_c = 1 / (N_c - 1) sum_k [(N_ck - 1) Sigma_ck +
    N_ck (mu_ck - mu_c)(mu_ck - mu_c)^T], which equals the paper's form and loses no digits where means are large. They
    are those of the pooled features, whatever the split. Returns the labels int64 [n], in order, and in float64 the
    means [n, d] and the covariances [n, p], packed as ``entries`` have them; a covariance is 0 where N_c is 1.
    """
    labels, of = torch.unique(entries["y"], return_inverse=True)
    count, mean, covariance = (entries[name].double() for name in ("count", "mean", "covariance"))
    width = mean.shape[1]

    def total(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(len(labels), *values.shape[1:]).index_add_(0, of, values)

    number = total(count)
    means = total(count[:, None] * mean) / number[:, None]
    apart = mean - means[of]
    rows, columns = torch.triu_indices(width, width) if covariance.shape[1] != width else [torch.arange(width)] * 2
    scatter = total((count - 1)[:, None] * covariance + count[:, None] * apart[:, rows] * apart[:, columns])
    return labels, means, scatter / (number - 1).clamp(min=1)[:, None]
