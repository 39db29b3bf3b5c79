"""Numbers for Prometheus, at a site and at the server: opt-in, on 127.0.0.1 only (extra `watch`).

A site's numbers are those of its audit log and its certificates; none is of its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fedblend.core.errors import FedblendError, missing_package
from fedblend.flower.audit import AuditLog
from fedblend.flower.credentials import days_left, load_certificate
from fedblend.flower.limits import used_limits
from fedblend.flower.site import Site
from fedblend.runs.directory import METRICS, RunDirectory
from fedblend.runs.groups import read

Gauge = tuple[str, str, Mapping[str, float]]  # Name, help, and numbers by what they are of, which is the label `of`


def serve(port: int, collect: Callable[[], Iterable[Gauge]]) -> None:
    """Serve numbers on a port of 127.0.0.1, from a thread, until this process ends. Raises :class:`FedblendError`."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import GaugeMetricFamily
        from prometheus_client.registry import Collector
    except ImportError:
        raise missing_package("--metrics-port", "prometheus-client", "watch") from None

    class Gauges(Collector):
        def collect(self) -> Iterable[GaugeMetricFamily]:
            for name, text, numbers in collect():
                family = GaugeMetricFamily(f"fedblend_{name}", text, labels=["of"])
                for of, number in numbers.items():
                    family.add_metric([of], number)
                yield family

    registry = CollectorRegistry()
    registry.register(Gauges())
    try:
        start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise FedblendError(f"--metrics-port {port}: {error.strerror}; valid: a free port") from None


def certificate_days(certificates: Iterable[Path]) -> Gauge:
    """Days until certificates expire, by file."""
    days = {path.name: float(days_left(load_certificate(path))) for path in certificates if path.exists()}
    return "certificate_days", "Days until a certificate expires.", days


def site_numbers(site: Site, certificates: Iterable[Path]) -> list[Gauge]:
    """A site's numbers: limits over all runs, and how much of each is used."""
    limits = used_limits(site, AuditLog(site.audit))
    return [
        ("site_used", "Used of a limit of the site file.", {field: used for field, (used, _) in limits.items()}),
        ("site_limit", "A limit of the site file.", {field: most for field, (_, most) in limits.items()}),
        certificate_days(certificates),
    ]


def server_numbers(runs: Path, credentials: Path) -> list[Gauge]:
    """A server's numbers: of the newest run below a folder its round, and missing uploads of its last round by site."""
    numbers = [certificate_days([credentials / "server.crt", credentials / "ca.crt"])]
    found = [path.parent for path in runs.rglob(METRICS)]
    if found:
        run = read(RunDirectory(max(found, key=lambda path: (path / METRICS).stat().st_mtime)))
        names = run.facts.get("partition", {}).get("sites", [])
        refused = [one["client"] for one in run.records[-1].refused or ()] if run.records else []
        missing = {names[client] if client < len(names) else str(client): 1 for client in refused}
        numbers += [
            ("run_round", "The last round of the newest run.", {run.path.name: run.round}),
            ("run_rounds", "Rounds that it will have.", {run.path.name: run.rounds}),
            ("run_running", "Whether it is running.", {run.path.name: run.state == "running"}),
            ("run_missing_upload", "Sites without an upload in its last round.", missing),
        ]
    return numbers
