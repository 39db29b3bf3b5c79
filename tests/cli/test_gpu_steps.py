"""The steps for a GPU, in small on the processor: broken off, gone on with from the kept files alone, and committed."""

import json
import os
import re
import shutil
import signal
import sys

import pytest
from cli_helpers import finish, start_process
from script_helpers import ROOT

SCRIPT = "benchmarks/gpu/steps.py"
DONE, NOT_DONE = "done", "not done; the same command goes on"
TINY = ("--device", "cpu", "--tiny")


def begin(step, kept, *more, checkout=ROOT):
    """Start a step."""
    return start_process([sys.executable, SCRIPT, step, "--kept", str(kept), *more], cwd=checkout)


def make(step, kept, *more):
    """Make a step in small: how it ended, and the rounds that it trained."""
    done = finish(begin(step, kept, *TINY, *more))
    assert done.code == 0, done.err
    return done.out.splitlines()[-1].removeprefix(f"step {step}: "), rounds(done.out)


def break_off(step, kept, by, after):
    """Break a step off after a round: its exit status, and the rounds that it trained."""
    process = begin(step, kept, *TINY)
    seen = ""
    while not re.search(after, seen):
        line = process.stdout.readline()
        assert line, finish(process)
        seen += line
    os.kill(process.pid, by)
    done = finish(process)
    return done.code, rounds(seen + done.out)


def rounds(text):
    """The rounds that a step printed."""
    return re.findall(r"^\S+-seed\d: round \d+", text, re.MULTILINE)


def files(folder):
    """The kept files, without the folder of the runs that stays on a machine."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def carried(kept, name):
    """A fresh folder, as on another machine, with nothing but the kept files."""
    folder = kept.with_name(name)
    folder.mkdir()
    for file, content in files(kept).items():
        (folder / file).write_bytes(content)
    return folder


def numbers(kept):
    """What was trained: quantities, and accuracies by round."""
    result = json.loads((kept / "result.json").read_text())
    curves = [{name: value for name, value in one.items() if name != "seconds"} for one in result["curves"]]
    return [result["quantities"], result["claims"], curves]


@pytest.mark.slow
def test_tests_and_timed_jobs_are_kept_together(tmp_path):
    assert [make(step, tmp_path)[0] for step in ("1", "2")] == [DONE, DONE]

    found = json.loads((tmp_path / "gpu.json").read_text())
    assert {kind: list(results) for kind, results in found.items()} == {
        "tests": ["tests/kernels/test_gpu.py"],
        "jobs": ["A"],
        "memory": ["  2 clients in one stack", "largest"],
    }
    assert "passed" in found["tests"]["tests/kernels/test_gpu.py"]["says"]


@pytest.mark.slow
def test_training_that_is_broken_off_goes_on_from_the_kept_files_alone(tmp_path):
    whole, kept = tmp_path / "whole", tmp_path / "kept"
    ended, all_rounds = make("3", whole)
    assert (ended, len(all_rounds)) == (DONE, 4 * 3 * 6)

    # No time at all, which ends the first round. Then Ctrl-C in the second run, and a kill in the next seed's runs.
    assert make("3", kept, "--seconds", "0")[0] == NOT_DONE
    kept = carried(kept, "out-of-time")
    status, before = break_off("3", kept, signal.SIGINT, "naivemix-.*-seed0: round 3")
    assert status == 0
    kept = carried(kept, "interrupted")
    unchanged = files(kept)
    assert break_off("3", kept, signal.SIGKILL, "seed1: round 3")[0] == -signal.SIGKILL
    assert files(kept) == unchanged
    kept = carried(kept, "killed")
    ended, after = make("3", kept)

    assert ended == DONE
    # The round of Ctrl-C is made again, and no other one.
    assert set(before[:-1]).isdisjoint(after)
    assert {*before, *after} == set(all_rounds)
    assert numbers(kept) == numbers(whole)
    assert files(kept).keys() == {"gpu.json", "result.json"}

    for step in ("4", "5"):
        kept = carried(kept, f"before-{step}")
        assert make(step, kept)[0] == DONE
    cells = numbers(kept)[0]["accuracy"]["cells"]
    assert [sorted(cell["ours"]) for cell in cells] == [["0", "1", "2"]] * 10

    checkout = tmp_path / "checkout"
    for folder in ("benchmarks", "evidence", "docs/site"):
        shutil.copytree(ROOT / folder, checkout / folder)
    for page in ("README.md", "docs/benchmarks.md", "docs/scaling.md"):
        shutil.copy(ROOT / page, checkout / page)
    assert finish(begin("commit", kept, checkout=checkout)).code == 0
    committed = json.loads((checkout / "evidence" / "results" / "fedmix" / "choice-vgg-long-smoke.json").read_text())
    assert committed["quantities"] == numbers(kept)[0]
    told = (checkout / "docs" / "benchmarks.md").read_text()
    for name, one in json.loads((checkout / "benchmarks" / "results" / "gpu.json").read_text())["training"].items():
        assert f"| {name} | cpu | {one['date']} | {one['commit']} | seeds 0 to 2 ended |" in told
