"""The kinds of payload that leave a client: one closed table, which sites, ledger, record and reports read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PayloadKind:
    """What is known of all payloads of a kind, whoever chooses the model and the experiment."""

    name: str
    """The word under which bytes are counted, and which a site file allows."""
    meaning: str
    """What it is, in a few words."""
    entries: Literal["", "sample", "means"] = ""
    """What each entry is: made of one "sample", or of two; or one of the "means" of at least ``min_mean`` samples."""
    through_model: bool = False
    """Whether the server's model is applied to samples before they are averaged or sent: who chooses its layers chooses
    what the payload tells, so that a mean of twenty may be one sample.
    """
    noise: Literal["protection", "sharing"] | None = None
    """The field of an experiment whose noise is on it; ``None`` where nothing adds noise. Answers are made of a model
    with its noise.
    """
    by_default: bool = False
    """Whether a site lets it leave unless its file says otherwise."""

    @property
    def is_shared(self) -> bool:
        """Whether a sharing makes it, without training."""
        return self.noise == "sharing"


PAYLOAD_KINDS = {
    kind.name: kind
    for kind in (
        PayloadKind("weights", "a model after training", noise="protection", by_default=True),
        PayloadKind("masked", "a model or mean of which the server learns a sum", noise="protection", by_default=True),
        PayloadKind("keys", "keys and sealed shares of masks", by_default=True),
        PayloadKind("outputs", "mean outputs by label", by_default=True),
        PayloadKind("means", "means of samples", entries="means", noise="sharing", by_default=True),
        PayloadKind("answers", "replies to a server step, of the model that left", noise="protection", by_default=True),
        PayloadKind("scores", "how many held-out samples are right", by_default=True),
        PayloadKind("extras", "what SCAFFOLD's term sends beside a model", by_default=True),
        PayloadKind("loss", "mean loss in training, beside a bare model", by_default=True),
        PayloadKind("metrics", "loss and metrics on held-out samples"),
        PayloadKind("local-loss", "mean loss of the server's model, for the choice of clients", through_model=True),
        PayloadKind("hidden-means", "means of hidden states", entries="means", through_model=True, noise="sharing"),
        PayloadKind("map-statistics", "means of hidden maps' statistics (FedFA)", through_model=True),
        PayloadKind("prototypes", "mean embeddings by class", through_model=True),
        PayloadKind("statistics", "moments of features or channels", through_model=True, noise="sharing"),
        PayloadKind("features", "hidden states of samples", entries="sample", through_model=True, noise="sharing"),
        PayloadKind("synthetic", "samples made to be like the site's", through_model=True, noise="sharing"),
        PayloadKind("seeds", "mixed samples", entries="sample", noise="sharing"),
        PayloadKind("raw", "samples as they are", entries="sample", noise="sharing"),
        PayloadKind("shared", "what a sharing of your own sends", noise="sharing"),
    )
}
"""All kinds, by name. In a masked sum the kind is ``masked``, whatever is summed."""
