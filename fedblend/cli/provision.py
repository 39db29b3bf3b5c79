"""``fedblend federation provision`` and ``fedblend site enroll``: what a federation's parties make and exchange."""

from __future__ import annotations

import threading
from pathlib import Path

import typer
from rich.table import Table

from fedblend.cli.console import Console
from fedblend.cli.federation import one_experiment
from fedblend.core.errors import FedblendError
from fedblend.experiment.toml_tables import read_toml


def provision(file: Path, out: Path, renew: bool = False) -> None:
    """Write the folders of a federation's parties, or bring them up to date, and print who has sent a key."""
    from fedblend.flower.credentials import fingerprint, load_certificate
    from fedblend.flower.provision import Federation
    from fedblend.flower.provision import provision as write
    from fedblend.flower.site import read_fields
    from fedblend.flower.sites import PEERS

    federation, console = read_fields(Federation, file), Console()
    experiment = None if federation.experiment is None else one_experiment(Path(federation.experiment), None)
    for line in write(federation, out, experiment, renew):
        console.tell(f"new: {line}")
    peers, table = read_toml(out / "server" / PEERS), Table("number", "site", "public key")
    for number, name in sorted(federation.sites.items(), key=lambda one: int(one[0])):
        table.add_row(
            number, name, fingerprint(peers[number]) if number in peers else f"none: {out / 'keys'}/{name}.pub"
        )
    console.print(table)
    for name in ("ca", "server"):
        valid = load_certificate(out / "server" / f"{name}.crt").not_valid_after_utc
        console.tell(f"{name}.crt: valid until {valid:%Y-%m-%d}; {fingerprint_of(out / 'server' / f'{name}.crt')}")


def enroll(path: Path, rotate: bool = False) -> None:
    """Make a site's private key, and print the line with its public key for the coordinator."""
    from fedblend.flower.credentials import fingerprint, make_site_key
    from fedblend.flower.site import read_site
    from fedblend.flower.supervise import member_of

    site, console = read_site(path), Console()
    member, key = member_of(path, site), Path(str(site.key))
    if key.suffix != ".key":
        raise FedblendError(f"{path}: key: {key}: is not valid; valid: a name that ends in .key")
    if rotate:
        key = key.with_name(f"{key.stem}.new.key")
    if not key.exists():
        make_site_key(key.with_suffix(""), member.name)
    line = key.with_suffix(".pub").read_text(encoding="utf-8").strip()
    console.tell(f"Send this line to the coordinator, as {member.name}.pub:\n\n{line}\n")
    console.tell(f"Compare by telephone: the key {fingerprint(line)}; the authority {fingerprint_of(Path(member.ca))}")
    if rotate:
        console.tell(
            f"Once it is registered: mv {key} {site.key}, mv {key.with_suffix('.pub')} likewise; restart the site"
        )


def start(path: Path, port: int, metrics_port: int | None = None) -> None:
    """Start a site's SuperNode; the process ends with the exit code that it returns."""
    import fedblend.flower  # noqa: F401  (raises where Flower is missing)
    from fedblend.flower.supervise import start_site

    raise typer.Exit(start_site(path, port, metrics_port))


def watch(runs: Path, credentials: Path, metrics_port: int = 9464) -> None:
    """Serve numbers of the server for Prometheus until the process is ended."""
    from fedblend.flower.metrics import serve, server_numbers

    serve(metrics_port, lambda: server_numbers(runs, credentials))
    Console().tell(f"http://127.0.0.1:{metrics_port}/metrics")
    threading.Event().wait()


def fingerprint_of(path: Path) -> str:
    """Return the SHA-256 of a certificate, as ``openssl x509 -fingerprint -sha256`` prints it."""
    from cryptography.hazmat.primitives.hashes import SHA256

    from fedblend.flower.credentials import load_certificate

    return f"sha256 {load_certificate(path).fingerprint(SHA256()).hex(':').upper()}"
