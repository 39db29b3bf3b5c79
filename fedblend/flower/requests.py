"""The closed form of a server's requests: each word is one of these, of this type, or the request is refused unread."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, with_config
from typing_extensions import TypeAliasType, TypedDict

from fedblend.core.errors import FedblendError, brief
from fedblend.core.registry import explain
from fedblend.flower.messages import MOST_ROUNDS, Tensors

MOST_CLIENTS = 10**7  # Largest number of clients of an experiment that a site accepts: it keeps one number for each
MAX_ENTRIES = 10**8  # Largest number of entries of a pool that a site accepts
CLOSED = ConfigDict(strict=True, extra="forbid")  # These fields and no others, each of its type

Client = Annotated[int, Field(ge=0, lt=MOST_CLIENTS)]
Number = Annotated[int, Field(ge=0, lt=2**62)]
Text = Annotated[str, Field(max_length=10_000)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{0,128}$")]
Numbers = TypeAliasType("Numbers", "list[Numbers] | float")
Mark = Annotated[str, Field(pattern=r"^[0-9]{1,10}-[0-9]{1,20}$")]
"""The mark of what a client keeps: ``ROUND-DIGEST`` (:func:`~fedblend.flower.messages.mark_text`)."""
Round = Annotated[int, Field(ge=0, lt=MOST_ROUNDS)]  # Counted from 0
Quantity = Literal["models", "means"]
SITE = "[0-9]{1,8}"  # A site in the name of a tensor


class Start(StrEnum):
    """What a client's training begins with. From the first two, which the server sent, protection sizes its noise."""

    ROUND = "round"  # The round's model, in this message
    SHARED = "shared"  # The round's model, which came with the request to share
    OWN = "own"  # The client's own weights of an earlier round, or of its first


class Form(BaseModel):
    """A request's fields: these and no others, each of its type; and the names that its tensors may have."""

    model_config = CLOSED
    tensors: ClassVar[str] = ""


class _Asked(Form):
    """What a server asks of one client in particular (:class:`~fedblend.core.sharing.Request`)."""

    wanted: list[Number]
    dummies: list[Number]


@with_config(CLOSED)
class ScalerForm(TypedDict):
    """An affine scale: one number for each channel or feature, in lists as deep as the samples have axes."""

    name: Text
    inverted: bool
    factor: Numbers
    offset: Numbers
    unit_factor: Numbers
    unit_offset: Numbers


@with_config(CLOSED)
class OneHotForm(TypedDict):
    """The scale of text."""

    vocabulary: Number


@with_config(CLOSED)
class TokensForm(TypedDict):
    """The scale of tokens."""

    name: Literal["tokens"]


@with_config(CLOSED)
class SetupForm(TypedDict):
    """What sites need of the server's setup (:func:`~fedblend.flower.site.describe_setup`)."""

    clients: Annotated[int, Field(ge=1, le=MOST_CLIENTS)]
    kind: Text
    shape: list[Number]
    classes: list[Text | int]
    outputs: Number
    labels: list[Text]
    table: dict[str, Any]
    features: Digest
    scale: ScalerForm | OneHotForm | TokensForm
    frozen: Digest


class _OfRun(Form):
    experiment: dict[str, Any]
    setup: SetupForm
    run: Digest | None = None


class Hello(_OfRun):
    """The first query: who are you? ``clients`` are those that take part in a run that has begun."""

    version: Text | None = None
    clients: Annotated[list[Client], Field(min_length=1)] | None = None


class _Request(_OfRun):
    client: Client
    round: Round


class Share(_Request):
    """Share data."""

    tensors = rf"weights/.+|sealed/{SITE}"
    request: _Asked | None = None


class Train(_Request):
    """Train. ``state``, ``mark`` and ``keep`` mark what the client keeps; ``pool`` is its data to mix with."""

    tensors = rf"(weights|outputs|server|pool)/.+|sealed/{SITE}"
    begins: Annotated[Start, Field(strict=False)]
    mark: Mark | None = None
    state: Mark | None = None
    keep: Mark | None = None
    pool: Digest | None = None
    owners: list[Annotated[list[Annotated[int, Field(ge=-1, lt=2**62)]], Field(min_length=2, max_length=2)]] = []
    total: Number | None = None


class Loss(_Request):
    """State the mean loss of the round's model over all own samples."""

    tensors = r"weights/.+"


class Ask(_Request):
    """Answer the server step's question; the step decides what a tensor is named."""

    tensors = r".+"


class Score(_Request):
    """Score a model; ``own`` and ``personal`` mark a model that only the client has."""

    tensors = r"weights/.+"
    split: Literal["test", "holdout", "validation"]
    own: Mark | None = None
    personal: Mark | None = None


class Keys(_Request):
    """Make keys of a masked sum."""

    quantity: Quantity


class Shares(Keys):
    """Split this site's secrets among the sites with keys."""

    tensors = rf"{SITE}/(mask|box|sign)"
    threshold: Annotated[int, Field(ge=1, lt=MOST_CLIENTS)]


class Unmask(Keys):
    """Sign, or reveal shares for, a sum of the sites ``present``."""

    tensors = rf"sign/{SITE}"
    present: list[Client]
    dropped: list[Client]


class StrategyShare(Form):
    """A :class:`~fedblend.flower.Strategy` asks a client of an app of its own to share."""

    sharing: Text | dict[str, Any]
    min_mean: Annotated[int, Field(ge=1)]
    seed: int


class StrategyRound(Form):
    """A :class:`~fedblend.flower.Strategy` tells a client of an app of its own how to train."""

    tensors = r"x|y"
    round: Round
    seed: int
    objective: Text | dict[str, Any]
    terms: list[Text | dict[str, Any]]
    pool: Digest | None
    own: Annotated[list[Number], Field(min_length=2, max_length=2)]


def read_request(form: type[Form], fields: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return all fields of a request. Raises :class:`FedblendError`, naming field and value, for what is none."""
    try:
        read = form.model_validate(fields)
    except pydantic.ValidationError as error:
        raise FedblendError(f"a request that is none: {explain(error)}") from None
    for name in tensors:
        if not re.fullmatch(form.tensors, name, re.DOTALL):
            raise FedblendError(f"a request that is none: it sends a tensor {brief(name)}")
    return {name: getattr(read, name) for name in form.model_fields}
