"""The figures of docs/benchmarks.md, docs/scaling.md and README.md, made from the committed results, none by hand.

python benchmarks/page.py          rewrites what stands between two marks in these pages
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import scaling

from fedblend.experiment.reference import fill

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "scaling.md", ROOT / "README.md")
RESULTS = HERE / "results"

HEAD = ("contestant", "s a round", "repeats", "x bare", "x fastest peer", "start s", "accuracy")
GOALS = {"naivemix": 1.1, "fedmix": 2.2, "fed-augmix": 3.5}
"""Most that a round of a method may take, as a multiple of FedAvg's."""
REGRET = 1.05
"""Most that a round may take as auto computes it, as a multiple of the fastest single choice's."""
EVALUATION = 0.33
"""Most that evaluating a sample may take, as a share of training on one: a step takes the outputs and two derivatives.
"""

GPU_SPEED = 20
"""Least that a round of job A may be faster than pfl's on the same card."""
GPU_SECONDS = 1.5
"""Most seconds that a round of FedMix may take in job D on a GPU."""

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


def against(base: Table | None, one: Table) -> str:
    """How many times as fast as a base."""
    return f"{quotient(base, one):.2f}" if base else ""


def rows(job: Table) -> list[list[str]]:
    """The table of a job, one row a contestant."""
    timed = job["contestants"]
    bare, peer = timed.get("bare"), fastest(timed, "peer")
    made = []
    for one in timed.values():
        medians = [repeat["median_s"] for repeat in one["repeats"]]
        starts = [repeat["wall_s"] - sum(repeat["round_s"]) for repeat in one["repeats"]]
        cells = [
            one["label"] + chosen(one),
            f"{one['median_s']:.3f}" + mark(one),
            f"{min(medians):.3f}-{max(medians):.3f}",
            against(bare, one),
            against(peer, one),
            f"{min(starts):.1f}",
            f"{one['accuracy']:.3f}",
        ]
        made.append(cells)
    return made


def chosen(one: Table) -> str:
    """What auto chose, where it did."""
    choices = [repeat["choice"] for repeat in one["repeats"] if repeat.get("choice")]
    if one["kind"] not in ("auto", "method") or not choices:
        return ""
    return " (" + ", ".join(dict.fromkeys(map(words_of, choices))) + ")"


def words_of(choice: Table) -> str:
    """A choice in a few words."""
    how = f"stacks of {choice['stack']}" if choice["engine"] == "stacked" else "loop"
    how += ", channels_last" if choice["memory_format"] == "channels_last" else ""
    return f"{how}, {choice['ranks']} rank{'s' if choice['ranks'] > 1 else ''}"


def verdict(told: str, value: float, goal: float, *measured: Table) -> str:
    """A figure beside its goal; ``measured`` are the contestants that it was made of."""
    met = "met" if value <= goal else "not met"
    return f"{told}: {value:.2f}, goal at most {goal:g}: {met}" + mark(*measured)


def mark(*measured: Table) -> str:
    """What stands behind a figure where others disturbed one of its measurements."""
    return " (disturbed)" if any(one["disturbed"] for one in measured) else ""


def verdicts(job: Table) -> list[str]:
    """What a job says of each goal that it is a test of."""
    timed, found = job["contestants"], gpu_verdicts(job) if job.get("device") == "cuda" else []
    if "auto" not in timed:
        return found
    auto, best = timed["auto"], fastest(timed, "fedblend")
    if best:
        found.append(verdict(f"auto / the fastest choice ({best['label']})", quotient(auto, best), REGRET, auto, best))
    for method, goal in GOALS.items():
        if method in timed:
            found.append(verdict(f"{method} / fedavg", quotient(timed[method], auto), goal, timed[method], auto))
    trained = job["settings"]["cohort"] * job["settings"]["samples"] * job["settings"]["epochs"]
    tested = job["settings"]["test_samples"]
    ratios = [ratio for repeat in auto["repeats"] if (ratio := evaluation_ratio(repeat, tested, trained)) is not None]
    if ratios:
        told = "seconds to evaluate a test sample / to train on a sample, which also takes two derivatives"
        found.append(verdict(told, statistics.median(ratios), EVALUATION, auto))
    return found


def gpu_verdicts(job: Table) -> list[str]:
    """What a job on a GPU says of the goals for one."""
    timed, name = job["contestants"], job["settings"]["name"]
    auto, peer = timed.get("auto"), fastest(timed, "peer")
    if name == "A" and auto and peer:
        speed = quotient(peer, auto)
        met = "met" if speed >= GPU_SPEED else "not met"
        return [f"{peer['label']} / auto: {speed:.1f}, goal at least {GPU_SPEED}: {met}" + mark(auto, peer)]
    if name == "D" and "fedmix" in timed:
        return [verdict("seconds of a round of fedmix", seconds_of(timed["fedmix"]), GPU_SECONDS, timed["fedmix"])]
    return []


def evaluation_ratio(repeat: Table, tested: int, trained: int) -> float | None:
    """Seconds of an evaluation by test sample, over those of the round before it by training sample: the median."""
    timed = repeat.get("evaluated")
    if not timed:
        return None
    pairs = zip(timed["round_s"], timed["evaluate_s"], strict=True)
    return statistics.median((evaluate / tested) / ((whole - evaluate) / trained) for whole, evaluate in pairs)


def facts(job: Table) -> str:
    """Where, when and with what a job was timed, in one paragraph."""
    machine, settings = job["machine"], job["settings"]
    versions = ", ".join(f"{name} {number}" for name, number in job["versions"].items())
    discarded = sum(one["discarded"] for one in job["contestants"].values())
    on_gpu = f", {job['gpu']}" if job.get("gpu") else ""
    data = f" on {settings['data']}" if settings.get("data") else ""
    epochs = f"{settings['epochs']} epoch{'s' if settings['epochs'] > 1 else ''}"
    priority = ", all contestants with real-time priority on a busy machine" if machine.get("real_time") else ""
    paces = [repeat["pace_ms"] for one in job["contestants"].values() for repeat in one["repeats"]]
    return (
        f"**{processor_of(job)}**: {settings['model']}{data}, {settings['clients']:,} clients of {settings['samples']} "
        f"samples, cohort {settings['cohort']}, {epochs}, batches of {settings['batch_size']}. {job['date']}, fedblend "
        f"at {job['commit']}, {machine['cores']} cores{on_gpu}{priority}; {versions}. {job['repeats']} repeats of "
        f"{job['rounds']} rounds, the first {job['warm_up']} to warm up; {discarded} "
        f"measurement{'s' if discarded != 1 else ''} thrown away as disturbed. The machine's own pace, a step of "
        f"LeNet-5 just before each measurement: {min(paces):.2f} to {max(paces):.2f} ms."
    )


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table as Markdown."""
    cells = [list(head), ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def job_section(name: str) -> str:
    """Facts, table and goals of a job on each processor."""
    return (
        "\n\n".join(job_text(found["jobs"][name]) for found in by_processor("rounds") if name in found["jobs"])
        or "Not timed yet."
    )


def gpu_section(name: str) -> str:
    """Facts, table and goals of a job on a GPU."""
    job = read("gpu").get("jobs", {}).get(name)
    return job_text(job) if job else "Not run on a GPU."


def gpu_steps_section() -> str:
    """What the other steps on a GPU found: tests, how many clients one stack trains, how far training is."""
    rows = [
        (name, one["gpu"], one["date"], one["commit"], one["says"])
        for kind in ("tests", "memory", "training")
        for name, one in read("gpu").get(kind, {}).items()
    ]
    return markdown(("step", "card", "day", "commit", "result"), rows) if rows else "Not run on a GPU."


def job_text(job: Table) -> str:
    """Facts, table and goals of a job on one processor."""
    parts = [facts(job), markdown(HEAD, rows(job)), "\n".join(f"- {line}" for line in verdicts(job))]
    return "\n\n".join(part for part in parts if part)


SPEED_HEAD = ("processor", "job", "fastest peer", "s a round", "fedblend", "s a round", "times as fast", "goal")
SPEED_JOBS = {"A": "A: LeNet-5", "B": "B: pfl's CNN", "C": "C: a VGG"}
SPEED_GOALS = {"AVX512": {"A": 5.0, "B": 3.0, "C": 2.0}, "AVX2": {"A": 3.0, "B": 2.0, "C": 1.5}}
"""How many times as fast as the fastest peer a round should be, by instruction set and job."""


def speed_rows() -> list[list[str]]:
    """One row a processor and job: fedblend's fastest way beside the fastest peer of the same run."""
    lines = []
    for found in by_processor("rounds"):
        for name, told in SPEED_JOBS.items():
            job = found["jobs"].get(f"{name} again") or found["jobs"].get(name)
            peer = fastest(job["contestants"], "peer") if job else None
            if job and peer:
                processor = processor_of(job)
                row = [processor, told, *speeds(job["contestants"], peer)]
                goal = next((goals[name] for isa, goals in SPEED_GOALS.items() if isa in processor), None)
                met = "" if goal is None else f"{goal:g}: {'met' if float(row[-1]) >= goal else 'missed'}"
                lines.append([*row, met])
    return lines


def brief_section() -> str:
    """Speed in one sentence: how many times as fast as the fastest peer, from the slowest to the fastest case."""
    _, jobs, peers, *_, factors, _ = zip(*speed_rows(), strict=True)
    (peer,), times = {*peers}, sorted(map(float, factors))
    return (
        f"In the fastest other framework ({peer}) a round of federated averaging takes {times[0]} to {times[-1]} times "
        f"as long ([{len({*jobs})} models](docs/benchmarks.md))."
    )


def speeds(timed: Table, peer: Table) -> list[str]:
    """The fastest peer, our fastest way, and how many times as fast that is."""
    ours = min((one for one in timed.values() if one["kind"] in ("fedblend", "auto")), key=seconds_of)
    way = ours["label"].removeprefix("fedblend: ") + chosen(ours)
    return [
        *(peer["label"], f"{seconds_of(peer):.3f}" + mark(peer)),
        *(way, f"{seconds_of(ours):.3f}" + mark(ours)),
        f"{quotient(peer, ours):.1f}",
    ]


def same_work_section() -> str:
    """How far each contestant's weights are from the bare loop's after one round, on each processor."""
    parts = []
    for found in by_processor("rounds"):
        if checks := found.get("same_work", {}):
            names = list(dict.fromkeys(name for check in checks.values() for name in check["apart"]))
            lines = [[labels(checks)[name], *(apart(check, name) for check in checks.values())] for name in names]
            parts.append(f"**{processor_of(next(iter(checks.values())))}**")
            parts.append(markdown(("contestant", *(f"job {job}" for job in checks)), lines))
    return "\n\n".join(parts) or "Not checked yet."


def labels(checks: Table) -> dict[str, str]:
    """Contestants' labels by id."""
    return {name: label for check in checks.values() for name, label in check["labels"].items()}


def apart(check: Table, name: str) -> str:
    """A contestant's distance in one job."""
    return f"{check['apart'][name]:.0e}" if name in check["apart"] else ""


def profile_section() -> str:
    """Where a stacked step's time goes, on each processor."""
    tables = (f"{profile_facts(one)}\n\n{markdown(PROFILE_HEAD, profile_rows(one))}" for one in by_processor("profile"))
    return "\n\n".join(tables) or "Not profiled yet."


PROFILE_HEAD = ("kind", "calls", "us a step", "share", "MFLOP", "GFLOP/s", "of the peak")


def profile_rows(found: Table) -> list[list[str]]:
    """One row a kind of operation."""
    made = []
    for kind, one in [*found["kinds"].items(), ("whole step", found["whole"])]:
        us, flop = one["us"], one["flop"]
        rate = flop / us / 1e3
        counted = [f"{flop / 1e6:.1f}", f"{rate:.1f}", f"{rate / found['peak_gflops']:.0%}"] if flop else ["", "", ""]
        made.append([kind, f"{one['calls']:g}", f"{us:.0f}", f"{us / found['whole']['us']:.0%}", *counted])
    return made


def profile_facts(found: Table) -> str:
    """What was profiled."""
    return (
        f"**Job {found['job']}, {processor_of(found)}**: stacks of {found['stack']} clients, 1 rank, 1 thread, medians "
        f"of {found['steps']} steps. The peak is what a float32 product of two {found['peak_size']} x "
        f"{found['peak_size']} matrices reaches in the same run: {found['peak_gflops']:.0f} GFLOP/s. {found['date']}, "
        f"fedblend at {found['commit']}."
    )


KERNELS_HEAD = ("layer", "MFLOP", "direct", "Winograd's", "tile", "PyTorch's")


def kernels_section() -> str:
    """How fast convolutions are, layer by layer, on each processor."""
    return "\n\n".join(kernels_table(found) for found in by_processor("kernels")) or "Not timed yet."


def kernels_table(found: Table) -> str:
    """The convolutions of one processor."""
    head = (
        f"**{processor_of(found)}**: GFLOP/s on {found['batch']} samples, one thread, the best of {found['turns']} "
        f"turns; a float32 product of two 1024 x 1024 matrices: {found['peak_gflops']:.0f}. {found['date']}, fedblend "
        f"at {found['commit']}."
    )
    return f"{head}\n\n{markdown(KERNELS_HEAD, kernels_rows(found))}"


def kernels_rows(found: Table) -> list[list[str]]:
    """One row a layer, rates forward, by input and by weights: of our direct kernels, Winograd's way, and PyTorch.

    Winograd's are those of the faster tile, PyTorch's those of the faster memory format for each form.
    """
    made = []
    for one in found["rows"]:
        theirs = [max(pair) for pair in zip(one["pytorch"], one["channels_last"], strict=True)]
        # Empty for rates of an earlier version, which used matrix units (AMX).
        ours = _rates([] if one.get("tiles") else one["ours"])
        tiles = {side: one[way] for way, side in (("winograd", "2x2"), ("winograd-4x4", "4x4")) if way in one}
        side = min(tiles, key=lambda side: sum(1 / rate for rate in tiles[side]), default="")
        fast = _rates(tiles.get(side, []))
        made.append([one["layer"], f"{one['mflop']:.0f}", ours, fast, side, _rates(theirs)])
    return made


def _rates(rates: list[float]) -> str:
    return ", ".join(f"{rate:.0f}" for rate in rates)


ENGINES_HEAD = ("job", "way", "ms a client's step", "x the loop")


def engines_section() -> str:
    """What each way of computing brings, on each processor."""
    parts = []
    for found in by_processor("engines"):
        stacks = ", ".join(f"{job} {one['stack']}" for job, one in found["jobs"].items())
        parts.append(
            f"**{processor_of(found)}**, one thread, the best of {found['turns']} turns; clients in a stack: {stacks}. "
            f"{found['date']}, fedblend at {found['commit']}."
        )
        parts.append(markdown(ENGINES_HEAD, engines_rows(found)))
    return "\n\n".join(parts) or "Not timed yet."


def engines_rows(found: Table) -> list[list[str]]:
    """One row a job and way."""
    return [
        [job, way, f"{ms:.2f}", f"{one['ms']['loop'] / ms:.2f}"]
        for job, one in found["jobs"].items()
        for way, ms in one["ms"].items()
    ]


def by_processor(name: str) -> list[dict[str, Any]]:
    """The results of one benchmark on each processor, by the names of their files."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{name}-*.json"))]


def processor_of(found: Table) -> str:
    """A processor with the instruction set that PyTorch uses on it."""
    machine = found["machine"]
    limit = " (limited to it)" if machine.get("limited_to") else ""
    return f"{machine['processor']} with {machine.get('instructions', 'AVX512')}{limit}"


def server_step_section() -> str:
    """What AggEnhance's server step takes, by clients and classes."""
    lines = [
        [
            one["model"],
            f"{one['clients']}",
            f"{one['classes']}",
            f"{one['train_s']:.3f}",
            f"{one['server_s']:.3f}",
            f"{one['server_s'] / (one['server_s'] + one['train_s']):.0%}",
        ]
        for one in read("server_step")["rows"]
    ]
    return markdown(("model", "clients", "classes", "training s", "server step s", "its share of both"), lines)


def aggregators_section() -> str:
    """How fast uploads are read while they are aggregated, beside a copy."""
    found = read("aggregators")
    lines = [
        [one["aggregator"], f"{one['gb_s']:.1f}", f"{one['x_copy']:.1f}", f"{one['extra_mb']:.0f}"]
        for one in found["rows"]
    ]
    head = f"{found['clients']} uploads of {found['parameters']:,} float32 numbers, one thread, medians of turns."
    return f"{head}\n\n{markdown(('aggregator', 'GB/s', 'x the time of a copy', 'MB beside the uploads'), lines)}"


def xor_section() -> str:
    """What XorMixFL's encoding and decoding take, beside a copy."""
    found = read("xor")
    if not found:
        return "Not timed yet."
    lines = [[one["what"], f"{one['gb_s']:.2f}", f"{one['of_copy']:.1f}", f"{one['bytes']:g}"] for one in found["rows"]]
    head = (
        f"{found['samples']:,} samples of 784 pixels at random rows, alpha {found['alpha']}, "
        f"{found['threads']} thread, medians of {found['turns']} turns."
    )
    return f"{head}\n\n{markdown(('what', 'GB/s', 'x the time of a copy', 'x the bytes of a copy'), lines)}"


def population_section() -> str:
    """What many clients cost at the start and in a round."""
    lines = [
        [
            f"{one['clients']:,}",
            one["partition"],
            f"{one['start_s']:.2f}",
            f"{one['beyond_data_mb'] - one['libraries_mb']:.0f}",
            f"{1000 * one['round_s']:.0f}",
        ]
        for one in read("population")["rows"]
    ]
    head = ("clients", "partition", "start s", "MB beyond data and libraries", "ms a round of 50 clients")
    return markdown(head, lines)


FLOWER_HEAD = ("way", "s a round", "training", "preparing", "starting", "serialisation", "transport", "waiting")


def flower_section() -> str:
    """What a federation's messages add to a round, and where a message's time goes."""
    found = read("flower")
    if not found:
        return "Not timed yet."
    machine, load, settings = found["machine"], found["load"], found["settings"]
    lines = [
        [
            name,
            f"{statistics.median(way['round_s']):.2f}",
            *(f"{way['parts'][part]:.3f}" if part in way["parts"] else "" for part in FLOWER_HEAD[2:]),
        ]
        for name, way in found["ways"].items()
    ]
    return (
        f"{settings['model']} on {settings['data']}, {settings['sites']} sites, {settings['rounds']} rounds. "
        f"{found['date']}, fedblend at {found['commit']}, {machine['processor']}, {machine['cores']} cores; flwr "
        f"{found['versions']['flwr']}, torch {found['versions']['torch']}. Meanwhile others used "
        f"{load['others']:.2f} cores; the load was {load['before']:.1f} before and {load['after']:.1f} after, these "
        f"processes' niceness {load['nice']}.\n\n{markdown(FLOWER_HEAD, lines)}"
    )


def batch_one_section() -> str:
    """What steps of one sample take, of ten devices and of the server."""
    found = read("batch_one")
    base = {one["what"]: one["step_ms"] for one in reversed(found["rows"])}
    lines = [
        [
            one["what"],
            one["how"],
            f"{one['step_ms']:.2f}",
            f"{one['round_s']:.1f}",
            f"{base[one['what']] / one['step_ms']:.1f}",
        ]
        for one in found["rows"]
    ]
    rounds = found["round"]
    head = (
        f"{found['devices']} devices with {rounds['devices']:,} steps of one sample a round, and a server with "
        f"{rounds['server']:,}; one thread, medians of turns of {found['steps']} steps."
    )
    return f"{head}\n\n{markdown(('what', 'how', 'ms a step of all', 's a round', 'times as fast'), lines)}"


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
    "job A": lambda: job_section("A"),
    "job A again": lambda: job_section("A again"),
    "job B": lambda: job_section("B"),
    "job C": lambda: job_section("C"),
    "job C again": lambda: job_section("C again"),
    "job A on a GPU": lambda: gpu_section("A"),
    "job D on a GPU": lambda: gpu_section("D"),
    "steps on a GPU": gpu_steps_section,
    "same work": same_work_section,
    "profile": profile_section,
    "kernels": kernels_section,
    "engines": engines_section,
    "server step": server_step_section,
    "batch one": batch_one_section,
    "aggregators": aggregators_section,
    "xor": xor_section,
    "population": population_section,
    "flower": flower_section,
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
