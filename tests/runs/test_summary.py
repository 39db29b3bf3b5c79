"""Tidy tables from runs: every number here was worked out by hand from the metrics written below."""

import io
import json
import math
import re

import pytest

from fedblend.analysis.privacy.statements import Release, epsilon
from fedblend.core.errors import FedblendError
from fedblend.core.record import RoundRecord
from fedblend.experiment.config import resolve
from fedblend.report import compare
from fedblend.report.columns import rounds_note
from fedblend.report.description import describe_runs
from fedblend.report.guarantees import epsilon_text
from fedblend.report.sections import dataset_sections
from fedblend.report.tables import results_table, section_tables
from fedblend.runs.directory import METRICS, RunDirectory, find_runs
from fedblend.runs.groups import group
from fedblend.runs.summary import averaged, curves_of, rounds_to_target, rows_of, score


def record(round, accuracy=None, up=None, down=None, seconds=None, loss=1.0, **more):
    measured = {} if accuracy is None else {"loss": loss, "accuracy": accuracy}
    machine = {"seconds": seconds or {}, "peak_memory": 1000 * (round + 1)}
    return {"round": round, **measured, "bytes_up": up or {}, "bytes_down": down or {}, "machine": machine, **more}


def write_run(path, records, state="done", method="fedmix", **fields):
    experiment = {
        "name": "by hand",
        "data": "digits",
        "model": "mlp",
        "partition": {"name": "iid", "clients": 4},
        "train": {"cohort": 2},
        "rounds": 2,
        "target": 0.5,
        "method": method,
        **fields,
    }
    run = RunDirectory(path)
    path.mkdir(parents=True)
    run.create(resolve(experiment), {}, {})
    for one in records:
        run.add_record(RoundRecord.from_dict(one))
    run.set_status(state, len(records) - 1)
    return run


def curve(*accuracies, **last):
    """Records of rounds 0, 1, ... with these accuracies; ``last`` are fields of the last one."""
    *before, end = enumerate(accuracies)
    return [*(record(*one) for one in before), record(*end, **last)]


def write_runs(folder, by_method, **fields):
    """A run for each method and seed: ``by_method`` has the records of each seed."""
    return [
        write_run(folder / f"{method}{seed}", records, method=method, seed=seed, **fields)
        for method, seeds in by_method.items()
        for seed, records in enumerate(seeds)
    ]


def plain(text):
    """A text without styles."""
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.fixture
def two_seeds(tmp_path):
    clients = {"tested": 4, "mean": 0.5, "std": 0.1, "p10": 0.4, "by_size": {}}
    sent = {"up": {"weights": 100, "means": 7}, "down": {"weights": 300}, "seconds": {"train": 2.0, "share": 0.5}}
    again = {"up": {"weights": 100}, "down": {"weights": 300}, "seconds": {"train": 1.0}}
    write_run(
        tmp_path / "fedmix-seed0",
        [
            record(0, 0.1),
            record(1, 0.5, **sent, train_loss=2.0),
            record(2, 0.7, **again, train_loss=1.5, clients=clients),
        ],
    )
    write_run(
        tmp_path / "fedmix-seed1",
        [record(0, 0.1), record(1, 0.3, **sent), record(2, 0.4, **again, clients={**clients, "mean": 0.3})],
        seed=1,
    )
    return find_runs([tmp_path])


def test_a_folder_of_another_program_with_a_configuration_is_no_run(tmp_path):
    write_run(tmp_path / "fedavg-seed0", [record(0, 0.1)])
    (tmp_path / "flower").mkdir()
    (tmp_path / "flower" / "config.toml").write_text("[superlink]\n", encoding="utf-8")

    assert [one.path.name for one in find_runs([tmp_path])] == ["fedavg-seed0"]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"ranks": 2, "engine": "loop", "min_uploads": 0}, ["fedmix"]),
        ({"stack": 2, "memory_format": "contiguous", "device": "cuda", "cuda_graphs": True}, ["fedmix"]),
        (
            {"callbacks": ["keep-best"]},
            ["fedmix (callbacks=[])", "fedmix (callbacks=[{'name': 'keep-best', 'mode': 'max'}])"],
        ),
        ({"rounds": 3}, ["fedmix (rounds=2)", "fedmix (rounds=3)"]),
    ],
)
def test_how_a_seed_was_executed_does_not_split_its_method(tmp_path, fields, names):
    """A resume may change these fields, such as `fedblend resume --ranks 2` of one seed."""
    for seed, more in ((0, {}), (1, fields)):
        write_run(tmp_path / f"fedmix-seed{seed}", curve(0.1, 0.5), seed=seed, **more)

    groups = group(find_runs([tmp_path]))

    assert [one.name for one in groups] == names
    shared = dict(describe_runs(groups).shared)
    assert shared["method.name"] == "fedmix"
    assert not shared.keys() & fields.keys()


def test_curves_have_a_row_a_run_and_round_with_totals_from_the_beginning(two_seeds):
    frame = curves_of(group(two_seeds))
    assert len(frame) == 6
    last = frame[(frame["seed"] == 0) & (frame["round"] == 2)].iloc[0]
    assert last["run"] == "fedmix-seed0"
    assert last["method"] == "fedmix"
    assert bool(last["finished"])
    assert (last["accuracy"], last["train_loss"]) == (0.7, 1.5)
    assert (last["bytes_up"], last["bytes_up.weights"], last["bytes_up.means"]) == (207, 200, 7)
    assert (last["bytes_down"], last["seconds"], last["seconds.train"]) == (600, 3.5, 3.0)
    assert frame[frame["round"] == 0]["bytes_up.means"].tolist() == [0, 0]


def test_rounds_that_were_not_evaluated_still_count_in_the_totals(tmp_path):
    run = write_run(
        tmp_path / "a",
        [record(0, 0.1), record(1, up={"weights": 10}), record(2, 0.4, up={"weights": 10})],
        eval_every=2,
    )
    frame = curves_of(group([run]))
    assert frame["round"].tolist() == [0, 2]
    assert frame["bytes_up"].tolist() == [0, 20]


def test_the_untrained_model_reaches_no_target_and_is_no_best_round(tmp_path):
    run = write_run(tmp_path / "a", curve(0.6, 0.4, 0.5), target=0.5)
    [row] = rows_of(group([run]))
    assert row["target_by_seed"] == {0: 2}
    assert row["best"] == pytest.approx(0.5)


def test_table_averages_over_seeds(two_seeds):
    [row] = rows_of(group(two_seeds))
    assert [row[name] for name in ("seeds", "finished", "unfinished")] == [2, 2, 0]
    assert [row[name] for name in ("method", "status", "measure")] == ["fedmix", "done", "accuracy"]
    assert row["final"] == pytest.approx(0.55)
    assert row["final_std"] == pytest.approx(0.3 / math.sqrt(2))  # a sample's: sqrt((0.15^2 + 0.15^2) / 1)
    assert row["last"] == pytest.approx((0.6 + 0.35) / 2)  # rounds 1 and 2; the untrained model is left out
    assert row["last_n"] == 2
    assert row["best"] == pytest.approx(0.55)
    assert row["target_by_seed"] == {0: 1, 1: None}
    assert (row["target_round"], row["target_reached"]) == (1, 1)
    assert rounds_to_target(row) == "1 (1 of 2)"
    assert row["client_mean"] == pytest.approx(0.4)
    assert row["client_p10"] == pytest.approx(0.4)
    assert (row["bytes_up"], row["bytes_up.means"], row["bytes_down"]) == (207, 7, 600)
    assert (row["seconds"], row["seconds.share"], row["peak_memory"]) == (3.5, 0.5, 3000)


def test_mean_of_last_takes_ten_evaluations(tmp_path):
    values = [0.0] * 3 + [0.1 * i for i in range(1, 11)]
    run = write_run(tmp_path / "a", curve(*values), rounds=12, target=None)
    [row] = rows_of(group([run]))
    assert row["last_n"] == 10
    assert row["last"] == pytest.approx(0.55)
    assert math.isnan(row["final_std"])
    assert math.isnan(row["target"])
    assert rounds_to_target(row) == "—"


def test_unfinished_runs_are_told_and_left_out_of_averages(tmp_path):
    whole, cut = curve(0.1, 0.2, 0.6), curve(0.1, 0.9)
    runs = [write_run(tmp_path / "a", whole), write_run(tmp_path / "b", cut, "failed", seed=1)]
    runs.append(write_run(tmp_path / "c", cut, "done", seed=2))  # marked done, but its metrics end early
    [row] = rows_of(group(runs))
    assert (row["seeds"], row["finished"], row["unfinished"]) == (1, 1, 2)
    assert row["status"] == "seed 1: failed at round 1 of 2; seed 2: incomplete at round 1 of 2"
    assert row["final"] == 0.6
    assert curves_of(group(runs))["finished"].tolist() == [True] * 3 + [False] * 4


def test_how_unfinished_runs_stand_is_counted(tmp_path):
    cut = curve(0.1, 0.9)
    stands = ["failed", "stopped", "stopped", "running"]
    runs = [write_run(tmp_path / str(seed), cut, state, seed=seed) for seed, state in enumerate(stands)]
    [row] = rows_of(group(runs))
    assert row["states"] == "1 failed, 2 stopped, 1 killed"  # nobody holds the folder that says it is running
    with runs[3].locked():
        assert runs[3].status()["state"] == "running"
        [row] = rows_of(group(runs))
    assert row["states"] == "1 failed, 2 stopped, 1 running"
    assert runs[3].status()["state"] == "killed"
    with runs[3].locked():
        pass  # looking at it has not kept the lock


def test_the_number_of_evaluations_averaged_is_that_of_each_seed(tmp_path):
    runs = write_runs(tmp_path, {"fedmix": [curve(0.1, 0.2), curve(0.1, 0.2, 0.4)]}, state="stopped", rounds=9)
    [row] = rows_of(group(runs))
    assert (row["last_n_least"], row["last_n"]) == (1, 2)
    assert averaged(row) == "1 to 2"
    assert row["last"] == pytest.approx((0.2 + 0.3) / 2)


def test_a_run_without_any_metrics_has_a_row_of_its_own(tmp_path):
    run = write_run(tmp_path / "a", [], "running")
    with run.locked():
        [row] = rows_of(group([run]))
    assert row["seeds"] == 0
    assert math.isnan(row["final"])
    assert row["status"] == "seed 0: running at round 0 of 2"
    assert curves_of(group([RunDirectory(tmp_path / "a")])).empty


def test_in_regression_the_loss_takes_the_place_of_accuracy(tmp_path):
    records = [{**record(i), "loss": loss} for i, loss in enumerate([3.0, 1.0, 2.0])]
    [row] = rows_of(group([write_run(tmp_path / "a", records)]))
    assert (row["measure"], row["final"], row["best"], row["last"]) == ("loss", 2.0, 1.0, 1.5)
    assert math.isnan(row["target"])  # a target is an accuracy
    assert score(row["measure"], row["final"]) == "2.000"


def test_real_sites_that_test_their_own_models_send_no_losses_and_count(tmp_path):
    records = [
        {k: v for k, v in record(i, accuracy).items() if k != "loss"} for i, accuracy in enumerate((0.1, 0.4, 0.6))
    ]
    run = write_run(tmp_path / "a", records)
    [row] = rows_of(group([run]))
    assert (row["measure"], row["final"], row["seeds"]) == ("accuracy", 0.6, 1)
    assert math.isnan(row["loss"])
    assert [one["accuracy"] for one in curves_of(group([run])).to_dict("records")] == [0.1, 0.4, 0.6]


def losses(folder, **by_method):
    """Runs of regression: a method's final loss for each seed."""
    made = {
        method: [[{**record(i), "loss": loss} for i, loss in enumerate([3.0, 2.0, final])] for final in finals]
        for method, finals in by_method.items()
    }
    return write_runs(folder, made)


def test_a_method_that_diverged_does_not_keep_others_from_being_compared(tmp_path):
    runs = losses(tmp_path, fedavg=(1.0, 1.1), fedmix=(0.5, 0.61), fedprox=(math.inf, math.inf))
    text = printed(runs, 200)
    assert "-0.495 [-0.559, -0.431]" in text  # 12.706 * 0.00707 / sqrt(2) = 0.0635
    assert re.search(r"\x1b\[1m *0.555 ± 0.078", text)  # the best, of the methods that have a loss


def test_a_seed_that_diverged_is_named_in_place_of_a_mean_that_does_not_exist(tmp_path):
    runs = losses(tmp_path, fedavg=(1.0, 1.1), fedmix=(0.5, math.nan), fedprox=(math.inf, math.nan, 0.5))
    assert [row["diverged"] for row in rows_of(group(runs))] == [[], [1], [0, 1]]
    text = printed(runs, 200)
    assert "diverged: seed 1" in text
    assert "diverged: seeds 0, 1" in text
    assert not re.search(r"\b(nan|inf)\b", text)


def test_one_label_for_two_configurations_makes_two_rows_named_by_what_differs(tmp_path):
    runs = [write_run(tmp_path / f"a{lr}", curve(0.1, 0.2, 0.3), train={"cohort": 2, "lr": lr}) for lr in (0.1, 0.2)]
    assert [g.name for g in group(runs)] == ["fedmix (lr=0.1)", "fedmix (lr=0.2)"]


def test_a_seed_run_twice_is_not_two_seeds(tmp_path):
    runs = [write_run(tmp_path / study / "fedmix-seed0", curve(0.1, 0.2, 0.3)) for study in ("first", "second")]
    assert [(g.name, len(g.outcomes)) for g in group(runs)] == [("fedmix (first)", 1), ("fedmix (second)", 1)]
    assert len(group([runs[0], runs[0]])) == 1


def test_a_last_line_cut_short_by_a_kill_is_left_out(two_seeds):
    with open(two_seeds[0].path / METRICS, "a", encoding="utf-8") as file:
        file.write(json.dumps(record(3, 0.9))[:20])
    assert len(curves_of(group(two_seeds))) == 6


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(FedblendError, match="is not a run directory"):
        group([RunDirectory(tmp_path)])


def test_a_configuration_that_is_no_experiment_is_refused(tmp_path):
    (tmp_path / "config.toml").write_text("seed = 0\n", encoding="utf-8")
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(FedblendError, match=r"rounds: is missing; .*the file is damaged"):
        group([RunDirectory(tmp_path)])


def printed(runs, width=120, **options):
    from rich.console import Console

    console = Console(width=width, record=True, file=io.StringIO())
    console.print(compare(runs, **options))
    return console.export_text(styles=True)


def test_terminal_table_marks_the_best_and_tells_what_is_unfinished(tmp_path, two_seeds):
    sent = {"up": {"weights": 5_000_000}, "down": {"weights": 7_000_000}, "seconds": {"train": 90.0}}
    low, avg = curve(0.1, 0.2, 0.25, **sent), {"name": "fedavg", "label": "[red]avg[/]"}
    both = [write_run(tmp_path / f"avg{seed}", low, method=avg, seed=seed) for seed in (0, 1)]
    cut = write_run(tmp_path / "cut", curve(0.99), "stopped", method="naivemix")
    text = printed([*two_seeds, *both, cut])
    assert not re.search(r"\x1b\[1m *55.0 ± 21.2", text)  # the best, but its differences are 15 and 45 points
    assert not re.search(r"\x1b\[1m *<0.001", text)  # fewest bytes, the same with every seed
    assert not re.search(r"\x1b\[1m *99.0", text)  # the best, but unfinished
    assert "Never bold: one seed" in text
    assert "[red]avg[/]" in text
    assert "naivemix *" in text
    assert "* naivemix: seed 0: stopped at round 0 of 2" in text
    for word in ("(1 of 2)", "not reached", "5.0", "7.0", "90.0", "3.5"):
        assert word in text


def test_terminal_table_has_differences_to_the_baseline_over_equal_seeds(tmp_path):
    finals = {"fedmix": (0.75, 0.74), "fedavg": (0.25, 0.26, 0.9), "naivemix": (0.5,)}
    runs = write_runs(tmp_path, {method: [curve(0.1, 0.2, one) for one in of] for method, of in finals.items()})
    words = " ".join(plain(printed(runs, 200)).split())
    assert "to fedavg" in words
    # 50 and 48 points: deviation 1.414, and 12.706 * 1.414 / sqrt(2) = 12.7
    assert "+49.0 [+36.3, +61.7]" in words
    assert words.count("baseline") == 1
    assert "naivemix 1 50.0 —" in words
    words = " ".join(plain(printed(runs, 200, baseline="fedmix")).split())
    assert "-49.0 [-61.7, -36.3] (2 seeds)" in words
    with pytest.raises(FedblendError, match=r"baseline: 'fedmx' .* \(did you mean 'fedmix'\?\)$"):
        compare(runs, baseline="fedmx")


def test_a_target_on_validation_samples_says_so_and_is_no_line_among_test_scores(tmp_path):
    made = [
        record(i, a, validation={"server": {"samples": 9, "loss": 1.0, "accuracy": v}})
        for i, (a, v) in enumerate([(0.1, 0.1), (0.6, 0.4), (0.7, 0.6)])
    ]
    runs = [write_run(tmp_path / f"v{seed}", made, seed=seed, validation={"clients": 0.1}) for seed in (0, 1)]
    [section] = dataset_sections(runs)
    assert section.rows[0]["target_round"] == 2
    assert section.targets == []
    assert "that reached it on the validation samples" in headings_in_page(runs)["rounds to 50 % on validation"]
    assert "on validation" in printed(runs, 200)
    runs = [write_run(tmp_path / "t", made)]
    [section] = dataset_sections(runs)
    assert section.targets == [0.5]
    assert "rounds to 50 %" in headings_in_page(runs)


def test_rows_of_different_numbers_of_rounds_have_a_note(tmp_path):
    short = curve(0.1, 0.2)
    runs = write_runs(tmp_path, {"fedavg": [short] * 2}, rounds=1)
    runs += write_runs(tmp_path, {"fedmix": [curve(0.1, 0.2, 0.3)] * 2})
    assert "Rounds differ: fedavg 1, fedmix 2." in printed(runs, 200)
    assert "Rounds differ" not in printed(runs[:2], 200)
    stopped = write_run(tmp_path / "b2", short, "stopped", seed=2)
    assert "Rounds differ" not in printed([runs[2], stopped], 200)
    assert rounds_note(group([runs[2], runs[3], stopped])) == ""


@pytest.mark.parametrize(
    ("every", "bold", "told"),
    [
        (1, {"final accuracy (%)", "mean of last 4", "best", "rounds to 50 %"}, ""),
        (2, {"final accuracy (%)"}, "Rounds of evaluation differ: fedavg every 1, fedmix every 2. So means of"),
    ],
)
def test_what_is_taken_over_evaluations_is_not_bold_where_methods_are_evaluated_in_other_rounds(
    every, bold, told, tmp_path
):
    runs = []
    for method, own, curve in (("fedavg", 1, (0.2, 0.3, 0.4, 0.5)), ("fedmix", every, (0.3, 0.6, 0.7, 0.8))):
        for seed in range(4):  # with four seeds equal differences are certain
            shifted = [value + seed / 100 * (method == "fedmix") for value in curve]
            made = [record(0, 0.1), *(record(i, v if i % own == 0 else None) for i, v in enumerate(shifted, 1))]
            more = {"method": method, "seed": seed, "rounds": 4, "eval_every": own}
            runs.append(write_run(tmp_path / f"{method}{seed}", made, **more))
    columns = {"final accuracy (%)", "mean of last 4", "mean of last n", "best", "rounds to 50 %"}
    assert {heading for _, heading in bold_in_page(runs)} & columns == bold
    text = printed(runs, 200)
    assert told in text if told else "Rounds of evaluation" not in text


def headings_in_page(runs):
    """The headings of the table of results, and what they mean."""
    [section] = dataset_sections(runs)
    return dict(results_table(section.rows, "fedavg").headings)


def test_differences_are_of_the_round_best_on_validation_where_all_methods_validate_and_else_of_the_last(tmp_path):
    made = [[record(0, 0.1), record(1, best, best_round=1), record(2, 0.4, best_round=1)] for best in (0.8, 0.5)]
    runs = write_runs(tmp_path, {"fedmix": made[:1] * 2, "fedavg": made[1:] * 2})
    text = plain(printed(runs, 200))
    assert "+30.0 [-80.0, +140.0]" in text  # two equal differences: 12.706 * 30 / sqrt(6) / sqrt(2) = 110.0
    assert re.search(r" to fedavg \(best .*\n.* on validation\) ", text)
    why = headings_in_page(runs)["difference to fedavg (best on validation)"]
    assert why.startswith("percentage points of accuracy in the round that was best on validation: ")
    runs = write_runs(tmp_path / "last", {"fedmix": made[:1] * 2, "fedavg": [curve(0.1, 0.8, 0.4)] * 2})
    why = headings_in_page(runs)["difference to fedavg"]
    assert why.startswith("percentage points of accuracy after the last round: ")


def bold_in_page(runs):
    """The methods and headings of bold cells."""
    [section] = dataset_sections(runs)
    grid = results_table(section.rows, "fedavg")
    return {(name, grid.headings[k][0]) for name, cells in grid.rows for k, cell in enumerate(cells) if cell.best}


@pytest.mark.parametrize(
    ("fedmix", "bold"),
    [
        ((2, 3, 2), True),  # 4, 3 and 5 rounds fewer: 4 - 4.303 / sqrt(3) = 1.5
        ((2, 2, 3), False),  # four rounds fewer in each seed: 4 - 4.303 * 4 / sqrt(6) / sqrt(3) = -0.1
        ((2, 3, 2, None), False),  # one seed never reached it
    ],
)
def test_fewest_rounds_to_the_target_are_bold_in_the_page_if_every_seed_reached_it_clearly_sooner(
    fedmix, bold, tmp_path
):
    made = {
        method: [curve(*(0.6 if at is not None and i >= at else 0.1 for i in range(9))) for at in reached]
        for method, reached in (("fedmix", fedmix), ("fedavg", (6, 6, 7, 6)[: len(fedmix)]))
    }
    runs = write_runs(tmp_path, made, rounds=8)
    assert (("fedmix", "rounds to 50 %") in bold_in_page(runs)) == bold


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("more", [0, 100_000])
def test_the_fewest_bytes_are_bold_unless_they_are_the_same_with_every_seed(more, way, tmp_path):
    made = {
        method: [curve(0.1, 0.6, 0.6 + sent / 1e8, **{way: {"weights": sent + seed * more}}) for seed in range(2)]
        for method, sent in (("fedavg", 9_000_000), ("fedmix", 8_000_000))
    }
    runs = write_runs(tmp_path, made)
    assert bold_in_page(runs) == ({("fedmix", f"{way} (MB)")} if more else set())
    assert bool(re.search(r"\x1b\[1m *8\.[01]\x1b", printed(runs, 200))) == bool(more)


def test_metrics_have_a_table_of_their_own_in_the_page_and_long_names_are_wrapped_in_the_terminal(tmp_path):
    made = curve(0.1, 0.2, 0.3, metrics={"balanced-accuracy": 0.25, "ece": 0.5})
    runs = write_runs(tmp_path, {"fedmix": [made] * 2})
    [section] = dataset_sections(runs)
    assert [heading for heading, _ in section_tables(section)["metrics"].headings] == ["balanced-accuracy", "ece"]
    assert not {"balanced-accuracy", "ece"} & headings_in_page(runs).keys()
    assert re.search(r" balanced- .*\n.* accuracy ", plain(printed(runs, 200)))
    [section] = dataset_sections([write_run(tmp_path / "none", curve(0.1, 0.2, 0.3))])
    assert "metrics" not in section_tables(section)


def test_terminal_has_a_table_for_each_data_set(tmp_path):
    runs = []
    for data, best in (("digits", 0.9), ("mnist5k", 0.4)):
        for method, accuracy in (("fedavg", best), ("fedmix", best / 2)):
            made = [record(0, 0.1), record(1, accuracy, seconds={"train": 3.0}), record(2, accuracy)]
            runs.append(write_run(tmp_path / f"{data}-{method}", made, method=method, data=data))
    text = printed(runs)
    assert [word for word in re.findall(r"digits|mnist5k", text)] == ["digits", "mnist5k"]
    for best in ("90.0", "40.0"):  # of one seed
        assert not re.search(rf"\x1b\[1m\s*{best}\x1b\[0m", text)
    assert "difference\n" not in text
    assert text.count("One seed decides nothing") == 2
    assert "Bold:" not in text
    assert "3.0" in text  # seconds
    assert "digits" not in printed(runs[:2])


def test_terminal_table_tells_of_methods_that_give_raw_samples_away(tmp_path):
    run = write_run(tmp_path / "a", [record(0, 0.1)], method="global-mixup", unsafe=True)
    assert "! global-mixup: breaks privacy" in printed([run])


def test_terminal_table_has_epsilon_where_a_run_adds_noise(tmp_path):
    records = [record(0, 0.1), *(record(round, 0.5, cohort=[0, 1]) for round in (1, 2))]
    runs = [write_run(tmp_path / "plain", records, method="fedavg")]
    assert "epsilon" not in printed(runs)
    plain_mean = {"name": "mean", "by": "clients"}
    for label, multiplier, mean in (("some", 1.0, plain_mean), ("much", 8.0, plain_mean), ("weighted", 8.0, "mean")):
        method = {"name": "fedavg", "label": label, "aggregator": mean}
        noise = {"name": "noise", "clip": 1.0, "side": "server", "multiplier": multiplier}
        runs.append(write_run(tmp_path / label, records, method=method, protection=noise, delta=1e-3))
    text = printed(runs)
    epsilons = [epsilon_text(epsilon([Release("gaussian", m / 2, 2, (0, 2))], 1e-3)) for m in (1.0, 8.0)]
    rows = {line.split()[0]: line.split() for line in plain(text).splitlines() if line.strip()}
    place = rows["method"].index("epsilon") - len(rows["method"])
    assert [rows[name][place] for name in ("fedavg", "some", "much", "weighted")] == ["—", *epsilons, "none"]
    words = " ".join(plain(text).split())
    assert f"! epsilon {epsilons[0]} of some protects nothing: a guess is right" in words
    assert "of much protects" not in words
    assert "epsilon: of the weights sent in one whole run, for a client, at delta = 0.001" in words
    assert "runs on the same data (seeds, grids, repetitions) add up" in words
    assert "epsilon of weighted: none: noise at the server is sized for a plain mean" in words


def test_terminal_table_continues_below_where_its_columns_do_not_fit(tmp_path):
    method = {"name": "fedavg", "label": "some noise", "aggregator": {"name": "mean", "by": "clients"}}
    noise = {"name": "noise", "clip": 1.0, "side": "server", "multiplier": 2.0}
    sent = {"up": {"weights": 5 * 10**9}, "down": {"weights": 7 * 10**9}, "seconds": {"train": 90_000.0}}
    runs = []
    for seed, accuracy in ((0, 0.55), (1, 0.65)):
        records = [record(0, 0.1), *(record(r, accuracy, cohort=[0, 1], **sent) for r in (1, 2))]
        more = {"protection": noise, "delta": 1e-3, "target": 0.6, "seed": seed}
        runs.append(write_run(tmp_path / f"run{seed}", records, method=method, **more))

    wide, narrow = (plain(printed(runs, width)) for width in (120, 80))

    assert "…" not in narrow
    assert max(map(len, narrow.splitlines())) <= 80
    assert [len(re.findall(r"^ ?method ", text, re.M)) for text in (wide, narrow)] == [1, 2]
    assert [text.count("some noise") for text in (wide, narrow)] == [1, 2]
    assert {*wide.replace("─", "").split()} == {*narrow.replace("─", "").split()}


def test_nothing_to_compare_is_refused():
    with pytest.raises(FedblendError, match="no runs given"):
        compare([])
