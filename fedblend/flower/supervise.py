"""Starts a site's SuperNode, and ends it once it has given up its connection, so that the service manager restarts it.

Flower 1.42 gives up for ever at a certificate that does not verify, and its process stays.
"""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

from cryptography import x509

from fedblend.core.errors import FedblendError
from fedblend.flower.credentials import days_left, expiry_warning, expiry_warnings
from fedblend.flower.metrics import serve, site_numbers
from fedblend.flower.site import Membership, Site, read_site
from fedblend.flower.trial import NO_REPORTS, STOP_S, node_command, tool, without_proxy

GAVE_UP = ("Giving up reconnection", "SSL/TLS handshake error")
"""What a SuperNode logs before it stays without a connection."""

IN_USE = "address already in use"  # What a SuperNode logs, in small letters, where another process has its port
DAY_S = 24 * 60 * 60.0

PROBE_S = 10.0  # Seconds that a look at the server's certificate may take
RESTART = 3  # Exit code where the SuperNode has to be started again


def member_of(path: Path, site: Site) -> Membership:
    """Return a site's place in its federation. Raises :class:`FedblendError` if its file has none, or no key."""
    if site.federation is None:
        raise FedblendError(f"{path}: federation: is missing; valid: a site file of fedblend federation provision")
    if site.key is None:
        raise FedblendError(f"{path}: key: is missing; valid: the path of this site's private key")
    return site.federation


def start_site(path: Path, port: int = 9094, metrics_port: int | None = None) -> int:
    """Run a site's SuperNode until it ends, and return an exit code; with ``metrics_port`` serve numbers of the site.

    Raises :class:`FedblendError` for a site file with which none can run, and if another process has ``port``.
    """
    site = read_site(path)
    member, key = member_of(path, site), Path(str(site.key))
    for file, what in ((key, "fedblend site enroll makes it"), (Path(member.ca), "the coordinator sends it")):
        if not file.is_file():
            raise FedblendError(f"{path}: {file}: no such file; {what}")
    if metrics_port is not None:
        serve(metrics_port, lambda: site_numbers(site, [Path(member.ca)]))
    settings = {"partition-id": member.client, "site": str(path.absolute())}
    name, *words = node_command(member.server, member.ca, key, port, settings)
    node = subprocess.Popen(
        [tool(name), *words],
        env={**os.environ, **NO_REPORTS, **without_proxy()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A second SIGTERM, as of a terminal or a service manager to all processes, would end it without a goodbye.
        start_new_session=True,
        text=True,
        errors="replace",
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: _end(node))
    threading.Thread(target=_warn_daily, args=(member,), daemon=True).start()
    seen: set[str] = set()
    reader = threading.Thread(target=_read, args=(node, member, seen), daemon=True)
    reader.start()
    # Its own processes end with it once it is waited for, and they hold its output until then.
    code = node.wait()
    reader.join(STOP_S)
    if IN_USE in seen:
        raise FedblendError(f"--port {port}: another process has this port of 127.0.0.1; valid: a free one")
    return RESTART if seen else abs(code)


def _read(node: subprocess.Popen[str], member: Membership, seen: set[str]) -> None:
    """Print a SuperNode's log, and end it once it has given up, or its port is in use; note which in ``seen``."""
    assert node.stdout is not None
    for line in node.stdout:
        if IN_USE in line.lower():
            seen.add(IN_USE)
            node.kill()  # before its traceback
            return
        print(line, end="", flush=True)
        if not seen and any(sign in line for sign in GAVE_UP):
            seen.add(line)
            _tell(f"the SuperNode has given up its connection, and ends; {server_certificate(member)}")
            _end(node)


def server_certificate(member: Membership) -> str:
    """Connect to the server, and return until when its certificate is valid, or why it is not."""
    host, _, port = member.server.rpartition(":")
    address = (host.strip("[]"), int(port))
    try:
        found = x509.load_pem_x509_certificate(
            ssl.get_server_certificate(address, ca_certs=member.ca, timeout=PROBE_S).encode()
        )
    except (OSError, ValueError) as error:
        return f"{member.server} cannot be reached: {error}"
    warning = expiry_warning(f"the certificate of {member.server}", found)
    return warning or f"the certificate of {member.server} is valid for {days_left(found)} days"


def _warn_daily(member: Membership) -> None:
    while True:
        for text in [*expiry_warnings([Path(member.ca)]), server_certificate(member)]:
            _tell(text)
        time.sleep(DAY_S)


def _end(node: subprocess.Popen[str]) -> None:
    late = threading.Timer(STOP_S, node.kill)
    late.daemon = True
    late.start()
    node.terminate()


def _tell(text: str) -> None:
    print(f"fedblend: {text}", file=sys.stderr, flush=True)
