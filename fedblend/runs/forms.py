"""What the files of a run directory hold: every field that fedblend reads has the type that fedblend writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from fedblend.core.errors import FedblendError
from fedblend.core.record import Amount, EngineChoice, Number, Whole
from fedblend.core.registry import LARGEST_INT, explain

FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9.+_-]*[A-Za-z0-9+_-][A-Za-z0-9.+_-]*$")]
"""The name of a folder inside another one, as :func:`fedblend.experiment.study.slugify` makes it; not ".."."""


class Table(BaseModel):
    """A table with further entries, which are kept as they are. Types are strict: text is no number."""

    model_config = ConfigDict(extra="allow", strict=True)


class Named(Table):
    """A part, by its name."""

    name: str


class MethodConfig(Named):
    """A method's parts."""

    label: str = ""
    stateful_clients: bool = False
    sharing: Named = Named(name="none")
    objective: Named = Named(name="plain")
    upload: Named = Named(name="model")
    aggregator: Named = Named(name="mean")
    server_step: Named = Named(name="none")
    terms: list[Named] = []


class TrainConfig(Table):
    """Local training."""

    cohort: Whole = 1
    epochs: Whole = 1
    steps: Whole | None = None
    batch_size: Whole = 1
    lr: Amount = 0.0
    accumulate: Whole = 1
    optimizer: Named = Named(name="sgd")
    augment: list[Named] = []


class ValidationConfig(Table):
    """Shares of samples for validation."""

    server: Amount = 0.0
    clients: Amount = 0.0


class Config(Table):
    """``config.toml``, without a look at its parts: they may be of the user's own."""

    name: str = ""
    seed: Whole
    rounds: Whole
    eval_every: Whole = 1
    method: MethodConfig
    data: Named
    partition: Named
    model: Named
    scale: Named = Named(name="standard")
    channel: Named = Named(name="ideal")
    protection: Named = Named(name="none")
    train: TrainConfig
    holdout: Amount = 0.0
    validation: ValidationConfig = ValidationConfig()
    target: Number | None = None
    target_metric: str = "accuracy"
    evaluate_model: Literal["server", "device", "each"] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5


class DataFacts(Table):
    """A data set."""

    name: str = ""
    kind: str = ""
    train: Whole = 0
    test: Whole = 0
    shape: list[Whole] = []
    classes: list[str] = []
    labels: list[str] = []
    outputs: Whole = 0
    files: dict[str, str] = {}


class ScaleFacts(Table):
    """A scale of inputs."""

    inverted: bool = False
    factor: list[float] = []
    offset: list[float] = []


class ClientFacts(Table):
    """Clients' numbers of samples."""

    number: Whole = 0
    holding: Whole = 0
    samples: Whole = 0
    smallest: Whole = 0
    median: Amount = 0.0
    largest: Whole = 0


class ModelFacts(Table):
    """A model."""

    name: str = ""
    parameters: Whole = 0


class NoiseFacts(Table):
    """The noise on one kind of upload."""

    distribution: Literal["gaussian", "laplace"]
    multiplier: Annotated[float, Field(gt=0)]
    at_server: bool
    keeps: bool = False


Reason = Annotated[str, Field(min_length=1)]


class NoisesFacts(Table):
    """Noises, or the reasons why there are none."""

    weights: NoiseFacts | Reason
    means: NoiseFacts | Reason = "nothing is shared"


class PrivacyFacts(Table):
    """What bounds what a run reveals."""

    raw_samples: bool
    noise: NoisesFacts | None = None


class Facts(Table):
    """``facts.json``."""

    command: str = ""
    versions: dict[str, str] = {}
    machine: dict[str, str] = {}
    data: DataFacts = DataFacts()
    scale: ScaleFacts = ScaleFacts()
    model: ModelFacts = ModelFacts()
    clients: ClientFacts = ClientFacts()
    partition: dict[str, Any] = {}
    metrics: dict[str, bool] = {}
    import_from: list[str] = []
    engine: EngineChoice | None = None
    privacy: PrivacyFacts | None = None


class DataOfModel(DataFacts):
    """The data set of a run whose model is used."""

    name: str
    kind: str
    shape: list[Whole]
    classes: list[str]


class FactsOfModel(Facts):
    """``facts.json`` of a run whose model is used."""

    data: DataOfModel
    scale: ScaleFacts


class Split(Table):
    """``split.json``."""

    classes: list[str]
    counts: list[list[Whole]]
    sizes: list[Whole]
    names: list[str] = []
    measures: dict[str, float]

    @pydantic.model_validator(mode="after")
    def _require_one_number_for_each_class(self) -> Split:
        if any(len(row) != len(self.classes) for row in self.counts):
            raise ValueError(f"counts: a row has not one number for each of the {len(self.classes)} classes")
        if len(self.names) not in (0, len(self.sizes)):
            raise ValueError(f"names: {len(self.names)} names of {len(self.sizes)} clients")
        return self


class Status(Table):
    """``status.json``."""

    state: Literal["running", "done", "stopped", "failed", "killed"] = "running"
    round: Annotated[int, Field(ge=-1, le=LARGEST_INT)] = 0
    reason: str = ""


class Study(Table):
    """``study.json``."""

    name: str = ""
    experiments: dict[FolderName, dict[str, Any]] = {}


class TrialSeconds(Table):
    """``seconds.json``: the seconds of each trial of a search, by its run."""

    seconds: dict[str, Amount] = {}


class AdviceOptions(Table):
    """``options.json``: the options of the first ``fedblend advise`` in a folder."""

    methods: list[str] | None = None
    set: list[str] | None = None
    megabytes: Number | None = None
    least: Number | None = None
    leaves: list[str] | None = None


DAMAGED = "the file is damaged, or not fedblend's: restore it, or remove the folder and run again"


def require_sound(table: Any, form: type[BaseModel], path: Path) -> None:
    """Raise :class:`FedblendError` unless a file's content has the given form."""
    try:
        form.model_validate(table)
    except pydantic.ValidationError as error:
        raise FedblendError(f"{path}: {explain(error)}; {DAMAGED}") from None
