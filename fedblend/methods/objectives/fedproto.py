"""FedProto: embeddings drawn to the mean embeddings of classes over all clients."""

from __future__ import annotations

import torch

from fedblend.core.objective import Batch, Context, Net, Term
from fedblend.core.registry import NonNegative, part
from fedblend.core.trees import Tensors
from fedblend.methods.uploads import embedding


@part("term", "prototypes")
class ToPrototypes(Term):
    """Add lambda times the squared distance of samples' embeddings to the global prototypes of their classes.

    lambda mean_i ||z_i - C^(y_i)||^2 / d over the batch, with embeddings z of d numbers (FedProto, Tan et al. 2022,
    equations 7 and 8; the distance is the mean square, as in the authors' code). Nothing is added for a class without
    a global prototype, nor before the server has sent any. Each step takes a further forward pass.
    """

    outputs_kind = "prototypes"

    lam: NonNegative = 1.0
    """Weight of the term."""

    def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
        """lambda times the mean distance of the batch."""
        z = embedding(net, batch.x)
        if "prototypes" not in context.global_outputs:
            return 0.0 * z.sum()
        prototypes, label = context.global_outputs["prototypes"], context.task.encode(batch.y)
        known = label @ (prototypes != 0).any(1).float()
        return self.lam * ((z - label @ prototypes).square().mean(1) * known).mean()
