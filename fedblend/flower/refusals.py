"""What a site would refuse of an experiment, found without a server: `fedblend site check --experiment`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from fedblend.core.dataset import Dataset
from fedblend.core.engine import client_parts
from fedblend.core.errors import FedblendError
from fedblend.core.registry import build
from fedblend.data.loaders.table import TableFile
from fedblend.experiment.config import Experiment
from fedblend.experiment.fields import Validation
from fedblend.experiment.make_setup import make_setup
from fedblend.flower import limits
from fedblend.flower.audit import AuditLog
from fedblend.flower.client import ANSWERS, KEYS, SCORES, SHARING, UPLOAD, extras_kind, kind_of
from fedblend.flower.site import Site, difference, encoding_of, trust_of


def refusals(site: Site, experiment: Experiment, data: Dataset | None, record: AuditLog) -> list[str]:
    """Return what a site with these samples and this audit log refuses of an experiment, each with its reason."""
    method, found = experiment.method, []
    checks = [partial(limits.check_experiment, site, experiment), partial(limits.check_agreed, site, experiment)]
    if data is not None:
        size = round(len(data.train) * (1 - experiment.holdout - experiment.validation.clients))
        checks += [partial(check, site, experiment, size) for check in (limits.check_steps, limits.check_work)]
        checks.append(partial(_build, site, experiment, data))
    for kind, what in _kinds(experiment):
        checks.append(partial(limits.check_kind, site, kind, record, what == UPLOAD))
        checks.append(partial(limits.check_noise, site, kind, experiment, what == SHARING))
    for check in checks:
        try:
            check()
        except FedblendError as error:
            found.append(str(error))
    left = site.rounds - len(record.rounds_trained())
    if 0 < left < experiment.rounds:
        found.append(f"rounds: {experiment.rounds:,}: this site trains in {left:,} more (rounds in its site file)")
    masked = method.aggregator.works_on == "sums" or method.sharing.plan.who == "groups"
    clients = getattr(experiment.partition, "clients", site.min_sum)
    if masked and clients < site.min_sum:
        found.append(f"min_sum: {site.min_sum} in its site file, and the experiment has {clients} clients")
    if data is not None and isinstance(experiment.data, TableFile) and experiment.data.columns is not None:
        theirs, own = _stated(experiment.data), {"units": {}, "classes": list(data.classes), **encoding_of(data)}
        found += [f"data: {n}: {difference(own.get(n), one)}" for n, one in theirs.items() if own.get(n) != one]
    return list(dict.fromkeys(found))


def _kinds(experiment: Experiment) -> Iterator[tuple[str, str]]:
    method = experiment.method
    yield kind_of(method, UPLOAD), UPLOAD
    plan = method.sharing.plan
    if plan.active and plan.who != "server" and plan.to != "nobody":
        yield kind_of(method, SHARING), SHARING
    if any(part.sends for part in client_parts(method).values()):
        yield extras_kind(method), ""
    if method.aggregator.works_on == "sums" or method.sharing.plan.who == "groups":
        yield KEYS, KEYS
    if method.server_step.works_on == "answers":
        yield ANSWERS, ANSWERS
    if experiment.holdout or experiment.validation.clients:
        yield SCORES, SCORES


def _build(site: Site, experiment: Experiment, data: Dataset) -> None:
    one_client = {"partition": build("partition", {"name": "iid", "clients": 1}), "validation": Validation()}
    with trust_of(site), limits.bounded_model(site):
        make_setup(experiment.model_copy(update=one_client), data, at_site=True)


def _stated(table: TableFile) -> dict[str, Any]:
    """What a data dictionary states of samples, in the form in which a site describes its own."""
    targets = [table.target] if isinstance(table.target, str) else table.target
    columns = dict(table.columns or {})
    classes = columns.get(targets[0], "")
    features = table.features or [name for name in columns if name not in (*targets, table.client, table.split)]
    given = {name: columns[name] for name in features}
    return {
        "columns": features,
        "categories": {name: values for name, values in given.items() if isinstance(values, list)},
        "units": {name: unit for name, unit in given.items() if isinstance(unit, str) and unit},
        **({"classes": classes} if isinstance(classes, list) else {}),
    }
