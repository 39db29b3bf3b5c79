"""Copies of a process, which compute as ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cli_helpers import PATIENCE_S

from fedblend.engines.distributed import forks
from fedblend.engines.distributed.pipes import THREAD

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has safe copies")


def outcome(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.slow
def test_no_copy_is_made_beside_a_thread_of_someone_else_or_outside_the_main_thread() -> None:
    script = """
import sys, threading
from fedblend.engines.distributed.forks import can_fork
print(can_fork())
for name in (sys.argv[1], "other"):
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name=name)
    thread.start()
    print(can_fork())
    end.set()
    thread.join()
found = []
thread = threading.Thread(target=lambda: found.append(can_fork()), name=sys.argv[1])
thread.start()
thread.join()
print(*found)
"""
    assert outcome(script, THREAD).stdout.split() == ["True", "True", "False", "False"]


@pytest.mark.slow
def test_copies_end_when_their_process_is_killed() -> None:
    script = """
import os, signal, sys, time
from fedblend.engines.distributed.forks import ForkedProcess

def work(parent):
    parent.listen(lambda message: None)
    time.sleep(1000)

copies = []
for _ in range(3):
    copies.append(ForkedProcess(work, copies))
print(*(copy.pid for copy in copies), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    # Returns only when all copies have closed the standard error that they share.
    done = outcome(script)

    assert done.returncode == -signal.SIGKILL
    assert len(done.stdout.split()) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"), [("pass", 0), ("sys.exit(3)", 3), ("1 / 0", 1), ("os.kill(os.getpid(), 9)", -9)]
)
def test_a_copy_ends_with_its_own_code_and_prints_nothing_twice(end: str, code: int) -> None:
    script = f"""
import atexit, os, sys
from fedblend.engines.distributed.forks import ForkedProcess

def work(parent):
    print("the copy's")
    {end}

atexit.register(lambda: print("the end"))
sys.stdout.write("not printed yet\\n")
copy = ForkedProcess(work)
code = copy.wait(60)
copy.kill()
print(code)
"""
    done = outcome(script)

    assert done.stdout.splitlines() == ["not printed yet", str(code), "the end"]
    assert done.stderr.startswith("the copy's\n")
    assert ("ZeroDivisionError" in done.stderr) == ("1 / 0" in end)


@pytest.mark.slow
def test_a_copy_keeps_no_lock_of_its_process(tmp_path: Path) -> None:
    script = """
import sys
from fedblend.engines.distributed.forks import ForkedProcess
from fedblend.core.files import lock

file = open(sys.argv[1], "w")
lock(file)

def work(parent):
    parent.send({"ready": True})
    for message in parent.messages:
        return

copy = ForkedProcess(work)
assert b"ready" in copy.stdout.readline()
try:
    lock(open(sys.argv[1], "w"))
except BlockingIOError:
    print("locked")
file.close()
lock(open(sys.argv[1], "w"))
print("free while the copy runs:", copy.poll() is None)
"""
    assert outcome(script, tmp_path / "file").stdout.splitlines() == ["locked", "free while the copy runs: True"]


def test_no_copy_is_made_once_a_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
    assert forks.can_fork() == (threading.current_thread() is threading.main_thread())
    monkeypatch.setattr(forks.torch.cuda, "is_initialized", lambda: True)
    assert not forks.can_fork()
