"""A trial federation on one machine: who reaches it, and what its site files trust."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import TINY, here, refused, write

from fedblend.cli import federation
from fedblend.cli.federation import for_sites
from fedblend.core.errors import FedblendError
from fedblend.core.files import locked_folder
from fedblend.experiment.config import resolve
from fedblend.experiment.make_setup import make_setup
from fedblend.flower import process_guard, trial
from fedblend.flower.site import read_site
from fedblend.flower.trial import LoopbackTrial

NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
"""


def test_all_processes_of_a_trial_listen_on_loopback_and_sites_have_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(LoopbackTrial, "_start", lambda self, name, command: started.append(command))
    monkeypatch.setattr(LoopbackTrial, "_wait_for", lambda self, name, port: None)
    monkeypatch.setattr(LoopbackTrial, "flwr", lambda self, *words: "")
    with LoopbackTrial(tmp_path, 2) as made:
        made.begin()
        made.start_node(0, {})
    assert [command[0] for command in started] == ["flower-superlink", "flower-supernode"]
    for command in started:
        assert command[command.index("--host") + 1] == "127.0.0.1"
        assert "--insecure" not in command
    assert "--enable-supernode-auth" in started[0]
    assert "--auth-supernode-private-key" in started[1]


def test_processes_of_a_trial_import_from_where_this_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "beside the file"))
    folders = LoopbackTrial(tmp_path, 1)._environment()["PYTHONPATH"].split(os.pathsep)
    assert folders == [folder for folder in sys.path if folder]


def test_why_an_app_failed_is_quoted_from_its_log(tmp_path: Path) -> None:
    log = "Traceback:\nfedblend.core.errors.FedblendError: method.objective: cannot import 'a:B'\n"
    with pytest.raises(
        FedblendError, match=r"is not begun: method\.objective: cannot import 'a:B' \(logs in .*site-K\.log\)"
    ):
        federation._require_done(tmp_path / "run", log)


@pytest.mark.usefixtures("elsewhere")
def test_a_trial_warns_who_can_run_code_and_its_sites_trust_what_the_experiment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("trial_net.py").write_text(NET)
    begun: list[Any] = []

    def start_node(self: LoopbackTrial, site: int, config: dict[str, Any]) -> None:
        begun.append(read_site(config["site"]))
        raise FedblendError("enough")

    monkeypatch.setattr(trial.LoopbackTrial, "begin", lambda self: None)
    monkeypatch.setattr(trial.LoopbackTrial, "start_node", start_node)
    file = write(Path("own.toml"), {"model": {"name": "module", "path": "trial_net:Net"}}, TINY)
    outcome = here("federation", "up", file, "--sites", 3, "--out", "out")
    refused(outcome, "enough")
    (warning,) = [line for line in outcome.err.splitlines() if "warning" in line]
    assert re.fullmatch(
        r"warning: until the trial ends, every user of this machine can run code as you, through port \d+ of "
        r"127\.0\.0\.1; on a shared machine see docs/deployment\.md \(A trial on a shared machine\)",
        warning,
    )
    assert [site.trusted for site in begun] == [("trial_net:Net",)]
    # Enough for the run, and for rounds of a trial that is begun again.
    assert [site.rounds for site in begun] == [TINY["rounds"] + 1000]
    guide = Path(__file__).parents[2] / "docs" / "deployment.md"
    assert "A trial on a shared machine" in guide.read_text(encoding="utf-8")


SUBMITTED = """
import sys, time
def write(*lines):
    with open(sys.argv[1], "a") as log:
        log.writelines(lines)
write("\\x1b[92mINFO \\x1b[0m:      fedblend: 2 of 3 sites are connected; missing: 1\\n")
write("WARNING :   fedblend: node 7 (cli")
time.sleep(1.5)
write("ent 1) takes no part: data\\n", "INFO: fedblend: round 0, loss 1\\n")
write("ERROR :     fedblend: error: min_sites: 3\\n")
"""


@pytest.fixture
def submits(monkeypatch: pytest.MonkeyPatch, elsewhere: None) -> Callable[[str], None]:
    """Give trials a script in place of Flower's processes, with the path of the run's log."""

    def begin(self: LoopbackTrial) -> None:
        self.logs.mkdir(parents=True)
        (self.logs / "run.log").write_text("INFO: fedblend: 1 of 3 sites are connected\n")

    def set_script(script: str) -> None:
        def submit(self: LoopbackTrial, app: Path) -> subprocess.Popen[bytes]:
            return subprocess.Popen([sys.executable, "-c", script, str(self.logs / "run.log")])

        monkeypatch.setattr(trial.LoopbackTrial, "submit", submit)

    monkeypatch.setattr(trial.LoopbackTrial, "begin", begin)
    monkeypatch.setattr(trial.LoopbackTrial, "start_node", lambda self, site, config: None)
    return set_script


@pytest.mark.slow
def test_a_trial_shows_which_sites_are_connected_while_it_waits(submits: Callable[[str], None]) -> None:
    submits(SUBMITTED)
    outcome = here("federation", "up", write(Path("tiny.toml")), "--sites", 3, "--out", "out")
    refused(outcome, "the federation's run is not begun: min_sites: 3 (logs in")
    shown = outcome.out.splitlines()
    assert shown[1:] == ["2 of 3 sites are connected; missing: 1", "node 7 (client 1) takes no part: data"]


RECORDED = """
import pathlib, sys
log = pathlib.Path(sys.argv[1])
run = log.parents[1] / "run"
run.mkdir()
(run / "metrics.jsonl").write_text("".join(f'{{"round": {n}, "loss": {n + 1}.5}}\\n' for n in range(3)))
with log.open("a") as lines:
    lines.write("fedblend: 3 of 3 sites are connected; the run begins\\n")
    lines.write("fedblend: round 0, loss 1.5000\\nfedblend: round 1: client 0 shares nothing: no raw\\n")
    lines.write("fedblend: round 1\\nfedblend: client 2 is now node 8\\n")
"""


def test_a_trial_shows_rounds_and_sites_in_the_order_of_the_servers_log(submits: Callable[[str], None]) -> None:
    """The record of a round is on the disk before the log has arrived. Round 2 is not in the log."""
    submits(RECORDED)
    outcome = here("federation", "up", write(Path("tiny.toml")), "--sites", 3, "--out", "out")
    assert outcome.out.splitlines()[1:] == [
        "3 of 3 sites are connected; the run begins",
        "round 0  loss 1.5000",
        "round 1: client 0 shares nothing: no raw",
        "round 1  loss 2.5000",
        "client 2 is now node 8",
        "round 2  loss 3.5000",
    ]


SERVER_APP = """
import pathlib, sys, time
from fedblend.runs.directory import RunDirectory
run = RunDirectory(pathlib.Path(sys.argv[1]))
with run.locked():
    run.set_status("running", 1)
    (run.path / "metrics.jsonl").touch()
    (run.path / "config.toml").touch()
    time.sleep(3600)
"""

FOLLOWED = """
import pathlib, sys, time
config = pathlib.Path(sys.argv[1]).parents[1] / "run" / "config.toml"
while not config.exists():
    time.sleep(0.05)
"""


def test_a_trial_whose_superlink_was_killed_says_so_and_what_continues_it(
    submits: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of the run ends with the SuperLink, and the ServerApp holds the run for some seconds more."""

    def start_node(self: LoopbackTrial, site: int, config: Any) -> None:
        command = [sys.executable, "-c", SERVER_APP, str(self.folder / "run")]
        self.processes["server-app"] = subprocess.Popen(command, start_new_session=True)
        self.processes["superlink"] = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
        self.processes["superlink"].wait()

    submits(FOLLOWED)
    monkeypatch.setattr(trial.LoopbackTrial, "start_node", start_node)
    outcome = here("federation", "up", write(Path("tiny.toml")), "--sites", 1, "--out", "out")
    told = (
        "the federation's run is killed: superlink ended early (logs in out/logs; the log of client K is site-K.log); "
        "to resume, give the same command with --out out"
    )
    refused(outcome, told)


@pytest.mark.usefixtures("elsewhere")
def test_a_second_trial_in_a_folder_does_not_replace_the_keys_of_the_first(tmp_path: Path) -> None:
    file = write(Path("tiny.toml"))
    with locked_folder(tmp_path / "out", "trial.lock", "the trial"):
        outcome = here("federation", "up", file, "--sites", 3, "--out", tmp_path / "out")
    told = "the trial is in use by another process; wait for it, stop it, or give another folder"
    refused(outcome, f"{tmp_path / 'out'}: {told}")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["trial.lock"]


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("command", ["up", "app"])
def test_limits_with_which_no_round_begins_are_refused_before_anything_is_started_or_written(command: str) -> None:
    own = write(Path("own.toml"), {"method": "xormixfl"}, TINY)
    of_clients = TINY["partition"]["clients"]
    words = {"up": ("--sites", of_clients, "--out", "out"), "app": ("--out", "out", "--folder", "run")}[command]
    for file, sites, why in (
        (write(Path("tiny.toml")), of_clients, ""),
        # Client 0 is the server, which is no site.
        (own, of_clients - 1, f", because client 0 of {of_clients} is the server"),
    ):
        more = here("federation", command, file, *words, "--min-sites", sites + 1)
        refused(more, f"--min-sites {sites + 1}: the federation has {sites} sites{why}; valid: 1 to {sites}")
        for deadline in ("nan", "inf"):
            told = here("federation", command, file, *words, "--deadline", deadline)
            refused(told, f"--deadline {deadline}: is not valid; valid: a number of seconds from 1")
        assert here("federation", command, file, *words, "--deadline", 0).code == 2
    assert not Path("out").exists()


@pytest.mark.usefixtures("elsewhere")
def test_an_app_of_more_rounds_than_sites_train_by_default_says_so() -> None:
    for rounds, warns in ((1000, False), (1001, True)):
        file = write(Path("long.toml"), {"rounds": rounds}, TINY)
        made = here("federation", "app", file, "--out", "out", "--folder", "run", "--min-sites", 1)
        assert made.code == 0
        assert ("warning: this run has 1,001 rounds, and a site trains in 1,000" in made.err) == warns


@pytest.mark.usefixtures("elsewhere")
def test_a_trial_whose_sites_have_one_audit_log_is_refused_before_anything_is_started() -> None:
    file = write(Path("tiny.toml"))
    Path("site.toml").write_text("")
    files = [word for _ in range(3) for word in ("--site-file", "site.toml")]
    refused(here("federation", "up", file, "--sites", 3, *files, "--out", "out"), "two sites have the audit log", "own")
    assert not Path("out").exists()


APP = """
import os, sys, time
sys.argv[1:], sys.path[:0] = ["--parent-pid", str(os.getppid())], sys.argv[1:]
from process_guard import end_with_parent
end_with_parent()
print("started", flush=True)
try:
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="orphans have another parent on Linux and macOS only")
def test_an_app_ends_with_its_parent_even_where_nothing_collects_the_dead_parent() -> None:
    folder = str(Path(process_guard.__file__).parent)
    command = [sys.executable, "-c", PARENT, APP, folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        assert parent.stdout is not None
        try:
            assert parent.stdout.readline() == "started\n"
            parent.kill()
            # Not waited for: the parent is a zombie, and its number still that of a process, until the app has ended.
            # Nothing is printed where the machine is so busy that the app does not get to its interrupt for long.
            assert parent.stdout.read() in ("interrupted\n", "")
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_a_trial_says_which_classes_are_at_no_site(capsys: Any) -> None:
    partition = {"name": "classes", "clients": 20, "classes_per_client": 2}
    made = resolve({**TINY, "partition": partition})
    for_sites(made, 5)
    assert "no site has" not in capsys.readouterr().err
    adapted = for_sites(made, 3)
    setup = make_setup(adapted)
    held = {str(label) for label in setup.data.train.y[setup.population.order].tolist()}
    told = " ".join(capsys.readouterr().err.split())
    assert len(held) == 6
    assert all((f"'{label}'" in told or f" {label}" in told) for label in {str(i) for i in range(10)} - held)
    assert "; choose more sites, or another partition" in told
