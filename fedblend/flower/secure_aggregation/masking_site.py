"""Secure aggregation at a site: its keys, its secret shares, its masked values, its shares to unmask the sum.

A sum is of models after training, or of the means that a group of clients shares. The protocol of one sum is Bonawitz
et al. 2017, "Practical Secure Aggregation", figure 4, for a server that follows it:

1. :func:`make_keys`: two new key pairs; the server sends their public keys to the other sites of the sum.
2. :func:`make_shares`: a new secret; this secret and the private key of the masks are split among the sites, sealed
   for each.
3. :func:`masking` deletes both secrets, so that they mask no other integers, and counts the vector. Then
   :func:`masked_update` after training, or :func:`masked_mean`: integers with a mask from the site's own secret and one
   mask for each other site, which that site subtracts.
4. :func:`sign_sites`, where sites sign their keys: a signature of which sites' vectors arrived, once.
5. :func:`reveal_shares`: for each site whose vector arrived its share of that site's secret, for each site that
   dropped out its share of that site's private key. Never both of one site, and once. A site that knows its peers'
   keys does so only if enough sites have signed the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fedblend.core.errors import FedblendError, legible
from fedblend.core.trees import by_client
from fedblend.experiment.toml_tables import read_toml
from fedblend.flower.client_task import ClientTask
from fedblend.flower.messages import MessageContent, Tensors
from fedblend.flower.secure_aggregation import masks
from fedblend.flower.site import RefusedByPolicy, Withheld
from fedblend.methods.aggregators.mean import SecureMean
from fedblend.methods.sharing.means import MaskedSums

log = logging.getLogger("flwr")

SIGNATURE = "sign"  # Name of a site's signature among its public keys
STATE = "secure"  # Name of the protocol's state in a client's memory

SumState = dict[str, bytes]  # A site's keys, secrets and shares of one sum, by name


def secure_aggregator(task: ClientTask) -> SecureMean | None:
    """Return the experiment's aggregator if it takes masked uploads."""
    method = task.setup.experiment.method
    aggregator = method.upload.aggregator(method.aggregator)
    return aggregator if isinstance(aggregator, SecureMean) else None


def summing_part(task: ClientTask, quantity: Any) -> SecureMean | MaskedSums:
    """Return the part that sums this quantity under masks. Raises :class:`FedblendError` if there is none."""
    sharing = task.setup.experiment.method.sharing
    parts = {masks.MODELS: secure_aggregator(task), masks.MEANS: sharing if isinstance(sharing, MaskedSums) else None}
    part = parts.get(quantity)
    if part is None:
        raise FedblendError(f"this experiment sums no {quantity!r} under masks")
    return part


def make_keys(task: ClientTask, fields: dict[str, Any], tensors: Tensors) -> MessageContent:
    """Stage 1: make two key pairs, for masks and for sealed shares; return the public keys."""
    quantity = fields["quantity"]
    summing_part(task, quantity)
    pairs = {name: masks.new_key_pair() for name in ("mask", "box")}
    _keep(task, quantity, "keys", {f"private/{name}": private for name, (private, _) in pairs.items()})
    keys = {name: public for name, (_, public) in pairs.items()}
    if task.site.key is not None:
        text = masks.keys_text(task.client, quantity, masks.sum_digest(fields, task.round), keys)
        keys[SIGNATURE] = masks.sign(task.site.key, text)
    return {}, masks.as_tensors(keys)


def make_shares(task: ClientTask, fields: dict[str, Any], tensors: Tensors) -> MessageContent:
    """Stage 2: split this site's two secrets among all sites with keys; return the shares, sealed for each site.

    With them go the digests of all shares, by which the server detects a wrong share and whose it is.
    """
    quantity, threshold = fields["quantity"], fields["threshold"]
    state = _state(task, quantity, "keys")
    public = {site: masks.as_bytes(keys) for site, keys in by_client("", tensors).items()}
    if task.site.peers is not None:
        _check_signatures(task, quantity, masks.sum_digest(fields, task.round), public)
    public = {site: {n: k for n, k in keys.items() if n != SIGNATURE} for site, keys in public.items()}
    _check(task, summing_part(task, quantity).threshold(len(public)), public, state, threshold)
    own, table = os.urandom(32), masks.table_digest(public, threshold)
    shares = [masks.split_secret(secret, threshold, len(public)) for secret in (own, state["private/mask"])]
    sealed, digests = {}, b""
    for peer, *pair in zip(sorted(public), *shares, strict=True):
        for secret, share in zip(masks.SECRETS, pair, strict=True):
            digests += masks.share_digest(task.client, peer, secret, share)
        if peer == task.client:
            state |= {"own-share": pair[0]}
        else:
            sealed[str(peer)] = masks.seal(state["private/box"], public[peer]["box"], table, task.client, peer, *pair)
    state |= {f"public/{peer}/{name}": key for peer, keys in public.items() for name, key in keys.items()}
    _keep(task, quantity, "shares", state | {"own": own, "threshold": threshold.to_bytes(4, "little"), "table": table})
    committed = {"commit": masks.commitment(own), "digests": digests}
    return {}, masks.as_tensors({**sealed, **committed})


@contextmanager
def masking(task: ClientTask, quantity: str, fields: dict[str, Any], tensors: Tensors) -> Iterator[SumState]:
    """Begin stage 3: check the request, count the vector, and delete the secrets of its masks from memory; yield them.

    All this is done before the vector is computed. Whether that fails depends on the site's samples, so the server must
    not ask again in this round; and it is told no more than that it failed. Raises :class:`Withheld` then.
    """
    state = _state(task, quantity, "shares")
    part = summing_part(task, quantity)
    if isinstance(part, SecureMean):
        total = fields["total"]
        if total is None or not total >= max(1, part.weight_of(task.size)):
            raise FedblendError(f"the total weight {total!r} of the sum is not valid")
    sealed = _by_site("sealed/", masks.as_bytes(tensors))
    threshold = int.from_bytes(state["threshold"], "little")
    others = all(f"public/{peer}/mask" in state for peer in sealed) and task.client not in sealed
    if len(sealed) + 1 < threshold or not others:
        raise RefusedByPolicy(
            f"sites {sorted([task.client, *sealed])} are not those of this round, or not {threshold} of them"
        )
    task.begin()
    taken = state | {f"sealed/{peer}": content for peer, content in sealed.items()}
    kept = {name: content for name, content in taken.items() if name not in ("own", "private/mask")}
    _keep(task, quantity, "masked", kept)
    try:
        yield taken
    except Exception as error:
        _keep(task, quantity, "done", {})
        if isinstance(error, FedblendError):
            log.warning("fedblend: nothing was sent to a masked sum: %s", legible(error, most=1000))
            raise Withheld(str(error)) from error
        log.error("fedblend: an unexpected error", exc_info=error)
        raise Withheld("an unexpected error; the log of this SuperNode states which") from error


def masked_update(
    task: ClientTask,
    aggregator: SecureMean,
    upload: Tensors,
    start: Tensors,
    fields: dict[str, Any],
    taken: SumState,
    beside: Tensors = masks.NOTHING,
) -> dict[str, torch.Tensor]:
    """Stage 3 for models: return the masked upload, {"masked": int32 [numbers]}.

    ``taken`` is what :func:`masking` yields, ``beside`` what the server sent with the model
    (:func:`~fedblend.flower.secure_aggregation.masks.sent_beside`).
    """
    total = fields["total"]
    values = aggregator.encoded(upload, start, aggregator.weight_of(task.size) / total)
    return _masked(task, values, masks.sum_digest(fields, task.round, start, total, beside), taken)


def masked_mean(task: ClientTask, payload: Tensors, fields: dict[str, Any], taken: SumState) -> dict[str, torch.Tensor]:
    """Stage 3 for means: return the masked payload, {"masked": int32 [numbers]}, its tensors in order of name."""
    values = torch.cat([payload[name].flatten() for name in sorted(payload)])
    return _masked(task, values, masks.sum_digest(fields, task.round), taken)


def _masked(task: ClientTask, values: torch.Tensor, context: bytes, taken: SumState) -> dict[str, torch.Tensor]:
    masked = values.numpy().view(np.uint32)
    masked, context = masked + masks.mask_from_key(taken["own"], len(masked)), context + taken["table"]
    for peer in sorted(_by_site("sealed/", taken)):
        mask = masks.shared_mask(taken["private/mask"], taken[f"public/{peer}/mask"], context, len(masked))
        masked = masked + mask if task.client < peer else masked - mask
    return {"masked": torch.from_numpy(masked.view(np.int32))}


def sign_sites(task: ClientTask, fields: dict[str, Any], tensors: Tensors) -> MessageContent:
    """Stage 4: sign which sites are in the sum, and which have dropped out. A site replies to this stage once.

    Raises :class:`RefusedByPolicy` for other sites than those of stage 3, and at a site without a key.
    """
    quantity = fields["quantity"]
    state = _state(task, quantity, "masked")
    present, dropped = _sites_of(task, fields, state)
    if task.site.key is None:
        raise RefusedByPolicy("it signs nothing (no key in its site file)")
    _keep(task, quantity, "signed", state)
    text = masks.sites_text(task.client, quantity, state["table"], present, dropped)
    return {}, {SIGNATURE: masks.bytes_to_tensor(masks.sign(task.site.key, text))}


def reveal_shares(task: ClientTask, fields: dict[str, Any], tensors: Tensors) -> MessageContent:
    """Stage 5: return the shares that unmask the sum: of the secrets of present sites, of the keys of dropped sites.

    A site replies to this stage once. ``tensors`` are the signatures of stage 4, "sign/SITE".
    """
    quantity = fields["quantity"]
    state = _state(task, quantity, "signed", *(["masked"] if task.site.peers is None else []))
    present, dropped = _sites_of(task, fields, state)
    if task.site.peers is not None:
        _check_agreement(task, quantity, state, present, dropped, tensors)
    _keep(task, quantity, "done", {})
    shares = {f"own/{task.client}": state["own-share"]}
    for peer, content in _by_site("sealed/", state).items():
        try:
            keys = state["private/box"], state[f"public/{peer}/box"], state["table"]
            own, pair = masks.unseal(*keys, peer, task.client, content)
        except masks.CRYPTO_ERRORS:
            # The other sites' shares may suffice.
            continue
        shares |= {f"own/{peer}": own} if peer in present else {f"pair/{peer}": pair}
    return {}, masks.as_tensors(shares)


def _sites_of(task: ClientTask, fields: dict[str, Any], state: SumState) -> tuple[set[int], set[int]]:
    """The sites in the sum, and those that dropped out; refused if they are not those of stage 3, or too few."""
    present, dropped = set(fields["present"]), set(fields["dropped"])
    sealed, threshold = _by_site("sealed/", state), int.from_bytes(state["threshold"], "little")
    if present & dropped or present | dropped != {*sealed, task.client} or task.client not in present:
        raise RefusedByPolicy(
            f"the server wants to unmask {sorted(present)} without {sorted(dropped)}, for which the site has no masks"
        )
    if len(present) < threshold:
        raise RefusedByPolicy(f"a sum of {len(present)} sites; the least is {threshold}")
    return present, dropped


def _by_site(prefix: str, table: Mapping[str, bytes]) -> dict[int, bytes]:
    """Return what a table has under names of a prefix and a site, by site: "sealed/" shares for this one, say."""
    return {int(name.removeprefix(prefix)): content for name, content in table.items() if name.startswith(prefix)}


def _check_agreement(
    task: ClientTask, quantity: str, state: SumState, present: set[int], dropped: set[int], tensors: Tensors
) -> None:
    """Refuse to unmask a sum unless enough of its sites have signed that it is of these sites.

    They are more than half of all sites, and each signs once, so no other sum of these keys has as many signatures.
    """
    peers, threshold = read_toml(str(task.site.peers)), int.from_bytes(state["threshold"], "little")
    agreed = 0
    for site, signed in _by_site(f"{SIGNATURE}/", masks.as_bytes(tensors)).items():
        text = masks.sites_text(site, quantity, state["table"], present, dropped)
        agreed += site in present and masks.is_signed(str(peers.get(str(site))), text, signed)
    if agreed < threshold:
        raise RefusedByPolicy(
            f"{agreed} sites have signed that the sum is of {sorted(present)} without {sorted(dropped)}; {threshold} "
            "must (peers in the site file)"
        )


def _check(task: ClientTask, least: int, public: dict[int, dict[str, bytes]], state: SumState, threshold: int) -> None:
    """Refuse a sum of too few sites, and public keys that are not all different or lack this site's own."""
    least = max(least, task.site.min_sum)
    if not least <= threshold <= len(public):
        raise RefusedByPolicy(
            f"a sum of {threshold} of {len(public)} sites: the experiment and this site's policy want {least} "
            "(min_sum in its file)"
        )
    own = {name: masks.public_key_of(state[f"private/{name}"]) for name in ("mask", "box")}
    different = {key for keys in public.values() for key in keys.values()}
    if public.get(task.client) != own or len(different) != 2 * len(public):
        raise RefusedByPolicy("the server's public keys are not those that the sites sent")


def _check_signatures(task: ClientTask, quantity: str, context: bytes, public: dict[int, dict[str, bytes]]) -> None:
    """Refuse a sum with keys that are not signed by the sites of the site file's ``peers``."""
    peers = read_toml(str(task.site.peers))
    for site, keys in public.items():
        line, signed = peers.get(str(site)), keys.get(SIGNATURE, b"")
        if not isinstance(line, str):
            raise RefusedByPolicy(f"site {site} would be in the sum, and is not among this site's peers (peers)")
        whole = {"mask", "box"} <= set(keys)
        if not whole or not masks.is_signed(line, masks.keys_text(site, quantity, context, keys), signed):
            raise RefusedByPolicy(
                f"the keys of site {site} are not signed with its own key (peers in the site file); another took its "
                "place, or its site file has no key"
            )


def _state(task: ClientTask, quantity: str, *stages: str) -> SumState:
    found = (task.memory.recall(STATE, f"{task.round}/{quantity}/{stage}") for stage in stages)
    kept = next((table for table in found if table is not None), None)
    if kept is None:
        raise FedblendError(
            f"the masks of round {task.round + 1} are not at this stage (a repeated request, or a restarted SuperNode)"
        )
    return masks.as_bytes(kept)


def _keep(task: ClientTask, quantity: str, stage: str, state: SumState) -> None:
    task.memory.keep(STATE, f"{task.round}/{quantity}/{stage}", masks.as_tensors(state))
