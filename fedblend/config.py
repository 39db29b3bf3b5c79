"""One experiment as typed, validated data: TOML in, TOML out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from fedblend import methods, parts
from fedblend.errors import FedblendError, did_you_mean
from fedblend.parts import Count, Float, Fraction, Int, NonNegative, Positive
from fedblend.paths import absolute


class _Table(BaseModel):
    """A table of an experiment file: unknown keys are refused, values cannot be changed."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


def _part(kind: str, where: str = "") -> Any:
    """The type of a field that holds a part of ``kind``, given by name, as a table, or ready made.

    ``where`` is the field's path in a file, where that is not the kind's name.
    """

    def read(spec: Any) -> Any:
        return parts.build(kind, spec, where or kind)

    return Annotated[Any, BeforeValidator(read), PlainSerializer(parts.dump), WithJsonSchema({"part": kind})]


def _run_folder(given: Any) -> Any:
    """A folder as an absolute path; a name alone is left as it is."""
    return absolute(given) if isinstance(given, str) and "/" in given else given


def _fit_for_a_folder(name: str) -> str:
    if not re.search("[A-Za-z0-9]", name) or re.search(r"[/\\\x00-\x1f]", name):
        raise ValueError(
            "folders are called by it; valid: letters A to Z or digits, and beside them any sign but / and \\"
        )
    return name


def _terms(specs: Any) -> tuple[Any, ...]:
    if isinstance(specs, (str, Mapping)):
        specs = [specs]
    if not isinstance(specs, (list, tuple)):
        raise FedblendError(f'method.terms: {specs!r} is not valid: write a list, such as ["proximal"]')
    return tuple(parts.build("term", spec, f"method.terms[{i}]") for i, spec in enumerate(specs))


class Train(_Table):
    """Local training: SGD at lr * lr_decay^round; FedMix's settings by default (appendix B)."""

    cohort: Count = 10
    """Clients that are drawn for each round, among those that hold samples."""
    epochs: Count = 2
    """Passes over its samples that a client makes in a round."""
    steps: Count | None = None
    """Steps of a round in place of epochs, on samples drawn with replacement (Mix2FLD: 6,400 steps of one sample)."""
    batch_size: Count = 10
    """Samples in a step; a client's last, smaller batch is kept."""
    lr: Positive = 0.01
    """Learning rate in the first round."""
    lr_decay: Annotated[Float, Field(gt=0, le=1)] = 0.999
    """Factor by which the learning rate is multiplied after every round."""
    momentum: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Momentum of SGD; a client begins every round without any."""
    weight_decay: NonNegative = 0.0
    """L2 penalty of SGD: this times the weights is added to each gradient."""
    clip_norm: Positive | None = None
    """Norm to which the gradient of a step is scaled down if it is longer."""

    def steps_of(self, samples: int) -> int:
        """Steps that a client with so many samples makes in a round."""
        return (self.steps or self.epochs * -(-samples // self.batch_size)) if samples else 0

    def lr_in(self, round: int) -> float:
        """The learning rate of a round, counted from 0."""
        return self.lr * self.lr_decay**round


class Method(_Table):
    """A method as a composition of parts; presets with names are in :mod:`fedblend.methods`."""

    name: str = "custom"
    """A preset (`fedblend list methods`), whose parts can be changed by the fields below; without one, parts alone."""
    label: str = ""
    """What tables, figures and the run's folder call it, where that is not its name."""
    sharing: _part("sharing", "method.sharing") = Field(default="none", validate_default=True)  # type: ignore[valid-type]
    """What a client gives before training, and what the server makes of it."""
    objective: _part("objective", "method.objective") = Field(default="plain", validate_default=True)  # type: ignore[valid-type]
    """The loss that a client minimises."""
    terms: Annotated[
        tuple[Any, ...],
        BeforeValidator(_terms),
        PlainSerializer(lambda t: [parts.dump(p) for p in t]),
        WithJsonSchema({"type": "array", "items": {"part": "term"}}),
    ] = ()
    """What is added to the loss: a list of terms."""
    upload: _part("upload", "method.upload") = Field(default="model", validate_default=True)  # type: ignore[valid-type]
    """What a client sends each round."""
    keep_weights: bool = False
    """Clients go on from their own weights, and no model comes down to them (federated distillation)."""
    aggregator: _part("aggregator", "method.aggregator") = Field(default="mean", validate_default=True)  # type: ignore[valid-type]
    """How the uploads of a round become one."""
    server_step: _part("server_step", "method.server_step") = Field(default="none", validate_default=True)  # type: ignore[valid-type]
    """What the server does with the aggregate."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _expand(cls, spec: Any) -> Any:
        if isinstance(spec, str):
            spec = {"name": spec}
        if not isinstance(spec, Mapping):
            return spec
        # A resolved method names its parts in full; laying them over the preset changes nothing then.
        name = spec.get("name", "custom")
        return {
            "name": name,
            **methods.expand({k: v for k, v in spec.items() if (k, v) != ("name", "custom")}),
        }


class Policy(_Table):
    """What a client refuses to send, whatever the method asks of it."""

    min_mean: Count = 2
    """Fewest samples of which a client sends a mean; 1 only with `unsafe`."""


class Arrival(_Table):
    """Data that arrive while training goes on (FedMix, section 3.4)."""

    first: Fraction = 0.5
    """Share of its samples that a client starts with (at least one sample)."""
    clients: Fraction = 0.1
    """Probability, in each round, that a client gets a further portion."""
    portion: Fraction = 0.1
    """Share of its samples that such a portion is."""


class Experiment(_Table):
    """One run: data, split, model, local training, method, and how it is evaluated.

    Made from a file's content by :func:`resolve`, or in Python::

        Experiment(data="mnist5k", partition={"name": "classes", "clients": 20}, method="fedmix")
    """

    name: Annotated[str, AfterValidator(_fit_for_a_folder)] = "experiment"
    """What the study is called: its folder under `runs/`, and the report's title."""
    seed: Annotated[Int, Field(ge=0)] = 0
    """Seed of every random choice: split, first weights, cohorts, batches, mixing."""
    rounds: Annotated[Int, Field(ge=0)] = 10
    """Rounds to make; 0 evaluates the untrained model."""
    eval_every: Count = 1
    """Rounds from one evaluation on the test samples to the next; the last round is always evaluated."""
    judge: Literal["server", "device", "each"] | None = None
    """Whose model is evaluated: the server's, that of one device of the first cohort after training, or each client's
    on its own tests; unless given, the server's, or a device's where clients keep their own weights.
    """
    stop_change: Positive | None = None
    """Relative change of the model (or of the mean outputs of every label) below which a run ends early."""
    compute_seconds: NonNegative | None = None
    """Seconds that a round's computing is counted for in the time of a run, beside the channel's; unless given, the
    measured time.
    """
    target: Fraction | None = None
    """Test accuracy (a share, not per cent) for "rounds to reach" in tables; it stops nothing."""
    unsafe: bool = False
    """Allow methods that give raw samples away, as upper bounds."""
    data: _part("dataset", "data")  # type: ignore[valid-type]
    """The data set."""
    scale: _part("scale") = Field(default="standard", validate_default=True)  # type: ignore[valid-type]
    """What stored values become on their way into the model."""
    partition: _part("partition")  # type: ignore[valid-type]
    """Which client holds which training samples."""
    fraction: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Share of each client's samples that is kept, at least one (FedMix, Table 4)."""
    holdout: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Share of each client's samples that it keeps to test the model on, for accuracy by client."""
    arrival: Arrival | None = None
    """Data that arrive while training goes on; without this table all are there from the start."""
    model: _part("model") = Field(default="lenet5", validate_default=True)  # type: ignore[valid-type]
    """The network."""
    start: Annotated[str | None, BeforeValidator(_run_folder)] = None
    """A run to begin with the last weights of (a warm start): its folder, or the name alone of an earlier run of this
    study, such as `xormixfl-seed{seed}`; `{seed}` is the run's own seed.
    """
    train: Train = Train()
    """Local training."""
    method: Method = Method()
    """The method: a name, or a table."""
    channel: _part("channel") = Field(default="ideal", validate_default=True)  # type: ignore[valid-type]
    """What gets through between clients and server."""
    protection: _part("protection") = Field(default="none", validate_default=True)  # type: ignore[valid-type]
    """What is done to uploads before they leave a client."""
    delta: Annotated[Float, Field(gt=0, lt=1)] = 1e-5
    """Probability that a stated epsilon may fail (the delta of differential privacy); below 1 / clients, say."""
    adversary: _part("adversary") = Field(default="none", validate_default=True)  # type: ignore[valid-type]
    """Clients that send what they should not, to see what an aggregator makes of it."""
    policy: Policy = Policy()
    """What a client refuses."""
    min_uploads: Annotated[Int, Field(ge=0)] = 1
    """Good uploads without which a round stops the run, at most `train.cohort`; with 0 a round without any changes
    nothing.
    """
    checkpoint_every: Count = 1
    """Rounds from one checkpoint to the next; the last round always has one."""
    engine: Literal["auto", "loop", "stacked"] = "auto"
    """How clients are run: one after another, several at once as one model, or whichever a few timed steps favour."""
    stack: Count | None = None
    """Clients in one stack; unless given, what is fastest and fits into memory."""
    ranks: Count | None = None
    """Processes that share a round's clients; unless given, one a processor where the run is long enough."""
    memory_format: Literal["contiguous", "channels_last"] | None = None
    """How the loop engine lays images out in memory; unless given, whichever is faster."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Numbers of convolutions and matrix products in training; weights, sums and tests stay float32."""
    device: str = "cpu"
    """Where tensors are computed, as PyTorch names it: cpu, cuda, cuda:1."""
    cuda_graphs: bool = False
    """On a GPU, whether the steps of a stack are captured as CUDA graphs and replayed."""

    @property
    def judges_device(self) -> bool:
        """Whether the model of a device is evaluated, not the server's."""
        return self.judge == "device" or (self.judge is None and self.method.keep_weights)

    @property
    def keeps_weights(self) -> bool:
        """Whether clients' own weights are kept between rounds: where one may go on from them, or is judged by them."""
        return self.method.keep_weights or self.channel.loses or self.judges_device

    @pydantic.model_validator(mode="after")
    def _agree_on_uploads(self) -> Experiment:
        method, upload = self.method, self.method.upload
        if not upload.is_model:
            for field, made in (("protection", self.protection), ("adversary", self.adversary)):
                if made.name != "none":
                    raise ValueError(
                        f"{field}: '{made.name}' changes models, but method.upload '{upload.name}' sends none; "
                        "valid: none"
                    )
            if method.aggregator.name != "mean":
                raise ValueError(
                    f"method.aggregator: '{method.aggregator.name}' makes one of models, but method.upload "
                    f"'{upload.name}' sends none; valid: mean"
                )
            if not (method.server_step.active or method.keep_weights):
                raise ValueError(
                    f"method.upload: '{upload.name}' sends no models, so that the server's would never change; valid: "
                    "model, a method.server_step, or method.keep_weights = true"
                )
        if method.keep_weights and upload.is_model:
            raise ValueError(
                f"method.keep_weights: true keeps clients on their own weights, so that a model sent up "
                f"(method.upload '{upload.name}') would come down to nobody; valid: upload = \"outputs\""
            )
        for term in method.terms:
            if term.uses_outputs and upload.bytes_kind != "outputs":
                raise ValueError(
                    f"method.terms: '{term.name}' needs mean outputs, which method.upload '{upload.name}' does not "
                    'send; valid: upload = "outputs"'
                )
        if self.judge == "each" and not method.keep_weights:
            raise ValueError(
                "judge: 'each' needs clients that keep their own weights (method.keep_weights); valid: server, device"
            )
        if method.keep_weights and self.judge == "server":
            raise ValueError("judge: 'server' has no model to evaluate where clients keep theirs; valid: device, each")
        return self

    @pydantic.model_validator(mode="after")
    def _agree(self) -> Experiment:
        sharing, objective = self.method.sharing, self.method.objective
        for made in (sharing, objective, self.method.server_step):
            if (getattr(made, "unsafe", False) or getattr(made, "breaks_privacy", False)) and not self.unsafe:
                raise ValueError(
                    f"unsafe: false does not allow '{made.name}', which gives raw samples away; "
                    "set unsafe = true to run it as an upper bound"
                )
        if getattr(sharing, "samples_per_mean", None) == 1 and not self.unsafe:
            raise ValueError(
                "method.sharing.samples_per_mean: 1 would send raw samples as 'means'; "
                'valid: 2 or more, or "all" (or unsafe = true)'
            )
        if self.policy.min_mean == 1 and sharing.travels and sharing.bytes_kind == "means" and not self.unsafe:
            raise ValueError(
                "policy.min_mean: 1 would let a single sample leave a client as a 'mean'; valid: 2 or more "
                "(or unsafe = true)"
            )
        if objective.needs and not sharing.active:
            raise ValueError(
                f"method.sharing: '{sharing.name}' gives nothing, but the objective '{objective.name}' needs "
                f"{', '.join(objective.needs)}; valid: means, local-means, noise, hidden-means or raw"
            )
        if sharing.active and not (objective.needs or self.method.server_step.reads_pool):
            raise ValueError(
                f"method.sharing: '{sharing.name}' gives what neither the objective '{objective.name}' nor the server "
                f"step '{self.method.server_step.name}' reads; valid: none, an objective that mixes, or a server step "
                "that works on what clients share (reads_pool)"
            )
        if getattr(sharing, "own_only", False) and getattr(objective, "exclude_own", False):
            raise ValueError(
                f"method.objective.exclude_own: true leaves nothing to mix with, since '{sharing.name}' gives a client "
                "only what is its own; valid: false"
            )
        if not sharing.travels and getattr(sharing, "server_average", 1) > 1:
            raise ValueError(
                f"method.sharing.server_average: {sharing.server_average}: means of '{sharing.name}' never reach "
                "the server, which could not average them; valid: 1"
            )
        if sharing.hides_entries and self.channel.loses:
            raise ValueError(
                f"method.sharing: '{sharing.name}' sums what clients share once, and the channel '{self.channel.name}' "
                "loses some of it; valid: means, or another channel"
            )
        if getattr(sharing, "layer", None) != getattr(objective, "layer", None):
            raise ValueError(
                f"method.sharing.layer: {getattr(sharing, 'layer', None)} and method.objective.layer: "
                f"{getattr(objective, 'layer', None)} differ; both must name the same layer of hidden states"
            )
        hides, step = self.method.aggregator.hides_uploads, self.method.server_step
        if hides and step.looks_at_uploads and not step.asks_clients:
            raise ValueError(
                f"method.server_step: '{step.name}' looks at single uploads, which '{self.method.aggregator.name}' "
                "hides from the server; valid: aggenhance-secure, or another aggregator"
            )
        if self.min_uploads > self.train.cohort:
            raise ValueError(
                f"min_uploads: {self.min_uploads} is more than train.cohort: {self.train.cohort}; "
                "no round could have enough uploads"
            )
        return self

    # Below the other validators, so that their faults pass through it too.
    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _in_one_message(cls, given: Any, validate: pydantic.ModelWrapValidatorHandler[Experiment]) -> Experiment:
        if isinstance(given, Mapping):
            check_keys(given)
        try:
            return validate(given)
        except pydantic.ValidationError as error:
            raise FedblendError(parts.explain(error)) from None


TABLES: dict[str, type[BaseModel]] = {"train": Train, "method": Method, "policy": Policy, "arrival": Arrival}
"""Fields of an experiment that are tables of their own."""

OTHER_WORDS = {
    "learning_rate": "lr",
    "step_size": "lr",
    "clients_per_round": "cohort",
    "participants": "cohort",
    "gradient_clipping": "clip_norm",
    "local_epochs": "epochs",
    "local_steps": "steps",
}
"""What other libraries and papers call a field -> the field; only to tell which was meant."""


def resolve(table: Mapping[str, Any]) -> Experiment:
    """An experiment from plain data. Raises :class:`FedblendError` with one message that names the field."""
    return Experiment(**dict(table))


def check_keys(table: Mapping[str, Any], beside: Sequence[str] = ()) -> None:
    """Refuse unknown keys with the nearest known one suggested; ``beside`` are keys of a file that are no field."""
    _require_known(table, [*Experiment.model_fields, *beside], "")
    for key, model in TABLES.items():
        if isinstance(table.get(key), Mapping):
            _require_known(table[key], list(model.model_fields), f"{key}.")


def _require_known(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            one = OTHER_WORDS.get(key, key)
            inside = [] if where else [f"{name}.{one}" for name, model in TABLES.items() if one in model.model_fields]
            meant = f" (did you mean '{inside[0]}'?)" if inside else did_you_mean(key, known, others=OTHER_WORDS)
            raise FedblendError(f"{where}{key}: unknown key{meant}; valid: {', '.join(known)}")


def as_table(experiment: Experiment) -> dict[str, Any]:
    """The full resolved experiment as plain data that :func:`resolve` reads back to the same experiment."""
    return _without_none(experiment.model_dump())


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, (list, tuple)) else value
