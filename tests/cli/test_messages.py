"""Any error ends in one message of printable characters; exit codes tell the kinds apart."""

import re
from pathlib import Path
from unittest import mock

import pytest
from cli_helpers import here, refused, write
from helpers import each

from fedblend.cli import FAULT

pytestmark = pytest.mark.usefixtures("elsewhere")

FAILING = "fedblend.cli.compare.inspect"


def failing(error):
    """A command in which an error is raised."""
    with mock.patch(FAILING, side_effect=error):
        return here("inspect", "runs")


def told(outcome):
    """The only line on the standard error."""
    (line,) = outcome.err.splitlines()
    assert line.startswith("fedblend: error: ")
    assert line.isprintable()
    assert len(line) < 1_000
    return line


def test_an_unexpected_error_is_one_message_and_its_traceback_is_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outcome = failing(KeyError("a\x1b[31m fault"))
    assert outcome.code == FAULT == 70
    assert "unexpected KeyError ('a\\x1b[31m fault')" in told(outcome).replace("\\\\", "\\")
    report = Path(re.search(r"its traceback is in (\S+\.txt)\.", told(outcome))[1])
    assert report.parent == tmp_path
    assert "Traceback (most recent call last)" in report.read_text()
    assert "fedblend inspect runs" in report.read_text()


def test_where_no_file_can_be_written_the_message_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    outcome = failing(KeyError("a fault"))
    assert outcome.code == FAULT
    assert "its traceback could not be kept in a file" in told(outcome)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "a\nb/c"), "a b/c: Permission denied; check the path"),
        (MemoryError("Unable to allocate 7 PiB"), "needs more memory than there is (Unable to allocate 7 PiB); valid:"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "more memory than there is"),
        (ValueError("array is too big; `arr.size * arr.dtype.itemsize`"), "more memory than there is"),
    ],
)
def test_errors_of_the_system_that_a_user_can_mend(error, words):
    outcome = failing(error)
    assert outcome.code == 2
    assert words in told(outcome)


@each(
    "words",
    [
        ["list", "\x1b[31mred\x07"],
        ["list", "x" * 9_000],
        ["list", "a\nfedblend: error: b"],
        ["list", "\udcff"],
        ["run", "[/x]"],
        ["run", "a" * 5_000],
        ["run", "x.toml", "--set", "[" * 4_000 + "=1"],
        ["compare", "\u202enur"],
    ],
)
def test_words_of_a_command_line_are_shown_cut_and_escaped(words):
    outcome = here(*words)
    assert outcome.code == 2
    told(outcome)


@pytest.mark.parametrize("word", ["--\x1b[31m", "--" + "x" * 9_000])
def test_errors_of_the_parser_are_shown_cut_and_escaped(word):
    outcome = here("run", word)
    assert outcome.code == 2
    assert "Usage: " in outcome.err
    assert max(map(len, outcome.err.splitlines())) < 1_000
    assert all(line.isprintable() for line in outcome.err.splitlines())


def test_a_value_of_an_experiment_is_shown_cut_and_escaped():
    for value in ("\x1b[31mred", "x" * 9_000, {str(i): i for i in range(900)}, [0] * 9_000):
        outcome = here("run", write(Path("bad.toml"), {"train": {"lr": value}}))
        refused(outcome, "train.lr: ", "is not valid: input should be a valid number")
        told(outcome)
