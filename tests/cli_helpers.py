"""The command line as a user meets it: in this process where that is enough, in real ones where it is not."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import tomli_w
import typer.main

from fedblend.cli import main
from fedblend.experiment.config import resolve
from fedblend.runs import api
from fedblend.runs.directory import RunDirectory

PATIENCE_S = 900
"""How long a test waits for a process before it gives up; far more than a loaded machine needs."""

CHECKPOINT = "checkpoint.safetensors"
PNG = b"\x89PNG\r\n\x1a\n"

TINY: dict[str, Any] = {
    "name": "tiny",
    "rounds": 2,
    "data": "digits",
    "partition": {"name": "iid", "clients": 4},
    "model": {"name": "mlp", "hidden": [8]},
    "train": {"cohort": 2, "epochs": 1, "batch_size": 40, "lr": 0.05},
    "engine": "loop",
}
"""An experiment of a fraction of a second; with many rounds it would otherwise try engines first."""


class Outcome(NamedTuple):
    """What a command leaves: its exit code and what it wrote."""

    code: int
    out: str
    err: str


def words_of(text: str) -> str:
    """A table's text on one line, as it would stand in a terminal without end."""
    return " ".join(text.split())


# Files -----------------------------------------------------------------------------------------------------


def changed(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a table with some fields replaced; a table without a name only adds to the one there."""
    made = copy.deepcopy(dict(table))
    for key, value in changes.items():
        if isinstance(value, Mapping) and "name" not in value and isinstance(made.get(key), Mapping):
            made[key] = {**made[key], **value}
        else:
            made[key] = value
    return made


def write(path: Path, changes: Mapping[str, Any] | None = None, base: Mapping[str, Any] = TINY) -> Path:
    """An experiment file: ``base`` with changes."""
    path.write_text(tomli_w.dumps(changed(base, changes or {})), encoding="utf-8")
    return path


def tiny_run(path: Path, **changes: Any) -> RunDirectory:
    """Make the run of :data:`TINY` with changes."""
    api.run(resolve(changed(TINY, changes)), path)
    return RunDirectory(path)


def records(run: Path) -> list[str]:
    """A run's metrics, line by line, without the fields that differ between machines."""
    lines = []
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        del record["machine"]
        lines.append(json.dumps(record))
    return lines


def sites_with_own_data(run: Path, *samples: int) -> Path:
    """Make a run that of a federation whose sites have ``samples`` training samples of their own; return its folder."""
    facts = json.loads((run / "facts.json").read_text(encoding="utf-8"))
    facts["partition"] = {"rule": "each site's own data", "samples": list(samples)}
    facts["engine"]["engine"] = "flower"
    facts["clients"] |= {"smallest": min(samples), "largest": max(samples), "samples": sum(samples)}
    (run / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    return run


def status(run: Path) -> dict[str, Any]:
    """What a run's folder says of how it stands."""
    return json.loads((run / "status.json").read_text(encoding="utf-8"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, but for locks."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# Commands --------------------------------------------------------------------------------------------------


_get_command = functools.cache(typer.main.get_command)
"""What builds all commands from their functions, which a process otherwise does once."""


def here(*words: object) -> Outcome:
    """Run a command in this process: quicker than a new one, which waits for PyTorch."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    arguments = ["fedblend", *map(str, words)]
    with (
        mock.patch.object(typer.main, "get_command", _get_command),
        mock.patch.object(sys, "argv", arguments),
        mock.patch.object(sys, "path", list(sys.path)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
        except Exception:
            # What the interpreter would do: the tests then see it as a user would.
            code = 1
            traceback.print_exc()
    return Outcome(code or 0, out.getvalue(), err.getvalue())


def command(*words: object) -> list[str]:
    """The command as the shell would start it."""
    script = Path(sys.executable).with_name("fedblend")
    start = [sys.executable, str(script)] if script.is_file() else [sys.executable, "-m", "fedblend"]
    return [*start, *map(str, words)]


def start(*words: object, **options: Any) -> subprocess.Popen[str]:
    """Start a command as :func:`start_process` does."""
    return start_process(command(*words), **options)


def start_process(
    command: Sequence[str],
    cwd: Path | None = None,
    before: Callable[[], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start a program as a process (and a process group) of its own; it ends with its test."""

    def prepare() -> None:
        # A shell's background jobs, and so the tests in one, ignore Ctrl-C; a command in a terminal does not.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if before:
            before()

    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
        preexec_fn=prepare,
        env={**os.environ, **(environment or {})},
    )
    _started.append(process)
    return process


_started: list[subprocess.Popen[str]] = []


def stop_all() -> None:
    """Kill what is left of all commands that were started."""
    while _started:
        stop(_started.pop())


def finish(process: subprocess.Popen[str]) -> Outcome:
    """Wait for a command to end."""
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        stop(process)
    return Outcome(process.returncode, out, err)


def stop(process: subprocess.Popen[str]) -> None:
    """Kill a command and all it started, if any of it is left."""
    if alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kill_alone(process: subprocess.Popen[str]) -> list[int]:
    """Kill a command but nothing that it started; returns which of these go on without it."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    end = time.monotonic() + PATIENCE_S
    while (left := alive(process)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def alive(process: subprocess.Popen[str]) -> list[int]:
    """The processes of a command's group that still run, the command's own among them; this one alone without /proc."""
    if not Path("/proc").exists():
        return [process.pid] if process.poll() is None else []
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(group) == process.pid and state not in "ZX":
                    found.append(int(entry.name))
    return found


def call(*words: object, **options: Any) -> Outcome:
    """Run a command in a process of its own."""
    return finish(start(*words, **options))


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str], pause: float = 0.001) -> None:
    """Wait for something to come true while a process runs; fails if the process ends first."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        if process.poll() is not None:
            out, err = process.communicate()
            raise AssertionError(f"the command ended too early ({process.returncode}): {out[-400:]} {err[-2000:]}")
        if time.monotonic() > end:
            stop(process)
            raise AssertionError("waited in vain")
        time.sleep(pause)


def lines_of(run: Path) -> int:
    """Whole lines in a run's metrics; 0 before there are any."""
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def same_end(run: Path, undisturbed: Path) -> None:
    """Assert that two runs ended alike: the same metrics, and the same weights to the last bit."""
    assert records(run) == records(undisturbed)
    assert (run / CHECKPOINT).read_bytes() == (undisturbed / CHECKPOINT).read_bytes()
    assert status(run) == status(undisturbed)
    assert status(run)["state"] == "done"


# What is asked of the outcome ------------------------------------------------------------------------------


def succeeded(outcome: Outcome) -> Outcome:
    """Assert that a command did what it was told."""
    assert outcome.code == 0, outcome.err[-3000:]
    assert "Traceback" not in outcome.err
    return outcome


def refused(outcome: Outcome, *words: str) -> Outcome:
    """Assert that a command ended in one clear message that has all ``words``, and exit code 2."""
    told = [line for line in outcome.err.splitlines() if line.startswith("fedblend: error: ")]
    assert "Traceback" not in outcome.err
    assert (outcome.code, len(told)) == (2, 1), outcome
    assert outcome.err.rstrip().endswith(told[0]), outcome.err
    for word in words:
        assert word in told[0], f"{word!r} is not in: {told[0]}"
    return outcome
