"""The commands that the pages print do in a shell what is said of them, and each kept result has one that makes it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from cli_helpers import here
from script_helpers import ROOT, script

RESULTS = sorted((ROOT / "evidence" / "results").glob("*.json"))


def words_in_a_shell(line: str) -> list[str]:
    """The words that a POSIX shell makes of a line, where FEDBLEND_DATA is /some where."""
    told = subprocess.run(
        ["sh", "-c", f"printf '%s\\0' {line}"],
        env={"FEDBLEND_DATA": "/some where"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return told.split("\0")[:-1]


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """evidence/run.py, which imports what lies beside it."""
    monkeypatch.syspath_prepend(ROOT / "evidence")
    return script("evidence/run.py")


def test_a_shell_reads_the_words_back_with_the_variable_in_its_place(evidence: ModuleType) -> None:
    words = ["fedblend", "--set", "a=$FEDBLEND_DATA/x y", "it's", 'a "b" `c` \\', '$FEDBLEND_DATA "b" `c` \\d\\', ""]
    read = words_in_a_shell(evidence.in_a_shell(words))
    assert read == [word.replace("$FEDBLEND_DATA", "/some where") for word in words]
    assert evidence.in_a_shell(["--set", "a=$B/c", "d=1", "1,2"]) == '--set "a=$B/c" d=1 1,2'


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_no_kept_command_hides_the_variable_from_the_shell(path: Path) -> None:
    command = json.loads(path.read_text())["command"]
    assert not [word for word in words_in_a_shell(command) if "$" in word]


def test_every_kept_result_has_a_study_that_makes_it(evidence: ModuleType) -> None:
    assert {*evidence.STUDIES, *evidence.MEASURES, *evidence.SCRIPTS} == {path.stem for path in RESULTS}
    for name, words in evidence.STUDIES.items():
        command = json.loads((ROOT / "evidence" / "results" / f"{name}.json").read_text())["command"]
        assert command == evidence.in_a_shell(["fedblend", "run", *words])
    for name in evidence.SCRIPTS:
        command = json.loads((ROOT / "evidence" / "results" / f"{name}.json").read_text())["command"]
        assert command == f"python evidence/{name}.py"
        assert (ROOT / "evidence" / f"{name}.py").is_file()


def test_the_channel_command_of_the_readme_takes_a_new_file(tmp_path: Path) -> None:
    pytest.importorskip("mlxtend")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^fedblend (channel my\.toml.*)$", readme, re.MULTILINE)
    assert found is not None
    command = shlex.split(found[1], comments=True)
    (tmp_path / "my.toml").write_text(here("new", "fedmix", "mnist5k").out)
    told = here("channel", tmp_path / "my.toml", *command[2:])
    assert told.code == 0
    assert "outage" in told.out


def test_the_flower_page_counts_the_lines_of_its_app() -> None:
    app = (ROOT / "examples" / "flower_app" / "blended.py").read_text()
    ours = [line for line in app.splitlines() if "# fedblend" in line or line.startswith("from fedblend")]
    assert len(ours) == 6
    assert "Six lines of it are fedblend's" in (ROOT / "docs" / "flower.md").read_text()
