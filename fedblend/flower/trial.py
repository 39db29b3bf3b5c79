"""A trial federation on this machine: SuperLink and SuperNodes on loopback, with TLS and authenticated nodes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedblend.core.errors import FedblendError
from fedblend.flower.credentials import make_credentials

OFF = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
"""Nothing is told to anybody outside."""

EAGER = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}
"""Seconds between two looks for an app to start, at every message; Flower's own is 1."""

LINK = "trial"
"""The SuperLink's name in Flower's configuration."""

BEGIN = 300.0
"""Seconds in which the SuperLink, and Flower's commands, must answer: few are needed, but a machine may be busy."""

GOODBYE = 10.0
"""Seconds that a process gets to end after it was told to."""


class LoopbackTrial:
    """The processes of a federation in ``folder``: credentials, Flower's home and logs lie there.

    A context manager: everything it started is ended when it is left, also by SIGTERM or a terminal that is closed.
    """

    def __init__(self, folder: Path, sites: int) -> None:
        self.folder, self.sites = folder.absolute(), sites
        self.keys, self.logs, self.home = (self.folder / name for name in ("credentials", "logs", "flower"))
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._heard: list[signal.Signals] = []

    def __enter__(self) -> LoopbackTrial:
        # Python ends at these without leaving anything that it is in; only its main thread can change that. Where they
        # are ignored (nohup) or heard by somebody else, they stay so.
        if threading.current_thread() is threading.main_thread():
            self._heard = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
        for heard in self._heard:
            signal.signal(heard, _leave)
        return self

    def __exit__(self, *about: object) -> None:
        self.stop()
        for heard in self._heard:
            signal.signal(heard, signal.SIG_DFL)

    def begin(self) -> None:
        """Make the credentials, start the SuperLink, and register the sites' keys with it."""
        for folder in (self.logs, self.home):
            folder.mkdir(parents=True, exist_ok=True)
        # A new authority and new keys: what an earlier trial here had registered is of no use.
        (self.folder / "superlink.db").unlink(missing_ok=True)
        make_credentials(self.keys, self.sites)
        link = {"address": f"127.0.0.1:{self.port}", "root-certificates": str(self.keys / "ca.crt")}
        (self.home / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": LINK, LINK: link}}))
        self.start_link()
        for site in range(self.sites):
            self.register(self.keys / f"site-{site}.pub")

    def start_link(self) -> None:
        """Start the SuperLink (again, after it was stopped) and wait until it answers."""
        certificates = ("ca-certfile", "ca.crt"), ("certfile", "server.crt"), ("keyfile", "server.key")
        tls = [word for option, name in certificates for word in (f"--ssl-{option}", str(self.keys / name))]
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--database", str(self.folder / "superlink.db")]
        self._start(
            "superlink",
            ["flower-superlink", *tls, *where, "--enable-supernode-auth", "--disable-runtime-dependency-installation"],
        )
        self._wait_for("superlink", self.port)

    def register(self, key: Path) -> None:
        """Let the SuperNode with this public key take part."""
        self.flwr("supernode", "register", str(key), LINK)

    def start_node(self, site: int, config: Mapping[str, Any], key: Path | None = None, name: str = "") -> None:
        """Start a site's SuperNode; ``config`` becomes its ``--node-config``, and ``name`` that of its log."""
        told = " ".join(f"{name}={_toml(value)}" for name, value in {"partition-id": site, **config}.items())
        self._start(
            name or f"site-{site}",
            [
                "flower-supernode",
                *("--root-certificates", str(self.keys / "ca.crt")),
                *("--auth-supernode-private-key", str(key or self.keys / f"site-{site}.key")),
                *("--superlink", f"127.0.0.1:{self.port}", "--port", str(free_port()), "--node-config", told),
            ],
        )

    def submit(self, app: Path) -> subprocess.Popen[bytes]:
        """Have the SuperLink run an app; the process ends with the run, whose log it shows."""
        return self._start("run", ["flwr", "run", str(app.absolute()), LINK, "--stream"])

    def flwr(self, *words: str) -> str:
        """What a command of Flower's says. Raises :class:`FedblendError` if it fails."""
        done = subprocess.run(
            [tool("flwr"), *words], env=self._environment(), capture_output=True, text=True, timeout=BEGIN, check=False
        )
        if done.returncode:
            raise FedblendError(f"flwr {' '.join(words[:2])} failed: {(done.stdout + done.stderr).strip()}")
        return done.stdout

    def log_of(self, name: str) -> str:
        """All that a process has said."""
        path = self.logs / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def stop(self) -> None:
        """End all processes, those started last first."""
        for name in reversed(list(self.processes)):
            self.stop_one(name)

    def stop_one(self, name: str, kill: bool = False) -> None:
        """End one process and those it has started."""
        process = self.processes.pop(name)
        try:
            os.killpg(process.pid, 9 if kill else 15)
            process.wait(GOODBYE)
        except ProcessLookupError:
            pass
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
        process.wait()

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with open(self.logs / f"{name}.log", "ab") as log:
            # A group of its own, so that the apps it starts end with it.
            process = subprocess.Popen(
                [tool(command[0]), *command[1:]],
                env=self._environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=self.folder,
            )
        self.processes[name] = process
        return process

    def _wait_for(self, name: str, port: int) -> None:
        end = time.monotonic() + BEGIN
        while time.monotonic() < end and self.processes[name].poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        raise FedblendError(f"{name} does not answer on port {port}; its log says why: {self.logs / name}.log")

    def _environment(self) -> dict[str, str]:
        # The apps that Flower starts are to be those beside this Python, and to see this fedblend.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**EAGER, **os.environ, **OFF, "FLWR_HOME": str(self.home), "PATH": path, "PYTHONUNBUFFERED": "1"}


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def tool(name: str) -> str:
    """Flower's command beside this Python. Raises :class:`FedblendError` if it is not installed."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise FedblendError(
            f"{name} is not installed beside {sys.executable}; install it: pip install 'fedblend[flower]'"
        )
    return str(path)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _toml(value: Any) -> str:
    return tomli_w.dumps({"v": value}).partition("=")[2].strip()
