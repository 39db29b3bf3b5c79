"""The tables of an experiment file: local training, the method, the clients' policy, arriving data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from fedblend.core import registry
from fedblend.core.columns import Column
from fedblend.core.errors import FedblendError, brief
from fedblend.core.registry import Count, Float, Fraction, NonNegative, Positive
from fedblend.experiment import presets
from fedblend.experiment.parts import dump

LONGEST_NAME = 200  # Most characters of a name that is part of a folder's name; file systems allow 255 in all


class FrozenTable(BaseModel):
    """Base of the tables of an experiment file: unknown keys are invalid, values cannot be changed."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _require_table(cls, given: Any) -> Any:
        if not isinstance(given, (Mapping, cls)):
            raise ValueError(f"write a table with any of {', '.join(cls.model_fields)}")
        return given


def field_of_part(kind: str, where: str = "", before: Callable[[Any], Any] = lambda spec: spec) -> Any:
    """The type of a field that holds a part of ``kind``, given by its name, as a table, or as an object.

    ``where`` is the field's path in a file (default: ``kind``); ``before`` rewrites what is given.
    """

    def read(spec: Any) -> Any:
        return registry.build(kind, before(spec), where or kind)

    return Annotated[Any, BeforeValidator(read), PlainSerializer(dump), WithJsonSchema({"part": kind})]


def parts_field(kind: str, where: str, before: Callable[[Any], Any] = lambda spec: spec) -> Any:
    """The type of a field that holds a list of parts of ``kind``; one alone may be given without a list.

    ``before`` rewrites what is given for one part.
    """

    def read(specs: Any) -> tuple[Any, ...]:
        specs = [specs] if isinstance(specs, (str, Mapping)) else specs
        if not isinstance(specs, (list, tuple)):
            valid = f"write a list of {kind}s, each a name or a table"
            raise FedblendError(f"{where}: {brief(specs)} is not valid: {valid}")
        return tuple(registry.build(kind, before(spec), f"{where}[{i}]") for i, spec in enumerate(specs))

    return Annotated[
        tuple[Any, ...],
        BeforeValidator(read),
        PlainSerializer(lambda parts: [dump(one) for one in parts]),
        WithJsonSchema({"type": "array", "items": {"part": kind}}),
    ]


def by_path(package: str, part: str, own: Collection[str] = ()) -> Callable[[Any], Any]:
    """A rewriting of a name that is a path in ``package``, with its options, as the part that takes path and options.

    ``own`` are the options of the part itself.

    >>> by_path("torchmetrics", "torchmetrics")({"name": "torchmetrics.a:B", "k": 2})
    {'name': 'torchmetrics', 'path': 'torchmetrics.a:B', 'options': {'k': 2}}
    """

    def rewrite(spec: Any) -> Any:
        fields = dict(spec) if isinstance(spec, Mapping) else {"name": spec}
        name = fields.pop("name", None)
        if not isinstance(name, str) or not name.startswith((f"{package}.", f"{package}:")):
            return spec
        kept = {key: fields.pop(key) for key in own if key in fields}
        return {"name": part, "path": name, "options": fields, **kept}

    return rewrite


def no_module(spec: Any) -> Any:
    """Return what is given for a model. Raises :class:`FedblendError` with the line to write for an ``nn.Module``."""
    cls = spec if isinstance(spec, type) else type(spec)
    # By their names, so that nothing imports PyTorch for it.
    bases = {f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__}
    if "torch.nn.modules.module.Module" not in bases or getattr(cls, "kind", None) == "model":
        return spec
    # A program or notebook, a function and PyTorch itself are no places that a run could import the user's class from.
    of_torch = cls.__module__.startswith("torch.nn.")
    found = "." not in cls.__qualname__ and cls.__module__ != "__main__" and not of_torch
    path = f"{cls.__module__ if found else 'my_parts'}:{'Net' if of_torch else cls.__name__}"
    place = "" if found else "put the class in a file, such as my_parts.py, and "
    what = f"{cls.__name__} is {'a class' if cls is spec else 'an object'} of torch's nn.Module, and a run needs a path"
    write = f'write model = {{"name": "module", "path": "{path}"}}, with "arguments": {{...}} if it takes any'
    raise FedblendError(f"model: {what}; {place}{write}")


class Train(FrozenTable):
    """Local training: SGD at lr * lr_decay^(round - 1) by default, with FedMix's settings (appendix B)."""

    cohort: Count = 10
    """Clients that are drawn for each round, of those that hold samples. Default: 10, or all where `partition.clients`
    is less."""
    epochs: Count = 2
    """Passes over a client's samples in a round."""
    steps: Count | None = None
    """Batches in a round, instead of epochs, of samples drawn with replacement (Mix2FLD: 6,400 of one sample)."""
    batch_size: Count = 10
    """Samples in a batch."""
    last_batch: Literal["keep", "drop", "merge"] = "keep"
    """The last batch of an epoch where it is smaller than `batch_size`: used as it is, left out, or added to the batch
    before it. A client with fewer samples than `batch_size` has one batch of all of them in any case.
    """
    accumulate: Count = 1
    """Batches of one epoch whose gradients make one step, as a batch with the samples of all of them would."""
    lr: Positive = 0.01
    """Learning rate in the first round."""
    lr_decay: Annotated[Float, Field(gt=0, le=1)] = 0.999
    """Factor by which the learning rate is multiplied after every round; not used with a `schedule`."""
    schedule: field_of_part("schedule", "train.schedule") | None = None  # type: ignore[valid-type]
    """Schedule of the learning rate over rounds, in place of `lr_decay`."""
    schedule_in_round: field_of_part("schedule", "train.schedule_in_round") | None = None  # type: ignore[valid-type]
    """Schedule of the learning rate over the steps of a client's round, which begins anew in each round."""
    optimizer: field_of_part("optimizer", "train.optimizer", by_path("torch.optim", "torch")) = "sgd"  # type: ignore[valid-type]
    """Optimiser of the clients."""
    optimizer_state: Literal["reset", "keep"] = "reset"
    """State of the optimiser, such as momentum: each client begins with none in each round, or keeps its own from round
    to round. Personal models begin with none.
    """
    momentum: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Momentum of SGD."""
    weight_decay: NonNegative = 0.0
    """L2 penalty: weight_decay times the weights is added to each gradient; AdamW shrinks the weights instead."""
    augment: parts_field("augmentation", "train.augment") = ()  # type: ignore[valid-type]
    """Augmentation of the pictures of each batch, one part after another: a list (default: none)."""
    clip_norm: Positive | None = None
    """Largest norm of a step's gradient; a larger gradient is scaled down to it (default: no clipping)."""

    @pydantic.field_validator("epochs", mode="before")
    @classmethod
    def _require_whole(cls, given: Any) -> Any:
        if isinstance(given, float):
            raise ValueError("write a whole number from 1, or train.steps, a round's batches, for a part of an epoch")
        return given

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Names of what the optimiser keeps for each parameter; none for SGD without momentum."""
        keys: tuple[str, ...] = self.optimizer.state_keys
        return () if self.optimizer.steps == "sgd" and not self.momentum else keys

    def batches_of(self, samples: int) -> int:
        """Batches in a round of a client with ``samples`` samples."""
        full, rest = divmod(samples, self.batch_size)
        of_epoch = full + (rest > 0) if self.last_batch == "keep" else max(1, full)
        return (self.steps or self.epochs * of_epoch) if samples else 0

    def lr_in(self, round: int) -> float:
        """The learning rate of a round, counted from 0; of its first step, where it changes within the round."""
        factor: float = self.lr_decay**round if self.schedule is None else self.schedule.factor(round)
        return self.lr * factor

    def factors(self, steps: int) -> list[float] | None:
        """The factors of the learning rate in a round's ``steps``; ``None`` where it does not change."""
        schedule = self.schedule_in_round
        return None if schedule is None else [schedule.factor(step, steps) for step in range(steps)]


class Method(FrozenTable):
    """A method as a composition of parts; named presets are in :mod:`fedblend.experiment.presets`."""

    name: str = "custom"
    """A preset (`fedblend list methods`) of the parts below, which other fields can change (default: the preset that
    has exactly these parts, if there is one).
    """
    label: Annotated[str, Field(max_length=LONGEST_NAME)] = ""
    """Name of the method in tables, figures and the run's folder (default: its name)."""
    sharing: field_of_part("sharing", "method.sharing") = "none"  # type: ignore[valid-type]
    """The data that clients share before training, and their use at the server."""
    objective: field_of_part("objective", "method.objective") = "plain"  # type: ignore[valid-type]
    """The loss that a client minimises."""
    terms: parts_field("term", "method.terms") = ()  # type: ignore[valid-type]
    """Terms that are added to the loss: a list."""
    personal: field_of_part("personal", "method.personal") = "none"  # type: ignore[valid-type]
    """The model that each client trains for itself beside the global one."""
    upload: field_of_part("upload", "method.upload") = "model"  # type: ignore[valid-type]
    """The payload that a client sends each round."""
    stateful_clients: bool = False
    """Clients continue from their own weights, and the server sends them no model (federated distillation)."""
    aggregator: field_of_part("aggregator", "method.aggregator") = "mean"  # type: ignore[valid-type]
    """The combination of a round's uploads into one."""
    server_step: field_of_part("server_step", "method.server_step") = "none"  # type: ignore[valid-type]
    """The server's computation on the aggregate."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _expand(cls, spec: Any) -> Any:
        if isinstance(spec, str):
            spec = {"name": spec}
        if isinstance(spec, (list, tuple)):
            raise ValueError('write one name or table; for several methods: methods = ["a", "b"]')
        if not isinstance(spec, Mapping):
            return spec
        # A resolved method contains all its parts; updating the preset with them changes nothing.
        given = {key: value for key, value in spec.items() if (key, value) != ("name", "custom")}
        return {"name": spec.get("name", "custom"), **presets.expand(given)}

    @pydantic.model_validator(mode="after")
    def _name_by_parts(self) -> Method:
        if self.name == "custom":
            parts = self._parts()
            equal = (name for name in presets.presets() if _preset(name)._parts() == parts)
            object.__setattr__(self, "name", next(equal, "custom"))
        return self

    def _parts(self) -> dict[str, Any]:
        return self.model_dump(exclude={"name", "label"})


@functools.cache
def _preset(name: str) -> Method:
    return Method(name=name)


class Policy(FrozenTable):
    """Limits on the payloads of a client, for any method."""

    min_mean: Count = 2
    """Fewest samples in a mean that a client sends; 1 only with `unsafe`."""


class Validation(FrozenTable):
    """Training samples that are kept for validation, so that nothing is chosen on the test samples."""

    server: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Share of the training samples that the server keeps for validation, at random; no client holds them."""
    clients: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Share of each client's samples that it keeps for validation, besides those of `holdout`."""
    metric: str | None = None
    """Metric by which the best round is chosen: accuracy, loss, or the name of one of `metrics`; on the server's
    samples where it has some, else on the clients' (default: accuracy, without classes loss).
    """

    @property
    def active(self) -> bool:
        return bool(self.server or self.clients)


class Slow(FrozenTable):
    """Clients that do not make all of their epochs by the deadline of a round. Where `train.steps` is given, these
    stand in place of epochs. Of several reasons to be slow the one with the fewest epochs counts.
    """

    share: Fraction = 0.0
    """Probability that a client is slow, anew in each round: it then makes a number of epochs by the deadline that is
    drawn uniformly from 1 to `train.epochs` (FedProx, section 5.2)."""
    epochs: Column | None = None
    """Epochs that each client makes by the deadline: a list, or "FILE.csv:COLUMN" with a line for each client."""
    seconds: Column | None = None
    """Simulated seconds that a batch takes at each client: a list, or "FILE.csv:COLUMN"."""
    deadline: Positive | None = None
    """Seconds of computing after which a round ends, with `seconds` (default: a round waits for all clients)."""
    late: Literal["partial", "drop", "next-round"] = "partial"
    """What becomes of a slow client's upload: it has the batches made by the deadline, is not used, or arrives after
    all epochs in a later round, in whose time the client is busy and takes no part."""
    staleness: NonNegative = 0.5
    """Exponent a of the factor (1 + s)^-a on the change in an upload that is s rounds late (FedBuff: 0.5)."""


class Arrival(FrozenTable):
    """Data that arrive during training (FedMix, section 3.4)."""

    first: Fraction = 0.5
    """Share of a client's samples that are available from the start (at least one sample)."""
    clients: Fraction = 0.1
    """Probability, in each round, that a client gets a further portion."""
    portion: Fraction = 0.1
    """Share of a client's samples in such a portion."""
