"""Ctrl-C in real processes: `attack` keeps its best images, and `run` says at once what happens."""

import json
import os
import re
import select
import signal
import sys
import time
import warnings
from typing import Any

import pytest
from cli_helpers import (
    TINY,
    changed,
    finish,
    here,
    same_end,
    start,
    start_process,
    status,
    succeeded,
    wait_until,
    write,
)

from fedblend.analysis.attacks import outcome
from fedblend.experiment.config import resolve
from fedblend.runs import api, parallel
from fedblend.runs.directory import RunDirectory

COMMAND = "from fedblend.cli import main, progress; progress.LINE_EVERY = 0.0; main()"
"""The command with a progress line for every tenth iteration."""

ENDLESS = 10**7


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "plain"
    api.run(resolve(changed(TINY, {"rounds": 1})), path)
    return path


def started(run, out):
    """Start an attack that would take hours, as a process of its own."""
    words = ["attack", run, "--round", 0, "--client", 1, "--images", 1, "--steps", 1]
    words += ["--iterations", ENDLESS, "--out", out]
    return start_process([sys.executable, "-c", COMMAND, *map(str, words)])


def wait_for_iterations(process, iterations):
    """Wait for the progress line of at least so many iterations; their number, and the least cost until then."""
    assert process.stderr is not None
    for line in process.stderr:
        found = re.match(rf"invgrad: (\d+)/{ENDLESS}  cost \S+, least (\S+)(  \d+ s left)?\n$", line)
        assert found, line
        if int(found[1]) >= iterations:
            assert found[3], "no time left"
            return int(found[1]), float(found[2])
    raise AssertionError("the attack ended too early")


def interrupted(process, times):
    """Press Ctrl-C ``times`` times, and wait for the end of the process."""
    for _ in range(times):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.1)  # else several would count as one
    return finish(process)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 3])
def test_an_attack_that_is_interrupted_keeps_its_best_image(times, run, tmp_path):
    process = started(run, tmp_path / "kept")
    number, least = wait_for_iterations(process, 60)

    result = interrupted(process, times)

    assert (result.code, "Traceback" in result.err) == (130, False), result.err
    table = json.loads((tmp_path / "kept" / "attack.json").read_text())
    assert f"stopped after {table['iterations']} iterations; the best images so far are kept" in result.err
    assert table["stopped"]
    assert table["iterations"] >= number
    assert table["cost"] <= least * (1 + 1e-3)  # printed with four digits
    assert (tmp_path / "kept" / "images.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert not list((tmp_path / "kept").glob("*.tmp*"))


def test_before_the_attack_has_begun_nothing_is_written(run, tmp_path, monkeypatch):
    """The signal reaches this process while the attack is prepared."""
    pressed = []

    def stage(*given, **options):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            pressed.append(1)

    monkeypatch.setattr(outcome, "prepare", stage)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = here("attack", run, "--round", 0, "--client", 1, "--out", tmp_path / "none")
        after = signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)

    assert (result.code, "Traceback" in result.err) == (130, False)
    assert "stopped before the attack began; nothing was written" in result.err
    assert len(pressed) < 2
    assert after is signal.default_int_handler
    assert list((tmp_path / "none").iterdir()) == []


BUSY = """\
import ctypes, os, sys, threading
from fedblend import Callback, part

FIFO = {fifo!r}

@part("callback", "busy")
class Busy(Callback):
    "After round 2 this computes until somebody opens the FIFO, in C, so that Python handles no signal meanwhile."

    def on_round_end(self, state, record):
        if state.round != 2 or not os.path.exists(FIFO):
            return
        mutex, c, opened = ctypes.create_string_buffer(64), ctypes.CDLL(None), []
        c.pthread_mutex_lock(mutex)

        def release():
            open(FIFO).close()
            opened.append(True)
            c.pthread_mutex_unlock(mutex)

        threading.Thread(target=release, name="fedblend", daemon=True).start()
        try:
            os.write(2, b"busy\\n")  # at once, or lines of two processes mix
            c.pthread_mutex_lock(mutex)
        except KeyboardInterrupt:
            if not opened:  # the signal came between the two lines
                c.pthread_mutex_lock(mutex)
            raise
"""


def busy(folder, monkeypatch, **changes):
    """A file of two runs of three rounds, each of which is busy after its second."""
    (folder / "mine.py").write_text(BUSY.format(fifo=str(folder / "fifo")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return write(folder / "busy.toml", {"rounds": 3, "seeds": [0, 1], "callbacks": ["mine:Busy"]} | changes)


def pressed_while_busy(file, jobs, ranks=1, command="run"):
    """Run the file until it is busy, press Ctrl-C, and wait for the line that says what happens."""
    os.mkfifo(file.with_name("fifo"))
    more = [*(() if command == "tune" else ("--jobs", jobs)), "--set", f"ranks={ranks}"]
    process = start(command, file, "--out", file.with_name("out"), *more)
    for _ in range(jobs):
        assert "busy\n" in iter(process.stderr.readline, ""), "it ended before it was busy"
    os.kill(process.pid, signal.SIGINT)
    told = "fedblend: stopping after the step that is being computed; press Ctrl-C again to stop at once"
    assert next_line(process).startswith(told)
    return process


def next_line(process):
    wait_until(lambda: bool(select.select([process.stderr], [], [], 0)[0]), process)
    return process.stderr.readline()


def goes_on_to_the_same_bits(file):
    file.with_name("fifo").unlink()
    succeeded(here("resume", file.with_name("out"), "--jobs", 1))
    succeeded(here("run", file, "--out", file.with_name("whole"), "--jobs", 1))
    for slug in ("fedavg-seed0", "fedavg-seed1"):
        same_end(file.with_name("out") / slug, file.with_name("whole") / slug)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="locks a mutex of the C library")
@pytest.mark.parametrize("command", ["run", "tune", "advise"])
def test_ctrl_c_says_at_once_what_happens_while_a_step_is_computed(command, tmp_path, monkeypatch):
    search = {"validation": {"clients": 0.2}, "tune": {"fields": {"train.lr": [0.05, 0.1]}}}
    file = busy(tmp_path, monkeypatch, **({} if command == "run" else search))
    process = pressed_while_busy(file, jobs=1, command=command)
    (tmp_path / "fifo").open("w").close()

    result = finish(process)

    line = f"finished trials and checkpoints are kept. Go on with: fedblend {command} {file} --resume --out"
    if command == "run":
        line = "each run is kept up to its last checkpoint. Go on with: fedblend resume"
    assert result.code == 130
    assert result.err.splitlines()[-1] == f"fedblend: stopped; {line} {tmp_path / 'out'}"
    assert "press Ctrl-C" not in result.err
    if command == "run":
        assert status(tmp_path / "out" / "fedavg-seed0")["state"] == "stopped"
        goes_on_to_the_same_bits(file)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="locks a mutex of the C library")
@pytest.mark.parametrize(("jobs", "ranks"), [(1, 1), (1, 2), (2, 1)])
def test_a_second_ctrl_c_stops_at_once_what_resumes_to_the_same_bits(jobs, ranks, tmp_path, monkeypatch):
    file = busy(tmp_path, monkeypatch)
    process = pressed_while_busy(file, jobs, ranks)
    os.kill(process.pid, signal.SIGINT)

    result = finish(process)  # its output ends when the last of its processes has ended

    assert (result.code, result.err) == (130, "")
    assert RunDirectory(tmp_path / "out" / "fedavg-seed0").status()["state"] == "killed"
    goes_on_to_the_same_bits(file)


class OnceStopped:
    """The parent of a worker process that sends one run and stops it at once."""

    def __init__(self):
        self.sent: list[dict[str, Any]] = []

    def send(self, message):
        self.sent.append(message)

    def listen(self, handle):
        handle({"table": {}, "path": "nowhere", "resume": False, "processors": 1})
        handle(parallel.STOP)


def test_a_worker_that_is_stopped_before_its_run_begins_makes_none(monkeypatch):
    # The signal comes while the worker still ignores it.
    signals = []
    monkeypatch.setattr(signal, "raise_signal", signals.append)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    before, parent = signal.getsignal(signal.SIGINT), OnceStopped()
    try:
        parallel.serve_runs(parent)
    finally:
        signal.signal(signal.SIGINT, before)

    assert signals == [signal.SIGINT]
    assert parent.sent == [{"failure": "stopped"}]
