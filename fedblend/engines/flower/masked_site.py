"""Secure aggregation at a site: its keys, its shares for the others, its masked model, and its help to unmask the sum.

One round (Bonawitz et al. 2017, "Practical Secure Aggregation", figure 4, for a server that follows it):

1. ``keys``: two new key pairs; the public ones go to the server, and from there to the round's other sites.
2. ``shares``: a secret of its own; this and the private key of its masks are split among the sites, sealed for each.
3. ``masked``, after training: the model's encoded change, with a mask from its own secret and one for each other site,
   which that site subtracts. It then forgets both secrets, so that they never mask another model.
4. ``unmask``: of sites whose model arrived its share of their own secret, of those that are gone its share of their
   private key: never both of one site, and once.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from fedblend.aggregators.secure import SecureMean
from fedblend.engines.flower.here import Here
from fedblend.engines.flower.masks import (
    BROKEN,
    bytes_in,
    digest,
    masking,
    new_pair,
    public_of,
    seal,
    split,
    stretched,
    tensor_of,
    unseal,
)
from fedblend.engines.flower.messages import Spoken, Tensors
from fedblend.engines.flower.site import Refused
from fedblend.errors import FedblendError
from fedblend.prefixes import under

STATE = "secure"
"""What a site remembers of a round's protocol."""

Known = dict[str, bytes]


def secure(here: Here) -> SecureMean | None:
    """The aggregator that wants masked uploads, if this experiment has it."""
    method = here.world.experiment.method
    chosen = method.upload.aggregator(method.aggregator)
    return chosen if isinstance(chosen, SecureMean) else None


def keys(here: Here, words: dict[str, Any], tensors: Tensors) -> Spoken:
    """Stage 1: new public keys, for masks and for what is sealed."""
    if secure(here) is None:
        raise FedblendError("this experiment's aggregator masks nothing")
    made = {name: new_pair() for name in ("mask", "box")}
    _keep(here, "keys", {f"private/{name}": private for name, (private, _) in made.items()})
    return {}, {name: tensor_of(public) for name, (_, public) in made.items()}


def shares(here: Here, words: dict[str, Any], tensors: Tensors) -> Spoken:
    """Stage 2: this site's two secrets, split among all sites whose keys came, sealed for each of them."""
    known, threshold = _at(here, "keys"), int(words["threshold"])
    public = _public(tensors)
    _check(here, public, known, threshold)
    own = os.urandom(32)
    parts = [split(secret, threshold, len(public)) for secret in (own, known["private/mask"])]
    sealed = {}
    for peer, *pair in zip(sorted(public), *parts, strict=True):
        if peer == here.client:
            known |= {"own-share": pair[0]}
        else:
            sealed[str(peer)] = seal(known["private/box"], public[peer]["box"], here.client, peer, pair[0], pair[1])
    flat = {f"public/{peer}/{name}": key for peer, table in public.items() for name, key in table.items()}
    _keep(here, "shares", known | flat | {"own": own, "threshold": threshold.to_bytes(4, "little")})
    return {}, {name: tensor_of(content) for name, content in {**sealed, "commit": digest(own)}.items()}


def masked(
    here: Here, aggregator: SecureMean, upload: Tensors, start: Tensors, words: dict[str, Any], tensors: Tensors
) -> dict[str, torch.Tensor]:
    """Stage 3: the upload as it leaves, {"masked": int32 [numbers]}; the secrets that masked it are forgotten."""
    known = _at(here, "shares")
    sealed = {int(peer): bytes_in(tensor) for peer, tensor in under("sealed/", tensors).items()}
    threshold, share = int.from_bytes(known["threshold"], "little"), float(words["share"])
    if len(sealed) + 1 < threshold or not all(f"public/{peer}/mask" in known for peer in sealed):
        raise Refused(f"sites {sorted([here.client, *sealed])} are not those of this round, or not {threshold} of them")
    if not 0 <= share <= 1:
        raise FedblendError(f"a share of the sum that is none: {share}")
    numbers = aggregator.encoded(upload, start, share).numpy().view(np.uint32)
    numbers = numbers + stretched(known["own"], len(numbers))
    for peer in sorted(sealed):
        mask = masking(known["private/mask"], known[f"public/{peer}/mask"], len(numbers))
        numbers = numbers + mask if here.client < peer else numbers - mask
    left = {name: content for name, content in known.items() if name not in ("own", "private/mask")}
    _keep(here, "masked", left | {f"sealed/{peer}": content for peer, content in sealed.items()})
    return {"masked": torch.from_numpy(numbers.view(np.int32))}


def unmask(here: Here, words: dict[str, Any], tensors: Tensors) -> Spoken:
    """Stage 4: this site's shares, of those whose models arrived and of those who are gone. It answers once."""
    known = _at(here, "masked")
    there, gone = ({int(peer) for peer in words[name]} for name in ("there", "gone"))
    sealed = {int(name.removeprefix("sealed/")): c for name, c in known.items() if name.startswith("sealed/")}
    threshold = int.from_bytes(known["threshold"], "little")
    if there & gone or there | gone != {*sealed, here.client} or here.client not in there:
        raise Refused(f"it is asked to unmask {sorted(there)} without {sorted(gone)}, which is not what it masked for")
    if len(there) < threshold:
        raise Refused(f"a sum of {len(there)} sites, and it needs {threshold}")
    _keep(here, "done", {})
    said = {f"own/{here.client}": known["own-share"]}
    for peer, content in sealed.items():
        try:
            own, pair = unseal(known["private/box"], known[f"public/{peer}/box"], peer, here.client, content)
        except BROKEN:
            # The others' shares may still suffice.
            continue
        said |= {f"own/{peer}": own} if peer in there else {f"pair/{peer}": pair}
    return {}, {name: tensor_of(content) for name, content in said.items()}


def _public(tensors: Tensors) -> dict[int, dict[str, bytes]]:
    """The round's public keys by site, "mask" and "box", from tensors "SITE/mask" and "SITE/box"."""
    tables: dict[int, dict[str, bytes]] = {}
    for path, tensor in tensors.items():
        site, _, name = path.partition("/")
        tables.setdefault(int(site), {})[name] = bytes_in(tensor)
    return tables


def _check(here: Here, public: dict[int, dict[str, bytes]], known: Known, threshold: int) -> None:
    """Refuse too small a sum, and keys among which this site's are not its own or that are not all different."""
    aggregator = secure(here)
    assert aggregator is not None
    least = max(aggregator.threshold(len(public)), here.site.min_sum)
    if not least <= threshold <= len(public):
        raise Refused(
            f"a sum of {threshold} of {len(public)} sites: the experiment and this site's policy want {least} "
            "(min_sum in its file)"
        )
    ours = {name: public_of(known[f"private/{name}"]) for name in ("mask", "box")}
    different = {key for table in public.values() for key in table.values()}
    if public.get(here.client) != ours or len(different) != 2 * len(public):
        raise Refused("the keys that the server gives out are not those that the sites sent")


def _at(here: Here, stage: str) -> Known:
    """What is remembered of this round at a stage. Raises :class:`FedblendError` at any other."""
    kept = here.memory.recall(STATE, f"{here.round}/{stage}")
    if kept is None:
        raise FedblendError(
            f"round {here.round + 1}'s masks are not at this stage here (asked twice, or its SuperNode was restarted)"
        )
    return {name: bytes_in(tensor) for name, tensor in kept.items()}


def _keep(here: Here, stage: str, known: Known) -> None:
    here.memory.keep(STATE, f"{here.round}/{stage}", {name: tensor_of(content) for name, content in known.items()})
