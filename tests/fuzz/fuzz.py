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

import pandas as pd

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from worker import BLOCKED_S, KINDS, SHARES, keep, surface_of, work  # noqa: E402


def supervise(folder: Path, numbers: list[int], limit: float) -> list[dict[str, Any]]:
    """Have a worker read inputs for at most ``limit`` seconds, and start it again where an input ends it."""
    begin, results = time.monotonic(), folder / "results.jsonl"
    left, printed = list(numbers), 0
    while left and time.monotonic() - begin < limit:
        (folder / "numbers.json").write_text(json.dumps(left))
        with open(folder / "worker.log", "ab") as log:
            worker = subprocess.Popen([sys.executable, __file__, "--worker", str(folder)], stdout=log, stderr=log)
            try:
                while worker.poll() is None and time.monotonic() - begin < limit:
                    time.sleep(0.5)
                    done = _read(results)
                    if len(done) >= printed + 200:
                        printed, counts = len(done), Counter(one["kind"] for one in done)
                        told = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
                        seconds = time.monotonic() - begin
                        print(f"{printed:6} of {len(numbers)} inputs, {seconds:.0f} s: {told}", flush=True)
            finally:
                worker.kill()
                worker.wait()
        read = {one["number"] for one in _read(results)}
        left = [number for number in left if number not in read]
        if left and time.monotonic() - begin < limit:
            _keep_dead(folder, left.pop(0), worker.returncode)
    return _read(results)


def _keep_dead(folder: Path, number: int, code: int) -> None:
    """Record an input that ended the worker: by the watchdog, or by a crash."""
    place = folder / "inputs" / str(number)
    if not place.exists():
        raise SystemExit(f"the worker did not start; see {folder / 'worker.log'}")
    keep(place)
    result = {"number": number, "surface": surface_of(number), "kind": "hang" if code == 1 else "traceback"}
    result |= {"seconds": 2.0 * BLOCKED_S, "note": f"the process ended with {code}", "words": ""}
    with open(folder / "results.jsonl", "a", encoding="utf-8") as results:
        results.write(json.dumps(result) + "\n")


def _read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def table(done: list[dict[str, Any]]) -> str:
    """Inputs by surface and end, as text."""
    rows = []
    for name in (*SHARES, "all"):
        some = [one for one in done if name in (one["surface"], "all")]
        counts = Counter(one["kind"] for one in some)
        longest = max((one["seconds"] for one in some), default=0)
        kinds = {kind: counts[kind] for kind in KINDS}
        rows.append({"surface": name, "inputs": len(some), **kinds, "longest": f"{longest:.1f} s"})
    return pd.DataFrame(rows).to_string(index=False)


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
    parser.add_argument("--surface", default="", help="only inputs whose surface has this word")
    parser.add_argument("--out", type=Path, help="folder for failing inputs (default: a new one)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.worker, json.loads((asked.worker / "numbers.json").read_text()))
        return
    folder = (asked.out or Path(tempfile.mkdtemp(prefix="fedblend-fuzz-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    (folder / "results.jsonl").unlink(missing_ok=True)
    shutil.rmtree(folder / "inputs", ignore_errors=True)
    given = map(int, asked.only.split(",")) if asked.only else range(asked.first, asked.first + asked.inputs)
    numbers = [number for number in given if asked.surface in surface_of(number)]
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
