"""The configuration of one experiment as typed, validated data, read from and written to TOML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, WithJsonSchema

from fedblend.core import registry
from fedblend.core.callbacks import require_own_files
from fedblend.core.errors import FedblendError, or_valid
from fedblend.core.paths import absolute
from fedblend.core.registry import Count, Float, Int, NonNegative, Positive
from fedblend.data.loaders.features import features_of
from fedblend.experiment import checks
from fedblend.experiment.fields import (
    LONGEST_NAME,
    Arrival,
    FrozenTable,
    Method,
    Policy,
    Slow,
    Train,
    Validation,
    by_path,
    field_of_part,
    no_module,
    parts_field,
)
from fedblend.experiment.parts import has_option


def _run_folder(given: Any) -> Any:
    """A path with a folder, or one of :mod:`pathlib`, as an absolute path; a name alone unchanged."""
    return given if isinstance(given, str) and "/" not in given else absolute(given)


def _folder_name(name: str) -> str:
    if not re.search("[A-Za-z0-9]", name) or re.search(r"[/\\\x00-\x1f]", name):
        raise ValueError("it is the name of a folder; valid: letters A to Z or digits, and any other sign but / and \\")
    return name


class Experiment(FrozenTable):
    """One run: data, partition, model, local training, method, and evaluation.

    :func:`resolve` makes it from the content of a file. In Python::

        Experiment(data="digits", partition={"name": "classes", "clients": 20}, model="mlp", method="fedmix")
    """

    name: Annotated[str, Field(max_length=LONGEST_NAME), AfterValidator(_folder_name)] = "experiment"
    """Name of the study: its folder under `runs/`, and the report's title."""
    seed: Annotated[Int, Field(ge=0)] = 0
    """Seed of every random choice: partition, initial weights, cohorts, batches, mixing."""
    rounds: Annotated[Int, Field(ge=0)] = 10
    """Number of rounds; 0 evaluates the untrained model."""
    eval_every: Count = 1
    """Rounds between evaluations on the test samples; the last round is always evaluated."""
    eval_samples: Count | None = None
    """Test samples that evaluations use, a fixed part of the test half, the same for all seeds and methods (default:
    all).
    """
    evaluate_model: Literal["server", "device", "each"] | None = None
    """Model that is evaluated: the server's, a device's of the first cohort after training, or each client's on its own
    tests (default: the server's; a device's where clients keep weights, each client's where they keep layers).
    """
    convergence_tol: Positive | None = None
    """Relative change of the model (or of the mean outputs of every label) below which a run ends early."""
    compute_seconds: NonNegative | None = None
    """Fixed compute time per round in seconds, in the time of a run, which also includes the channel's time (default:
    the measured time).
    """
    metrics: parts_field("metric", "metrics", by_path("torchmetrics", "torchmetrics", ("title", "better"))) = ()  # type: ignore[valid-type]
    """Metrics that are recorded beside loss and accuracy, over all samples, by class and over clients: a list."""
    validation: Validation = Validation()
    """Samples for validation, on which the best round is chosen."""
    target: Float | None = None
    """Value of `target_metric` for "rounds to reach" in tables, on the validation samples where there are some, else on
    the test samples; an accuracy is a share, not per cent.
    """
    target_metric: str = "accuracy"
    """Metric of `target`: accuracy, loss, or the name of one of `metrics`."""
    stop_at_target: bool = False
    """Whether a run ends after the first evaluated round that reaches `target`."""
    unsafe: bool = False
    """Allow methods that send raw samples, as upper bounds."""
    data: field_of_part("dataset", "data", features_of)  # type: ignore[valid-type]
    """The data set."""
    scale: field_of_part("scale") = "standard"  # type: ignore[valid-type]
    """The scaling of stored values to the model's inputs."""
    partition: field_of_part("partition")  # type: ignore[valid-type]
    """The assignment of training samples to clients."""
    fraction: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Share of each client's samples that is used, at least one sample (FedMix, Table 4)."""
    holdout: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Share of each client's samples that is reserved for tests, for accuracy by client."""
    arrival: Arrival | None = None
    """Arrival of data during training (default: all data are available from the start)."""
    slow: Slow | None = None
    """Slow clients (default: each client makes all of its epochs)."""
    model: field_of_part("model", before=no_module) = "lenet5"  # type: ignore[valid-type]
    """The network."""
    start: Annotated[str | None, BeforeValidator(_run_folder)] = None
    """The run whose last weights are the initial weights (a warm start): its folder, or the name of an earlier run of
    this study, such as `xormixfl-seed{seed}`; `{seed}` is the run's own seed.
    """
    train: Train = Train()
    """Local training."""
    method: Method = Method()
    """The method: a name, or a table."""
    selection: field_of_part("selection") = "uniform"  # type: ignore[valid-type]
    """The choice of the clients of each round."""
    channel: field_of_part("channel") = "ideal"  # type: ignore[valid-type]
    """The transmission between clients and server."""
    protection: field_of_part("protection") = "none"  # type: ignore[valid-type]
    """The transformation of uploads before they leave a client."""
    delta: Annotated[Float, Field(gt=0, lt=1)] = 1e-5
    """The delta of differential privacy, the probability that epsilon does not hold; it should be below 1 / clients."""
    adversary: field_of_part("adversary") = "none"  # type: ignore[valid-type]
    """Clients that send corrupted uploads, to test aggregators."""
    policy: Policy = Policy()
    """Payloads that a client refuses to send."""
    min_uploads: Annotated[Int, Field(ge=0)] = 1
    """Valid uploads that a round needs, at most `train.cohort`; a round with fewer stops the run. With 0, a round
    without uploads changes nothing.
    """
    checkpoint_every: Count = 1
    """Rounds between checkpoints; the last round always has one."""
    callbacks: parts_field("callback", "callbacks") = ()  # type: ignore[valid-type]
    """Callbacks, which watch the run and may end it: a list."""
    engine: Literal["auto", "loop", "stacked"] = "auto"
    """Execution of clients: one after another (loop), several at once as one model (stacked), or the faster of both in
    a few timed steps (auto).
    """
    stack: Count | None = None
    """Clients in one stack (default: of several sizes that fit into memory, the fastest (auto) or the largest
    (stacked)).
    """
    ranks: Count | None = None
    """Processes that share a round's clients (default: one for each processor if the run is long enough)."""
    memory_format: Literal["contiguous", "channels_last"] | None = None
    """Memory layout of images in the loop engine (default: the faster one)."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Number format of convolutions and matrix products in training; weights, sums and tests stay float32. ``tf32``
    concerns GPUs only.
    """
    device: str = "cpu"
    """Device of tensors, by PyTorch's name: cpu, cuda, cuda:1."""
    cuda_graphs: bool = False
    """Whether the steps of a stack are captured as CUDA graphs and replayed, on a GPU."""

    @property
    def evaluates_device(self) -> bool:
        """Whether the model of a device is evaluated instead of the server's."""
        return self.evaluate_model == "device" or (self.evaluate_model is None and self.method.stateful_clients)

    @property
    def evaluates_each(self) -> bool:
        """Whether each client's own model is evaluated, on the client's own tests."""
        return self.evaluate_model == "each" or (self.evaluate_model is None and self.method.personal.keeps == "layers")

    @property
    def begins_at_clients(self) -> bool:
        """Whether clients may begin with a model that the server did not send."""
        return self.method.stateful_clients or self.channel.loses

    @property
    def keeps_client_weights(self) -> bool:
        """Whether clients' own weights are stored between rounds, because they train or are evaluated with them."""
        return self.begins_at_clients or self.evaluates_device

    @pydantic.model_validator(mode="after")
    def _check_fields(self) -> Experiment:
        for fault in checks.faults(self):
            raise ValueError(fault)
        require_own_files(self.callbacks)
        return self

    # Defined after the other validators, so that it also handles their errors.
    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _raise_one_message(cls, given: Any, validate: pydantic.ModelWrapValidatorHandler[Experiment]) -> Experiment:
        if isinstance(given, Mapping):
            try:
                given = _plain(given)
            except RecursionError:
                raise FedblendError("the experiment is nested too deeply; valid: tables of fields") from None
            check_keys(given)
            given = with_possible_cohort(given)
        try:
            return validate(given)
        except pydantic.ValidationError as error:
            raise FedblendError(registry.explain(error)) from None


def _plain(value: Any) -> Any:
    """Numbers and arrays of NumPy in a table as numbers and lists; anything else unchanged."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


TABLES: dict[str, type[BaseModel]] = {
    "train": Train,
    "method": Method,
    "validation": Validation,
    "policy": Policy,
    "arrival": Arrival,
    "slow": Slow,
}

OTHER_WORDS = {
    other: field
    for field, others in {
        "lr": "learning_rate step_size",
        "cohort": "clients_per_round participants fraction_fit min_fit_clients",
        "clients": "num_clients n_clients",
        "method": "strategy algorithm",
        "mu": "proximal_mu",
        "seed": "random_state",
        "device": "accelerator",
        "epochs": "max_epochs local_epochs",
        "steps": "local_steps",
        "test_share": "test_size",
        "clip_norm": "gradient_clipping",
        "evaluate_model": "judge",
        "convergence_tol": "stop_change",
        "stateful_clients": "keep_weights",
    }.items()
    for other in others.split()
}
"""Names of fields in other libraries, papers and versions -> the field, for suggestions in error messages."""


def resolve(table: Mapping[str, Any]) -> Experiment:
    """An experiment from plain data."""
    return Experiment(**dict(table))


def with_possible_cohort(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table with all clients in the cohort, where it gives fewer clients than the default cohort."""
    partition, train = table.get("partition"), table.get("train", {})
    clients = partition.get("clients") if isinstance(partition, Mapping) else None
    if type(clients) is not int or not isinstance(train, Mapping) or "cohort" in train:
        return table
    return {**table, "train": {**train, "cohort": clients}} if 0 < clients < Train().cohort else table


def check_keys(table: Mapping[str, Any], extra: Sequence[str] = ()) -> None:
    """Raise :class:`FedblendError` for unknown keys, with the nearest field; ``extra`` are further keys of a file."""
    top = [*Experiment.model_fields, *extra]
    parts = _options_of_parts(table)
    fields = {name: list(model.model_fields) for name, model in TABLES.items()} | parts
    for key in table:
        if key not in top:
            word = OTHER_WORDS.get(key, key)
            meant = next((f"{name}.{word}" for name in [*parts, *TABLES] if word in fields[name]), "")
            raise _unknown_key(key, top, meant)
    for name, valid in fields.items():
        given = inner if isinstance(inner := table.get(name), Mapping) else {}
        for key in given:
            if key in valid:
                continue
            if key in top:
                where = f"'{key}' is a top-level field: write it above the first [table]"
                raise FedblendError(f"{name}.{key}: unknown key ({where}); valid: {', '.join(valid)}")
            if name in TABLES:
                option = _option_of_part(TABLES[name], given, OTHER_WORDS.get(key) or key)
                raise _unknown_key(f"{name}.{key}", valid, option and f"{name}.{option}")


def _options_of_parts(table: Mapping[str, Any]) -> dict[str, list[str]]:
    """The fields of a table that name a part, with the keys that the part's table may have."""
    options = {}
    for field, given in table.items():
        metadata = Experiment.model_fields[field].metadata if field in Experiment.model_fields else ()
        kind = next((dict(m.json_schema or ()).get("part") for m in metadata if isinstance(m, WithJsonSchema)), None)
        name = given.get("name") if isinstance(given, Mapping) else given
        if kind and isinstance(name, str):
            own = ["features"] if kind == "dataset" else []
            options[field] = ["name", *own, *registry.words_of(registry.find(kind, name, field))]
    return options


def _unknown_key(path: str, known: Sequence[str], meant: str) -> FedblendError:
    """The error for an unknown key, with the field that is ``meant``, or if this is empty with the nearest one."""
    key = path.rpartition(".")[2]
    suggestion = f" (did you mean '{meant}'?)" if meant else or_valid(key, known, others=OTHER_WORDS)
    return FedblendError(f"{path}: unknown key{suggestion}")


def _option_of_part(model: type[BaseModel], given: Mapping[str, Any], key: str) -> str:
    """The path in a table of a part's option that was given as a key of the table, such as ``objective.lambda``."""
    try:
        table = model(**{field: value for field, value in given.items() if field in model.model_fields})
    except (FedblendError, pydantic.ValidationError):
        return ""
    values = {field: getattr(table, field) for field in model.model_fields}
    lists = {f"{field}.{part.name}": part for field, value in values.items() if type(value) is tuple for part in value}
    return next((f"{path}.{key}" for path, part in (values | lists).items() if has_option(part, key)), "")


def as_table(experiment: Experiment) -> dict[str, Any]:
    """The full resolved experiment as plain data, from which :func:`resolve` makes the same experiment."""
    return _without_none(experiment.model_dump())


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, (list, tuple)) else value
