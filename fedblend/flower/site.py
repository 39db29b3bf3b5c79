"""A site's policy: its site file, and the setup on which a site with data of its own trains.

The site file states where the site's data are and what may leave the site, for every request of every server.
"""

from __future__ import annotations

import functools
import json
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
"""Kinds of payload that can leave a site, by the names under which their bytes are counted.

``scores`` are numbers of right test samples. ``masked`` is a model or a mean of which the server learns only the sum
with others. ``keys`` are the public keys and secret shares of masks. ``extras`` are what terms such as SCAFFOLD's send
beside a model.
"""

SAFE = ("weights", "masked", "keys", "outputs", "means", "answers", "scores", "extras")
"""Kinds that a site allows by default: none that holds single samples."""


class RefusedByPolicy(FedblendError):
    """A request that a site's policy forbids; the audit log records it."""


class Site(BaseModel):
    """The fields of a site file.

    A site without a file trains on its client's part of the experiment's data and allows all kinds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    data: field_of_part("dataset", "data") | None = None  # type: ignore[valid-type]
    """This site's samples; default: its client's part of the experiment's data (for trials)."""
    allow: tuple[str, ...] = SAFE
    """Kinds of payload that may leave: weights, masked, keys, outputs, means, seeds, raw, shared, answers, scores,
    extras.
    """
    min_mean: Count = 2
    """Fewest samples that a shared mean may cover; the experiment's own minimum holds as well."""
    min_sum: Annotated[Int, Field(ge=2)] = 3
    """Fewest sites whose masked models, or means, the server may sum; the experiment's minimum holds as well."""
    max_seeds: Count | None = None
    """Most seeds that this site sends for one request (XorMixFL); default: no limit."""
    rounds: Count | None = None
    """Rounds that this site trains in, over all runs in its audit log; default: no limit."""
    protection: field_of_part("protection") | None = None  # type: ignore[valid-type]
    """Protection of models before they leave, after the experiment's own protection."""
    device: str = "cpu"
    """The PyTorch device on which this site computes."""
    audit: FilePath | None = None
    """The audit log: one JSON line for each payload that leaves; default with a site file: `audit.jsonl` beside it."""

    @pydantic.field_validator("allow")
    @classmethod
    def _check_kinds(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        for kind in allow:
            if kind not in KINDS:
                raise ValueError(
                    f"'{kind}' is no kind of payload{did_you_mean(kind, KINDS)}; valid: {', '.join(KINDS)}"
                )
        return allow


def read_site(path: str | Path) -> Site:
    """Read the site file at ``path``; paths in it are relative to it. Raises :class:`FedblendError`."""
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


def site_of_node(node_config: Any) -> Site:
    """Return the site of a SuperNode's ``--node-config 'site="..."'``; without a site file all kinds are allowed."""
    path = node_config.get("site")
    return Site(allow=KINDS) if path is None else _read_cached(str(path))


_read_cached = functools.lru_cache(maxsize=4)(read_site)


def setup_at_site(site: Site, experiment: Experiment, client: int, server_setup: dict[str, Any]) -> Setup:
    """Return the setup at a site: its client has the site's samples, all other clients have none.

    ``server_setup`` is the result of :func:`describe_setup`. Raises :class:`FedblendError` if the site's samples have
    another shape or other classes than the server's.
    """
    if site.data is None:
        return make_setup(experiment)
    data = site.data.load()
    own = {"shape": list(data.train.x.shape[1:]), "classes": list(data.classes), "outputs": data.outputs}
    for field, value in own.items():
        if value != server_setup[field]:
            raise FedblendError(f"data: this site's {field} is {value}, the federation's {server_setup[field]}")
    one_client = experiment.model_copy(update={"partition": registry.build("partition", {"name": "iid", "clients": 1})})
    setup = make_setup(one_client, data)
    before, mine = np.zeros(client + 1, np.int64), setup.population
    after = server_setup["clients"] - client - 1
    offsets = np.concatenate([before, np.full(1 + after, len(mine.order))])
    held = np.concatenate([before, np.full(1 + after, len(mine.held_order))]) if mine.held_offsets is not None else None
    # Samples stay in the order of the site's file, not in the order of the partition into one client.
    population = Population(np.sort(mine.order), offsets, np.sort(mine.held_order), held)
    scale = scale_from(server_setup["scale"])
    return replace(setup, experiment=experiment, population=population, scale=scale)


def describe_setup(setup: Setup) -> dict[str, Any]:
    """Return what sites need of the server's setup, as JSON values: clients, shape, classes, outputs, scale."""
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


def scale_from(numbers: dict[str, Any]) -> Scaler | OneHot:
    """Return the scale that :func:`describe_setup` described, equal to the last bit."""
    if "vocabulary" in numbers:
        return OneHot(numbers["vocabulary"])
    factors = [torch.tensor(numbers[name]) for name in ("factor", "offset", "unit_factor", "unit_offset")]
    return Scaler(numbers["name"], numbers["inverted"], *factors)


SITE_FILE = """# What may leave this site, for every request of every server. fedblend reads it before it replies.
# Start the SuperNode with: --node-config 'partition-id=K site="{path}"'

# Kinds of payload that may leave. Other kinds: {others}.
#   weights   a model after training            outputs   mean outputs by label
#   means     means of samples                  seeds     mixed samples
#   raw       samples as they are               answers   replies to a server step, from this site's model
#   scores    how many test samples are right   masked    a model or mean of which the server learns only a sum
#   keys      keys and sealed shares of masks   extras    what terms such as SCAFFOLD's send beside a model
# Without "weights" this site's model leaves masked, or not at all.
allow = {allow}

# Fewest samples that a shared mean may cover; the experiment's own minimum holds as well.
min_mean = {min_mean}

# Fewest sites whose masked models (or means) the server may sum; the experiment's minimum holds as well.
min_sum = 3

# Most seeds (single samples, mixed or encoded) for one request of a server; without this line: no limit.
# max_seeds = 100

# Rounds in which this site trains, over all runs in its audit log; without this line: no limit.
# rounds = 200

# The device on which this site computes: cpu, cuda, cuda:1.
device = "cpu"

# The record of every payload that left and of every request that was refused: JSON lines.
audit = "audit.jsonl"
{data}
# Protection of every model before it leaves, after the experiment's own protection. Noise comes from the operating
# system's random numbers. `fedblend list protection` shows all protections.
# [protection]
# name = "noise"
# clip = 1.0               # norm to which an update is scaled down
# multiplier = 0.1         # standard deviation of the noise, in clips
"""

NO_DATA = """
# This site's samples. Without this table the site trains on its client's part of the experiment's data (for trials).
# [data]
# name = "npz"
# path = "samples.npz"
"""

DATA = """
# This site's samples; their test half stays at this site and is not used.
[data]
name = "npz"
path = {path}
"""


def site_text(path: Path, data: Path | None, allow: tuple[str, ...] = SAFE, min_mean: int = 2) -> str:
    """Return the commented content of a new site file at ``path``, with the samples in ``data`` (an ``.npz`` file)."""
    others = ", ".join(kind for kind in KINDS if kind not in allow) or "none"
    # A JSON string is a valid TOML string.
    table = NO_DATA if data is None else DATA.format(path=json.dumps(str(data.absolute())))
    return SITE_FILE.format(
        path=path.absolute(), others=others, allow=json.dumps(list(allow)), min_mean=min_mean, data=table
    )
