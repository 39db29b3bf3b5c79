"""The committed results, the commands that make them, and the pages made from them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import each
from script_helpers import ROOT, script

from fedblend.papers.plan import plan_item
from fedblend.papers.result import kept_values

pytestmark = pytest.mark.slow

RESULTS = sorted((ROOT / "evidence" / "results").glob("*/*.json"))
STUDIES = {path.stem: path for path in RESULTS if path.parent.name == "studies"}


@pytest.fixture(scope="module")
def run() -> ModuleType:
    """evidence/run.py."""
    return script("evidence/run.py")


def words_in_a_shell(line: str) -> list[str]:
    """The words that a POSIX shell makes of a line, where FEDBLEND_DATA is /some where."""
    written = subprocess.run(
        ["sh", "-c", f"printf '%s\\0' {line}"],
        env={"FEDBLEND_DATA": "/some where"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return written.split("\0")[:-1]


def test_every_table_of_the_pages_is_made_from_the_committed_results() -> None:
    pages = script("evidence/pages.py")
    for path in pages.PAGES:
        assert pages.filled(path) == path.read_text()


def test_every_figure_is_on_a_page_and_small() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    for path in (ROOT / "docs" / "figures").iterdir():
        assert f"figures/{path.name}" in pages
        assert path.stat().st_size <= 300_000


def test_figures_are_drawn_from_the_committed_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = script("evidence/pages.py")
    monkeypatch.setattr(sys.modules["tables.common"], "FIGURES", tmp_path)
    for draw in pages.DRAWINGS:
        draw()
    drawn = [*tmp_path.iterdir()]
    assert {path.name for path in drawn} <= {path.name for path in (ROOT / "docs" / "figures").iterdir()}
    assert all(path.read_text().startswith("<svg") for path in drawn)


def test_links_of_tables_lead_to_files_from_every_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = script("evidence/pages.py")
    links = "[a](b.md#c), ![d](figures/e.png), [f](#g), [h](https://i.org)"
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    monkeypatch.setattr(pages, "TABLES", {"links": lambda: links})
    (tmp_path / "results").mkdir()
    for name in ("top.md", "results/below.md"):
        (tmp_path / name).write_text("<!-- links -->\n<!-- end -->")

    assert links in pages.filled(tmp_path / "top.md")
    below = "[a](../b.md#c), ![d](../figures/e.png), [f](#g), [h](https://i.org)"
    assert below in pages.filled(tmp_path / "results" / "below.md")


def test_a_shell_reads_the_words_back_with_the_variable_replaced(run: ModuleType) -> None:
    words = ["fedblend", "--set", "a=$FEDBLEND_DATA/x y", "it's", 'a "b" `c` \\', '$FEDBLEND_DATA "b" `c` \\d\\', ""]
    read = words_in_a_shell(run.shell_line(words))
    assert read == [word.replace("$FEDBLEND_DATA", "/some where") for word in words]
    assert run.shell_line(["--set", "a=$B/c", "d=1", "1,2"]) == '--set "a=$B/c" d=1 1,2'


def test_the_baselines_of_both_data_sets_have_one_grid(run: ModuleType) -> None:
    given = tomllib.loads(next(word for word in run.GRID if word.startswith("tune=")))["tune"]
    asked = tomllib.loads((ROOT / "evidence/studies/baselines-cifar10.toml").read_text())["tune"]
    personal = {"method.terms.prototypes.lambda", "method.personal.lambda"}
    assert given == {**asked, "fields": {key: asked["fields"][key] for key in asked["fields"] if key not in personal}}


def test_every_committed_study_has_the_command_that_makes_it(run: ModuleType) -> None:
    assert set(STUDIES) <= {*run.STUDIES, *run.FUNCTIONS}  # a study may wait for its run
    for name, path in STUDIES.items():
        command = json.loads(path.read_text())["command"]
        if name in run.STUDIES:
            assert command == run.shell_line(["fedblend", *run.STUDIES[name]])
            (file,) = [word for word in run.STUDIES[name] if word.endswith(".toml")]
            assert (ROOT / file).is_file()
        else:
            assert command == f"python evidence/run.py {name}"


def test_every_study_file_belongs_to_a_study(run: ModuleType) -> None:
    named = {
        Path(word).name for words in run.STUDIES.values() for word in words if word.startswith("evidence/studies/")
    }
    files = {path.name for path in (ROOT / "evidence" / "studies").iterdir()}
    # A figure, and two tables of docs/results/selection.md; the commands stand in the files.
    assert files - named == {"xormixfl-pictures.toml", "selection.toml", "slow.toml"}


@each("path", RESULTS)
def test_a_committed_result_has_a_command_a_commit_and_todays_verdicts_on_its_numbers(
    path: Path, run: ModuleType
) -> None:
    result = json.loads(path.read_text())

    assert not [word for word in words_in_a_shell(result["command"]) if "$" in word]
    assert re.fullmatch(r"[0-9a-f]{8}\+?", result["commit"])
    if path.parent.name != "studies":
        assert path.relative_to(ROOT / "evidence/results").as_posix() == f"{result['item']}-{result['scale']}.json"
        assert run.judged_again(path, {})["claims"] == result["claims"]


def test_every_committed_item_is_made_by_reproduce(run: ModuleType) -> None:
    assert all(words[0] == "reproduce" for words in run.committed_commands())
    assert len(run.committed_commands()) == len(RESULTS) - len(STUDIES)


def test_every_deciding_run_is_an_item_that_can_be_planned_and_decides(run: ModuleType) -> None:
    runs = run.deciding_runs()

    assert [one["hours"] for one in runs.values()] == sorted(one["hours"] for one in runs.values())
    for one in runs.values():
        plan = plan_item(one["item"], one["scale"], one["seeds"], one.get("only", ()))
        assert plan.cells_to_run
        assert plan.item.claims
        assert one["decides"]


def test_rows_and_columns_may_be_named_one_by_one(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(run, "remake_item", made.append)
    monkeypatch.setattr("sys.argv", ["run.py", "fedmix/table-1", "--only", "fedavg", "--only", "fedmix", "femnist"])

    run.main()

    assert made[0][-6:] == ["--only", "fedavg", "--only", "fedmix", "--only", "femnist"]


def test_a_deciding_run_is_made_by_its_command(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(run, "remake_item", made.append)

    run.make_deciding(["fed-augmix-accuracy"])

    assert [" ".join(words) for words in made] == [
        "reproduce fed-augmix/table-3 --scale paper --seeds 0,1,2 --only mnist"
    ]
    with pytest.raises(SystemExit, match=r"unknown deciding run 'nothing'; valid: .*fed-augmix-accuracy, "):
        run.make_deciding(["nothing"])


def write(path: Path, quantity: str, cells: dict[str, tuple[str, dict[str, float]]], **more: Any) -> None:
    """Write a result of one column: what made each row, and its numbers by seed."""
    rows = [{"row": row, "column": "cifar10", "made_by": by, "ours": ours} for row, (by, ours) in cells.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"quantities": {quantity: {"cells": rows}}, **more}))


def test_a_new_result_never_drops_numbers_of_the_committed_one_and_names_the_commit_of_its_newest(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(run, "commit_of_code", lambda: "new")
    committed, made = tmp_path / "fedmix" / "table-1-laptop.json", tmp_path / "new" / "result.json"
    both = {"fedavg": ("a", {"0": 70.0}), "fedmix": ("a", {"0": 71.0})}
    write(committed, "accuracy", both, commit="old")
    before = committed.read_text()

    write(made, "accuracy", {"fedmix": ("a", {"0": 72.0, "1": 73.0})})
    with pytest.raises(SystemExit, match=r"1 of its numbers .* the first of accuracy fedavg cifar10 seed 0"):
        run.commit_result(committed, made.parent)
    assert committed.read_text() == before

    changes = {"fedmix": ("a", {"0": 72.0, "1": 73.0})}
    for cells, commit in ((both, "old"), (both | changes, "new")):
        write(made, "accuracy", cells, note="in other words")
        run.commit_result(committed, made.parent)
        assert json.loads(committed.read_text()) == json.loads(made.read_text()) | {"commit": commit}


def test_the_commit_of_code_is_marked_where_the_code_was_changed(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert run.commit_of_code() == ""

    (tmp_path / "fedblend").mkdir()
    (tmp_path / "fedblend" / "loop.py").write_text("1")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for line in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *line], cwd=tmp_path, check=True)
    clean = run.commit_of_code()
    assert re.fullmatch("[0-9a-f]{8}", clean)
    (tmp_path / "notes.md").write_text("not code")
    assert run.commit_of_code() == clean
    (tmp_path / "fedblend" / "loop.py").write_text("2")
    assert run.commit_of_code() == f"{clean}+"


def test_lists_of_numbers_stand_on_one_line_and_are_read_back(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "commit_of_code", lambda: "new")
    result = {"rounds": [0, -1, 2], "loss": [1.5e-05, None], "says": "in [0, 1]", "none": [], "names": ["a", "b"]}

    run.write_result(tmp_path / "studies" / "a.json", result)

    text = (tmp_path / "studies" / "a.json").read_text()
    assert json.loads(text) == result | {"commit": "new"}
    assert '"rounds": [0, -1, 2],' in text


def test_an_item_takes_over_the_numbers_that_another_has_of_the_same_experiments(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    cells = {"fedavg": ("a", {"0": 7.0}), "other": ("b", {"0": 5.0}), "empty": ("a", {}), "none": ("c", {})}
    write(tmp_path / "aggenhance" / "table-1-laptop.json", "rounds", {"fedavg": ("a", {"0": 8.0, "3": 17.0})})
    write(tmp_path / "aggenhance" / "figure-6-laptop.json", "rounds", cells)

    run._seed_result("aggenhance/figure-6", "laptop", tmp_path / "new" / "result.json")

    made = json.loads((tmp_path / "new" / "result.json").read_text())["quantities"]["rounds"]["cells"]
    assert [cell["ours"] for cell in made] == [{"0": 7.0, "3": 17.0}, {"0": 5.0}, {"0": 8.0, "3": 17.0}, {}]


def test_an_item_without_a_result_takes_over_the_numbers_of_the_same_experiments(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The laptop scale of XorMixFL's Table 2 has some of its columns, at the paper's settings."""
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    plan = plan_item("xormixfl/table-2")
    cell = next(cell for cell in plan.cells if (cell.row, cell.column) == ("mixfl", "9"))
    made = {"row": "mixfl", "column": "9", "made_by": plan.provenance("accuracy", cell), "ours": {"0": 95.66}}
    (tmp_path / "xormixfl").mkdir()
    (tmp_path / "xormixfl" / "table-2-laptop.json").write_text(
        json.dumps({"quantities": {"accuracy": {"cells": [made]}}})
    )

    run._seed_result("xormixfl/table-2", "paper", tmp_path / "new" / "result.json")

    kept = kept_values(plan, json.loads((tmp_path / "new" / "result.json").read_text()))
    assert {key: values for key, values in kept.items() if values} == {("accuracy", "mixfl", "9"): {0: 95.66}}


def test_a_result_of_which_a_run_failed_is_kept_too(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that diverges fails each time: without its result the others would never be kept."""
    results = tmp_path / "evidence" / "results"
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "RESULTS", results)
    folder = tmp_path / run.REPRODUCTIONS / "fedmix" / "table-1" / "laptop"
    made = {"faults": {"fedmix-seed1": "round 94: 0 good uploads"}, "quantities": {}}

    def fails(writes: bool) -> int:
        if writes:
            folder.mkdir(parents=True)
            (folder / "result.json").write_text(json.dumps(made))
        return 2

    command = ["reproduce", "fedmix/table-1", "--scale", "laptop"]
    for writes in (False, True):
        monkeypatch.setattr(run, "_exit_status", lambda _, writes=writes: fails(writes))
        with pytest.raises(SystemExit) as error:
            run.remake_item(command)
        assert error.value.code == 2
        assert (results / "fedmix" / "table-1-laptop.json").exists() == writes


def test_the_closest_pair_of_two_labels_is_not_the_closest_pair() -> None:
    x = torch.tensor([[[0, 0]], [[3, 4]], [[1, 0]], [[250, 0]]], dtype=torch.uint8)

    closest = script("evidence/mix2fld.py").closest_of_two_labels(x, torch.tensor([0, 1, 0, 1]))

    # (0, 0) and (1, 0) have one label; (1, 0) and (3, 4) are 2 and 4 apart, (0, 0) and (3, 4) 3 and 4.
    assert closest == pytest.approx(20**0.5)
    assert script("evidence/mix2fld.py").closest_of_two_labels(x, torch.zeros(4)) == float("inf")
