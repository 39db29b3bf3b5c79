"""Ditto: a personal model for each client, near the global one."""

from __future__ import annotations

from collections.abc import Sequence

from fedblend.core.objective import Personal, Term
from fedblend.core.registry import NonNegative, part
from fedblend.methods.objectives.terms import Proximal


@part("personal", "ditto")
class Ditto(Personal):
    """A client trains a personal model v_k on h_k(v; w_t) = F_k(v) + lambda / 2 ||v - w_t||^2 (Li et al. 2021).

    The global model w is trained as without Ditto (Algorithm 1: its solver is independent of the personal models). In
    each of its rounds a client goes on from the v_k that it kept, for as many epochs, on batches of its own drawing;
    v_k begins as its first global model, in the authors' code as the run's first weights. F_k is the method's
    objective. v_k never leaves the client and is never averaged; ``evaluate_model = "each"`` tests every client with
    its v_k. lambda = 0 trains clients alone, a large lambda keeps them on the global model.
    """

    lam: NonNegative = 0.1
    """Weight lambda of the distance to the global model; the paper tries 0.05 to 2."""

    def terms(self) -> Sequence[Term]:
        return (Proximal(mu=self.lam),)
