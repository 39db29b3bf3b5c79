"""Say in words what the runs of quickstart.toml show. `make demo` ends with it.

python examples/quickstart.py runs/quickstart
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

from fedblend.runs.differences import Difference, paired_difference
from fedblend.runs.directory import find_runs
from fedblend.runs.groups import Group, group

IDEAS = {
    "naivemix": "mixes each batch with means of other clients' samples",
    "fedmix": "approximates mixing with other clients' samples by their means",
    "scaffold": "corrects each step for the client's own direction, and sends that correction too",
    "virtual-means": "trains on means of other clients' digits too, so a client sees all ten; such means leave it once",
}
"""How each method differs from FedAvg."""


def in_words(folder: Path) -> str:
    """What the runs in a folder show: each method beside FedAvg, in accuracy, bytes and rounds."""
    methods = {one.name: one for one in group(find_runs([folder]))}
    plain = methods["fedavg"]
    first = plain.outcomes[0]
    classes, own = len(first.facts["data"]["classes"]), first.config["partition"]["classes_per_client"]
    found = {
        name: paired_difference(accuracies(one), accuracies(plain)) for name, one in methods.items() if name != "fedavg"
    }
    apart = {name: one for name, one in found.items() if one is not None}
    order = sorted(apart, key=lambda name: -apart[name].mean)
    lines = [
        "What these runs show",
        f"  Each client has {own} of {classes} digits. fedavg averages their models. After {first.round} rounds "
        f"{fmean(accuracies(plain).values()):.1f} % of the test",
        f"  digits are right, mean of {len(plain.outcomes)} seeds; {speed(plain)}.",
        "  Beside fedavg, seed by seed (mean difference, 95 % interval):",
        *(
            f"    {verdict(name, apart[name], sent(methods[name]) / sent(plain))}; {speed(methods[name])}"
            for name in order
        ),
    ]
    gains = [name for name in order if apart[name].low > 0]
    lines += [f"  {name} {IDEAS[name]}." for name in gains if name in IDEAS]
    return "\n".join(lines if gains else [*lines, "  No method gains more than chance may explain; more seeds decide."])


def accuracies(one: Group) -> dict[int, float]:
    """Test accuracy in per cent after the last round, by seed."""
    return {run.seed: 100 * (run.evaluated[-1].accuracy or 0.0) for run in one.outcomes}


def sent(one: Group) -> float:
    """Bytes of a run in both directions, the mean over seeds."""
    return fmean(
        sum(sum(record.bytes_up.values()) + sum(record.bytes_down.values()) for record in run.records)
        for run in one.outcomes
    )


def verdict(name: str, apart: Difference, bytes_ratio: float) -> str:
    """One method beside FedAvg, in a line."""
    word = "above" if apart.low > 0 else "below" if apart.high < 0 else "within noise"
    interval = f"({apart.low:+.1f} to {apart.high:+.1f}):"
    return f"{name:<14}{apart.mean:+5.1f} points {interval:<18}{word:<13} {bytes_ratio:.2f} times the bytes"


def speed(one: Group) -> str:
    """The rounds until a run reached its target, the mean over seeds."""
    target = one.config["target"]
    reached = [next((r.round for r in run.evaluated if (r.accuracy or 0) >= target), None) for run in one.outcomes]
    rounds = [number for number in reached if number is not None]
    when = f"in {fmean(rounds):.0f} rounds" if len(rounds) == len(reached) else "not with every seed"
    return f"{100 * target:.0f} % {when}"


NEXT = """
What to try next
  source .venv/bin/activate
  fedblend run examples/quickstart.toml --set partition.classes_per_client=10   # does a gain stay with all digits?
  fedblend list virtual-means                                                   # the options of a method
  docs/tutorial.md                                                              # step by step, in five minutes"""

if __name__ == "__main__":
    print(f"\n{in_words(Path(sys.argv[1]))}\n{NEXT}")
