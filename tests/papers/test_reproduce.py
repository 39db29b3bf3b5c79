"""Items of papers: running, resuming, pages, and the command."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli_helpers import here
from helpers import each, experiment, slow_except
from reproduce_helpers import RUNNABLE, result_of

import fedblend
from fedblend.analysis.attacks.snapshot import RoundSnapshot
from fedblend.core import registry
from fedblend.core.errors import FedblendError, Stopped
from fedblend.core.record import RoundRecord
from fedblend.data.loaders import cifar
from fedblend.experiment.config import Experiment
from fedblend.papers import formatting
from fedblend.papers.items import all_papers
from fedblend.papers.measures import (
    Accuracy,
    AccuracyAt,
    AfterTraining,
    AttackFigure,
    CellRun,
    Clients,
    Costs,
    Devices,
    LabelAccuracy,
    RoundsTo,
    SamplePrivacy,
)
from fedblend.papers.memory import most_kept
from fedblend.papers.plan import ItemPlan, plan_item
from fedblend.papers.result import (
    COMMITTED,
    OutputPaths,
    Values,
    as_json,
    command,
    contradicted_data,
    judged_claims,
    read_result,
    write_result,
)
from fedblend.papers.result import RESULT as RESULT_FILE
from fedblend.papers.run_item import missing_reason, run_item
from fedblend.papers.verdicts import judge_result
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import Outcome, read


class Counted:
    """Counts the runs that are started."""

    def __init__(self) -> None:
        self.runs: list[str] = []

    @contextmanager
    def __call__(self, experiments: dict[str, Experiment], made: Mapping[str, int]) -> Iterator[Any]:
        self.runs += experiments
        yield lambda slug, record: None


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all items, since they share runs."""
    return tmp_path_factory.mktemp("reproductions")


def at_smoke(name: str, **options: Any) -> ItemPlan:
    return plan_item(name, "smoke", **options)


def made(name: str, out: Path, shown: Counted | None = None, **options: Any) -> dict[str, Any]:
    """The result of an item at the smallest scale."""
    return run_item(at_smoke(name, **options), out, shown or Counted(), jobs=1)


QUICK_ITEMS = ["fedmix/table-15", "aggenhance/figure-16", "xormixfl/table-2"]


@pytest.mark.parametrize("name", slow_except(QUICK_ITEMS, RUNNABLE))
def test_every_item_runs_at_smoke(name: str, out: Path) -> None:
    plan = at_smoke(name)
    if lacking := {reason for cell in plan.cells if (reason := missing_reason(cell.experiment.data))}:
        pytest.skip("; ".join(lacking))

    result = made(name, out)

    assert not result["faults"]
    assert len(result["claims"]) == len(plan.item.claims)
    for quantity in result["quantities"].values():
        assert any(cell["ours"] for cell in quantity["cells"]) or "n_k" in quantity["label"]
        for value in (value for cell in quantity["cells"] for value in cell["ours"].values()):
            assert not str(value).endswith(".png") or (OutputPaths(out, plan).folder / value).is_file()
    assert f"# {plan.id}" in formatting.markdown(result)


def test_what_is_made_is_not_made_again_and_further_seeds_are_added(out: Path) -> None:
    again, more = Counted(), Counted()
    made("fedmix/table-15", out)

    one = made("fedmix/table-15", out, again)
    two = made("fedmix/table-15", out, more, seeds=[1])

    assert again.runs == []
    assert len(more.runs) == 2
    assert (one["seeds"], two["seeds"]) == ([0], [0, 1])


def test_numbers_from_another_machine_are_kept_without_their_runs(tmp_path: Path) -> None:
    elsewhere, here_too, changed = Counted(), Counted(), Counted()
    one = made("fedmix/table-15", tmp_path / "elsewhere", elsewhere)
    for folder in ("here", "changed"):
        (tmp_path / folder / "fedmix/table-15/smoke").mkdir(parents=True)
    (tmp_path / "here/fedmix/table-15/smoke" / RESULT_FILE).write_text(json.dumps(one))

    both = made("fedmix/table-15", tmp_path / "here", here_too, seeds=[0, 1])

    assert len(elsewhere.runs) == 2
    assert all(name.endswith("seed1") for name in here_too.runs)
    assert len(here_too.runs) == 2
    values = [cell["ours"] for cell in both["quantities"]["accuracy"]["cells"] if cell["ours"]]
    assert [sorted(value) for value in values] == [["0", "1"]] * 2

    # One number of two that was made otherwise: its experiment is run.
    one["quantities"]["accuracy"]["cells"][0]["made_by"] = "otherwise"
    (tmp_path / "changed/fedmix/table-15/smoke" / RESULT_FILE).write_text(json.dumps(one))
    made("fedmix/table-15", tmp_path / "changed", changed)
    assert len(changed.runs) == 1


def test_only_keeps_rows_and_columns_and_refuses_others() -> None:
    plan = plan_item("fedmix/table-1", "laptop", only=["fedmix", "cifar100", "fedavg"])

    assert [(cell.row, cell.column) for cell in plan.cells_to_run] == [("fedavg", "cifar100"), ("fedmix", "cifar100")]
    assert len(plan.cells) == 27  # shown beside the scale's own rows and columns
    with pytest.raises(FedblendError, match=r"--only fedmx: no such row or column \(did you mean 'fedmix'\?\)"):
        plan_item("fedmix/table-1", only=["fedmx"])
    by_label = at_smoke("fedmix/table-1", only=["FedAvg", "cifar10"])
    assert by_label.only == ("fedavg", "cifar10")
    assert [(cell.row, cell.column) for cell in by_label.cells_to_run] == [("fedavg", "cifar10")]


def test_what_only_adds_joins_what_is_there_unless_that_was_made_otherwise(tmp_path: Path) -> None:
    first, both = (made("mix2fld/table-2", tmp_path, only=[column]) for column in ("0.01", "0.1"))

    cells = [result["quantities"]["privacy"]["cells"] for result in (first, both)]
    assert [bool(cell["ours"]) for cell in cells[0]] == [True, False]
    assert [bool(cell["ours"]) for cell in cells[1]] == [True, True]
    assert cells[1][0]["ours"] == cells[0][0]["ours"]
    # Which is the whole table of this scale.
    assert first["command"].endswith("--scale smoke --only 0.01")
    assert both["command"].endswith("--scale smoke")

    cells[1][0] |= {"ours": {"0": 1.0}, "made_by": "otherwise"}
    (tmp_path / "mix2fld/table-2/smoke" / RESULT_FILE).write_text(json.dumps(both | {"minutes": 7.5}))
    again = made("mix2fld/table-2", tmp_path, only=["0.1"])
    assert again["quantities"]["privacy"]["cells"][0]["ours"] == {}
    assert 7.5 <= again["minutes"] < 8.5


@pytest.mark.slow
def test_numbers_beyond_the_scales_own_table_stay(tmp_path: Path) -> None:
    def command_of(value: float, *only: str) -> dict[str, Any]:
        plan = plan_item("fedmix/table-1", "laptop", only=only)
        new = {("accuracy", cell.row, cell.column): {0: value} for cell in plan.cells_to_run}
        return write_result(OutputPaths(tmp_path, plan), {}, {}, new, 1.0)

    beyond = ("localmix", "cifar100")
    assert beyond not in plan_item("fedmix/table-1", "laptop").usual
    command_of(70.0, *beyond)
    command_of(71.0, "fedavg", "cifar10")
    last = command_of(72.0, "fedmix", "femnist")

    cells = {(c["row"], c["column"]): c["ours"] for c in last["quantities"]["accuracy"]["cells"]}
    assert {key: ours["0"] for key, ours in cells.items() if ours} == {
        beyond: 70.0,
        ("fedavg", "cifar10"): 71.0,
        ("fedmix", "femnist"): 72.0,
    }
    assert cells.keys() - {beyond} == plan_item("fedmix/table-1", "laptop").usual
    assert beyond[1] in last["columns"]
    assert "--only cifar100" in last["command"]


def test_a_claim_about_a_spread_needs_the_whole_table_of_the_scale() -> None:
    plan = plan_item("fedmix/table-12")
    (place,) = [i for i, claim in enumerate(plan.item.claims) if claim.holds.startswith("spread:")]
    values: Values = {("accuracy", "fedmix", cell.column): {0: 70.0, 1: 70.0} for cell in plan.cells}

    assert judged_claims(plan, values)[place]["verdict"] == "holds"
    values.popitem()
    assert judged_claims(plan, values)[place]["verdict"] == "not measured"


def test_a_small_run_whose_upper_bound_contradicts_the_large_one_is_not_comparable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Global Mixup is 5 points above FedAvg at the paper's scale; in small 6 below, but on CIFAR10 above there, too."""
    monkeypatch.setattr(fedblend.papers.result, "COMMITTED", tmp_path)
    (tmp_path / "fedmix").mkdir()

    def write(scale: str, femnist: float, seeds: int) -> None:
        ours = {("fedavg", column): [number] * seeds for column, number in (("femnist", 70.0), ("cifar10", 80.0))}
        above = {"femnist": femnist, "cifar10": 90.0}
        ours |= {("global", column): [at + seed / 10 for seed in range(seeds)] for column, at in above.items()}
        result = result_of(ours, "accuracy")
        (tmp_path / "fedmix" / f"table-1-{scale}.json").write_text(json.dumps(result))
        contradicted_data.cache_clear()

    values: Values = {
        ("accuracy", row, column): {0: number, 1: number + 1}
        for column in ("femnist", "cifar10")
        for row, number in (("fedmix", 60.0), ("localmix", 50.0))
    }
    plan = plan_item("fedmix/table-1", "laptop", only=["fedmix", "localmix"])
    above = next(i for i, claim in enumerate(plan.item.claims) if claim.holds == "fedmix > localmix")
    try:
        for bound, seeds, comparable in ((64.0, 3, False), (64.0, 1, True), (76.0, 3, True)):
            write("paper", 75.0, 3)
            write("laptop", bound, seeds)
            claim = judged_claims(plan, values)[above]
            assert [*claim["places"]] == (["femnist", "cifar10"] if comparable else ["cifar10"])
            assert claim.get("not_comparable", []) == ([] if comparable else ["femnist"])
        write("laptop", 64.0, 3)
        alone = plan_item("fedmix/table-12", "laptop")
        (claim, *_) = judged_claims(alone, {("accuracy", cell.row, cell.column): {0: 70.0} for cell in alone.cells})
        assert (claim["verdict"], claim["places"]) == ("not comparable", {})
        result = result_of({}, "accuracy")
        assert judge_result(result, claim).word == "not comparable"
        assert formatting.verdict_text(claim, result).startswith("not comparable (the upper bound is the other way")
    finally:
        contradicted_data.cache_clear()


def test_up_to_is_judged_in_the_best_column_of_a_whole_row() -> None:
    plan = plan_item("xormixfl/table-2", seeds=())
    gain = next(i for i, claim in enumerate(plan.item.claims) if claim.says.startswith("The same to the number"))
    columns = [*plan.item.all_columns]
    values: Values = {("accuracy", "vanilla", column): {0: 50.0} for column in columns}
    values |= {("accuracy", "xormixfl", column): {0: 51.0 + 10 * (column == "4,8")} for column in columns}

    claim = judged_claims(plan, values)[gain]
    assert (claim["verdict"], claim["places"]) == ("holds", {"4,8": [True, 4.45]})  # 61 / 50 is 22 %, 4.45 above 17.55
    del values["accuracy", "xormixfl", "0"]
    assert judged_claims(plan, values)[gain]["verdict"] == "not measured"


def test_cells_of_one_experiment_are_run_once() -> None:
    cells = plan_item("aggenhance/figure-8").cells

    assert len({cell.fingerprint for cell in cells}) == 1
    assert len({cell.fingerprint for cell in plan_item("fedmix/table-5").cells}) == 8


class Interrupting(Counted):
    """Stops as Ctrl-C does where ``ends``, which is given the runs with a record so far and the newest record."""

    def __init__(self, ends: Callable[[set[str], RoundRecord], bool]) -> None:
        super().__init__()
        self.ends = ends

    @contextmanager
    def __call__(self, experiments: dict[str, Experiment], made: Mapping[str, int]) -> Iterator[Any]:
        def listen(slug: str, record: RoundRecord) -> None:
            self.runs.append(slug)
            if self.ends(set(self.runs), record):
                raise KeyboardInterrupt

        yield listen


def test_ctrl_c_keeps_what_was_made_and_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(Stopped, match=r"Go on with: fedblend reproduce fedmix/table-17 --scale smoke --out"):
        made("fedmix/table-17", tmp_path, Interrupting(lambda runs, _: len(runs) == 2))
    partial = read_result(tmp_path, "fedmix", "table-17", "smoke")
    second = Counted()
    whole = made("fedmix/table-17", tmp_path, second)

    assert sum(bool(cell["ours"]) for cell in partial["quantities"]["accuracy"]["cells"]) == 1
    assert len(second.runs) == 1
    assert all(cell["ours"] for cell in whole["quantities"]["accuracy"]["cells"])


def test_a_target_reached_by_a_run_that_was_interrupted_counts_and_its_last_accuracy_does_not(tmp_path: Path) -> None:
    plan = at_smoke("aggenhance/table-1", only=["fedavg"])
    plan.measures["after-15", "fedavg", "mnist"] = AccuracyAt(round=1)
    with pytest.raises(Stopped):
        run_item(plan, tmp_path, Interrupting(lambda _, record: record.round == 2), jobs=1)
    result = read_result(tmp_path, "aggenhance", "table-1", "smoke")
    kept = result["quantities"]

    assert [cell["ours"] for cell in kept["rounds"]["cells"] if cell["row"] == "fedavg"] == [{"0": 1.0}]
    assert [len(cell["ours"]) for cell in kept["after-15"]["cells"] if cell["row"] == "fedavg"] == [1]
    assert not any(cell["ours"] for cell in kept["accuracy"]["cells"])
    assert "Stopped early: some values are missing." in formatting.heading(result)


def cell_of(folder: Path, records: list[RoundRecord], target: float | None = None) -> CellRun:
    """A cell with a run of these records, which was stopped."""
    one = at_smoke("aggenhance/table-1").cells_to_run[0].experiment
    cell = CellRun(one.model_copy(update={"target": target}), None, folder, lambda what, done, total: None)
    vars(cell)["outcome"] = Outcome(folder, {"rounds": 9}, records, {"state": "stopped"}, {})
    return cell


def test_places_on_a_curve_are_means_up_to_there_and_settled_once_they_are_reached(tmp_path: Path) -> None:
    records = [RoundRecord(n, loss=1.0, accuracy=n / 10) for n in range(6)]  # 0 is the untrained model

    def cell_run(target: float) -> CellRun:
        return cell_of(tmp_path, records, target)

    assert AccuracyAt(round=3, last=2).measured(cell_run(0.5)) == pytest.approx(25)
    assert AccuracyAt(round=1, last=5).measured(cell_run(0.5)) == pytest.approx(10)
    assert [AccuracyAt(round=n).is_settled(cell_run(0.5)) for n in (4, 5, 6)] == [True, True, False]
    assert RoundsTo(last=2).measured(cell_run(0.44)) == 5
    assert [RoundsTo(last=2).is_settled(cell_run(target)) for target in (0.44, 0.46)] == [True, False]
    assert not Accuracy().is_settled(cell_run(0.5))


def test_costs_are_of_all_rounds_to_the_first_evaluated_one_after_training_that_reached_the_target(
    tmp_path: Path,
) -> None:
    # Seeds are sent before the first round, which is round 1, and every second round is evaluated.
    records = [RoundRecord(0, loss=1.0, accuracy=0.1, bytes_up={"seeds": 5})]
    records += [
        RoundRecord(n, loss=1.0, accuracy=None if n % 2 else n / 10, bytes_up={"weights": 10}) for n in range(1, 7)
    ]

    def up_to(target: float) -> float:
        return Costs(figure="bytes_up", until_target=True).measured(cell_of(tmp_path, records, target))

    assert [up_to(target) for target in (0.1, 0.2, 0.3, 0.7)] == [25, 25, 45, math.inf]


def test_labels_without_test_samples_have_no_accuracy(tmp_path: Path) -> None:
    cell = cell_of(tmp_path, [RoundRecord(1, loss=1.0, accuracy=0.5, per_class=[0.5, None, 0.75])])

    assert LabelAccuracy(labels=(0, 2)).measured(cell) == 62.5
    assert LabelAccuracy(labels=(0, 1)).measured(cell) is None


def test_the_variance_over_devices_does_not_depend_on_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CellRun, "cached", lambda *_: {"accuracy": [0.7, 0.8]})

    # Deviations of 5 points from the mean: 50 over N - 1 = 1.
    assert Devices(figure="variance").measured(cell_of(tmp_path, [])) == pytest.approx(50)


@pytest.mark.parametrize("engine", slow_except(["loop"], ["loop", "stacked"]))
def test_clients_are_tested_with_the_model_that_each_has_after_training(engine: str, tmp_path: Path) -> None:
    def measured(lr: float) -> tuple[float, float]:
        one = experiment(
            partition={"name": "classes", "clients": 6, "classes_per_client": 1, "samples": 40},
            holdout=0.25,
            rounds=1,
            engine=engine,
            train={"cohort": 2, "epochs": 5, "lr": lr},
        )
        folder = tmp_path / f"{lr}"
        fedblend.run(one, folder / "run")
        cell = CellRun(one, folder / "run", folder, lambda *_: None)
        after, of_global = AfterTraining().measured(cell), Clients().measured(cell)
        assert of_global is not None
        return after, of_global

    # A client of one class answers with its class after training; without a step it has the global model.
    after, of_global = measured(0.3)
    assert after == 100
    assert of_global < 100
    after, of_global = measured(1e-30)
    assert after == pytest.approx(of_global)


RESULT: dict[str, Any] = {
    "item": "p/t",
    "title": "a table",
    "scale": "laptop",
    "command": "fedblend reproduce p/t --scale laptop",
    "smaller": ["rounds: 2, not 4"],
    "other_data": ["digits for cifar10"],
    "absent": ["cifar10"],
    "faults": {},
    "note": "",
    "seeds": [0, 1],
    "facts": {},
    "rows": {"a": "A", "b": "B"},
    "columns": {"x": "X"},
    "quantities": {
        "q": {
            "label": "Accuracy",
            "unit": "%",
            "digits": 1,
            "cells": [
                {"row": "a", "column": "x", "ours": {"0": 80.0, "1": 82.0}, "paper": 81.2, "paper_std": 0.5},
                {"row": "b", "column": "x", "ours": {"0": "never", "1": 70.0}, "paper": None, "paper_std": None},
            ],
        }
    },
    "claims": [
        {
            "says": "A above B",
            "holds": "a > b",
            "of": "q",
            "verdict": "holds",
            "places": {"x": [True, 11.0]},
            "seeds": [2, 2],
            "paper": "holds",
        }
    ],
}


def test_a_page_shows_ours_the_papers_number_and_the_verdict() -> None:
    lines = formatting.markdown(RESULT).splitlines()

    assert "| A | 81.0 ± 1.4 (81.2 ± 0.5) |" in lines
    assert "| B | 70.0 (1 of 2) |" in lines
    assert "| A above B | holds (by +11), 2 of 2 seeds and places: within noise, on other data |" in lines
    assert "Scaled down: rounds: 2, not 4." in lines
    assert "On other data: digits for cifar10." in lines
    assert "Data not at hand: cifar10." in lines


def test_a_page_shows_pictures_and_the_command_names_what_was_asked_for() -> None:
    cell = {"row": "a", "column": "x", "ours": {"0": "work/seeds.png"}, "paper": None, "paper_std": None}
    quantity = {"label": "Samples", "unit": "", "digits": 1, "cells": [cell]}

    page = formatting.markdown({**RESULT, "quantities": {"q": quantity}, "claims": []})
    words = command(plan_item("xormixfl/table-2", "smoke", only=["standalone", "0,2,4,8"]), Path("reproductions"))

    assert "| A | ![A](work/seeds.png) |" in page.splitlines()
    assert words == "fedblend reproduce xormixfl/table-2 --scale smoke --seeds 0 --only standalone --only 0,2,4,8"


@pytest.mark.parametrize(
    ("psnrs", "mses", "mean", "text"),
    [
        ([None, 10.0], [0.01, 0.1], math.inf, "∞"),
        ([None], [0.0], math.inf, "∞"),
        ([10.0, 20.0], [0.1, 0.01], 15.0, "15.0"),
    ],
)
def test_the_mean_psnr_with_an_exactly_rebuilt_image_is_infinite(
    psnrs: list[float | None],
    mses: list[float],
    mean: float,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshot = SimpleNamespace(round=0, task=SimpleNamespace(sizes=np.array([9] * len(psnrs))))
    monkeypatch.setattr(RoundSnapshot, "load", lambda *_: snapshot)
    tables = iter({"mse": m, "psnr": p, "ssim": 1.0, "cost": 0.0} for p, m in zip(psnrs, mses, strict=True))
    monkeypatch.setattr(AttackFigure, "_attack_client", lambda *_: next(tables))
    cell = CellRun(experiment(), tmp_path, tmp_path, lambda *_: None)
    vars(cell)["outcome"] = SimpleNamespace(round=0)

    found = AttackFigure(figure="psnr").measured(cell)

    assert found == mean
    assert formatting.ours_text({"0": as_json(found, AttackFigure.infinite)}, 1) == text


def test_an_infinite_number_without_a_target_is_written_and_read_back(tmp_path: Path) -> None:
    plan = at_smoke("fed-augmix/table-2")
    key = next(key for key in plan.measures if key[0] == "psnr")
    for new in ({key: {0: math.inf, 1: 9.0}}, {}):
        result = write_result(OutputPaths(tmp_path, plan), {}, {}, new, 0.0)
        cells = result["quantities"]["psnr"]["cells"]
        (ours,) = [cell["ours"] for cell in cells if (cell["row"], cell["column"]) == key[1:]]
        assert ours == {"0": "∞", "1": 9.0}
    assert formatting.ours_text(ours, 1) == "∞"
    assert formatting.mean_over_seeds(ours) == math.inf


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_measure_without_a_number_is_a_fault(value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SamplePrivacy, "measured", lambda *_: value)

    result = made("mix2fld/table-2", tmp_path, only=["0.01"])

    assert f"the value is {value}" in " ".join(result["faults"].values())
    assert not any(cell["ours"] for cell in result["quantities"]["privacy"]["cells"])


def test_a_cell_of_fewer_seeds_than_others_says_which() -> None:
    assert formatting.ours_text({"1": 2.0, "2": 4.0}, 1, [0, 1, 2]) == "3.0 ± 1.4 [seeds 1, 2]"
    assert formatting.ours_text({"1": 2.0}, 1, [0, 1]) == "2.0 [seed 1]"
    assert formatting.ours_text({"1": 2.0, "2": 4.0}, 1, [1, 2]) == "3.0 ± 1.4"


def test_data_that_cannot_be_fetched_end_an_item_before_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedblend.data.loaders import mnist

    def no_net(*asked: Any) -> Path:
        raise FedblendError("mnist: cannot fetch it")

    monkeypatch.delenv("FEDBLEND_DATA", raising=False)
    monkeypatch.setattr(mnist, "local_files", lambda *asked: None)
    monkeypatch.setattr(mnist, "_download", no_net)

    with pytest.raises(FedblendError, match="fed-augmix/table-3: mnist: cannot fetch it"):
        run_item(plan_item("fed-augmix/table-3", "laptop"), tmp_path, None)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_items_share_the_attacks_on_an_experiments_clients_however_many_they_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantities = {"fed-augmix/figure-4": "mse", "fed-augmix/figure-3": "picture"}
    attacks: list[tuple[int, Path]] = []

    def attack(measure: Any, cell: CellRun, folder: Path) -> dict[str, Any]:
        attacks.append((measure.clients, folder))
        return {"mse": 1.0, "clients": [0]}

    monkeypatch.setattr(AttackFigure, "_attack", attack)
    for name, quantity in quantities.items():
        plan = plan_item(name, "laptop")
        output = OutputPaths(tmp_path, plan)
        cell = next(cell for cell in plan.cells if (cell.row, cell.column) == ("untrained", "10.0"))
        cell_run = CellRun(cell.seeded(0), None, output.work_folder(cell, 0), lambda *_: None)
        value = plan.measures[quantity, cell.row, cell.column].measured(cell_run)
        picture = output.relative_value(value, cell_run.folder)

    (many, first_folder), (one, second_folder) = attacks
    assert many > one
    assert first_folder == second_folder
    assert (output.folder / picture).resolve() == (first_folder / "client0/images.png").resolve()


def test_the_most_that_a_backward_pass_keeps_is_counted_once_and_let_go() -> None:
    import torch

    x = torch.zeros(250, requires_grad=True)

    assert most_kept(lambda: [x.exp().sum().backward() for _ in range(3)]) == 1000
    assert most_kept(lambda: (x.exp() * x.sin()).sum().backward()) == 3000  # x, sin, and exp, which is saved twice


def test_the_command_prints_the_table_and_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    output = here("reproduce", "mix2fld/table-2", "--scale", "smoke")

    assert output.code == 0
    assert "On other data: digits for mnist" in output.out
    assert "Privacy grows with lambda" in output.out
    folder = tmp_path / "reproductions/mix2fld/table-2/smoke"
    assert json.loads((folder / "result.json").read_text())["item"] == "mix2fld/table-2"
    assert (folder / "table.md").read_text().startswith("# mix2fld/table-2")


@each(
    ("words", "message"),
    [
        (["fedmix/tabel-1"], "did you mean 'fedmix/table-1'?"),
        (["fedmix"], "fedblend reproduce --list fedmix"),
        (["fedmix/table-1", "--scale", "small"], "valid: paper, laptop, smoke"),
        (["fedmix/table-1", "--only", "fedmx"], "did you mean 'fedmix'?"),
        (["--list", "fedmx"], "did you mean 'fedmix'?"),
        ([], "name an item"),
    ],
)
def test_a_mistyped_word_gets_the_right_one_suggested(words: list[str], message: str) -> None:
    output = here("reproduce", *words)

    assert output.code == 2
    assert message in output.err


def test_the_list_has_every_item_its_data_and_results_with_their_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    made("mix2fld/table-2", tmp_path, only=["0.01"])

    output = here("reproduce", "--list", "mix2fld", "--out", str(tmp_path)).out

    assert max(map(len, output.splitlines())) <= 100
    for name in all_papers()["mix2fld"].items:
        assert f"mix2fld/{name}" in output
    assert "smoke 4/8 (1 min)" in output
    # What the checkout holds is no "none".
    for path in (COMMITTED / "mix2fld").glob("*-paper.json"):
        (line,) = (one for one in output.splitlines() if one.startswith(f"mix2fld/{path.stem.removesuffix('-paper')} "))
        assert re.search(r"paper( \d+/\d+)?\^", line), line

    # In a narrow terminal titles and data wrap; nothing is cut off.
    monkeypatch.setenv("COLUMNS", "60")
    narrow = here("reproduce", "--list", "mix2fld", "--out", str(tmp_path)).out
    assert max(map(len, narrow.splitlines())) <= 60
    assert "…" not in output + narrow
    assert narrow.split()[:4] == ["item", "what,", "data", "results"]
    for name, item in all_papers()["mix2fld"].items.items():
        assert f"mix2fld/{name} " in narrow
        for word in item.title.split():
            assert word in narrow


def test_a_result_without_differences_or_verdicts_says_why() -> None:
    no_number, numbers = ({"q": {"cells": [{"paper": one}]}} for one in (None, 1.0))
    unmeasured = [{"verdict": "not measured"}, {"verdict": "holds"}]

    assert formatting.absences({"quantities": numbers, "claims": unmeasured[1:]}) == []
    pictures = formatting.absences({"quantities": no_number, "claims": []})
    assert [line.partition(":")[0] for line in pictures] == ["No differences", "No verdicts"]
    (line,) = formatting.absences({"quantities": numbers, "claims": unmeasured, "scale": "smoke"})
    assert line.startswith("1 of 2 claims not measured")
    assert "--scale laptop" in line


def test_a_result_keeps_curves_of_another_machine_and_no_facts_on_data_that_no_cell_has(tmp_path: Path) -> None:
    plan = at_smoke("fedmix/table-15", only=["1"])
    first = made("fedmix/table-15", tmp_path, only=["1"])
    output = OutputPaths(tmp_path, plan)
    (cell,) = [one for one in plan.cells if (one.row, one.column) == ("fedmix", "1")]
    outcome = read(RunDirectory(output.all_runs(cell)[0]))

    (curve,) = [one for one in first["curves"] if (one["row"], one["column"]) == ("fedmix", "1")]
    assert curve["rounds"] == [record.round for record in outcome.evaluated]
    assert curve["accuracy"] == [round(record.accuracy, 5) for record in outcome.evaluated]
    assert curve["seconds"] == round(sum(sum(one.machine["seconds"].values()) for one in outcome.records), 1)

    shutil.rmtree(output.folder / "runs")
    assert run_item(plan, tmp_path, Counted(), jobs=1)["curves"] == first["curves"]
    assert list(first["facts"]["data"]) == ["digits"]
    first["facts"]["data"]["fashion-mnist"] = {}
    changed = first | {"curves": [curve | {"experiment": "another"}]}
    (output.folder / RESULT_FILE).write_text(json.dumps(changed))
    again = run_item(plan, tmp_path, Counted(), jobs=1)
    assert again["curves"] == []
    assert list(again["facts"]["data"]) == ["digits"]


def test_a_data_set_with_all_its_files_is_not_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path))
    data = registry.build("dataset", "cifar10", "data")
    assert missing_reason(data).startswith("data: 'cifar10' needs data_batch_1.bin")

    place = tmp_path / cifar.CIFAR10.folders[0]
    place.mkdir(parents=True)
    for name in cifar.CIFAR10.files:
        (place / name).touch()

    assert missing_reason(data) == ""
