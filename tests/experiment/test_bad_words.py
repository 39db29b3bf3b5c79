"""Mistakes on the command line end in one message."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from bad_input_helpers import RUN, refused_at_once, run
from cli_helpers import contents, here, refused, succeeded, write
from helpers import each, slow_except

pytestmark = pytest.mark.usefixtures("elsewhere")


@each(
    ("text", "words"),
    [
        ("rounds = ", ("bad.toml: is not valid TOML", "end of document")),
        ("rounds = 1\nrounds = 2", ("is not valid TOML",)),
        ("[train\nlr = 1", ("is not valid TOML", "line 1")),
        ("rounds = 1", ("data", "missing")),
        ('data = "digits"', ("partition", "missing")),
        ("", ("data", "missing")),
    ],
)
def test_files_that_are_no_experiment(text: str, words: tuple[str, ...]) -> None:
    Path("bad.toml").write_text(text)
    refused_at_once(here("run", "bad.toml"), *words)


def test_files_that_cannot_be_read() -> None:
    refused(here("run", "nowhere.toml"), "nowhere.toml", "no such file")
    refused(here("run", "."), "folder")
    Path("bad.toml").write_bytes(b"name = '\xff\xfe'")
    refused(here("run", "bad.toml"), "bad.toml", "TOML")
    Path("bad.toml").write_bytes(os.urandom(300))
    refused(here("run", "bad.toml"), "bad.toml", "TOML")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--set", "rounds"), ("--set 'rounds'", "FIELD=VALUE")),
        (("--set", "=3"), ("--set '=3'", "FIELD=VALUE")),
        (("--set", "ruonds=3"), ("ruonds", "'rounds'")),
        (("--set", "train.lr=fast"), ("train.lr: 'fast'",)),
        (("--set", "train.lr.x=3"), ("train.lr",)),
        (("--seeds", "a,b"), ("--seeds 'a,b'", "0,1,2")),
        (("--seeds", ""), ("--seeds ''", "0,1,2")),
        (("--seeds", "1,1"), ("seeds: [1, 1]", "different")),
        (("--seeds", "-1"), ("--seeds '-1'", "from 0")),
        (("--engine", "warp"), ("engine: 'warp'", "'loop'")),
        (("--out", "bad.toml"), ("--out bad.toml", "folder")),
        (("--out", "full"), ("--out full", "holds files", "--resume")),
    ],
)
def test_options_that_are_not_valid(options: tuple[str, ...], words: tuple[str, ...]) -> None:
    Path("full").mkdir()
    Path("full", "letter.txt").write_text("keep me")
    refused_at_once(run({}, *options), *words)
    assert contents(Path("full")) == {"letter.txt": b"keep me"}


def test_one_field_for_several_methods_is_set_in_the_file() -> None:
    outcome = run({"methods": ["fedavg", "fedmix"]}, "--set", "method.objective.lambda=0.2")
    refused_at_once(outcome, "method.objective.lambda", "the file lists several methods")
    refused_at_once(run({"methods": ["fedavg"], "method": "fedmix"}), "methods", "'method'")


def test_a_field_of_the_only_method_of_a_list_can_be_set() -> None:
    words = ("--set", "method.objective.lambda=0.2", "--set", "method.label=ours", "--out", "out")
    succeeded(run({"methods": ["fedmix"]}, *words))
    assert "lambda = 0.2" in Path("out/ours-seed0/config.toml").read_text()


def test_a_grid_over_a_field_that_a_method_lacks_names_the_method() -> None:
    grid = {"method.objective.lambda": [0.1, 0.2]}
    outcome = run({"methods": ["fedavg", "fedmix"], "grid": grid})
    refused_at_once(outcome, "grid: method.objective.lambda", "not of fedavg;", "[[methods]]")
    # A value that is wrong for the method that has the field is told as anywhere.
    wrong = run({"methods": ["naivemix", "fedmix"], "grid": {"method.objective.lambda": [1.5]}})
    refused_at_once(wrong, "objective.lambda: 1.5", "less than or equal to 1")


def test_names_that_no_folder_can_have_are_refused() -> None:
    for name in ("../../evil", "", "..", "a/b", "a\\b", "a\nb", "\N{GREEK SMALL LETTER MU}"):
        refused_at_once(run({"name": name}), f"name: {name!r} is not valid", "valid: letters A to Z or digits")
    for name, folder in (("ours, lr=0.1", "ours-lr-0.1"), ("a.b+c_d-2", "a.b+c_d-2")):
        succeeded(run({"name": name, "rounds": 0}))
        assert Path("runs", folder, RUN, "config.toml").is_file()


@pytest.mark.parametrize("words", [("run",), ("rum",), ("run", "x", "--jobs", "0"), ("run", "x", "--nonsense")])
def test_words_that_are_no_command(words: tuple[str, ...]) -> None:
    outcome = here(*words)
    assert outcome.code == 2
    assert "Usage: " in outcome.err
    suggestions = re.findall("did you mean.*", outcome.err, re.IGNORECASE)
    assert suggestions == (["did you mean 'run'?)."] if words == ("rum",) else [])
    assert "--help" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("option", "field"), [("--rounds", "rounds"), ("--lr", "train.lr"), ("--batch-size", "train.batch_size")]
)
def test_a_field_that_is_written_as_an_option_is_told_with_the_option_that_sets_it(option: str, field: str) -> None:
    for words in (("run", "bad.toml", option, "3"), ("tune", "bad.toml", f"{option}=3")):
        outcome = here(*words)
        assert outcome.code == 2
        assert f"No such option '{option}'." in outcome.err
        assert outcome.err.splitlines()[-1] == f"To set the field {field} of the file: --set {field}=VALUE"


@pytest.mark.parametrize("words", [("run", "bad.toml", "--nonsense"), ("resume", "runs", "--rounds", "3")])
def test_other_options_that_are_none_have_no_such_hint(words: tuple[str, ...]) -> None:
    assert "--set" not in here(*words).err


@pytest.mark.parametrize("order", ["resume", "report", "compare", "inspect"])
def test_runs_that_are_not_there(order: str) -> None:
    Path("empty").mkdir()
    Path("letter.txt").write_text("no run")
    refused(here(order, "nowhere"), "nowhere", "no such run")
    refused(here(order, "empty"), "empty", "holds no run")
    refused(here(order, "letter.txt"), "letter.txt", "no such run")
    assert contents(Path()) == {"letter.txt": b"no run"}


@pytest.mark.slow
def test_the_folder_of_all_studies_is_told_from_a_study() -> None:
    for name in ("one", "two"):
        succeeded(run({"rounds": 0}, "--out", f"runs/{name}"))
    refused(here("resume", "runs"), "runs: holds studies, not runs", "one, two")
    succeeded(run({"rounds": 0, "method": "fedmix"}, "--out", "runs", "--resume"))
    assert "studies in it are not: one, two" in succeeded(here("resume", "runs")).err
    several = refused(here("switches", "runs"), "runs: holds 3 runs; name one of them: ")
    assert "fedmix-seed0, one/fedavg-seed0, two/fedavg-seed0" in several.err


@pytest.mark.parametrize("order", slow_except(["resume"], ["resume", "report", "compare"]))
def test_a_log_with_a_damaged_line_is_told_of_and_left_alone(order: str) -> None:
    succeeded(run({"rounds": 2}, "--out", "out"))
    log = Path("out") / RUN / "metrics.jsonl"
    first, *rest = log.read_text().splitlines(keepends=True)
    log.write_text(first[:20] + "\n" + "".join(rest))
    kept = log.read_bytes()
    refused(here(order, "out"), "metrics.jsonl: line 1 of 3 is damaged")
    assert log.read_bytes() == kept


@pytest.mark.parametrize("out", ["bad.toml/split.png", ".", "split", "split.xyz"])
def test_a_picture_that_cannot_be_written(out: str) -> None:
    refused(here("data", "show", write(Path("bad.toml")), "--out", out), f"--out {out}: cannot be written", "split.png")


def test_names_for_lists_and_new_files() -> None:
    refused(here("list", "methodss"), "'methodss'", "did you mean 'methods'")
    refused(here("new", "fedmixx", "digits"), "'fedmixx'", "'fedmix'")
    refused(here("new", "fedmix", "digts"), "'digts'", "'digits'")
