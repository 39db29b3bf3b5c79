"""The fuzzer's worker: it reads inputs one after another, each in a folder of its own and under a watchdog."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import json
import multiprocessing.process
import os
import pkgutil
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

HANG_S = 20
"""Seconds of the processor after which an input hangs. Elapsed seconds would count how busy the machine is."""

BLOCKED_S = 100
"""Elapsed seconds after which an input hangs that has used the processor for less than one: it waits for something."""

TRAINING_S = 2
"""Seconds of the processor after which a run that trains is stopped as by Ctrl-C: its length is what its file asks."""

MESSAGE_LENGTH = 1_000
"""Characters that a message may have."""

MEMORY = 6 * 10**9
"""Bytes of addresses that the worker may have beyond those after its imports."""

NOBODY = 65534
"""The user that reads the inputs where the fuzzer is started by root, to whom every file is readable."""

LIBRARIES = (
    "matplotlib.pyplot", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "jinja2",
    "sklearn.datasets", "sklearn.manifold", "skimage.metrics", "scipy.optimize", "pandas", "pyarrow.parquet",
    "datasets", "flwr_datasets", "mlxtend.data", "sympy", "sympy.printing", "torch._dynamo", "torch.distributed",
    "PIL.Image", "dp_accounting", "pooch",
)  # fmt: skip
"""Modules that inputs import when they need them."""

SHARES = {
    "experiment_tables": 23,
    "experiment_text": 6,
    "data_files": 20,
    "run_directories": 18,
    "site_files": 6,
    "key_files": 5,
    "paths": 6,
    "command_lines": 10,
    "site_messages": 4,
    "server_messages": 2,
}
"""What is fuzzed, each a function of :mod:`surfaces`, with its share of the inputs in per cent."""

KINDS = ("clean", "message", "traceback", "hang", "too long", "control")
"""The ends of an input; the last two are messages that are too long, or that hold control characters."""


class Hang(BaseException):
    """An input took too long."""


class Blocked(OSError):
    """An input would have started a process or opened a connection."""


def surface_of(number: int) -> str:
    """The surface of the input of this number."""
    return Random(f"surface {number}").choices(list(SHARES), list(SHARES.values()))[0]


def work(folder: Path, numbers: list[int]) -> None:
    """Read the inputs of these numbers; one line of results for each goes to ``folder/results.jsonl``."""
    prepare_worker(folder)
    with open(folder / "results.jsonl", "a", encoding="utf-8") as results:
        for number in numbers:
            results.write(json.dumps(one(number, folder)) + "\n")
            results.flush()


def prepare_worker(folder: Path) -> None:
    """Import what inputs use, then give up rights, processes, connections and memory."""
    import surfaces

    import fedblend
    import fedblend.cli.app

    # An import that the watchdog breaks off leaves a module half made for all later inputs.
    names = [found.name for found in pkgutil.walk_packages(fedblend.__path__, "fedblend.")]
    for name in (*names, *LIBRARIES):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    real, home = folder / "real", str(folder / "home")
    os.makedirs(home, exist_ok=True)
    os.environ |= dict.fromkeys(("HOME", "MPLCONFIGDIR", "TMPDIR", "HF_HOME"), home)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "COLUMNS": "200"}
    os.environ.pop("FEDBLEND_DATA", None)
    tempfile.tempdir = home
    if not (real / "done").exists():
        # Runs name their data by absolute paths, so that the folder is made where it stays.
        shutil.rmtree(real, ignore_errors=True)
        surfaces.make_real_files(real)
        (real / "done").touch()
    _block()
    _shorten()
    if os.getuid() == 0:
        _import_standard_library()
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _import_standard_library() -> None:
    """Import Python's own modules: they may lie where only root can read them."""
    left_out = ("antigravity", "this", "idlelib", "lib2to3", "tkinter", "turtle", "turtledemo", "ensurepip", "venv")
    for name in sorted(sys.stdlib_module_names):
        if not name.startswith("_") and name not in left_out:
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name)
                for inner in pkgutil.iter_modules(getattr(module, "__path__", ())):
                    if not inner.name.startswith("_"):
                        importlib.import_module(f"{name}.{inner.name}")


def _block() -> None:
    """Let no input start a process or open a connection."""

    def blocked(*arguments: object, **options: object) -> Any:
        raise Blocked("blocked by the fuzzer")

    subprocess.Popen.__init__ = blocked  # type: ignore[assignment, method-assign]
    multiprocessing.process.BaseProcess.start = blocked  # type: ignore[method-assign]
    socket.socket.connect = blocked  # type: ignore[assignment, method-assign]
    socket.getaddrinfo = blocked


def _shorten() -> None:
    """Leave out what takes most of the time and is not fuzzed.

    Typer makes all commands anew for each command line. Files are synced to the disk for a crash of the machine.
    Figures have fourteen times as many dots. A server waits half a second until it looks for nodes again.
    """
    import typer.main

    from fedblend.analysis import plotting
    from fedblend.flower import sites

    typer.main.get_command = functools.cache(typer.main.get_command)
    os.fsync = lambda handle: None  # type: ignore[assignment]
    plotting.DPI = 40
    sites.CONNECT_POLL_S = 0.01


def one(number: int, folder: Path) -> dict[str, Any]:
    """Read one input; the result as plain data. A failing input's folder is kept."""
    import surfaces
    import torch

    torch.set_grad_enabled(True)  # an input that the watchdog stopped inside no_grad may have left it off
    place = folder / "inputs" / str(number)
    place.mkdir(parents=True)
    begin, words, kind, note, text = time.monotonic(), "", "clean", "", ""
    watch = Watchdog()
    try:
        case = surfaces.SURFACES[surface_of(number)](Random(number), place, folder / "real")
        words = case.words
        with watch:
            outcome = case.run()
        kind, note, text = judge(outcome)
    except Hang:
        kind, note = "hang", watch.where
    except Blocked:
        pass
    except BaseException as error:
        if not (isinstance(error, (SystemExit, KeyboardInterrupt)) and watch.stopped):
            kind, note, text = "traceback", signature(error), traceback.format_exc()
    seconds = time.monotonic() - begin
    _open_up(place)
    if kind in ("clean", "message"):
        shutil.rmtree(place, ignore_errors=True)
    else:
        told = f"{words}\n{kind}: {note}\n\n{text}"
        (keep(place) / "what.txt").write_text(told, encoding="utf-8", errors="backslashreplace")
    said = next((line for line in text.splitlines() if "rror: " in line), "") if kind == "message" else ""
    result = {"number": number, "surface": surface_of(number), "kind": kind, "seconds": round(seconds, 3)}
    return {**result, "note": note, "words": words[:300], "said": said[:MESSAGE_LENGTH]}


def keep(place: Path) -> Path:
    """Move the folder of a failing input to those that are kept, and return its new place."""
    kept = place.parents[1] / "failed" / place.name
    kept.parent.mkdir(exist_ok=True)
    shutil.rmtree(kept, ignore_errors=True)
    return Path(shutil.move(place, kept))


def _open_up(place: Path) -> None:
    """Make folders that an input closed removable."""
    for folder, names, _ in os.walk(place):
        for path in (Path(folder, name) for name in names):
            if not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.chmod(0o700)


class Watchdog:
    """Ends an input that takes too long; where Python does not come to it, faulthandler ends the process."""

    stopped, where = False, ""

    def __enter__(self) -> None:
        self.begin, self.used = time.monotonic(), time.process_time()
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, 1, 0.5)
        faulthandler.dump_traceback_later(2 * BLOCKED_S, exit=True, file=sys.__stderr__)

    def __exit__(self, *about: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()

    def _look(self, number: int, frame: FrameType | None) -> None:
        used = time.process_time() - self.used
        # Python does come to it.
        faulthandler.dump_traceback_later(2 * BLOCKED_S, exit=True, file=sys.__stderr__)
        if used > HANG_S or (used < 1 and time.monotonic() - self.begin > BLOCKED_S):
            self.where = place_of(traceback.extract_stack(frame))
            raise Hang
        if used > TRAINING_S and any(at in TRAINING for at in _stack(frame)):
            self.stopped = True
            raise KeyboardInterrupt


def _stack(frame: FrameType | None) -> list[str]:
    return [f"{Path(at.f_code.co_filename).name}:{at.f_code.co_name}" for at, _ in traceback.walk_stack(frame)]


TRAINING = ("loop.py:round", "inversion.py:attack", "search.py:search", "work.py:train", "autotune.py:plan_engine")
"""Functions inside which an input computes what it was asked for."""


def judge(outcome: Any) -> tuple[str, str, str]:
    """The kind of an outcome, what is wrong with it, and what was printed."""
    from fedblend.cli import FAULT

    text = outcome.text
    if outcome.code == FAULT:
        reports = [Path(found) for found in re.findall(r"(\S+fedblend-fault\S*\.txt)", text)]
        text = next((path.read_text(errors="replace") for path in reports if path.is_file()), text)
    if outcome.code == FAULT or "Traceback (most recent call last)" in text:
        if "blocked by the fuzzer" in text:
            return "clean", "", text
        lines = [line.strip() for line in text.splitlines()]
        where = [line for line in lines if line.startswith("File") and "/fedblend/" in line]
        raised = [line for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception|Interrupt|Hang|Blocked)", line)]
        return "traceback", " ".join([*where[-1:], *(line[:200] for line in raised[-1:])]), text
    if outcome.code not in (0, 2, 130):
        return "traceback", f"exit code {outcome.code}", text
    if found := re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text):
        return "control", f"{found[0]!r} in {text[max(0, found.start() - 60) : found.start() + 20]!r}", text
    if outcome.code != 2:
        return "clean", "", text
    told = [line for line in text.splitlines() if line.startswith(("fedblend: error: ", "Error: "))]
    if len(told) != 1 and "Usage:" not in text:
        return "traceback", f"{len(told)} messages", text
    longest = max((line for line in text.splitlines() if not line.startswith((" ", "│"))), key=len, default="")
    if len(longest) > MESSAGE_LENGTH:
        return "too long", f"{len(longest)} characters: {longest[:80]}", text
    return "message", "", text


def signature(error: BaseException) -> str:
    """An error's type, its place in fedblend, and its beginning."""
    return f"{type(error).__name__} at {place_of(traceback.extract_tb(error.__traceback__))}: {str(error)[:80]!r}"


def place_of(stack: traceback.StackSummary) -> str:
    """The innermost place in fedblend of a stack."""
    own = [frame for frame in stack if "/fedblend/" in frame.filename]
    return f"{own[-1].filename.rpartition('/fedblend/')[2]}:{own[-1].lineno} {own[-1].name}" if own else "outside"
