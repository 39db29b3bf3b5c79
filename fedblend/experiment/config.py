"""One experiment as typed, validated data: TOML in, TOML out."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from fedblend.core import registry
from fedblend.core.errors import FedblendError, did_you_mean
from fedblend.core.paths import absolute
from fedblend.core.registry import Count, Float, Fraction, Int, NonNegative, Positive
from fedblend.experiment import checks
from fedblend.experiment.fields import Arrival, FrozenTable, Method, Policy, Train, field_of_part


def _run_folder(given: Any) -> Any:
    """A folder as an absolute path; a name alone is left as it is."""
    return absolute(given) if isinstance(given, str) and "/" in given else given


def _fit_for_a_folder(name: str) -> str:
    if not re.search("[A-Za-z0-9]", name) or re.search(r"[/\\\x00-\x1f]", name):
        raise ValueError(
            "folders are called by it; valid: letters A to Z or digits, and beside them any sign but / and \\"
        )
    return name


class Experiment(FrozenTable):
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
    evaluate_model: Literal["server", "device", "each"] | None = None
    """Whose model is evaluated: the server's, that of one device of the first cohort after training, or each client's
    on its own tests; unless given, the server's, or a device's where clients keep their own weights.
    """
    convergence_tol: Positive | None = None
    """Relative change of the model (or of the mean outputs of every label) below which a run ends early."""
    compute_seconds: NonNegative | None = None
    """Seconds that a round's computing is counted for in the time of a run, beside the channel's; unless given, the
    measured time.
    """
    target: Fraction | None = None
    """Test accuracy (a share, not per cent) for "rounds to reach" in tables; it stops nothing."""
    unsafe: bool = False
    """Allow methods that give raw samples away, as upper bounds."""
    data: field_of_part("dataset", "data")  # type: ignore[valid-type]
    """The data set."""
    scale: field_of_part("scale") = Field(default="standard", validate_default=True)  # type: ignore[valid-type]
    """What stored values become on their way into the model."""
    partition: field_of_part("partition")  # type: ignore[valid-type]
    """Which client holds which training samples."""
    fraction: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Share of each client's samples that is kept, at least one (FedMix, Table 4)."""
    holdout: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Share of each client's samples that it keeps to test the model on, for accuracy by client."""
    arrival: Arrival | None = None
    """Data that arrive while training goes on; without this table all are there from the start."""
    model: field_of_part("model") = Field(default="lenet5", validate_default=True)  # type: ignore[valid-type]
    """The network."""
    start: Annotated[str | None, BeforeValidator(_run_folder)] = None
    """A run to begin with the last weights of (a warm start): its folder, or the name alone of an earlier run of this
    study, such as `xormixfl-seed{seed}`; `{seed}` is the run's own seed.
    """
    train: Train = Train()
    """Local training."""
    method: Method = Method()
    """The method: a name, or a table."""
    channel: field_of_part("channel") = Field(default="ideal", validate_default=True)  # type: ignore[valid-type]
    """What gets through between clients and server."""
    protection: field_of_part("protection") = Field(default="none", validate_default=True)  # type: ignore[valid-type]
    """What is done to uploads before they leave a client."""
    delta: Annotated[Float, Field(gt=0, lt=1)] = 1e-5
    """Probability that a stated epsilon may fail (the delta of differential privacy); below 1 / clients, say."""
    adversary: field_of_part("adversary") = Field(default="none", validate_default=True)  # type: ignore[valid-type]
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
    """Clients in one stack; unless given, of some that fit into memory the fastest (auto) or the largest (stacked)."""
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
    def evaluates_device(self) -> bool:
        """Whether the model of a device is evaluated, not the server's."""
        return self.evaluate_model == "device" or (self.evaluate_model is None and self.method.stateful_clients)

    @property
    def keeps_client_weights(self) -> bool:
        """Whether clients' own weights are kept between rounds: where one may go on from them, or is judged by them."""
        return self.method.stateful_clients or self.channel.loses or self.evaluates_device

    @pydantic.model_validator(mode="after")
    def _agree(self) -> Experiment:
        method = self.method
        checks.check_uploads(method, self.protection, self.adversary)
        checks.check_evaluate_model(method, self.evaluate_model)
        checks.check_raw_samples(method, self.policy, self.unsafe)
        checks.check_sharing(method, self.channel)
        checks.check_sums(method)
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
            given = renamed(given)
            check_keys(given)
        try:
            return validate(given)
        except pydantic.ValidationError as error:
            raise FedblendError(registry.explain(error)) from None


TABLES: dict[str, type[BaseModel]] = {"train": Train, "method": Method, "policy": Policy, "arrival": Arrival}
"""Fields of an experiment that are tables of their own."""

OLD_NAMES = {
    "judge": "evaluate_model",
    "stop_change": "convergence_tol",
    "method.keep_weights": "method.stateful_clients",
}
"""Fields that had another name before version 0.2: old name -> name. Files may still use the old one."""

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


def renamed(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with today's names of fields; an old name gives a warning.

    Raises :class:`FedblendError` where both the old and the new name of a field are given.
    """
    made = dict(table)
    for old, new in OLD_NAMES.items():
        outer, _, last = old.rpartition(".")
        inner = made.get(outer) if outer else made
        if not isinstance(inner, Mapping) or last not in inner:
            continue
        if (now := new.rpartition(".")[2]) in inner:
            raise FedblendError(f"{old}: is the old name of {new}, and both are given; give {new} only")
        warnings.warn(f"{old}: this field is called {new} since version 0.2", FutureWarning, stacklevel=2)
        fields = {now if key == last else key: value for key, value in inner.items()}
        made = {**made, outer: fields} if outer else fields
    return made


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
