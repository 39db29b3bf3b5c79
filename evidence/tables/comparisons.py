"""Tables of tuned methods beside tuned FedAvg: baselines, personal models, and the map of blends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean

from fedblend.analysis.advice import BASE, LAST, Advice, Option
from fedblend.analysis.privacy.membership import ENOUGH, SAMPLES
from fedblend.report.scatter_figures import draw_advice
from fedblend.runs.differences import Difference, certain_together, paired_difference
from tables.common import RESULTS, Row, by_method, save_svg, study_result, table

SETTINGS = {
    "fashion-dirichlet": "Fashion-MNIST, Dirichlet 0.1",
    "fashion-classes": "Fashion-MNIST, two classes",
    "cifar10-dirichlet": "CIFAR10, Dirichlet 0.1",
    "cifar10-classes": "CIFAR10, two classes",
}
"""The settings of the baselines, as their columns are headed."""

MAP = {
    "fashion-classes": "Fashion-MNIST, two classes",
    "fashion-dirichlet": "Fashion-MNIST, Dirichlet 0.1",
    "fashion-dirichlet-half": "Fashion-MNIST, Dirichlet 0.5",
    "cifar10-classes": "CIFAR10, two classes",
    "cifar10-dirichlet": "CIFAR10, Dirichlet 0.1",
    "cifar10-dirichlet-half": "CIFAR10, Dirichlet 0.5",
    "femnist": "FEMNIST, 105 writers",
    "har": "HAR, 30 people",
    "heart": "heart disease, four hospitals",
    "shakespeare": "Shakespeare, 20 roles",
}
"""The settings of the map of blends."""

LATER = {"map": ("checked", "rest"), "relatives": ("more", "matched")}
"""Kinds of studies with methods that came later. The map's first studies have an earlier FedMix with a check."""

LONG = ("fedlc", "aggenhance")
"""Methods with long runs of their own, at the learning rate that validation chose for each."""

HINDSIGHT = ("server-means", "virtual-means")
"""Methods that are compared with FedAvg at the learning rate that the test samples would choose for it."""

Scores = dict[str, dict[int, float]]
"""Per cent by method and seed."""


def committed(kind: str, settings: dict[str, str]) -> dict[str, Row]:
    """The committed results of studies of a kind, by setting."""
    made = [one for one in settings if (RESULTS / "studies" / f"{kind}-{one}.json").exists()]
    return {one: study_result(f"{kind}-{one}") for one in made}


def baseline_table() -> str:
    """Test accuracy of each baseline in each setting, and its difference to FedAvg's."""
    return _compared("baselines", committed("baselines", SETTINGS), _last)


def combined_table() -> str:
    """The same of methods that combine two parts that help."""
    return _compared("combined", committed("combined", SETTINGS), _last)


def long_table() -> str:
    """Accuracy of FedAvg and of methods that help by round, and the difference with its interval."""
    rows, rounds = [], []
    others = [committed(f"long-{method}", MAP) for method in LONG]
    for setting, result in committed("long", MAP).items():
        runs = by_method(sum((other[setting]["runs"] for other in others if setting in other), result["runs"]))
        at = [index for index, number in enumerate(result["runs"][0]["rounds"]) if number and number % 40 == 0]
        rounds = [result["runs"][0]["rounds"][index] for index in at]
        for method, own in runs.items():
            scores = [{run["seed"]: 100 * fmean(run["accuracy"][i - LAST + 1 : i + 1]) for run in own} for i in at]
            base = [{r["seed"]: 100 * fmean(r["accuracy"][i - LAST + 1 : i + 1]) for r in runs[BASE]} for i in at]
            cells = [f"{fmean(one.values()):.1f}" for one in scores]
            if method != BASE:
                pairs = zip(cells, scores, base, strict=True)
                cells = [f"{cell}, {told(paired_difference(one, other))}" for cell, one, other in pairs]
            rows.append([MAP[setting], method, *cells])
    return table(["setting", "method", *(f"round {number}" for number in rounds)], rows)


def personal_table() -> str:
    """Accuracy over clients' own tests, with personal models and with FedAvg's one model."""

    def own(run: Row) -> float:
        return 100 * float(run["clients"]["mean"])

    plain, personal = (committed(kind, SETTINGS) for kind in ("baselines", "personal"))
    joined = {
        setting: {**result, "runs": [r for r in plain[setting]["runs"] if r["method"] == BASE] + result["runs"]}
        for setting, result in personal.items()
        if setting in plain
    }
    return _compared("personal", joined, own)


def _last(run: Row) -> float:
    return 100 * fmean(run["accuracy"][-LAST:])


def _compared(kind: str, results: dict[str, Row], score: Callable[[Row], float]) -> str:
    scores: dict[str, Scores] = {
        setting: {
            method: {run["seed"]: score(run) for run in runs} for method, runs in by_method(result["runs"]).items()
        }
        for setting, result in results.items()
    }
    diverged = {
        setting: Counter(run["method"] for run in result.get("failed", ())) for setting, result in results.items()
    }
    methods = list(dict.fromkeys(method for found in scores.values() for method in found))
    rows = []
    for method in methods:
        cells = []
        for setting, found in scores.items():
            own, lost = found.get(method, {}), diverged[setting][method]
            parts = [f"{fmean(own.values()):.1f}"] if own else []
            parts += [told(paired_difference(own, found[BASE]))] if own and method != BASE else []
            parts += [f"{lost} of {len(own) + lost} seeds diverged"] if lost else []
            cells.append(", ".join(parts))
        rows.append([method, *cells])
    studies = " ".join(f"{kind}-{setting}" for setting in scores)
    return table(["method", *(SETTINGS[setting] for setting in scores)], rows, f"`python evidence/run.py {studies}`:")


def told(difference: Difference | None, factor: float = 1.0) -> str:
    """A difference with its interval; bold where zero lies outside."""
    if difference is None:
        return "one seed"
    mean, low, high = (factor * value for value in (difference.mean, difference.low, difference.high))
    text = f"{mean:+.1f} [{low:+.1f},\u00a0{high:+.1f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def of_map(kind: str) -> dict[str, Row]:
    """The committed advice of studies of a kind, by setting, with the methods of its later studies (:data:`LATER`)."""
    results = committed(kind, MAP)
    for later in LATER[kind]:
        for setting, result in committed(later, MAP).items():
            if setting in results:
                advice = results[setting]["advice"]
                options = {option["method"]: option for option in advice["options"]}
                options |= {
                    option["method"]: option for option in result["advice"]["options"] if option["method"] != BASE
                }
                joined = {
                    "options": list(options.values()),
                    "left_out": advice["left_out"] | result["advice"]["left_out"],
                }
                results[setting] = {**results[setting], "advice": advice | joined}
    return results


def map_table(kind: str = "map") -> str:
    """A row for each setting: FedAvg's accuracy, and each blend's difference to it. ``kind`` begins a study's name.

    A dagger marks what is certain among all differences of a row (Holm's correction).
    """
    results = of_map(kind)
    methods = _methods(results)
    rows = []
    for setting, result in results.items():
        options = {option["method"]: option for option in result["advice"]["options"]}
        cells = [f"{100 * fmean(options[BASE]['scores'].values()):.1f}"]
        impossible = result["advice"]["left_out"]
        marked = certain_together(
            {m: given.p_value for m, option in options.items() if (given := difference_of(option)) is not None}
        )
        cells += [
            _cell(options[m]) + "\u00a0†" * (m in marked) if m in options else _missing(m, impossible) for m in methods
        ]
        rows.append([MAP[setting], *cells])
    return table(["setting", f"{BASE} %", *methods], rows)


def rate_table() -> str:
    """FedAvg's accuracy at its best learning rate, which only the test tells, and each of HINDSIGHT minus it."""
    advised = of_map("map")
    rows = []
    for setting, result in committed("rates", MAP).items():
        scores = {
            label.rpartition("=")[2]: {run["seed"]: fmean(run["accuracy"][-LAST:]) for run in runs}
            for label, runs in by_method(result["runs"]).items()
        }
        whole = max(len(own) for own in scores.values())
        rate = max(
            (one for one, own in scores.items() if len(own) == whole), key=lambda one: fmean(scores[one].values())
        )
        best = scores[rate]
        cells = [rate, f"{100 * fmean(best.values()):.1f}"]
        options = {option["method"]: option for option in advised[setting]["advice"]["options"]}
        for method in HINDSIGHT:
            own = {int(seed): score for seed, score in options[method]["scores"].items()}
            cells.append(told(paired_difference(own, best), 100.0))
        rows.append([MAP[setting], *cells])
    return table(["setting", "best rate", "fedavg % at it", *(f"{method} minus that" for method in HINDSIGHT)], rows)


def map_attack_table() -> str:
    """How near an attacker on each method's first update comes to the images, beside the mean picture of a class."""
    result = study_result("map-attacks")
    data = list(dict.fromkeys(row["data"] for row in result["rows"]))
    found = {(row["method"], row["data"]): row for row in result["rows"]}
    methods = list(dict.fromkeys(row["method"] for row in result["rows"]))
    rows = [["the mean picture of the class"] + [_near(found[methods[0], name]["class_mean"]) for name in data]]
    rows += [[method, *(_near(found[method, name]) for name in data)] for method in methods]
    heads = [f"{name}: PSNR dB, SSIM" for name in data]
    return table(["attack on", *heads], rows, f"`{result['command']}`:")


def _near(row: Row) -> str:
    def told(measure: str, digits: int) -> str:
        error = f" ± {row[f'{measure}_error']:.{digits}f}" if f"{measure}_error" in row else ""
        return f"{row[measure]:.{digits}f}{error}"

    return f"{told('psnr', 1)}, {told('ssim', 2)}"


def _methods(results: dict[str, Row]) -> list[str]:
    """The methods with a gain whose own interval is above 0 in some setting, in order of first appearance."""
    options = (option for result in results.values() for option in result["advice"]["options"])
    return list(dict.fromkeys(o["method"] for o in options if (given := difference_of(o)) and given.low > 0))


def _missing(method: str, impossible: Row) -> str:
    return "not possible" if method in impossible else "not tried"


def difference_of(option: Row) -> Difference | None:
    """A committed option's difference to FedAvg."""
    given = option["difference"]
    return given and Difference(tuple(given["seeds"]), given["mean"], given["half"])


def _cell(option: Row) -> str:
    given = difference_of(option)
    if given is None and option["verdict"].startswith("failed"):
        return "diverged with all seeds but one"
    return told(given, 100.0)


def advice_of(table: Row) -> Advice:
    """Advice as :meth:`~fedblend.analysis.advice.Advice.table` writes it."""
    options = [
        Option(
            one["method"],
            {int(seed): score for seed, score in one["scores"].items()},
            one["megabytes"],
            tuple(one["leaves"]),
            one["to_clients"],
            {kind: math.nan if value is None else value for kind, value in one["membership"].items()},
            math.nan if one["recognised"] is None else one["recognised"],
            difference_of(one),
            one["fault"],
        )
        for one in table["options"]
    ]
    return Advice(table["metric"], table["larger_is_better"], options, table["left_out"])


def draw_maps() -> None:
    """The figure of each setting's advice, from its committed numbers."""
    for setting, result in of_map("map").items():
        used, test = result["clients"]["samples"], result["data"]["test"]
        held = used // 9  # each client holds out a tenth
        samples = min(SAMPLES, used, held if held >= ENOUGH else test)
        save_svg(draw_advice(advice_of(result["advice"]), MAP[setting], samples), f"map-{setting}")


def map_costs(kind: str = "map") -> str:
    """A row for each method: what leaves clients, to whom, how much, and what an attacker makes of it."""
    results = of_map(kind)
    rows = []
    for method in (BASE, *_methods(results)):
        found = [o for result in results.values() for o in result["advice"]["options"] if o["method"] == method]
        leaves = list(dict.fromkeys(kind for option in found for kind in option["leaves"]))
        whom = "other clients too" if any(option["to_clients"] for option in found) else "the server alone"
        known = [value for o in found for value in o["membership"].values() if value is not None]
        shared = [o["membership"][kind] for o in found for kind in o["leaves"] if o["membership"].get(kind) is not None]
        weights = [o["membership"]["weights"] for o in found if o["membership"].get("weights") is not None]
        seen = [o["recognised"] for o in found if o["recognised"] is not None]
        rows.append(
            [
                method,
                f"{', '.join(leaves)}, to {whom}" if leaves else "nothing but the model",
                span([option["megabytes"] for option in found], 2),
                span(weights, 2) if known else "",
                span(shared, 2),
                span([100 * share for share in seen], 0),
            ]
        )
    head = ["method", "what leaves a client", "MB a client", "membership: model", "membership: shared", "recognised %"]
    return table(head, rows)


def span(values: Sequence[float], digits: int) -> str:
    """The least and the largest value; empty for none."""
    if not values:
        return ""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"
