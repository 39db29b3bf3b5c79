"""The fuzzer: changed copies of real files, words and messages, read by fedblend in this process.

``make fuzz`` runs it. Input K is made from the number K alone, so that ``fuzz.py --only K`` makes it again. A worker
process reads one input after another (:mod:`worker`). The supervisor starts the worker again where an input ends it.
At the end a table has, for each surface, the inputs that ended cleanly, in one message, in a traceback, and in none of
them within 20 seconds of the processor. Failing inputs stay in OUT/failed/K.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from worker import BLOCKED_S, KINDS, SHARES, surface_of, work  # noqa: E402


def supervise(folder: Path, numbers: list[int], limit: float) -> list[dict[str, Any]]:
    """Have a worker read inputs for at most ``limit`` seconds, and start it again where an input ends it."""
    begin, results = time.monotonic(), folder / "results.jsonl"
    left, printed = list(numbers), 0
    while left and time.monotonic() - begin < limit:
        (folder / "numbers.json").write_text(json.dumps(left))
        with open(folder / "worker.log", "ab") as log:
            command = [sys.executable, __file__, "--worker", str(folder)]
            worker = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                while worker.poll() is None and time.monotonic() - begin < limit:
                    time.sleep(0.5)
                    done = _read(results)
                    if len(done) >= printed + 200:
                        printed = len(done)
                        _progress(done, len(numbers), time.monotonic() - begin)
            finally:
                worker.kill()
                worker.wait()
        done = _read(results)
        left = [number for number in left if number not in {one["number"] for one in done}]
        now = (folder / "now").read_text() if (folder / "now").exists() else ""
        if not now:
            raise SystemExit(f"the worker did not start; see {folder / 'worker.log'}")
        if left and now.isdecimal() and int(now) == left[0] and time.monotonic() - begin < limit:
            _keep_dead(folder, left.pop(0), worker.returncode)
    return _read(results)


def _keep_dead(folder: Path, number: int, code: int) -> None:
    """Record an input that ended the worker: by the watchdog, or by a crash."""
    kind = "hang" if code == 1 else "traceback"
    note = f"the process ended with {code}"
    place, kept = folder / "inputs" / str(number), folder / "failed" / str(number)
    if place.exists():
        kept.parent.mkdir(exist_ok=True)
        shutil.rmtree(kept, ignore_errors=True)
        shutil.move(place, kept)
    result = {"number": number, "surface": surface_of(number), "kind": kind, "seconds": 2.0 * BLOCKED_S}
    with open(folder / "results.jsonl", "a", encoding="utf-8") as results:
        results.write(json.dumps({**result, "note": note, "words": ""}) + "\n")


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _progress(done: list[dict[str, Any]], total: int, seconds: float) -> None:
    counts = Counter(one["kind"] for one in done)
    told = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
    print(f"{len(done):6} of {total} inputs, {seconds:.0f} s: {told}", flush=True)


def table(done: list[dict[str, Any]]) -> str:
    """Inputs by surface and end, as text."""
    rows = [("surface", "inputs", *KINDS, "longest")]
    for name in (*SHARES, "all"):
        some = [one for one in done if name in (one["surface"], "all")]
        counts = Counter(one["kind"] for one in some)
        longest = max((one["seconds"] for one in some), default=0)
        rows.append((name, str(len(some)), *(str(counts[kind]) for kind in KINDS), f"{longest:.1f} s"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            f"{cell:<{w}}" if not i else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(lines)


def faults(done: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The numbers of failing inputs, by what went wrong."""
    found: dict[str, list[int]] = {}
    for one in done:
        if one["kind"] not in ("clean", "message"):
            found.setdefault(f"{one['kind']}: {one['note']}", []).append(one["number"])
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def main() -> None:
    """Run the fuzzer; exit code 1 if an input failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--inputs", type=int, default=10_000, help="how many inputs")
    parser.add_argument("--seconds", type=float, default=3_600, help="most seconds")
    parser.add_argument("--only", help="the inputs of these numbers alone, with commas")
    parser.add_argument("--surface", help="only inputs whose surface has this word")
    parser.add_argument("--out", type=Path, help="folder for failing inputs (default: a new one)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.worker, json.loads((asked.worker / "numbers.json").read_text()))
        return
    folder = (asked.out or Path(tempfile.mkdtemp(prefix="fedblend-fuzz-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    for name in ("results.jsonl", "now"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "inputs", ignore_errors=True)
    numbers = list(range(asked.first, asked.first + asked.inputs))
    if asked.only:
        numbers = [int(word) for word in asked.only.split(",")]
    if asked.surface:
        numbers = [number for number in numbers if asked.surface in surface_of(number)]
    begin = time.monotonic()
    done = supervise(folder, numbers, asked.seconds)
    seconds = time.monotonic() - begin
    found = faults(done)
    print(f"\n{table(done)}\n")
    for fault, where in found.items():
        print(f"{len(where):5}  {fault[:220]!a}  such as {where[0]}")
    last = f" to {done[-1]['number']}" if done else ""
    print(f"\n{len(done)} inputs, numbers {numbers[0]}{last}, {len(done) / seconds:.1f} a second")
    print(f"failing inputs are in {folder}/failed" if found else "no input failed")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
