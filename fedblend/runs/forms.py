"""What the files of a run directory hold: every field that fedblend reads has the type that fedblend writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

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


OF_DEFAULT: dict[type, Any] = {int: Whole, float: Amount, list: list[str], dict: dict[str, str]}
"""The type of a field by its default, where another type than the default's own is meant."""


def _form(name: str, base: type[Table] = Table, /, **fields: Any) -> Any:
    """A form. A field is given by its type if a file must have it, or by its default, or by both as a pair."""
    pairs: dict[str, Any] = {}
    for field, given in fields.items():
        is_type = isinstance(given, type) or get_origin(given) is not None
        of_default = OF_DEFAULT.get(type(given), type(given))
        pairs[field] = (given, ...) if is_type else given if isinstance(given, tuple) else (of_default, given)
    return pydantic.create_model(name, __base__=base, **pairs)


class Named(Table):
    """A part, by its name."""

    name: str


# config.toml, without a look at its parts: they may be of the user's own.
MethodConfig = _form(
    "MethodConfig",
    Named,
    label="",
    stateful_clients=False,
    sharing=Named(name="none"),
    objective=Named(name="plain"),
    upload=Named(name="model"),
    aggregator=Named(name="mean"),
    server_step=Named(name="none"),
    terms=(list[Named], []),
)
TrainConfig = _form(
    "TrainConfig",
    cohort=1,
    epochs=1,
    steps=(Whole | None, None),
    batch_size=1,
    lr=0.0,
    accumulate=1,
    optimizer=Named(name="sgd"),
    augment=(list[Named], []),
)
ValidationConfig = _form("ValidationConfig", server=0.0, clients=0.0)
Config = _form(
    "Config",
    name="",
    seed=Whole,
    rounds=Whole,
    eval_every=1,
    method=MethodConfig,
    data=Named,
    partition=Named,
    model=Named,
    scale=Named(name="standard"),
    channel=Named(name="ideal"),
    protection=Named(name="none"),
    train=TrainConfig,
    holdout=0.0,
    validation=ValidationConfig(),
    target=(Number | None, None),
    target_metric="accuracy",
    evaluate_model=(Literal["server", "device", "each"] | None, None),
    delta=(Annotated[float, Field(gt=0, lt=1)], 1e-5),
)

# facts.json
DataFacts = _form(
    "DataFacts", name="", kind="", train=0, test=0, shape=(list[Whole], []), classes=[], labels=[], outputs=0, files={}
)
ScaleFacts = _form("ScaleFacts", inverted=False, factor=(list[float], []), offset=(list[float], []))
ClientFacts = _form("ClientFacts", number=0, holding=0, samples=0, smallest=0, median=0.0, largest=0)
ModelFacts = _form("ModelFacts", name="", parameters=0)
NoiseFacts = _form(
    "NoiseFacts",
    distribution=Literal["gaussian", "laplace"],
    multiplier=Annotated[float, Field(gt=0)],
    at_server=bool,
    keeps=False,
)
NoNoise = Annotated[str, Field(min_length=1)]  # the reason
NoisesFacts = _form("NoisesFacts", weights=NoiseFacts | NoNoise, means=(NoiseFacts | NoNoise, "nothing is shared"))
PrivacyFacts = _form("PrivacyFacts", raw_samples=bool, noise=(NoisesFacts | None, None))
Facts = _form(
    "Facts",
    command="",
    versions={},
    machine={},
    data=DataFacts(),
    scale=ScaleFacts(),
    model=ModelFacts(),
    clients=ClientFacts(),
    partition=(dict[str, Any], {}),
    metrics=(dict[str, bool], {}),
    import_from=[],
    engine=(EngineChoice | None, None),
    privacy=(PrivacyFacts | None, None),
)
DataOfModel = _form("DataOfModel", DataFacts, name=str, kind=str, shape=list[Whole], classes=list[str], outputs=Whole)
FactsOfModel = _form("FactsOfModel", Facts, data=DataOfModel, scale=ScaleFacts)


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


Status = _form(
    "Status",
    state=(Literal["running", "done", "stopped", "failed", "killed"], "running"),
    round=(Annotated[int, Field(ge=-1, le=LARGEST_INT)], 0),
    reason="",
)
Study = _form("Study", name="", experiments=(dict[FolderName, dict[str, Any]], {}))
# The seconds of each trial of a search, by its run.
TrialSeconds = _form("TrialSeconds", seconds=(dict[str, Amount], {}))
# The options of the first ``fedblend advise`` in a folder.
AdviceOptions = _form(
    "AdviceOptions",
    methods=(list[str] | None, None),
    set=(list[str] | None, None),
    megabytes=(Number | None, None),
    least=(Number | None, None),
    leaves=(list[str] | None, None),
)

DAMAGED = "the file is damaged, or not fedblend's: restore it, or remove the folder and run again"


def require_sound(table: Any, form: type[BaseModel], path: Path) -> None:
    """Raise :class:`FedblendError` unless a file's content has the given form."""
    try:
        form.model_validate(table)
    except pydantic.ValidationError as error:
        raise FedblendError(f"{path}: {explain(error)}; {DAMAGED}") from None
