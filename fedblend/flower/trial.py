"""A trial federation on this machine: SuperLink and SuperNodes on loopback, with TLS and authenticated nodes."""

from __future__ import annotations

import os
import secrets
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

from fedblend.core.errors import FedblendError, missing_package
from fedblend.flower import process_guard
from fedblend.flower.credentials import make_credentials

NO_REPORTS = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
"""Environment in which neither Flower nor Ray sends reports to its makers."""

FAST_POLL = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}
"""Seconds between two looks for an app to start, at every message; Flower's default is 1."""

LOOPBACK = "127.0.0.1"  # The only address on which a trial's processes listen
LINK = "trial"  # The SuperLink's name in Flower's configuration

START_S = 300.0
"""Seconds in which the SuperLink, and Flower's commands, must answer: few are needed, but a machine may be busy."""

STOP_S = 10.0  # Seconds between SIGTERM and SIGKILL to a process


class LoopbackTrial:
    """The processes of a federation; their credentials, Flower home and logs are in ``folder``.

    A context manager. All processes end when the context is left, also by SIGTERM or SIGHUP. On Linux they also end
    when this process is killed: a guard process waits for its end (:mod:`fedblend.flower.process_guard`). ``keys`` is
    a folder with the server's certificates; without it there are new ones, and keys of the sites.
    """

    def __init__(self, folder: Path, sites: int, keys: Path | None = None) -> None:
        self.folder, self.sites = folder.absolute(), sites
        self.logs, self.home = self.folder / "logs", self.folder / "flower"
        self.keys, self._own_keys = keys or self.folder / "credentials", keys is None
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.mark = secrets.token_hex(16)  # Value of the variable by which the guard finds the processes of this trial
        self._guard: subprocess.Popen[bytes] | None = None
        self._handled_signals: list[signal.Signals] = []

    def __enter__(self) -> LoopbackTrial:
        if not hasattr(os, "killpg"):
            raise FedblendError("a trial of a federation needs Linux or macOS: this system has no process groups")
        # By default Python ends at these signals without leaving a context. Only the main thread can set handlers.
        # Signals that are ignored (nohup) or already have a handler keep it.
        if threading.current_thread() is threading.main_thread():
            default = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
            self._handled_signals = default
        for number in self._handled_signals:
            signal.signal(number, _exit)
        return self

    def __exit__(self, *about: object) -> None:
        self.stop()
        for number in self._handled_signals:
            signal.signal(number, signal.SIG_DFL)

    def begin(self) -> None:
        """Make the credentials, start the SuperLink, and register the sites' keys with it."""
        for folder in (self.logs, self.home):
            folder.mkdir(parents=True, exist_ok=True)
        # The database of an earlier trial in this folder has other keys.
        (self.folder / "superlink.db").unlink(missing_ok=True)
        if self._own_keys:
            make_credentials(self.keys, self.sites)
        link = {"address": f"127.0.0.1:{self.port}", "root-certificates": str(self.keys / "ca.crt")}
        (self.home / "config.toml").write_text(
            tomli_w.dumps({"superlink": {"default": LINK, LINK: link}}), encoding="utf-8"
        )
        self.start_link()
        for site in range(self.sites):
            self.register(self.keys / f"site-{site}.pub")

    def start_link(self) -> None:
        """Start the SuperLink, or start it again, and wait until it answers."""
        certificates = ("ca-certfile", "ca.crt"), ("certfile", "server.crt"), ("keyfile", "server.key")
        tls = [word for option, name in certificates for word in (f"--ssl-{option}", str(self.keys / name))]
        address = ["--host", LOOPBACK, "--port", str(self.port)]
        database = ["--database", str(self.folder / "superlink.db")]
        options = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        self._start("superlink", ["flower-superlink", *tls, *address, *database, *options])
        self._wait_for("superlink", self.port)

    def register(self, key: Path) -> None:
        """Register a SuperNode's public key with the SuperLink."""
        self.flwr("supernode", "register", str(key), LINK)

    def start_node(self, site: int, config: Mapping[str, Any], key: Path | None = None, name: str = "") -> None:
        """Start a site's SuperNode with ``config`` as its ``--node-config``; ``name`` is the name of its log."""
        link, ca, key = f"{LOOPBACK}:{self.port}", self.keys / "ca.crt", key or self.keys / f"site-{site}.key"
        command = node_command(link, ca, key, free_port(), {"partition-id": site, **config})
        self._start(name or f"site-{site}", command)

    def submit(self, app: Path) -> subprocess.Popen[bytes]:
        """Submit an app to the SuperLink; the returned process shows the run's log and ends with the run."""
        return self._start("run", ["flwr", "run", str(app.absolute()), LINK, "--stream"])

    def flwr(self, *words: str) -> str:
        """Return the output of a ``flwr`` command. Raises :class:`FedblendError` if it fails."""
        command = [tool("flwr"), *words]
        done = subprocess.run(
            command, env=self._environment(), capture_output=True, text=True, timeout=START_S, check=False
        )
        if done.returncode:
            raise FedblendError(f"flwr {' '.join(words[:2])} failed: {(done.stdout + done.stderr).strip()}")
        return done.stdout

    def log_of(self, name: str) -> str:
        """Return the log of a process."""
        path = self.logs / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def stop(self) -> None:
        """End all processes, the last started first, and then whatever apps they have left running."""
        for name in reversed(list(self.processes)):
            self.stop_one(name)
        if self._guard is not None:
            self._guard.communicate()
            self._guard = None

    def stop_one(self, name: str, kill: bool = False) -> None:
        """End one process and its process group, with ``kill`` by SIGKILL."""
        process = self.processes.pop(name)
        try:
            os.killpg(process.pid, signal.SIGKILL if kill else signal.SIGTERM)
            process.wait(STOP_S)
        except ProcessLookupError:
            pass
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        self._start_guard()
        with open(self.logs / f"{name}.log", "ab") as log:
            # In a process group of its own, so that its children get the same signals.
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

    def _start_guard(self) -> None:
        if self._guard is None and (process_guard.PROC / "self" / "environ").exists():
            # In a session of its own, so that a signal to this process and its group does not end the guard.
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", process_guard.__file__, self.mark],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _wait_for(self, name: str, port: int) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.processes[name].poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        raise FedblendError(f"{name} does not answer on port {port}; see its log: {self.logs / name}.log")

    def _environment(self) -> dict[str, str]:
        # Flower must start the apps of this Python's environment.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        own = {
            "FLWR_HOME": str(self.home),
            "PATH": path,
            # Code beside the experiment's file is on this process's path, not in the installed packages.
            "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder),
            "PYTHONUNBUFFERED": "1",
            process_guard.VARIABLE: self.mark,
        }
        return {**FAST_POLL, **os.environ, **NO_REPORTS, **without_proxy(), **own}


def without_proxy() -> dict[str, str]:
    """Return variables with which no request to this machine goes to a proxy: the SuperNode's own ones are in clear."""
    given = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    hosts = ",".join(filter(None, [given, "127.0.0.1,localhost,::1"]))
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def _exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def tool(name: str) -> str:
    """Return the path of Flower's command beside this Python. Raises :class:`FedblendError` if it is missing."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise missing_package(f"{name}, which is not beside {sys.executable},", "flwr", "flower")
    return str(path)


def free_port() -> int:
    """Return a free TCP port of this machine."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def node_command(link: str, ca: str | Path, key: Path, port: int, settings: Mapping[str, Any]) -> list[str]:
    """Return the command of a SuperNode at a SuperLink's address, with ``settings`` as its ``--node-config``."""
    words = (tomli_w.dumps({name: value}).strip().replace(" = ", "=", 1) for name, value in settings.items())
    tls = ["--root-certificates", str(ca), "--auth-supernode-private-key", str(key)]
    own = ["--host", LOOPBACK, "--port", str(port), "--node-config", " ".join(words)]
    return ["flower-supernode", "--superlink", link, *tls, *own]
