"""Selections: which clients take part in a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field, WithJsonSchema

from fedblend.core.columns import read_columns
from fedblend.core.errors import FedblendError, listed
from fedblend.core.registry import Count, FilePath, Fraction, Int, NonNegative, Positive, build, part
from fedblend.core.selection import Selection, SelectionContext, draw
from fedblend.core.trees import Tensors

Client = Annotated[Int, Field(ge=0)]


@part("selection", "uniform")
class Uniform(Selection):
    """Draw each client with the same probability, without replacement (FedAvg)."""

    by = "chance"

    def choose(self, context: SelectionContext) -> np.ndarray:
        return context.rng.choice(context.clients, context.number, replace=False, shuffle=False)


@part("selection", "size")
class BySize(Selection):
    """Draw clients by their number of samples, without replacement: each next one with probability n_k / sum n.

    A client of many samples then counts twice if its upload is also weighted by them: give ``aggregator = {name =
    "mean", by = "clients"}`` (Li et al. 2020, "On the convergence of FedAvg on non-IID data", section 3.3, scheme I,
    there with replacement).
    """

    def choose(self, context: SelectionContext) -> np.ndarray:
        return draw(context.rng, context.clients, context.number, np.log(context.sizes[context.clients]))


@part("selection", "power-of-choice")
class PowerOfChoice(Selection):
    """Take the clients with the largest loss among candidates (Cho, Wang and Joshi 2022, section 4, pow-d).

    1. Draw d candidates without replacement, each next one with probability n_k / sum n.
    2. They receive the model w, and send F_k(w), the mean loss over all of their samples.
    3. The m = ``train.cohort`` candidates with the largest loss take part; equal losses are ordered at random.

    d = m is sampling by size, and d = all clients always takes the largest losses. The paper averages with equal
    weights: ``aggregator = {name = "mean", by = "clients"}``. Models to candidates and their losses are counted as
    "weights" and "local-loss". A candidate of which no loss arrives is not chosen.

    Often wrong elsewhere: candidates are drawn uniformly; the loss is that of the last training, not of the current
    model; the models that candidates receive are not counted.
    """

    by = "losses"
    candidates: Count = 20
    """Candidates d of a round, at least `train.cohort`; all clients where they are fewer."""

    def require_possible(self, holding: np.ndarray, cohort: int) -> None:
        """Raise :class:`FedblendError` for fewer candidates than a cohort."""
        if self.candidates < cohort:
            raise FedblendError(
                f"selection.candidates: {self.candidates} is less than train.cohort: {cohort}; valid: {cohort} or more"
            )

    def choose(self, context: SelectionContext) -> np.ndarray:
        # In the order of the draw, which is random: the stable sort leaves equal losses in it.
        drawn = draw(context.rng, context.clients, self.candidates, np.log(context.sizes[context.clients]))
        losses = context.losses(drawn)
        known = np.flatnonzero(~np.isnan(losses))
        return drawn[known[np.argsort(-losses[known], kind="stable")]][: context.number]


@part("selection", "loss")
class ByLastLoss(Selection):
    """Draw clients by the loss of their last training (active federated learning, Goetz et al. 2019, algorithm 1).

    A client's value is v_k = sqrt(n_k) times its mean loss when it last trained. Of K clients the alpha1 K of the
    smallest values are left out; (1 - alpha3) m are drawn with probabilities proportional to exp(alpha2 v_k), and
    alpha3 m uniformly from all others. The defaults are the paper's.

    A client that has not trained yet counts with the largest known value, so that it is tried; the paper does not say
    what it counts with. The loss is the mean over the steps of a training, which clients send with their models anyhow.
    """

    smallest: Fraction = 0.75
    """Share alpha1 of the clients, those of the smallest values, that are left out."""
    sharpness: NonNegative = 0.01
    """Factor alpha2 of values in the exponent."""
    uniform: Fraction = 0.1
    """Share alpha3 of a cohort that is drawn uniformly."""

    def init_state(self, clients: int) -> dict[str, torch.Tensor]:
        return {"values": torch.full((clients,), math.nan, dtype=torch.float64)}

    def choose(self, context: SelectionContext) -> np.ndarray:
        values = context.state["values"].numpy()[context.clients]
        values = np.where(np.isnan(values), np.nanmax(values, initial=0.0), values)
        # Equal values in random order.
        order = context.rng.permutation(len(values))
        order = order[np.argsort(values[order], kind="stable")]
        uniform = int(round(self.uniform * context.number, 9))
        left = order[min(int(round(self.smallest * len(order), 9)), len(order) - context.number + uniform) :]
        by_value = draw(context.rng, left, context.number - uniform, self.sharpness * values[left])
        rest = np.setdiff1d(order, by_value)
        return context.clients[np.concatenate([by_value, context.rng.choice(rest, uniform, replace=False)])]

    def after_round(self, state: Tensors, uploads: Sequence[tuple[int, int, float | None]]) -> dict[str, torch.Tensor]:
        values = state["values"].clone()
        for client, samples, loss in uploads:
            if loss is not None and math.isfinite(loss):
                values[client] = math.sqrt(samples) * loss
        return {"values": values}


@part("selection", "list")
class Listed(Selection):
    """Take given clients in each round; after the last list the first one follows again."""

    clients: Annotated[tuple[tuple[Client, ...], ...], Field(min_length=1)]
    """Clients of each round: a list of lists. `train.cohort` is not used."""

    def require_possible(self, holding: np.ndarray, cohort: int) -> None:
        """Raise :class:`FedblendError` for a client that holds no samples, or is listed twice for a round."""
        for i, clients in enumerate(self.clients):
            if len(set(clients)) < len(clients) or not set(clients) <= set(holding.tolist()):
                raise FedblendError(
                    f"selection.clients[{i}]: {listed(clients)}; valid: different clients that hold samples: "
                    f"{listed(holding.tolist())}"
                )

    def choose(self, context: SelectionContext) -> np.ndarray:
        return np.intersect1d(context.clients, self.clients[context.round % len(self.clients)])


@part("selection", "available")
class Available(Selection):
    """Choose among the clients that are there, by a trace; where they are fewer than a cohort, all of them.

    A round in which fewer uploads than ``min_uploads`` arrive stops the run; with ``min_uploads = 0`` a round without
    clients changes nothing.
    """

    trace: FilePath
    """CSV file with columns `client`, `from` and `to`: a client is there from one round to another, both included,
    counted from 1. A client may have several lines; without a line it is never there."""
    among: Annotated[
        Any,
        BeforeValidator(lambda spec: build("selection", spec, "selection.among")),
        WithJsonSchema({"part": "selection"}),
    ] = Field(default="uniform", validate_default=True)
    """Choice among the clients that are there, with its options."""
    seconds: Positive | None = None
    """Seconds from one round to the next (default: not given); `from` and `to` are then seconds since the first one."""

    @property
    def by(self) -> Literal["losses", "other"]:  # type: ignore[override]
        return "losses" if self.among.by == "losses" else "other"

    @property
    def by_losses(self) -> bool:
        return bool(self.among.by_losses)

    def require_possible(self, holding: np.ndarray, cohort: int) -> None:
        """Raise :class:`FedblendError` if the trace cannot be read, or names a client that holds no samples."""
        self.among.require_possible(holding, cohort)
        if strange := set(self._columns()[0]) - set(holding.tolist()):
            raise FedblendError(
                f"{self.trace}: clients {listed(sorted(map(int, strange)))} hold no samples, or do not exist"
            )

    def _columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        client, first, last = read_columns(self.trace, "client", "from", "to")
        return client.astype(np.int64), first, last

    def init_state(self, clients: int) -> dict[str, torch.Tensor]:
        return dict(self.among.init_state(clients))

    def choose(self, context: SelectionContext) -> np.ndarray:
        client, first, last = self._columns()
        now = context.round + 1 if self.seconds is None else context.round * self.seconds
        there = np.intersect1d(context.clients, client[(first <= now) & (now <= last)])
        some = replace(context, clients=there, number=min(context.number, len(there)))
        return np.asarray(self.among.choose(some))

    def after_round(self, state: Tensors, uploads: Sequence[tuple[int, int, float | None]]) -> dict[str, torch.Tensor]:
        return dict(self.among.after_round(state, uploads))
