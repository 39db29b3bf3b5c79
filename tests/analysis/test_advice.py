"""``fedblend advise``: limits, the answer in words, and the command from a file to a file."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import PNG, TINY, here, refused, succeeded, tiny_run, words_of, write
from helpers import each

import fedblend
from fedblend.analysis.advice import HEADS, Advice, Limits, Option, _option, front, read_advice, study_of
from fedblend.analysis.privacy.leak_report import LeakReport, leak_report
from fedblend.cli.advise import KINDS, _runs_folder, _table
from fedblend.core.errors import FedblendError
from fedblend.core.record import RoundRecord
from fedblend.experiment.config import resolve
from fedblend.experiment.study import expand
from fedblend.experiment.toml_tables import read_toml
from fedblend.report import scatter_figures
from fedblend.runs.differences import paired_difference
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import group

FEDAVG = {0: 0.60, 1: 0.62, 2: 0.64}


def option(method: str, gain: tuple[float, float, float] = (0.0, 0.0, 0.0), **fields: Any) -> Option:
    """A method whose scores are FedAvg's plus a gain for each seed."""
    scores = {seed: FEDAVG[seed] + one for seed, one in zip(FEDAVG, gain, strict=True)}
    difference = None if method == "fedavg" else paired_difference(scores, FEDAVG)
    given = {"megabytes": 1.0, "leaves": (), "to_clients": False, "membership": {"weights": 0.1}}
    given |= {"recognised": math.nan, "difference": difference}
    return Option(**{"method": method, "scores": scores, **given, **fields})


def advice(*options: Option, metric: str = "accuracy", larger: bool = True) -> Advice:
    return Advice(metric, larger, [option("fedavg"), *options])


SURE, UNSURE, WORSE = (0.05, 0.06, 0.07), (0.05, -0.04, 0.06), (-0.05, -0.06, -0.07)


def test_a_blend_helps_if_the_interval_of_its_difference_is_above_zero() -> None:
    made = advice(option("a", SURE), option("b", UNSURE), option("c", WORSE))
    assert [made.verdict(one) for one in made.options] == ["base", "helps", "level", "hurts"]
    assert made.best is made.options[1]
    # 6 points, t = 4.303 with two degrees of freedom, a standard error of 1 / sqrt(3) points.
    assert made.answer()[0] == "a helps: +6.0 [+3.5, +8.5] points over FedAvg's 62.0, 3 seeds."


@pytest.mark.parametrize(("others", "helps", "hurts"), [(4, "helps", "hurts"), (5, "may help", "may hurt")])
def test_what_helps_is_certain_among_all_comparisons(others: int, helps: str, hurts: str) -> None:
    # t = 6 sqrt(3) with two degrees of freedom: p = 1 - t / sqrt(t^2 + 2) = 0.00914, and 5 p = 0.046, 6 p = 0.055.
    made = advice(option("a", SURE), *(option(f"b{k}", UNSURE) for k in range(others)))
    assert made.verdict(made.options[1]) == helps
    assert made.to_run is made.options[1]
    assert ("This is not certain among 6 comparisons; more seeds would decide it." in made.answer()) == (others == 5)
    worse = advice(option("a", WORSE), *(option(f"b{k}", UNSURE) for k in range(others)))
    assert worse.verdict(worse.options[1]) == hurts
    assert worse.to_run is worse.base


def test_a_method_that_helps_comes_before_one_that_may() -> None:
    # The larger gain has t = 10 / (3 / sqrt(3)) = 5.8, p = 0.029: twice that is above 0.05.
    large, sure = option("large", (0.07, 0.10, 0.13)), option("sure", SURE)
    made = advice(large, sure, *(option(f"b{k}", UNSURE) for k in range(2)))
    assert [one.method for one in made.helping] == ["sure", "large"]
    assert made.answer()[-1].startswith("large may help too: +10.0 [")


def test_the_answer_tells_what_is_given_away_and_what_else_helps() -> None:
    shares = option("a", (0.07, 0.08, 0.09), leaves=("seeds",), to_clients=True, recognised=0.975, megabytes=3.0)
    other = option("d", SURE, leaves=("means",), megabytes=1.25)
    made = advice(other, option("b", UNSURE), shares)
    assert made.answer()[1:] == [
        "It costs a client 3 MB in all, +2 MB beside FedAvg.",
        "What leaves a client beside its model: seeds, to the server and the other clients.",
        "Of the shared samples, 98% are nearest to a raw sample that they were made of.",
        "An attacker tells members from others with an advantage of 0.100 (FedAvg: 0.100; 0 is guessing).",
        "d helps too: +6.0 [+3.5, +8.5] points, 1.25 MB in all; beside its model a client gives away means, to "
        "the server alone.",
    ]
    assert advice(option("a", SURE)).answer()[2] == "What leaves a client beside its model: nothing."


def test_of_a_loss_the_smaller_one_is_better() -> None:
    made = advice(option("a", SURE), option("c", WORSE), metric="loss", larger=False)
    assert [made.verdict(one) for one in made.options] == ["base", "hurts", "helps"]
    assert made.best is made.options[2]


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_seed_that_diverged_counts_as_failed(lost: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedblend.analysis.advice.leak_report", lambda run, trust: LeakReport(run.path.name, (), ()))
    runs = []
    for method, finals in (("fedavg", (1.0, 1.1, 1.2)), ("fedmix-checked", (lost, 0.5, 0.6)), ("vhl", (lost,) * 3)):
        for seed, final in enumerate(finals):
            run = RunDirectory(tmp_path / f"{method}{seed}")
            run.path.mkdir()
            run.create(resolve({**TINY, "method": method, "seed": seed}), {"clients": {"number": 4}}, {})
            for round in range(3):
                run.add_record(RoundRecord(round, loss=final, bytes_up={}, bytes_down={}, machine={}))
            run.set_status("done", 2)
            runs.append(run)

    made = read_advice(runs, "loss", False, Limits(), {})

    assert [made.verdict(one) for one in made.options] == ["base", "failed with a seed", "failed with a seed"]
    assert (made.options[1].scores.keys(), made.options[2].scores) == ({1, 2}, {})
    assert made.answer() == ["No blend helps for certain here, over 3 seeds: train with FedAvg."]
    assert made.as_text(made.options[2].score) == "—"
    cost = {one.method: 1.0 for one in made.options}
    assert "vhl" not in [one.method for one in front(made.options, cost, False)]
    assert scatter_figures.draw_advice(made, "numbers", 100).axes
    assert json.dumps(made.table(), allow_nan=False)


@each(
    ("given", "seeds"),
    [
        ({}, [0, 1, 2]),
        ({"seed": 7}, [7, 0, 1]),
        ({"seeds": [1]}, [1, 0, 2]),
        ({"seeds": [0, 1]}, [0, 1, 2]),
        ({"seeds": [3, 4]}, [3, 4, 0]),
        ({"seeds": [5, 6, 7, 8]}, [5, 6, 7, 8]),
    ],
)
def test_fewer_than_three_seeds_are_filled_up_with_the_smallest_others(given: dict[str, Any], seeds: list[int]) -> None:
    table = {key: value for key, value in TINY.items() if key not in ("seed", "seeds")}
    assert study_of({**table, **given}, [])[0]["seeds"] == seeds


def test_candidates_are_possible_where_a_round_needs_several_uploads() -> None:
    study, left_out = study_of({**TINY, "min_uploads": 2}, ["fedprox"])
    assert (study["methods"], left_out) == (["fedavg", "fedprox"], {})
    assert study["min_uploads"] == 2


@pytest.mark.slow
def test_heads_in_closed_form_are_candidates_where_the_model_is_one_layer() -> None:
    for hidden in ([], [4]):
        study, _ = study_of({**TINY, "model": {"name": "mlp", "hidden": hidden}}, None)
        assert set(HEADS) & {*study["methods"]} == (set(HEADS) if not hidden else set())


def test_runs_of_other_values_are_not_taken_for_the_best_ones(tmp_path: Path) -> None:
    first, second = (expand({**TINY, "train": {**TINY["train"], "lr": lr}}) for lr in (0.1, 0.3))
    assert _runs_folder(tmp_path, first) == tmp_path / "runs"
    for slug, experiment in first.experiments.items():
        fedblend.run(experiment, out=tmp_path / "runs" / slug)
    assert _runs_folder(tmp_path, first) == tmp_path / "runs"
    assert _runs_folder(tmp_path, second) == tmp_path / "runs-2"


@each(
    ("limits", "leaves", "fault"),
    [
        (Limits(), "means", ""),
        (Limits(megabytes=0.5), "means", "needs 1 MB a client"),
        (Limits(score=0.7), "means", "reaches 0.62 only"),
        (Limits(leaves=frozenset()), "means", "means may not leave a client"),
        (Limits(leaves=frozenset({"means"})), "means", ""),
        (Limits(), "raw", "raw may not leave a client"),
        (Limits(leaves=frozenset({"raw"})), "raw", ""),
    ],
)
def test_limits(limits: Limits, leaves: str, fault: str) -> None:
    assert limits.fault(option("a", leaves=(leaves,)), True) == fault


NONE = ["No blend helps for certain here, over 3 seeds: train with FedAvg."]
KEPT = "Nothing that helps for certain keeps the limits, nor does FedAvg: it needs 3 MB a client."
GUESS = "The best guess is b: +2.3 [-11.3, +16.0] points; more seeds would decide it."


@each(
    ("base", "others", "answer"),
    [
        ("", [option("b", UNSURE), option("c", WORSE)], [*NONE, GUESS]),
        ("", [option("b", (-0.05, 0.04, -0.06))], NONE),  # below FedAvg
        ("", [option("a", SURE, fault="means may not leave a client")], NONE),
        ("needs 3 MB a client", [option("b", UNSURE)], [KEPT]),
    ],
)
def test_without_a_certain_gain_within_the_limits_nothing_is_advised(
    base: str, others: list[Option], answer: list[str]
) -> None:
    made = Advice("accuracy", True, [option("fedavg", fault=base), *others])
    assert (made.best, made.answer()) == (None, answer)


@each(
    ("changes", "limits", "told"),
    [
        ({"seeds": [0, 0]}, Limits(), "seeds: [0, 0] is not valid"),
        ({}, Limits(score=80.0), "--least 80: an accuracy is from 0 to 1; valid: such as 0.8 for 80 %"),
    ],
)
def test_mistakes_are_refused_before_the_search(changes: dict[str, Any], limits: Limits, told: str) -> None:
    with pytest.raises(FedblendError, match=re.escape(told)):
        study_of({**TINY, **changes}, ["fedprox"], limits)


def test_the_front_has_the_options_that_no_other_beats_in_both() -> None:
    one, two, three = option("a", SURE), option("b", UNSURE), option("c", WORSE)
    cost = {"fedavg": 1.0, "a": 3.0, "b": 2.0, "c": 0.5}
    assert [o.method for o in front([option("fedavg"), one, two, three], cost)] == ["c", "fedavg", "b", "a"]
    assert [o.method for o in front([option("fedavg"), one, two], cost | {"a": 0.9, "b": math.nan})] == ["a"]


def test_a_leak_below_zero_is_shown_as_it_was_measured() -> None:
    below = option("a", SURE, membership={"weights": -0.031, "means": -0.012, "outputs": math.nan})
    assert below.exposure == -0.012
    made = advice(below)
    assert list(_table(made).columns[4].cells) == ["0.100", "-0.012"]
    figure = scatter_figures.draw_advice(made, "digits, 20 clients", 200)
    marks = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_marker() not in ("None", "_", "")]
    assert -0.012 in marks


@pytest.mark.parametrize(("megabytes", "scale"), [(2.0, ""), (4.0, ", log scale")])
def test_the_figure_says_what_is_seen_and_which_side_is_better(megabytes: float, scale: str) -> None:
    made = advice(option("a", SURE, megabytes=megabytes))
    figure = scatter_figures.draw_advice(made, "digits, 20 clients", 200)
    leak, sent = figure.axes
    assert figure.get_suptitle() == "Test accuracy by what leaks and by megabytes sent: digits, 20 clients"
    assert leak.get_title("left") == made.answer()[0]
    assert (leak.get_ylabel(), sent.get_ylabel()) == ("test accuracy (%)", "")
    assert leak.get_xlabel() == "membership advantage ± standard error  (← more private)"
    assert sent.get_xlabel() == f"MB a client, up and down{scale}  (← cheaper)"


@pytest.mark.slow
def test_the_command_answers_and_writes_a_file_that_runs(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra 'tune' is not installed")
    tune = {"trials": 2, "fields": {"train.lr": [0.02, 0.05]}}
    file = write(tmp_path / "x.toml", {"tune": tune, "seeds": [3, 4], "methods": ["fedmix"]})
    out = tmp_path / "out"

    told = succeeded(here("advise", file, "--methods", "server-means,fedbn", "--out", out, "--jobs", 1))

    assert "fedbn: left out, since it cannot be used here: " in told.err
    run_with = "2 methods are tuned, then run with the seeds 3, 4, 0 (the file's, and others up to three)"
    assert run_with in words_of(told.err)
    assert "3 seeds" in told.out
    assert "nothing to resume" not in told.err
    table = json.loads((out / "advice.json").read_text(encoding="utf-8"))
    assert [one["method"] for one in table["options"]] == ["fedavg", "server-means"]
    assert table["options"][1]["leaves"] == ["means"]
    assert not table["options"][1]["to_clients"]
    assert set(table["options"][1]["membership"]) == {"weights", "means"}
    assert list(table["left_out"]) == ["fedbn"]
    assert table["answer"][0] in words_of(told.out)
    assert (out / "advice.png").read_bytes().startswith(PNG)
    chosen = read_toml(out / "advice.toml")
    assert chosen["method"] == (table["best"] or "fedavg")
    assert chosen["train"]["lr"] in (0.02, 0.05)
    succeeded(here("run", out / "advice.toml", "--out", tmp_path / "again", "--jobs", 1))
    refused(here("advise", file, "--out", out), "add --resume to go on")

    before = (out / "advice.json").read_bytes()
    others = here("advise", file, "--resume", "--methods", "fedprox", "--out", out, "--jobs", 1)
    begun = "was begun with ['server-means', 'fedbn']; leave --methods out, or name another folder (--out)"
    refused(others, f"--methods ['fedprox']: the advice in {out} {begun}")
    refused(
        here("advise", file, "--resume", "--set", "rounds=3", "--out", out), "was begun without it; leave --set out"
    )
    refused(here("advise", file, "--resume", "--megabytes", 0, "--out", out), "--megabytes 0.0: the advice in ")
    succeeded(here("advise", file, "--resume", "--out", out, "--jobs", 1))
    assert (out / "advice.json").read_bytes() == before

    (out / "options.json").unlink()  # as of a folder that an earlier version began
    none = ("--methods", "server-means,fedbn", "--megabytes", 1e-9, "--resume")
    told = succeeded(here("advise", file, *none, "--out", out, "--jobs", 1))
    assert "nor does FedAvg" in words_of(told.out)
    assert "To run it" not in told.out
    assert not (out / "advice.toml").exists()


def test_advice_that_is_not_there_is_not_resumed_silently(tmp_path: Path) -> None:
    file, out = write(tmp_path / "x.toml"), tmp_path / "out"
    told = refused(here("advise", file, "--resume", "--methods", "fedmox", "--out", out), "unknown method")
    assert told.err.count(f"{out}: nothing to resume; advise starts anew") == 1


def test_bad_options_end_in_one_message(tmp_path: Path) -> None:
    start = ("advise", write(tmp_path / "x.toml"))
    refused(here(*start, "--methods", "fedmox"), "--methods fedmox: unknown method (did you mean 'fedmix'?)")
    refused(here(*start, "--leaves", "photos"), f"--leaves photos: unknown; valid: {', '.join(KINDS)}, none")


@pytest.mark.parametrize(
    ("method", "kind", "shape"),
    [
        ("fedfa", "extras", "4 tensors, 16 numbers"),
        pytest.param("flea", "features", "about 35.5 of x 4x4x4, y 10", marks=pytest.mark.slow),
    ],
)
def test_what_hidden_states_reveal_is_named_and_counted_among_what_leaves(
    method: str, kind: str, shape: str, tmp_path: Path
) -> None:
    run = tiny_run(tmp_path, method=method, model={"name": "cnn", "channels": [4]}, rounds=1)

    leaks = {leak.kind: leak for leak in leak_report(run).leaks}

    assert set(leaks) == {"weights", kind}
    assert leaks[kind].shape == shape
    assert math.isnan(leaks[kind].membership)
    assert leaks[kind].senders == 2
    (found,) = group([run])
    assert _option(found, "accuracy").leaves == (kind,)
