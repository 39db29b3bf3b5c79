"""Secure aggregation at a site: its keys, its shares for the others, its masked numbers, its help to unmask the sum.

What is summed is models after training, or the means that a group of clients shares. One sum (Bonawitz et al. 2017,
"Practical Secure Aggregation", figure 4, for a server that follows it):

1. ``keys``: two new key pairs; the public ones go to the server, and from there to the sum's other sites.
2. ``shares``: a secret of its own; this and the private key of its masks are split among the sites, sealed for each.
3. ``masked``, after training (or ``masked_mean``): its whole numbers, with a mask from its own secret and one for each
   other site, which that site subtracts. It then forgets both secrets, so that they never mask other numbers.
4. ``unmask``: of sites whose model arrived its share of their own secret, of those that are gone its share of their
   private key: never both of one site, and once.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from fedblend.core.errors import FedblendError
from fedblend.core.trees import strip_prefix
from fedblend.flower.client_task import ClientTask
from fedblend.flower.messages import Spoken, Tensors
from fedblend.flower.secure_aggregation.masks import (
    BROKEN,
    MEANS,
    MODELS,
    about_sum,
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
from fedblend.flower.site import RefusedByPolicy
from fedblend.methods.aggregators.secure import SecureMean
from fedblend.methods.sharing.secure_means import SecureMeans

STATE = "secure"
"""What a site remembers of a sum's protocol."""

Known = dict[str, bytes]


def secure(here: ClientTask) -> SecureMean | None:
    """The aggregator that wants masked uploads, if this experiment has it."""
    method = here.setup.experiment.method
    chosen = method.upload.aggregator(method.aggregator)
    return chosen if isinstance(chosen, SecureMean) else None


def summing(here: ClientTask, of: Any) -> SecureMean | SecureMeans:
    """What says how many sites make a sum of this kind. Raises :class:`FedblendError` if nothing is summed so."""
    sharing = here.setup.experiment.method.sharing
    chosen = {MODELS: secure(here), MEANS: sharing if isinstance(sharing, SecureMeans) else None}.get(of)
    if chosen is None:
        raise FedblendError(f"this experiment sums no {of!r} under masks")
    return chosen


def keys(here: ClientTask, words: dict[str, Any], tensors: Tensors) -> Spoken:
    """Stage 1: new public keys, for masks and for what is sealed."""
    of = words["of"]
    summing(here, of)
    made = {name: new_pair() for name in ("mask", "box")}
    _keep(here, of, "keys", {f"private/{name}": private for name, (private, _) in made.items()})
    return {}, {name: tensor_of(public) for name, (_, public) in made.items()}


def shares(here: ClientTask, words: dict[str, Any], tensors: Tensors) -> Spoken:
    """Stage 2: this site's two secrets, split among all sites whose keys came, sealed for each of them."""
    of, threshold = words["of"], int(words["threshold"])
    known, public = _at(here, of, "keys"), _public(tensors)
    _check(here, summing(here, of), public, known, threshold)
    own = os.urandom(32)
    parts = [split(secret, threshold, len(public)) for secret in (own, known["private/mask"])]
    sealed = {}
    for peer, *pair in zip(sorted(public), *parts, strict=True):
        if peer == here.client:
            known |= {"own-share": pair[0]}
        else:
            sealed[str(peer)] = seal(known["private/box"], public[peer]["box"], here.client, peer, pair[0], pair[1])
    flat = {f"public/{peer}/{name}": key for peer, table in public.items() for name, key in table.items()}
    _keep(here, of, "shares", known | flat | {"own": own, "threshold": threshold.to_bytes(4, "little")})
    return {}, {name: tensor_of(content) for name, content in {**sealed, "commit": digest(own)}.items()}


def masked(
    here: ClientTask, aggregator: SecureMean, upload: Tensors, start: Tensors, words: dict[str, Any], tensors: Tensors
) -> dict[str, torch.Tensor]:
    """Stage 3 for models: the upload as it leaves, {"masked": int32 [numbers]}."""
    total = words["total"]
    if type(total) is not int or not total >= max(1, aggregator.weight_of(here.size)):
        raise FedblendError(f"a total of the sum that is none: {total!r}")
    whole = aggregator.encoded(upload, start, aggregator.weight_of(here.size) / total)
    return _masked(here, MODELS, whole, about_sum(words, here.round, start, total), tensors)


def masked_mean(here: ClientTask, payload: Tensors, words: dict[str, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    """Stage 3 for means: what is shared as it leaves, {"masked": int32 [numbers]}, tensors by name."""
    whole = torch.cat([payload[name].flatten() for name in sorted(payload)])
    return _masked(here, MEANS, whole, about_sum(words, here.round), tensors)


def _masked(here: ClientTask, of: str, whole: torch.Tensor, about: bytes, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Whole numbers, int32 [numbers], under their masks; the secrets that made these are forgotten."""
    known = _at(here, of, "shares")
    sealed = {int(peer): bytes_in(tensor) for peer, tensor in strip_prefix("sealed/", tensors).items()}
    threshold = int.from_bytes(known["threshold"], "little")
    if len(sealed) + 1 < threshold or not all(f"public/{peer}/mask" in known for peer in sealed):
        raise RefusedByPolicy(
            f"sites {sorted([here.client, *sealed])} are not those of this round, or not {threshold} of them"
        )
    numbers = whole.numpy().view(np.uint32)
    numbers = numbers + stretched(known["own"], len(numbers))
    for peer in sorted(sealed):
        mask = masking(known["private/mask"], known[f"public/{peer}/mask"], about, len(numbers))
        numbers = numbers + mask if here.client < peer else numbers - mask
    left = {name: content for name, content in known.items() if name not in ("own", "private/mask")}
    _keep(here, of, "masked", left | {f"sealed/{peer}": content for peer, content in sealed.items()})
    return {"masked": torch.from_numpy(numbers.view(np.int32))}


def unmask(here: ClientTask, words: dict[str, Any], tensors: Tensors) -> Spoken:
    """Stage 4: this site's shares, of those whose numbers arrived and of those who are gone. It answers once."""
    of = words["of"]
    known = _at(here, of, "masked")
    there, gone = ({int(peer) for peer in words[name]} for name in ("there", "gone"))
    sealed = {int(name.removeprefix("sealed/")): c for name, c in known.items() if name.startswith("sealed/")}
    threshold = int.from_bytes(known["threshold"], "little")
    if there & gone or there | gone != {*sealed, here.client} or here.client not in there:
        raise RefusedByPolicy(
            f"it is asked to unmask {sorted(there)} without {sorted(gone)}, which is not what it masked for"
        )
    if len(there) < threshold:
        raise RefusedByPolicy(f"a sum of {len(there)} sites, and it needs {threshold}")
    _keep(here, of, "done", {})
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
    """The sum's public keys by site, "mask" and "box", from tensors "SITE/mask" and "SITE/box"."""
    tables: dict[int, dict[str, bytes]] = {}
    for path, tensor in tensors.items():
        site, _, name = path.partition("/")
        tables.setdefault(int(site), {})[name] = bytes_in(tensor)
    return tables


def _check(
    here: ClientTask, rule: SecureMean | SecureMeans, public: dict[int, dict[str, bytes]], known: Known, threshold: int
) -> None:
    """Refuse too small a sum, and keys among which this site's are not its own or that are not all different."""
    least = max(rule.threshold(len(public)), here.site.min_sum)
    if not least <= threshold <= len(public):
        raise RefusedByPolicy(
            f"a sum of {threshold} of {len(public)} sites: the experiment and this site's policy want {least} "
            "(min_sum in its file)"
        )
    ours = {name: public_of(known[f"private/{name}"]) for name in ("mask", "box")}
    different = {key for table in public.values() for key in table.values()}
    if public.get(here.client) != ours or len(different) != 2 * len(public):
        raise RefusedByPolicy("the keys that the server gives out are not those that the sites sent")


def _at(here: ClientTask, of: str, stage: str) -> Known:
    """What is remembered of this round's sum at a stage. Raises :class:`FedblendError` at any other."""
    kept = here.memory.recall(STATE, f"{here.round}/{of}/{stage}")
    if kept is None:
        raise FedblendError(
            f"round {here.round + 1}'s masks are not at this stage here (asked twice, or its SuperNode was restarted)"
        )
    return {name: bytes_in(tensor) for name, tensor in kept.items()}


def _keep(here: ClientTask, of: str, stage: str, known: Known) -> None:
    here.memory.keep(STATE, f"{here.round}/{of}/{stage}", {name: tensor_of(content) for name, content in known.items()})
