"""The figures of docs/benchmarks.md, docs/scaling.md and README.md, made from the committed results, none by hand.

python benchmarks/page.py          rewrites what stands between two marks in these pages
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import scaling

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs" / "site"))
from reference import fill

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "scaling.md", ROOT / "README.md")
RESULTS = HERE / "results"

Table = Mapping[str, Any]


def fastest(timed: Table, kind: str) -> Table | None:
    """The fastest contestant of a kind."""
    return min((one for one in timed.values() if one["kind"] == kind), key=seconds_of, default=None)


def seconds_of(one: Table) -> float:
    """Seconds of a contestant's round."""
    return float(one["median_s"])


def quotient(a: Table, b: Table) -> float:
    """Seconds of a over seconds of b: the median of what the repeats say, so that a drift of the machine drops out."""
    pairs = zip(a["repeats"], b["repeats"], strict=True)
    return statistics.median(one["median_s"] / other["median_s"] for one, other in pairs)


def mark(*measured: Table) -> str:
    """What stands behind a figure where others disturbed one of its measurements."""
    return " (disturbed)" if any(one["disturbed"] for one in measured) else ""


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table as Markdown."""
    cells = [list(head), ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


JOBS = {"A": "A: LeNet-5", "B": "B: pfl's CNN", "C": "C: a VGG"}
SPEED_HEAD = ("processor", "day", "job", "fastest peer", "s a round", "fedblend", "times as fast")


def speed_rows() -> list[list[str]]:
    """One row a processor and job: what ``fedblend run`` takes by itself, beside the fastest peer of the same run."""
    lines = []
    for found in by_processor("rounds"):
        for name, told in JOBS.items():
            job = found["jobs"].get(f"{name} again") or found["jobs"].get(name)
            timed = job["contestants"] if job else {}
            peer, ours = fastest(timed, "peer"), timed.get("auto")
            if peer and ours:
                both = [f"{seconds_of(one):.2f}" + mark(one) for one in (peer, ours)]
                factor = f"{quotient(peer, ours):.1f}"
                lines.append([processor_of(job), job["date"], told, peer["label"], *both, factor])
    return lines


def brief_section() -> str:
    """Speed in one sentence: how many times as fast as the fastest peer, from the slowest to the fastest case."""
    _, _, _, peers, *_, factors = zip(*speed_rows(), strict=True)
    (peer,), times = {*peers}, sorted(map(float, factors))
    return (
        f"In the fastest other framework ({peer}) a round of federated averaging takes {times[0]} to {times[-1]} times "
        "as long ([table](docs/benchmarks.md))."
    )


def contestants_section() -> str:
    """Every contestant's round, on the processor where most were timed last."""
    found = max(by_processor("rounds"), key=lambda one: sum(len(job["contestants"]) for job in one["jobs"].values()))
    jobs = {name: found["jobs"][name] for name in JOBS if name in found["jobs"]}
    labels = {key: one["label"] for job in jobs.values() for key, one in job["contestants"].items()}
    lines = []
    for key, label in labels.items():
        timed = [job["contestants"].get(key) for job in jobs.values()]
        lines.append([label, *(f"{seconds_of(one):.3f}" + mark(one) if one else "" for one in timed)])
    first = next(iter(jobs.values()))
    versions = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    where = f"{processor_of(first)}, {first['machine']['cores']} cores, {first['date']}; {versions}. Seconds a round:"
    return f"{where}\n\n{markdown(('contestant', *(JOBS[name] for name in jobs)), lines)}"


def same_work_section() -> str:
    """How far the contestants' weights are from the bare loop's after one round, in one sentence."""
    checks = [check for found in by_processor("rounds") for check in found.get("same_work", {}).values()]
    same = max(apart for check in checks for name, apart in check["apart"].items() if name != "other-order")
    other = min(check["apart"]["other-order"] for check in checks)
    return (
        "After one round on the stored order of batches, no contestant's weights are further from the bare loop's than "
        f"{same:.0%} of what the round changed; shuffled batches are {other:.0%} of it away."
    )


def gpu_section(name: str) -> str:
    """A job's rounds on a GPU."""
    job = read("gpu").get("jobs", {}).get(name)
    if not job:
        return "Not run on a GPU."
    lines = [[one["label"], f"{seconds_of(one):.3f}" + mark(one)] for one in job["contestants"].values()]
    return f"{job['gpu']}, {job['date']}\n\n{markdown(('contestant', 's a round'), lines)}"


def gpu_steps_section() -> str:
    """What the other steps on a GPU found: tests, how many clients one stack trains, how far training is."""
    rows = [
        (name, one["gpu"], one["date"], one["commit"], one["says"])
        for kind in ("tests", "memory", "training")
        for name, one in read("gpu").get(kind, {}).items()
    ]
    return markdown(("step", "card", "day", "commit", "result"), rows) if rows else "Not run on a GPU."


def others_section() -> str:
    """What other benchmarks found, a row each."""
    steps = [one["server_s"] / (one["server_s"] + one["train_s"]) for one in read("server_step")["rows"]]
    copies = {one["aggregator"]: f"{one['x_copy']:.1f}" for one in read("aggregators")["rows"]}
    xor = {one["what"]: f"{one['of_copy']:.1f}" for one in read("xor")["rows"]}
    devices = [one["step_ms"] for one in read("batch_one")["rows"] if one["what"] == "FL"]
    many = [one for one in read("population")["rows"] if one["clients"] == 1_000_000]
    flower = {name: statistics.median(way["round_s"]) for name, way in read("flower")["ways"].items()}
    starts, rounds = ([one[name] for one in many] for name in ("start_s", "round_s"))
    lines = [
        ("server_step.py", "AggEnhance's server step", f"{min(steps):.0%} to {max(steps):.0%} of a round's computing"),
        ("aggregators.py", "mean, median, Krum of 100 uploads", f"{copies['mean']}, {copies['median']}, "
         f"{copies['krum, 20']} times a copy"),
        ("xor.py", "XorMixFL: encode, decode two samples", f"{xor['encode, p = 1']}, {xor['decode, p = 1']} times a "
         "copy"),
        ("batch_one.py", "ten devices' steps of one sample, stacked", f"{devices[0] / min(devices):.1f} times as fast"),
        ("population.py", "a million clients, 50 a round", f"ready in {min(starts):.1f} to {max(starts):.1f} s, then "
         f"{1000 * max(rounds):.0f} ms a round"),
        ("flower.py", "a round of three real sites on one machine", f"{flower['federation']:.0f} s; loop engine "
         f"{flower['loop']:.1f} s: processes start for each message"),
    ]  # fmt: skip
    return markdown(("`benchmarks/`", "what", "result"), [(f"`{file}`", *others) for file, *others in lines])


def by_processor(name: str) -> list[dict[str, Any]]:
    """The results of one benchmark on each processor, by the names of their files."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{name}-*.json"))]


def processor_of(found: Table) -> str:
    """A processor with the instruction set that PyTorch uses on it."""
    machine = found["machine"]
    limit = " (limited to it)" if machine.get("limited_to") else ""
    return f"{machine['processor']} with {machine.get('instructions', 'AVX512')}{limit}"


def growth_section() -> str:
    """How a round grows with each of four numbers."""
    found = scaling.growth()
    base = ", ".join(f"{name} {value:,}" for name, value in found["base"].items())
    head = f"{processor_of(found)}, one thread; not varied: {base}. {found['date']}, fedblend at {found['commit']}."
    return f"{head}\n\n{markdown(scaling.HEAD, scaling.measured_rows(found))}"


def constants_section() -> str:
    """What one more client or parameter costs."""
    return scaling.told(scaling.growth())


def scaling_section() -> str:
    """What a large federation would need, computed."""
    return markdown(scaling.COMPUTED_HEAD, scaling.computed_rows(scaling.growth()))


def read(name: str) -> dict[str, Any]:
    """One file of results; empty where there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


SECTIONS = {
    "speed": lambda: markdown(SPEED_HEAD, speed_rows()),
    "speed in brief": brief_section,
    "contestants": contestants_section,
    "same work": same_work_section,
    "job A on a GPU": lambda: gpu_section("A"),
    "job D on a GPU": lambda: gpu_section("D"),
    "steps on a GPU": gpu_steps_section,
    "others": others_section,
    "growth": growth_section,
    "growth constants": constants_section,
    "scaling": scaling_section,
}


def write() -> None:
    """Rewrite the figures of all pages."""
    for page in PAGES:
        page.write_text(fill(page.read_text(), SECTIONS))


if __name__ == "__main__":
    write()
