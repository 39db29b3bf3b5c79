"""A year of a federation in some minutes: `make federation-drill`.

Three hospitals with tables of different names and texts, provisioned as docs/deployment.md says, run one experiment on
loopback, as real processes with TLS and registered keys. On the way each fault of a table happens on purpose. The table
says what server and site logged, the seconds until the run went on, and the uploads that the run lost. The exit code is
1 if a fault did not end as expected.

    python examples/federation_drill.py [--out FOLDER] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fedblend.flower.credentials import make_credentials
from fedblend.flower.process_guard import PROC, marked_processes
from fedblend.flower.trial import LINK, LoopbackTrial, free_port, tool
from fedblend.runs import api
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import read

BOUND_S = 400.0
"""Seconds in which each step must end."""

SITES = ("north", "south", "west")

COLUMNS = {"age": "years", "pulse": "1/min", "ward": ["surgery", "medicine"], "ill": ["no", "yes"]}
"""The data dictionary."""

TABLES = {
    "server": ("age,pulse,ward,ill", ("surgery", "medicine"), ("no", "yes"), ""),
    "north": ("age,pulse,ward,ill", ("surgery", "medicine"), ("no", "yes"), ""),
    "south": (
        "Alter,pulse,Station,krank",
        ("Chirurgie", "Innere"),
        ("nein", "ja"),
        '[data.rename]\nAlter = "age"\nStation = "ward"\nkrank = "ill"\n'
        '[data.categories]\nward = {Chirurgie = "surgery", Innere = "medicine"}\nill = {nein = "no", ja = "yes"}\n',
    ),
    "west": (
        "age,pulse,unit,ill",
        ("1", "1"),
        ("0", "1"),
        ('[data.rename]\nunit = "ward"\n[data.categories]\nward = {1 = "medicine"}\nill = {0 = "no", 1 = "yes"}\n'),
    ),
}
"""Header, texts of ward and target, and what the site file adds. West has one ward only, and codes."""

EXPERIMENT = """name = "drill"
rounds = {rounds}
min_uploads = 1
method = "fedavg"
partition = {{name = "iid", clients = 3}}
model = {{name = "mlp", hidden = [4]}}
train = {{cohort = 3, epochs = 1, batch_size = 20, lr = 0.05}}
[data]
name = "table"
path = "{path}"
target = "ill"
[data.columns]
age = "years"
pulse = "1/min"
ward = ["surgery", "medicine"]
ill = ["no", "yes"]
"""


class Service:
    """A site's unit: starts `fedblend site start` again ten seconds after it ended, unless its file is at fault."""

    pause = 2.0

    def __init__(self, drill: Drill, name: str) -> None:
        self.drill, self.name, self.wanted = drill, name, True
        self.codes: list[int] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.thread = threading.Thread(target=self._keep, daemon=True)
        self.thread.start()

    def _keep(self) -> None:
        trial = self.drill.trial
        while self.wanted:
            file = self.drill.site_file(self.name)
            self.process = trial._start(self.name, ["fedblend", "site", "start", str(file), "--port", str(free_port())])
            self.codes.append(self.process.wait())
            if self.codes[-1] == 2:
                return
            time.sleep(self.pause)

    def end(self) -> None:
        """Stop the unit."""
        self.wanted = False
        if self.process is not None:
            self.process.terminate()
        self.thread.join(BOUND_S)

    def kill(self) -> None:
        """Kill the site's processes, as a power cut does."""
        for pid in marked_processes(self.drill.trial.mark):
            with contextlib.suppress(OSError):
                if str(self.drill.site_file(self.name)) in (PROC / str(pid) / "cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)


class Drill:
    """The federation, and the table of what happened to it."""

    def __init__(self, out: Path) -> None:
        self.out, self.rows = out, []
        self.folder = out / "federation"
        self.server = self.folder / "server"
        self.trial = LoopbackTrial(out / "trial", 0, self.server)
        self.services: dict[str, Service] = {}
        self.experiment = out / "experiment.toml"
        self.run = RunDirectory(out / "run-1")
        self.failed = 0

    def fedblend(self, *words: object, code: int = 0) -> str:
        """Return the output of a command of fedblend, which must end with this exit code."""
        done = subprocess.run(
            [tool("fedblend"), *map(str, words)],
            env=self.trial._environment() | {"COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
            timeout=BOUND_S,
        )
        if done.returncode != code:
            raise RuntimeError(f"fedblend {' '.join(map(str, words))}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def site_file(self, name: str) -> Path:
        """The file of a site."""
        return self.folder / "sites" / name / "site.toml"

    def edit(self, name: str, old: str, new: str) -> None:
        """Change a site's file."""
        text = self.site_file(name).read_text(encoding="utf-8")
        if old not in text:
            raise RuntimeError(f"{name}: its site file has no {old!r}")
        self.site_file(name).write_text(text.replace(old, new, 1), encoding="utf-8")

    def write_tables(self, rounds: int) -> None:
        """Write the tables, the experiment, and the coordinator's file."""
        self.out.mkdir(parents=True)
        for name, (header, wards, ill, _) in TABLES.items():
            rows = [f"{20 + i % 60},{60 + i * 7 % 50},{wards[i % 2]},{ill[i * 7 % 60 > 25]}" for i in range(120)]
            (self.out / f"{name}.csv").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
        self.experiment.write_text(EXPERIMENT.format(rounds=rounds, path=self.out / "server.csv"), encoding="utf-8")
        sites = "\n".join(f'{number} = "{name}"' for number, name in enumerate(SITES))
        (self.out / "sites.toml").write_text(
            f'server = "127.0.0.1:{self.trial.port}"\nexperiment = "{self.experiment}"\n[sites]\n{sites}\n'
        )

    def provision(self, *options: str) -> str:
        """Run the coordinator's command."""
        return self.fedblend("federation", "provision", self.out / "sites.toml", "--out", self.folder, *options)

    def enroll(self, name: str, *options: str) -> None:
        """Let a site make its key, and bring the public one to the coordinator."""
        self.fedblend("site", "enroll", self.site_file(name), *options)
        public = self.out / "state" / name / f"{name}{'.new' if options else ''}.pub"
        shutil.copy(public, self.folder / "keys" / f"{name}.pub")

    def begin(self, min_sites: int = 2, deadline: int = 150) -> None:
        """Submit the app, or submit it again."""
        if "run" in self.trial.processes:
            self.trial.stop_one("run", kill=True)
            # A ServerApp ends some seconds after its SuperLink.
            self.wait("the run is free", lambda: not self.run.is_locked())
        app = self.out / "app"
        limits = ("--min-sites", min_sites, "--deadline", deadline, "--credentials", self.server)
        self.fedblend("federation", "app", self.experiment, "--out", app, "--folder", self.run.path, *limits)
        self.trial.submit(app)

    def rounds(self) -> int:
        """Records of the run so far."""
        return len(self.run.metrics())

    def wait(self, what: str, happened: Callable[[], bool], running: bool = False) -> None:
        """Wait for an event. Raises :class:`RuntimeError` after :data:`BOUND_S` seconds, or if a run has ended."""
        end = time.monotonic() + BOUND_S
        while not happened():
            if time.monotonic() > end:
                raise RuntimeError(f"not within {BOUND_S:g} seconds: {what}")
            if running and self.trial.processes["run"].poll() is not None:
                raise RuntimeError(f"the run ended before {what}; see {self.trial.logs / 'run.log'}")
            time.sleep(0.5)

    def wait_for_full_round(self) -> None:
        """Wait for a round with an upload of each site."""
        begun = self.rounds()
        self.wait("a round of all sites", lambda: any(r.uploads == 3 for r in self.run.records()[begun:]), True)

    def said(self, log: str, pattern: str, since: int = 0) -> str:
        """Return a line of a process's log after its first ``since`` characters; empty if there is none."""
        text = re.sub(r"\x1b\[\d+m", "", self.trial.log_of(log)[since:])
        found = re.search(f"fedblend: .*{pattern}.*|.*{pattern}.*", text)
        return found[0].strip() if found else ""

    @contextlib.contextmanager
    def fault(self, name: str, *logs: tuple[str, str]) -> Iterator[None]:
        """Time a fault and its recovery inside, and note the lines of these logs."""
        start, records = time.monotonic(), self.rounds()
        since = {log: len(self.trial.log_of(log)) for log, _ in logs}
        print(f"{time.strftime('%T')} {name}", flush=True)
        ended = ""
        try:
            yield
            self.wait("the words in all logs", lambda: all(self.said(*one, since[one[0]]) for one in logs))
        except RuntimeError as error:
            ended = f"FAILED: {error}"
        lines = [f"{log}: {self.said(log, pattern, since[log])}" for log, pattern in logs]
        lost = sum(3 - (record.uploads or 0) for record in self.run.records()[records:] if record.round)
        self.failed += bool(ended)
        self.rows.append((name, ended or "as expected", f"{time.monotonic() - start:.0f}", str(lost), lines))

    def restart_link(self, sites: bool = True) -> None:
        """Restart the SuperLink, as systemd does, and wait for the sites, unless its certificate is a wrong one."""
        self.trial.stop_one("superlink")
        self.trial.start_link()
        if sites:
            nodes = ("supernode", "list", LINK, "--format", "json")
            self.wait("all sites are connected", lambda: self.trial.flwr(*nodes).count('"online"') == len(SITES))

    def report(self) -> None:
        """Print the table."""
        for name, ended, seconds, lost, lines in self.rows:
            print(f"\n{name}: {ended}; {seconds} s; uploads lost: {lost}")
            for line in lines:
                print(f"    {line[:240]}")


def main() -> int:
    """Run the drill; return 1 if a fault did not end as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for all files (default: runs/federation-drill)")
    parser.add_argument("--short", action="store_true", help="from nothing to the first round, and one certificate")
    given = parser.parse_args()
    out, start = (given.out or api.free_folder(api.RUNS / "federation-drill")).absolute(), time.monotonic()
    if out.exists():
        parser.error(f"--out {out}: exists; name another folder")
    drill = Drill(out)
    with proxy() as requests, drill.trial:
        try:
            begin(drill, requests[0])
            certificates(drill)
            if not given.short:
                during(drill)
        finally:
            for service in drill.services.values():
                service.end()
            drill.report()
    inside = [line for line in requests[1:] if "CONNECT" not in line]
    print(f"\nrequests of a SuperNode's own processes that reached the proxy: {len(inside)}")
    print(f"{time.monotonic() - start:.0f} seconds, {drill.failed} of {len(drill.rows)} faults not as expected")
    return min(1, drill.failed + len(inside))


def begin(drill: Drill, proxy: str) -> None:
    """From nothing to the first round, with a wrong number, a missing file, and a site that comes too late."""
    drill.write_tables(rounds=40)
    with drill.fault("provision, enrol, check, register"):
        drill.provision()
        for name in SITES:
            data = f'path = "{out_table(drill, name)}"'
            drill.edit(name, 'path = "/srv/data/table.csv"', data)
            drill.edit(name, "/var/lib/fedblend/audit", f"{drill.out}/state/{name}/audit")
            drill.edit(name, "/var/lib/fedblend", f"{drill.out}/state/{name}")
            drill.edit(name, "[data.rename]\n", "")
            drill.edit(name, "[data.categories]\n", TABLES[name][3])
            (drill.out / "state" / name).mkdir(parents=True)
            drill.enroll(name)
        drill.provision()
        drill.trial.begin()
        for name in SITES:
            drill.fedblend("site", "check", drill.site_file(name), "--experiment", drill.experiment)
            drill.trial.register(drill.folder / "keys" / f"{name}.pub")
    with drill.fault("a site file that does not exist"):
        drill.fedblend("site", "start", drill.out / "no.toml", code=2)
    drill.edit("west", "client = 2", "client = 1")
    os.environ |= {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy}
    for name in SITES:
        drill.services[name] = Service(drill, name)
    with drill.fault(
        "a site with another's number", ("run", r"takes no part: its key is not that of client 1 \(south\)")
    ):
        drill.begin(deadline=90)
        drill.wait("round 1 of two sites", lambda: drill.rounds() > 1, True)
    late = "the run began without this site"
    with drill.fault("a site that comes too late", ("run", late), ("west", late)):
        drill.services["west"].end()
        drill.edit("west", "client = 1", "client = 2")
        drill.services["west"] = Service(drill, "west")
        drill.wait("west is told", lambda: bool(drill.said("west", late)))
    with drill.fault("flwr stop"):
        ids = re.search(r'"run-id": "?(\d+)', drill.trial.flwr("list", LINK, "--format", "json"))
        drill.trial.flwr("stop", ids[1] if ids else "", LINK)
        drill.wait("the run is stopped", lambda: drill.run.status()["state"] == "stopped")
    drill.run = RunDirectory(drill.out / "run-2")
    with drill.fault("a new run, with all sites", ("run", r"client 2 \(west\): node")):
        drill.begin()
        drill.wait_for_full_round()


def out_table(drill: Drill, name: str) -> Path:
    """The table of a site."""
    return drill.out / f"{name}.csv"


def certificates(drill: Drill) -> None:
    """A certificate that does not verify, and one that is renewed in time."""
    gave_up = "the SuperNode has given up its connection"
    with drill.fault("the server's certificate is of another authority", *((name, gave_up) for name in SITES)):
        kept = {name: (drill.server / name).read_bytes() for name in ("server.crt", "server.key", "ca.crt")}
        make_credentials(drill.out / "other", 0)
        for name in kept:
            shutil.copy(drill.out / "other" / name, drill.server / name)
        drill.restart_link(sites=False)
        drill.wait("all sites give up", lambda: all(drill.said(name, gave_up) for name in SITES))
        for name, content in kept.items():
            (drill.server / name).write_bytes(content)
        drill.restart_link()
        drill.begin()
        drill.wait_for_full_round()
    with drill.fault("the server's certificate is renewed"):
        drill.provision("--renew")
        drill.restart_link()
        drill.begin()
        drill.wait_for_full_round()


def during(drill: Drill) -> None:
    """Faults of sites while the run goes on."""
    with drill.fault("a site is killed", ("run", r"client 1 \(south\) refused")):
        drill.services["south"].kill()
        drill.wait("a round without it", lambda: drill.run.records()[-1].uploads == 2, True)
        drill.wait_for_full_round()
    with drill.fault("a site's key is rotated"):
        drill.enroll("north", "--rotate")
        drill.provision()
        drill.trial.register(drill.folder / "keys" / "north.pub")
        drill.services["north"].end()
        state = drill.out / "state" / "north"
        for ending in ("key", "pub"):
            (state / f"north.new.{ending}").replace(state / f"north.{ending}")
        drill.services["north"] = Service(drill, "north")
        drill.wait_for_full_round()
    with drill.fault(
        "an older copy of the audit log", ("run", "audit log is not as the site wrote it"), ("south", "was")
    ):
        log = drill.out / "state" / "south" / "audit.jsonl"
        drill.services["south"].end()
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
        log.write_text("".join(lines[:-2]), encoding="utf-8")
        drill.services["south"] = Service(drill, "south")
        drill.wait("the server is told", lambda: bool(drill.said("run", "audit log is not as the site wrote it")))
        drill.fedblend("site", "audit", drill.site_file("south"), "--accept")
        drill.services["south"].end()
        drill.services["south"] = Service(drill, "south")
        drill.wait_for_full_round()
    with drill.fault("a site's limit is used up", ("run", r"client 2 \(west\) refused: this site has trained in")):
        drill.edit("west", "rounds = 1000", "rounds = 1")
        drill.wait("a round without it", lambda: drill.run.records()[-1].uploads == 2, True)
        if "client 2 (west) in" not in (told := read(drill.run).missing_uploads):
            raise RuntimeError(f"missing uploads: {told}")


@contextlib.contextmanager
def proxy() -> Iterator[list[str]]:
    """A proxy that forwards nothing; a list of its address, and then of each request's first line."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        found = [f"http://127.0.0.1:{listener.getsockname()[1]}"]

        def listen() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.settimeout(2)
                        found.append(connection.recv(200).split(b"\r\n")[0].decode(errors="replace"))

        threading.Thread(target=listen, daemon=True).start()
        yield found


if __name__ == "__main__":
    sys.exit(main())
