"""A site's own file: where its data are, and what it lets out of the house, whatever the server asks."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic
import torch
from pydantic import BaseModel, ConfigDict, Field

from fedblend.core import registry
from fedblend.core.dataset import Population
from fedblend.core.errors import FedblendError, did_you_mean
from fedblend.core.paths import from_file
from fedblend.core.registry import Count, FilePath, Int
from fedblend.core.setup import Setup
from fedblend.data.scale import OneHot, Scaler
from fedblend.experiment.config import Experiment
from fedblend.experiment.fields import field_of_part
from fedblend.experiment.setup import make_setup
from fedblend.experiment.tables import read_toml

KINDS = ("weights", "masked", "keys", "outputs", "means", "seeds", "raw", "shared", "answers", "scores", "extras")
"""What can leave a site, by the words under which bytes are counted; ``scores`` are counts of right test samples,
``extras`` what terms such as SCAFFOLD's send beside a model.

``masked`` is a model, or a mean, of which the server learns only the sum with others, ``keys`` what that takes.
"""

SAFE = ("weights", "masked", "keys", "outputs", "means", "answers", "scores", "extras")
"""What a site allows unless its file says otherwise: nothing that holds single samples."""


class RefusedByPolicy(FedblendError):
    """What a site's policy forbids, found out only while it works on an answer; it goes into the audit log."""


class Site(BaseModel):
    """What stands in a site file.

    A site without one works on its client's part of the experiment's data, which is nobody's own, and lets all out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    data: field_of_part("dataset", "data") | None = None  # type: ignore[valid-type]
    """This site's samples; unless given, its client's part of the experiment's data (for trials)."""
    allow: tuple[str, ...] = SAFE
    """Kinds of payload that may leave: weights, masked, keys, outputs, means, seeds, raw, shared, answers, scores,
    extras.
    """
    min_mean: Count = 2
    """Fewest samples that a shared mean may cover; the experiment's own minimum holds as well."""
    min_sum: Annotated[Int, Field(ge=2)] = 3
    """Fewest sites whose masked models, or means, make a sum that the server may learn; the experiment's holds too."""
    max_seeds: Count | None = None
    """Most seeds that this site gives where a server asks for a number of them (XorMixFL); unless given, no limit."""
    rounds: Count | None = None
    """Rounds that this site trains in, over all runs in its audit log; unless given, no limit."""
    protection: field_of_part("protection") | None = None  # type: ignore[valid-type]
    """What is done to models before they leave, after the experiment's own protection."""
    device: str = "cpu"
    """Where this site computes, as PyTorch names it."""
    audit: FilePath | None = None
    """The audit log: one JSON line for everything that leaves; with a site file, `audit.jsonl` beside it."""

    @pydantic.field_validator("allow")
    @classmethod
    def _known(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        for kind in allow:
            if kind not in KINDS:
                raise ValueError(
                    f"'{kind}' is no kind of payload{did_you_mean(kind, KINDS)}; valid: {', '.join(KINDS)}"
                )
        return allow


def read_site(path: str | Path) -> Site:
    """The site file at ``path``; paths in it are relative to it. Raises :class:`FedblendError`."""
    table = read_toml(path)
    for field in table:
        if field not in Site.model_fields:
            raise FedblendError(
                f"{path}: {field}: unknown key{did_you_mean(field, Site.model_fields)}; "
                f"valid: {', '.join(Site.model_fields)}"
            )
    try:
        return Site(**from_file({"audit": "audit.jsonl", **table}, path))
    except pydantic.ValidationError as error:
        raise FedblendError(f"{path}: {registry.explain(error)}") from None


def site_of(node_config: Any) -> Site:
    """The site that a SuperNode was started for: its ``--node-config 'site="..."'``, or none in particular."""
    path = node_config.get("site")
    return Site(allow=KINDS) if path is None else _cached(str(path))


@functools.lru_cache(maxsize=4)
def _cached(path: str) -> Site:
    return read_site(path)


def world_at(site: Site, experiment: Experiment, client: int, told: dict[str, Any]) -> Setup:
    """The world as a site knows it: its own samples are its client's, and it knows of no others.

    ``told`` is what :func:`about_setup` says of the server's. Raises :class:`FedblendError` if the site's samples are
    of another shape or have other classes than the server's.
    """
    if site.data is None:
        return make_setup(experiment)
    data = site.data.load()
    ours = {"shape": list(data.train.x.shape[1:]), "classes": list(data.classes), "outputs": data.outputs}
    for field, value in ours.items():
        if value != told[field]:
            raise FedblendError(f"data: this site's {field} is {value}, the federation's {told[field]}")
    alone = experiment.model_copy(update={"partition": registry.build("partition", {"name": "iid", "clients": 1})})
    setup = make_setup(alone, data)
    before, mine = np.zeros(client + 1, np.int64), setup.population
    after = told["clients"] - client - 1
    offsets = np.concatenate([before, np.full(1 + after, len(mine.order))])
    held = np.concatenate([before, np.full(1 + after, len(mine.held_order))]) if mine.held_offsets is not None else None
    # In the order in which they lie in the site's file, not in that of the split into one.
    population = Population(np.sort(mine.order), offsets, np.sort(mine.held_order), held)
    return replace(setup, experiment=experiment, population=population, scale=scale_of(told["scale"]))


def about_setup(setup: Setup) -> dict[str, Any]:
    """What every site must know of the server's world, as plain words: clients, shapes, classes, scale."""
    scale = setup.scale
    numbers: dict[str, Any] = {"vocabulary": scale.vocabulary} if isinstance(scale, OneHot) else {}
    if isinstance(scale, Scaler):
        tensors = {"factor": scale.factor, "offset": scale.offset}
        tensors |= {"unit_factor": scale.unit_factor, "unit_offset": scale.unit_offset}
        numbers = {"name": scale.name, "inverted": scale.inverted, **{n: t.tolist() for n, t in tensors.items()}}
    return {
        "clients": len(setup.population),
        "shape": list(setup.data.train.x.shape[1:]),
        "classes": list(setup.data.classes),
        "outputs": setup.data.outputs,
        "scale": numbers,
    }


def scale_of(told: dict[str, Any]) -> Scaler | OneHot:
    """The scale that :func:`about_setup` wrote down, to the last bit."""
    if "vocabulary" in told:
        return OneHot(told["vocabulary"])
    factors = [torch.tensor(told[name]) for name in ("factor", "offset", "unit_factor", "unit_offset")]
    return Scaler(told["name"], told["inverted"], *factors)
