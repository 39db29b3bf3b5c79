"""What works where Python has no ``fcntl`` and ``resource``, and the system no ``/proc``: Windows, and partly macOS.

Linux imitates them: these modules, functions and paths are hidden in a process of their own.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from cli_helpers import PATIENCE_S, write

from fedblend.core import files
from fedblend.core.errors import FedblendError
from fedblend.runs.directory import RunDirectory

HIDE = """
import builtins, ctypes, io, os, signal, sys, warnings

warnings.filterwarnings("error", category=EncodingWarning, module=r"fedblend\\.")  # Windows has another default
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # importing it raises ImportError
for name in ("sched_getaffinity", "getuid", "geteuid", "fork", "killpg", "setsid", "getpgid", "O_DIRECTORY"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGALRM"):
    delattr(signal, name)

open_file, open_number, open_library = io.open, os.open, ctypes.CDLL.__init__

def open_outside_proc(path, *rest, **options):
    if not isinstance(path, int) and os.fspath(path).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", path)
    return open_file(path, *rest, **options)

def open_no_library_of_the_program(self, name, *rest, **options):
    if name is None:
        raise TypeError("bad argument type for built-in operation")
    if name == "libc.so.6":
        raise OSError("no such library")
    open_library(self, name, *rest, **options)

builtins.open = io.open = open_outside_proc
ctypes.CDLL.__init__ = open_no_library_of_the_program
"""

MAIN = """
from fedblend.cli import main
try:
    main()
except SystemExit as end:
    raise SystemExit(end.code)
"""

SEVERAL = """
from fedblend.cli import main
for words in ("--help", "compare out", "inspect out", "report out", "list fedmix"):
    sys.argv[1:] = words.split()
    try:
        main()
    except SystemExit as end:
        assert end.code in (0, None), words
"""


def without_unix(folder, code, *words):
    """Run Python code in a process without Unix's modules; opening a text without naming its encoding is an error."""
    command = [sys.executable, "-X", "warn_default_encoding", "-c", HIDE + code, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.slow
def test_a_simulation_its_table_and_its_report_need_nothing_of_unix(tmp_path):
    file = write(tmp_path / "file.toml", {"engine": "auto", "rounds": 2})

    done = without_unix(tmp_path, MAIN, "run", str(file), "--out", "out")

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("cannot be locked (this system has no file locks)") == 2, "of the study, and of the run"
    assert "fedavg" in done.stdout
    run = tmp_path / "out" / "fedavg-seed0"
    assert json.loads((run / "status.json").read_text(encoding="utf-8")) == {"state": "done", "round": 2}
    assert (tmp_path / "out" / "report.html").is_file()
    shown = without_unix(tmp_path, SEVERAL)
    assert (shown.returncode, "Traceback" in shown.stderr) == (0, False), shown.stderr


@pytest.mark.slow
def test_a_stacked_run_needs_nothing_of_unix_either(tmp_path):
    code = """
import fedblend
table = {"data": "digits", "partition": {"name": "iid", "clients": 4}, "model": {"name": "mlp", "hidden": [8]}}
table |= {"rounds": 1, "train": {"cohort": 2, "epochs": 1, "batch_size": 40}, "engine": "stacked"}
print(len(fedblend.run(fedblend.Experiment(**table), out="stacked").metrics))
"""
    done = without_unix(tmp_path, code)

    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    facts = json.loads((tmp_path / "stacked" / "facts.json").read_text(encoding="utf-8"))
    reasons = ("cpuinfo, which identifies the processor, cannot be read", "no C++ compiler was found")
    assert any(reason in facts["kernels"] for reason in reasons)


def windows_locks():
    """Python's module ``msvcrt`` as its documentation describes it: a lock excludes every other, also shared ones."""
    held = []

    def locking(number, mode, length):
        import os

        place = (os.fstat(number).st_ino, os.lseek(number, 0, os.SEEK_CUR))
        assert (mode, length) == (2, 1)
        if place in held:
            raise PermissionError(13, "Permission denied")
        held.append(place)

    return SimpleNamespace(locking=locking, LK_NBLCK=2)


def test_windows_locks_exclude_a_second_process(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FCNTL", None)
    monkeypatch.setattr(files, "MSVCRT", windows_locks())
    run = RunDirectory(tmp_path / "run")
    assert not run.is_locked()
    with run.locked():
        assert run.is_locked()
        with pytest.raises(FedblendError, match="this run directory is in use by another process"), run.locked():
            pass


def test_without_locks_a_warning_says_what_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FCNTL", None)
    monkeypatch.setattr(files, "MSVCRT", None)
    run = RunDirectory(tmp_path / "run")
    with pytest.warns(UserWarning, match="do not start this run directory a second time"), run.locked():
        assert run.status()["state"] == "running"
