"""AggEnhance: the aggregate is tuned on points that lie inside the classes of the clients' models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, Float, Positive, part
from fedblend.core.server_step import ModelSpec, Refined, Response, ServerContext, Tensors
from fedblend.methods.server_steps.points import Stacked, ballots, beginning, elect, require_classes, search
from fedblend.methods.server_steps.tuning import Tuning


@part("server_step", "aggenhance")
class AggEnhance(Tuning):
    """AggEnhance (Ou et al. 2022, Algorithms 1 and 2): tune the aggregate on class interior points.

    Each round, for every class c and every client's model w_k, a point s is moved down the loss l(w_k; (s, c))
    (equation 11) from (the last round's point + noise) / 2; every model votes for the points that it puts into
    their class, with its probability; the best point of each class joins the set S; and the aggregate is trained
    on all of S. Points live in [0, 1], the unit scale of pictures; models are in evaluation mode throughout.
    """

    looks_at_uploads = True

    steps: Count = 100
    """Steps down the loss that each point takes."""
    step_size: Positive = 0.1
    """Step size of these steps, on inputs in [0, 1]."""
    keep: Count | None = None
    """Points kept, the newest ones; unless given, all (Figure 16)."""
    decay: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Weight of a point against one of the next round's; 1 weighs all alike (Figure 16)."""

    def require_possible(self, known: ModelSpec) -> None:
        """Raise :class:`FedblendError` unless points can be made: of classes, by a model that can be stacked."""
        name: str = type(self).name
        require_classes(name, known)
        for layer in known.model.modules():
            if isinstance(layer, nn.RNNBase):
                raise FedblendError(
                    f"method.server_step: '{name}' moves the points of many models together, which PyTorch cannot with "
                    f"a fused {type(layer).__name__}"
                )

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        """The aggregate tuned on the points; and these, with their labels and the rounds they were made in."""
        best = self.best(beginning(server), server)
        kept = server.state if best is None else self._joined(server.state, best, server.round)
        if not kept:
            return dict(weights), {}
        worth = self.decay ** (server.round - kept["rounds"]).float()
        return self.tune(weights, kept["points"], kept["labels"], worth, server), kept

    def best(self, begin: torch.Tensor, server: ServerContext) -> torch.Tensor | None:
        """The round's points [C, ...], from ``begin`` [C, ...]; ``None`` if there is no model to make them of."""
        # Answers may come from clients, who are not trusted: only points of the right form, within the box, and votes
        # of at most 1.
        made = [a["points"].clamp(0, 1) for a in server.query({"begin": begin}) if _like(a.get("points"), begin)]
        if not made:
            return None
        found = torch.stack(made)
        empty = torch.zeros(found.shape[:2])
        said = [a["scores"].clamp(0, 1) for a in server.query({"points": found}) if _like(a.get("scores"), empty)]
        return elect(found, sum(said, empty))

    def respond(self, uploads: Mapping[int, Tensors], question: Tensors, known: ModelSpec) -> dict[int, Response]:
        """Of each model its points [C, ...], or what it says of all models' points [K, C, ...]."""
        if not uploads:
            return {}
        if "points" in question:
            votes = ballots(list(uploads.values()), question["points"], known)
            return {client: {"scores": vote} for client, vote in zip(uploads, votes, strict=True)}
        first = next(iter(uploads.values()))
        models = {name: torch.stack([one[name] for one in uploads.values()]) for name in first}
        found = search(models, question["begin"], known, self.steps, self.step_size)
        return {client: {"points": points} for client, points in zip(uploads, found, strict=True)}

    def _joined(self, state: Stacked, best: torch.Tensor, round: int) -> Stacked:
        """The set of points with the new ones at its end, and the oldest gone where there are too many."""
        new = {
            "points": best,
            "labels": torch.arange(len(best)),
            "rounds": torch.full((len(best),), round),
        }
        whole = {name: torch.cat([state[name], t]) if state else t for name, t in new.items()}
        return whole if self.keep is None else {name: t[-self.keep :] for name, t in whole.items()}


@part("server_step", "aggenhance-secure")
class SecureAggEnhance(AggEnhance):
    """AggEnhance for secure aggregation (Ou et al. 2022, Figure 12): the server never sees a client's model.

    The server sends out where to begin; each client makes the points of its own model; the server sends all of them
    to all clients, and these send back what their models say of each. The rest is as in `aggenhance`, and so are the
    points. A client makes its points from what it has sent, with the protection on it, so that noise that earned an
    (epsilon, delta) there earns it here too.
    """

    queries_clients = True


def _like(tensor: torch.Tensor | None, like: torch.Tensor) -> bool:
    return tensor is not None and tensor.shape == like.shape and tensor.dtype == like.dtype
