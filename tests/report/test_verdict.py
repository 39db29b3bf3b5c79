"""The sentences at the top of a comparison, from rows whose intervals are worked out by hand."""

from __future__ import annotations

import math
from typing import Any

from fedblend.report.verdict import NO_SEEDS, ONE_SEED, verdict

KEYS = {"measure": "accuracy", "target": 0.9, "target_metric": "accuracy", "eval_every": 1, "failed": False}
KEYS |= {"chosen": math.nan}


def row(method: str, final: list[float], rounds: list[float] | None = None, **more: Any) -> dict[str, Any]:
    """A method's row; ``rounds`` are those to the target, NaN where a seed did not reach it; a round takes 1 MB."""
    rounds = rounds or [math.nan] * len(final)

    def of(finals: list[float], rounds: list[float]) -> dict[str, Any]:
        reached = [number for number in rounds if not math.isnan(number)]
        mean = math.fsum(reached) / len(reached) if reached else math.nan
        found = {"seeds": len(finals), "target_reached": len(reached), "target_round": mean, "target_bytes": 1e6 * mean}
        sent = {"bytes_up": 5e6, "bytes_down": 5e6, "bytes_up.weights": 5e6}
        return KEYS | {"method": method, "final": math.fsum(finals) / len(finals)} | found | sent | more

    by_seed = {seed: of([value], [number]) for seed, (value, number) in enumerate(zip(final, rounds, strict=True))}
    return of(final, rounds) | {"by_seed": by_seed, "unsafe": method == "raw"}


BASE = row("fedavg", [0.80, 0.82, 0.84, 0.80, 0.84], [20, 22, 18, 21, 19])


def test_the_method_that_helps_comes_first_with_its_intervals_and_its_price() -> None:
    means = row("means", [0.80, 0.83, 0.84, 0.80, 0.84], [5, 6, 4, 5, 5], **{"bytes_up.means": 2e4, "bytes_up": 5.02e6})
    slow = row("slow", [0.70, 0.73, 0.74, 0.70, 0.74], [30, 33, 28, 30, 31])
    other = row("other", [0.81, 0.80, 0.86, 0.81, 0.80], [19, 25, 17, 23, 18])

    found = verdict([BASE, means, slow, other], "fedavg")

    # Rounds apart: -15, -16, -14, -16, -14: mean -15, deviation 1, half 2.776 / sqrt(5) = 1.24.
    assert found[0] == (
        "means reaches 90 % in 5.0 rounds instead of 20.0 (-15.0; 95 %: -16.2 to -13.8), with 5.0 MB instead of "
        "20.0 MB (-15.0; 95 %: -16.2 to -13.8)."
    )
    # 10, 11, 10, 9, 12: mean 10.4, deviation sqrt(1.3), half 1.42.
    assert found[1] == "Later, in rounds: slow (+10.4; 95 %: +9.0 to +11.8)."
    assert found[2] == "Rounds to 90 % within noise: other."
    # -10, -9, -10, -10, -10: mean -9.8, deviation sqrt(0.2), half 0.56.
    assert found[3] == (
        "After the last round, beside fedavg, worse: slow (-9.8 points; 95 %: -10.4 to -9.2); within noise: means, "
        "other."
    )
    assert found[4] == (
        "Price of means: its clients also send 0.020 MB of means; all rounds together take 1.00 times the bytes of "
        "fedavg."
    )


def test_a_difference_that_is_certain_alone_is_noise_among_many() -> None:
    """Its p-value is 0.013: below 0.05, and above 0.05 / 6."""
    base, alone = row("fedavg", [0.5, 0.5, 0.5]), row("a", [0.520, 0.522, 0.529])
    assert "better: a (+2.4 points" in verdict([base, alone], "fedavg")[-2]
    many = [row(name, [0.5, 0.49, 0.52]) for name in "bcdef"]
    said = "After the last round no difference to fedavg is certain among 6 (Holm's correction)."
    assert said in verdict([base, alone, *many], "fedavg")


def test_a_baseline_that_misses_the_target_is_told_without_an_interval() -> None:
    base = row("fedavg", [0.5, 0.5, 0.6], [20, math.nan, math.nan])
    reaching, alone = row("a", [0.9, 0.95, 0.93], [4, 5, 6]), row("b", [0.5, 0.5, 0.6], [9, math.nan, 9])
    assert verdict([base, reaching, alone], "fedavg")[:2] == [
        "fedavg reaches 90 % with 1 of 3 seeds; a does, in 5.0 rounds.",
        "90 % not with every seed: b (2 of 3).",
    ]
    assert verdict([base, alone], "fedavg")[0] == "No method reaches 90 % with every seed: fedavg (1 of 3), b (2 of 3)."
    reaches = row("fedavg", [0.9, 0.9, 0.9], [20, 20, 20])
    assert verdict([reaches, alone], "fedavg")[0] == "90 % not with every seed: b (2 of 3)."


def test_one_seed_decides_nothing_and_one_method_is_no_comparison() -> None:
    assert verdict([row("fedavg", [0.5]), row("a", [0.9])], "fedavg") == [ONE_SEED]
    assert verdict([BASE], "fedavg") == verdict([BASE], None) == []


def test_methods_that_cannot_be_compared_are_named() -> None:
    diverged = row("a", [0.9, math.nan, 0.9, 0.9, 0.9])
    assert verdict([BASE, diverged], "fedavg")[-1] == "Not compared, since it diverged or lacks common seeds: a."
    later = row("b", [0.9, 0.9])
    later["by_seed"] = {seed + 5: one for seed, one in later["by_seed"].items()}
    assert verdict([BASE, later], "fedavg") == [NO_SEEDS]


def test_means_are_over_the_seeds_of_their_difference() -> None:
    base = row("fedavg", [0.8, 0.8, 0.8], [20, 22, 21])
    five = row("a", [0.8, 0.8, 0.8, 0.8, 0.8], [5, 6, 5, 25, 25])
    assert verdict([base, five], "fedavg")[0].startswith("a reaches 90 % in 5.3 rounds instead of 21.0 (-15.7;")


def test_with_validation_the_scores_are_those_of_its_best_round() -> None:
    base, one = (row(name, [0.9, 0.9, 0.9]) for name in ("fedavg", "a"))
    for of, chosen in ((base, 0.5), (one, 0.7)):
        of["chosen"] = chosen
        for seed, each in of["by_seed"].items():
            each["chosen"] = chosen + seed / 100 * (of is one)
    said = "In the round that was best on validation, beside fedavg, better: a (+21.0"
    assert said in verdict([base, one], "fedavg")[-2]


def test_less_loss_is_better_and_methods_that_share_raw_samples_do_not_help() -> None:
    loss = {"measure": "loss", "target": math.nan}
    base, better = row("fedavg", [1.0, 1.1, 1.2], **loss), row("a", [0.5, 0.61, 0.7], **loss)
    raw = row("raw", [0.1, 0.2, 0.3], **loss)
    (said, _) = verdict([base, raw, better], "fedavg")
    assert said == "After the last round, beside fedavg, better: a (-0.497 of loss; 95 %: -0.511 to -0.482)."
