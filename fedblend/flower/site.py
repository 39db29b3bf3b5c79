"""A site's policy: its site file, and the setup on which a site with data of its own trains.

The site file states where the site's data are and what may leave the site, for every request of every server.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_type_hints

import numpy as np
import pydantic
import torch
from pydantic import BaseModel, ConfigDict, Field

from fedblend.core import registry
from fedblend.core.dataset import Dataset, Population
from fedblend.core.errors import FedblendError, brief, legible, listed, or_valid, printable
from fedblend.core.paths import absolute, absolute_file, absolute_folder, from_file
from fedblend.core.payload import PAYLOAD_KINDS
from fedblend.core.registry import Count, FilePath, Int, Positive, fields_of
from fedblend.core.setup import Setup
from fedblend.data.backbones import MINILM
from fedblend.data.loaders.features import BackboneFeatures, features_of
from fedblend.data.partitions.prepare import prepare
from fedblend.data.scale import Fitted, OneHot, Scaler, Tokens
from fedblend.experiment.config import Experiment
from fedblend.experiment.fields import Validation, field_of_part
from fedblend.experiment.make_setup import make_setup
from fedblend.experiment.toml_tables import read_toml, write_toml
from fedblend.flower.requests import SetupForm

KINDS = tuple(PAYLOAD_KINDS)  # Kinds of payload that can leave a site

SAFE = tuple(kind.name for kind in PAYLOAD_KINDS.values() if kind.by_default)
"""Kinds that a site allows by default: none that holds single samples, none of the server's model, and no metrics."""

LEFT_AS = {"hidden-means": "means", "prototypes": "prototypes", "map-statistics": "extras"}
"""Kinds that left by default in version 0.2, and the kinds that they were."""

MOST_ROUNDS = 1000
"""Rounds that a site trains in by default, over all runs: a server that lies learns something in each."""

MOST_SECONDS, MOST_WEIGHTS, MOST_STEPS = 3600.0, 10**8, 10**5
"""Seconds of work for one message, numbers of a model, and batches of one training that a site accepts by default."""

MOST_SCORES = 500
"""Scores that a site sends by default, over all runs: some ten of chosen models tell a number of a sample."""

UNWRITTEN = "free disk space, or let this site's user write there; until then nothing that needs this file leaves"
"""What to do at a site about a file that cannot be written."""

log = logging.getLogger("flwr")

LOCAL_PATH = re.compile(r"""(?<![\w.])(?:~|[A-Za-z]:)?[/\\][^'",;:()\n]+""")
"""A path in a message, with all that follows it up to a punctuation mark: paths may have spaces."""


Form = TypeVar("Form", bound=BaseModel)


class RefusedByPolicy(FedblendError):
    """A request that a site's policy forbids; the audit log records it."""


class Withheld(RefusedByPolicy):
    """A vector that a site does not send to a masked sum.

    The server is told one text, whatever the reason is: it would tell of the site's samples. The audit log has it.
    """

    def __init__(self, why: str) -> None:
        super().__init__(
            "it sends nothing to this masked sum: a number is beyond its range, or its app failed; the site's logs "
            "state which; valid: a larger range (coarser steps)"
        )
        self.why = why


class Membership(BaseModel):
    """A site's place in its federation, as `fedblend federation provision` writes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str
    """The site's name."""
    client: Annotated[Int, Field(ge=0)]
    """The number of the site's client."""
    server: Annotated[str, Field(pattern=r":\d+$")]
    """Address and port of the SuperLink."""
    ca: FilePath
    """The certificate of the authority that signed the server's."""


class Policy(BaseModel):
    """The fields of a site file that a new one has from its federation; a site's owner decides."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    allow: tuple[str, ...] = SAFE
    """Kinds of payload that may leave (:data:`~fedblend.core.payload.PAYLOAD_KINDS`)."""
    min_mean: Count = 2
    """Fewest samples that a shared mean, a label's mean output or a score may cover; for means the experiment's own
    minimum holds as well.
    """
    min_sum: Annotated[Int, Field(ge=2)] = 3
    """Fewest sites whose masked models, or means, the server may sum; the experiment's minimum holds as well."""
    sharings: Count = 1
    """Different payloads (means, seeds, ...) that this site makes of its samples to share, over all runs in its audit
    log. An unmasked one that left before is sent again, the same to the last bit, and does not count.
    """
    rounds: Count = MOST_ROUNDS
    """Rounds that this site trains in, over all runs in its audit log."""

    @pydantic.field_validator("allow")
    @classmethod
    def _check_kinds(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        for kind in allow:
            if kind not in KINDS:
                raise ValueError(f"'{kind}' is no kind of payload{or_valid(kind, KINDS)}")
        return allow


class Site(Policy):
    """The fields of a site file.

    A site without a file trains on its client's part of the experiment's data and allows all kinds.
    """

    data: field_of_part("dataset", "data", features_of) | None = None  # type: ignore[valid-type]
    """This site's samples; default: its client's part of the experiment's data (for trials)."""
    key: FilePath | None = None
    """This site's private key in OpenSSH's format, such as its SuperNode's. It signs the site's keys of masked sums."""
    peers: FilePath | None = None
    """A TOML file with the public keys of a federation's sites, by client: `0 = "ecdsa-sha2-nistp384 AAAA..."`. With it
    this site takes part in masked sums only if each site's keys are signed; the server then cannot take a site's place.
    """
    max_seeds: Count | None = None
    """Most seeds, or features, that this site sends for one request (XorMixFL, FLea); default: no limit."""
    max_answers: Count | None = None
    """Answers to server steps that this site sends, over all runs in its audit log; default: twice `rounds`, as an
    experiment with `aggenhance-secure` requests two a round.
    """
    max_scores: Count | None = None
    """Times that this site scores a model on samples that it holds out or keeps for validation, over all runs in its
    audit log; default: four times `rounds`, as a run of one round scores two models on both, and 500 at most.
    """
    max_seconds: Positive = MOST_SECONDS
    """Seconds of work for one message of a server; then the work ends, and the server learns that it failed."""
    max_weights: Count = MOST_WEIGHTS
    """Most numbers of a model; a larger one is not built."""
    max_steps: Count = MOST_STEPS
    """Most batches of one training."""
    agreed: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")] | None = None
    """Digest of the only experiment in which this site takes part, as `fedblend site check --experiment` prints it;
    default: any.
    """
    protection: field_of_part("protection") | None = None  # type: ignore[valid-type]
    """Protection of models before they leave, after the experiment's own protection."""
    trusted: tuple[str, ...] = ()
    """What a server may name that is not fedblend's own, each exactly: parts and models as `package.module:Name`, and
    for a site without `data` the experiment's files as absolute paths; default: nothing.
    """
    min_noise: Positive | None = None
    """Least noise on models and on shared data before they leave, by the experiment or by `protection`: its standard
    deviation (Laplace: its scale) over the largest change that it hides, of a client's model or of a sample's share in
    a mean. A model's `multiplier` is twice this number, a mean's 1.42 times. Default: none.
    """
    device: str = "cpu"
    """The PyTorch device on which this site computes."""
    audit: FilePath | None = None
    """The audit log: one JSON line for each payload that leaves; each site needs its own. Default with a site file:
    `audit.jsonl` beside it.
    """
    federation: Membership | None = None
    """This site's place in its federation, with which `fedblend site start` starts its SuperNode."""

    def __hash__(self) -> int:
        # Options of data may be lists and tables.
        return hash(repr(self))

    @property
    def has_file(self) -> bool:
        """Whether there is a site file: a site that has one also has an audit log."""
        return self.audit is not None

    @pydantic.field_validator("trusted")
    @classmethod
    def _check_trusted(cls, trusted: tuple[str, ...]) -> tuple[str, ...]:
        for name in trusted:
            if ":" not in name and "/" not in name:
                raise ValueError(f"'{name}' names nothing; valid: package.module:Name, or the absolute path of a file")
        return trusted


def read_site(path: str | Path) -> Site:
    """Read the site file at ``path``; paths in it are relative to it. Raises :class:`FedblendError`."""
    return read_fields(Site, path, {"audit": "audit.jsonl"})


def read_fields(form: type[Form], path: str | Path, default: Mapping[str, Any] = MappingProxyType({})) -> Form:
    """Read a TOML file with the fields of ``form``; paths in it are relative to it. Raises :class:`FedblendError`."""
    table = read_toml(path)
    for field in table:
        if field not in form.model_fields:
            raise FedblendError(f"{path}: {field}: unknown key{or_valid(field, form.model_fields)}")
    try:
        return form(**from_file({**default, **table}, path))
    except pydantic.ValidationError as error:
        raise FedblendError(f"{path}: {registry.explain(error)}") from None
    except FedblendError as error:
        raise FedblendError(f"{path}: {error}") from None


def site_of_node(node_config: Any) -> Site:
    """Return the site of a SuperNode's ``--node-config 'site="..."'``.

    Without a site file a client trains on the experiment's data. All kinds may then leave but those that are made
    through the server's model, which need a word: ``allow="prototypes"``, with commas between several.
    """
    if (path := node_config.get("site")) is not None:
        site, client = _read_cached(str(path)), node_config.get("partition-id")
        if site.federation is not None and client != site.federation.client:
            own = f"{site.federation.client}, that of {site.federation.name} (federation.client in the site file)"
            raise FedblendError(f"partition-id: {brief(client)}; valid: {own}")
        return site
    more = str(node_config.get("allow", "")).replace(" ", "").split(",")
    safe = (kind.name for kind in PAYLOAD_KINDS.values() if not kind.through_model)
    try:
        return Site(allow=(*safe, *filter(None, more)))
    except pydantic.ValidationError as error:
        raise FedblendError(f"--node-config: {registry.explain(error)}") from None


_read_cached = functools.lru_cache(maxsize=4)(read_site)


def trust_of(site: Site) -> AbstractContextManager[None]:
    """Return a context in which only code of fedblend's own, and code that the site file names, is imported."""
    return registry.trust_only(site.trusted, "the site's file must name it in trusted")


def reply_text(error: Exception) -> str:
    """Return what a server is told of an error: its message without paths of this machine.

    An error that is no :class:`FedblendError` may hold anything: of it the server is told only that it occurred. The
    log of the SuperNode has the full text of both.
    """
    if isinstance(error, FedblendError):
        log.warning("fedblend: refused: %s", legible(error, most=1000))
        return LOCAL_PATH.sub("(a path)", printable(str(error)))
    log.error("fedblend: an unexpected error", exc_info=error)
    return "its app failed; the log of its SuperNode states why"


def setup_at_site(site: Site, experiment: Experiment, client: int, server_setup: SetupForm) -> Setup:
    """Return the setup at a site: its client has the site's samples, all other clients have none.

    ``server_setup`` is the result of :func:`describe_setup`. Raises :class:`FedblendError` if the site's samples have
    another kind or shape, or other classes, than the server's, or if the model has other frozen tensors here.
    """
    setup = _setup_at_site(site, experiment, client, server_setup)
    if setup.frozen_digest(setup.weights()) != server_setup["frozen"]:
        raise FedblendError(
            f"model: the tensors of {experiment.model.name} that are not trained differ from the server's, and they do "
            "not travel; valid: the same file of weights at server and sites (drawn weights, such as normal ones, may "
            "differ between processors)"
        )
    return setup


def _setup_at_site(site: Site, experiment: Experiment, client: int, server_setup: SetupForm) -> Setup:
    if site.data is None:
        for option, file in files_of(experiment.data).items():
            if file not in site.trusted:
                raise RefusedByPolicy(
                    f"data.{option}: a server chooses no file of a site; the site's file must give data, or name the "
                    "file in trusted"
                )
        return make_setup(experiment)
    try:
        data = site.data.load()
    except FedblendError as error:
        log.error("fedblend: data: %s", error)
        raise FedblendError("data: this site's samples cannot be loaded; the site's log states why") from None
    # Images and features of one shape have other ranges of values, and the server's scale fits only its own kind.
    for field, value in _form_of(data).items():
        given = server_setup[field]  # type: ignore[literal-required]
        if value != given and (field != "table" or (value and given)):
            apart = printable(difference(value, given))
            log.error("fedblend: data: this site's %s differs from the federation's: %s", field, apart)
            raise FedblendError(f"data: this site's {field} differs from the federation's; the site's log states how")
    # The server's validation samples are the server's own.
    at_clients = Validation(clients=experiment.validation.clients)
    one_client = experiment.model_copy(
        update={"partition": registry.build("partition", {"name": "iid", "clients": 1}), "validation": at_clients}
    )
    setup = make_setup(one_client, data, at_site=True)
    # Not by the experiment's seed: scores of sets that differ in a few samples would tell of these.
    mine = prepare(one_client.partition, data, 0, holdout=experiment.holdout, validation=experiment.validation.clients)
    if client >= (clients := server_setup["clients"]):
        raise FedblendError(f"the server's number of clients: {clients}; valid: {client + 1} or more")
    # Samples stay in the order of the site's file, not in the order of the partition into one client. Offsets are 0 up
    # to this client, and the number of its samples after it.
    after = (np.arange(clients + 1) > client).astype(np.int64)
    population = Population(
        np.sort(mine.order),
        after * len(mine.order),
        np.sort(mine.held_order),
        None if mine.held_offsets is None else after * len(mine.held_order),
        validation_order=np.sort(mine.validation_order),
        validation_offsets=None if mine.validation_offsets is None else after * len(mine.validation_order),
    )
    scale = scale_from(server_setup["scale"])
    require_plain_scale(scale, setup.scale)
    return replace(setup, experiment=experiment, population=population, scale=scale)


def difference(own: Any, theirs: Any) -> str:
    """Return in what two values of JSON differ; names of lists that only one has, or the places that differ.

    >>> difference({"columns": ["age", "Dose"]}, {"columns": ["age", "dose"]})
    "columns: place 2: 'Dose' here, 'dose' there"
    >>> difference(["a", "b"], ["a", "b", "c"]), difference(3, 4)
    ("only there: 'c'", '3 here, 4 there')
    """
    if isinstance(own, dict) and isinstance(theirs, dict):
        both = {name: (own.get(name), theirs.get(name)) for name in {**own, **theirs}}
        parts = [f"{name}: {difference(*pair)}" for name, pair in both.items() if pair[0] != pair[1]]
        return f"{'; '.join(parts[:10])}{f'; and {len(parts) - 10} more' if len(parts) > 10 else ''}"
    if isinstance(own, list) and isinstance(theirs, list):
        if len(own) == len(theirs):
            pairs = enumerate(zip(own, theirs, strict=True), 1)
            return listed([f"place {n}: {difference(*pair)}" for n, pair in pairs if pair[0] != pair[1]])
        sides = ("only here", own, theirs), ("only there", theirs, own)
        only = [(side, [brief(one) for one in mine if one not in other]) for side, mine, other in sides]
        return "; ".join(f"{side}: {listed(names)}" for side, names in only if names) or (
            f"{len(own)} here, {len(theirs)} there"
        )
    here, there = ("nothing" if value is None else brief(value) for value in (own, theirs))
    return f"{here} here, {there} there"


def describe_setup(setup: Setup) -> SetupForm:
    """Return what sites need of the server's setup, as JSON values.

    Of a table these are its columns and texts, and of the model's frozen tensors their digest.
    """
    scale = setup.scale
    numbers: Any = {"vocabulary": scale.vocabulary} if isinstance(scale, OneHot) else scale.describe()
    if isinstance(scale, Scaler):
        tensors = {"factor": scale.factor, "offset": scale.offset}
        tensors |= {"unit_factor": scale.unit_factor, "unit_offset": scale.unit_offset}
        numbers = {"name": scale.name, "inverted": scale.inverted, **{n: t.tolist() for n, t in tensors.items()}}
    return {
        "clients": len(setup.population),
        **_form_of(setup.data),  # type: ignore[typeddict-item]
        "scale": numbers,
        "frozen": setup.frozen_digest(setup.weights()),
    }


def _form_of(data: Dataset) -> dict[str, Any]:
    return {
        "kind": data.kind,
        "shape": list(data.train.x.shape[1:]),
        "classes": list(data.classes),
        "outputs": data.outputs,
        "labels": list(data.labels),
        # The digest of the frozen backbone that made the features, and of its inputs; empty for other data.
        "features": str(data.facts.get("backbone", {}).get("digest", "")),
        "table": encoding_of(data),
    }


def encoding_of(data: Dataset) -> dict[str, Any]:
    """Return a table's columns, and its texts and units by column: what a feature means. Empty for other data.

    Of a column of free texts these are the length of a sample, and what the tokenizer makes of one text.
    """
    form = data.facts.get("table", {})
    return {name: form[name] for name in ("columns", "categories", "units", "length", "pangram") if name in form}


def scale_from(numbers: Mapping[str, Any]) -> Fitted:
    """Return the scale that :func:`describe_setup` described, equal to the last bit. Raises :class:`FedblendError`."""
    if "vocabulary" in numbers:
        return OneHot(numbers["vocabulary"])
    if "factor" not in numbers:
        return Tokens()
    try:
        factors = [torch.tensor(numbers[name]) for name in ("factor", "offset", "unit_factor", "unit_offset")]
    except (ValueError, TypeError) as error:
        raise FedblendError(f"the server's scale of inputs: {error}") from None
    return Scaler(numbers["name"], numbers["inverted"], *factors)


def require_plain_scale(given: Fitted, own: Any) -> None:
    """Raise :class:`RefusedByPolicy` unless the server's scale has the kind and the shapes of the site's own.

    A scale that has a number for each sample makes one sample of a mean; one number in place of a number for each
    feature makes noise too small. So does one with steps of float32 that are large beside the range of its values.
    """
    fault = ""
    if not isinstance(given, Scaler) or not isinstance(own, Scaler):
        fault = "" if given == own else "it is not that of the site's text or tokens"
    else:
        for name in ("factor", "offset", "unit_factor", "unit_offset"):
            theirs, ours = getattr(given, name), getattr(own, name)
            if theirs.shape != ours.shape or not theirs.is_floating_point() or not theirs.isfinite().all():
                fault = fault or f"'{name}' is no finite number for each of the site's {len(ours)} channels or features"
        if not fault and not (given.factor.all() and given.unit_factor.all()):
            fault = "a factor is 0"
        if not fault and not given.is_exact():
            fault = "its numbers are so large that float32 moves values by more than 0.1 % of their range"
    if fault:
        raise RefusedByPolicy(f"the server's scale of inputs: {fault}; valid: the scale of a server with such data")


NO_DATA = """
# This site's samples. Without this table the site trains on its client's part of the experiment's data (for trials).
# [data]
# name = "npz"
# path = "samples.npz"
"""

FEDERATION = """
# This site's place in its federation, for `fedblend site start`. Leave it as it is.
"""

DATA = """
# This site's samples; their test half stays at this site and is not used.
"""


def site_text(
    path: Path,
    data: Path | None,
    allow: tuple[str, ...] = SAFE,
    trusted: Sequence[str] = (),
    table: Mapping[str, Any] = MappingProxyType({}),
    key: str | None = None,
    audit: str | None = None,
    federation: Mapping[str, Any] | None = None,
    **numbers: int,
) -> str:
    """Return the commented content of a new site file at ``path``, with the samples in ``data``.

    ``data`` is an ``.npz`` file, or a table with the options ``table``. Other arguments are fields of the file;
    ``numbers`` are of ``min_mean``, ``min_sum``, ``sharings`` and ``rounds``.
    """
    others = ", ".join(kind for kind in KINDS if kind not in allow) or "none"
    kinds = [f"{kind.name + '*' * kind.through_model:15} {kind.meaning}" for kind in PAYLOAD_KINDS.values()]
    samples = NO_DATA if data is None else DATA + write_toml({"data": samples_of(data, table)})
    if federation is not None:
        samples = FEDERATION + write_toml({"federation": federation}) + samples
    template = files("fedblend.flower").joinpath("templates", "site.toml").read_text(encoding="utf-8")
    return Template(template).substitute(
        path=printable(str(path.absolute())),
        others=others,
        kinds="\n".join(f"#   {line}" for line in kinds),
        allow=_toml_list(allow),
        trusted=_toml_list(trusted),
        audit=_toml(audit or f"{path.stem}.audit.jsonl"),
        key=f"key = {_toml(key)}" if key else '# key = "site-0"',
        data=samples,
        MOST_SECONDS=f"{MOST_SECONDS:.0f}",
        MOST_WEIGHTS=MOST_WEIGHTS,
        MOST_STEPS=MOST_STEPS,
        **{name: Site.model_fields[name].default for name in ("min_mean", "min_sum", "sharings", "rounds")} | numbers,
    )


def samples_of(data: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data set of a file as in an experiment file: an ``.npz`` file, or a table with its options."""
    return {"name": "table" if table else "npz", "path": str(data.absolute()), **table}


def _toml(text: str) -> str:
    """Return a text as a TOML string. A JSON string is none: it escapes an emoji as two surrogates."""
    return write_toml({"text": text}).removeprefix("text = ").rstrip("\n")


def _toml_list(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(_toml, texts))}]"


def files_of(made: Any) -> dict[str, str]:
    """The files and folders that a part's options name, by option; of the Hugging Face Hub also its data sets.

    Of the features of a data set these are the data set's own.
    """
    if isinstance(made, BackboneFeatures):
        return {f"of.{option}": file for option, file in files_of(made.of).items()}
    hints = get_type_hints(type(made), include_extras=True)
    paths = [
        field
        for field in fields_of(type(made))
        if {absolute, absolute_file, absolute_folder} & {getattr(one, "func", None) for one in _metadata(hints[field])}
    ]
    return {field: getattr(made, field) for field in paths if getattr(made, field) not in (None, MINILM)}


def _metadata(hint: Any) -> list[Any]:
    inner = [one for arg in getattr(hint, "__args__", ()) for one in _metadata(arg)]
    return [*getattr(hint, "__metadata__", ()), *inner]
