"""A run that is killed, stopped or short of room goes on, and ends as if nothing had happened."""

import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from cli_helpers import (
    CHECKPOINT,
    PATIENCE_S,
    TINY,
    alive,
    changed,
    contents,
    finish,
    here,
    kill_alone,
    lines_of,
    records,
    refused,
    same_end,
    start,
    status,
    stop,
    succeeded,
    wait_until,
    write,
)
from helpers import same_state, slow_after_first, slow_except
from safetensors.torch import load_file

import fedblend
from fedblend.core.errors import Stopped
from fedblend.core.state import RunState
from fedblend.engines.distributed.pipes import Parent
from fedblend.experiment.config import resolve
from fedblend.experiment.study import expand
from fedblend.runs import checkpoint, parallel
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import group
from fedblend.runs.summary import rows_of

SLUG = "fedmix-seed0"

EVENTFUL = {
    "name": "eventful",
    "rounds": 60,
    "eval_every": 2,
    "checkpoint_every": 3,
    "data": "digits",
    "partition": {"name": "classes", "clients": 10, "classes_per_client": 2},
    "arrival": {"first": 0.4, "clients": 0.2, "portion": 0.1},
    "model": {"name": "mlp", "hidden": [32], "dropout": 0.3},
    "train": {"cohort": 4, "epochs": 1, "batch_size": 20, "lr": 0.05},
    "method": {"name": "fedmix", "sharing": {"samples_per_mean": 5, "refresh": 0.2}},
    "selection": {"name": "power-of-choice", "candidates": 6},
    "slow": {"epochs": [1, 1, 0.5, 1, 1, 0.3, 1, 1, 1, 1], "late": "next-round"},
    "engine": "loop",
}
"""All that a run can carry from round to round: dropout, shared means that are renewed, data that arrive, late uploads,
and losses that choose clients; with one engine, since `auto` may take another on a machine that is busier."""


@pytest.fixture(scope="module")
def eventful(tmp_path_factory):
    """The eventful run, undisturbed; ``eventful.toml`` lies beside its folder."""
    folder = tmp_path_factory.mktemp("eventful")
    succeeded(here("run", write(folder / "eventful.toml", base=EVENTFUL), "--out", folder / "whole"))
    return folder / "whole" / SLUG


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Six rounds of the tiny experiment, undisturbed; ``tiny.toml`` lies beside its folder."""
    folder = tmp_path_factory.mktemp("tiny")
    succeeded(here("run", write(folder / "tiny.toml", {"rounds": 6}), "--out", folder / "whole"))
    return folder / "whole" / "fedavg-seed0"


def copy_of(run, folder):
    """A run's copy inside ``folder``, to be damaged."""
    return Path(shutil.copytree(run, folder / "out" / run.name))


@pytest.mark.slow
def test_a_run_killed_at_ten_instants_ends_like_one_left_alone(eventful, tmp_path):
    file, run, chance = eventful.parent.parent / "eventful.toml", tmp_path / "out" / SLUG, random.Random(20)
    checkpoint = run / CHECKPOINT

    def kill(when, pause):
        process = start("run", file, "--resume", "--out", tmp_path / "out")
        try:
            wait_until(when, process, pause=0.0002)
            time.sleep(chance.uniform(0, pause))
        finally:
            os.kill(process.pid, signal.SIGKILL)
            stop(process)
        assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"

    def after(line, then=lambda: True):
        return lambda: lines_of(run) >= line and then()

    kill(lambda: True, pause=1.5)  # somewhere on its way to the first file
    kill((run / "facts.json").exists, pause=0.0)  # while it makes its folder
    kill((run / "metrics.jsonl").exists, pause=0.0)  # before the first checkpoint, most likely
    for _ in range(4):  # anywhere in a round
        kill(after(lines_of(run) + 3), pause=0.1)
    for _ in range(3):  # while it writes a checkpoint
        kill(after(lines_of(run) + 2, lambda: any(run.glob(f".{CHECKPOINT}.*.tmp"))), pause=0.0005)
    assert lines_of(run) <= EVENTFUL["rounds"]
    assert json.loads((run / "facts.json").read_text())["data"]["name"] == "digits"
    assert checkpoint.exists()
    succeeded(here("resume", run))
    same_end(run, eventful)
    assert not list(run.glob(".*.tmp")), "files that were being written when the run was killed"
    assert load_file(checkpoint).keys() == load_file(eventful / CHECKPOINT).keys()
    shared = [round for round, line in enumerate(records(run)) if '"shared"' in line]
    assert len(shared) > 1, "means were never renewed, so the test missed what it is for"


@pytest.mark.slow
def test_a_folder_in_use_by_another_process(tmp_path):
    file, out = write(tmp_path / "long.toml", {"rounds": 100_000}), tmp_path / "out"
    run = out / "fedavg-seed0"
    process = start("run", file, "--out", out)
    try:
        wait_until(lambda: lines_of(run) >= 2, process)
        for again in (("run", file, "--resume", "--out", out), ("resume", out)):
            refused(here(*again), str(out), "this study is in use by another process")
        refused(here("resume", run), str(run), "this run directory is in use by another process")
        at = lines_of(run)
        wait_until(lambda: lines_of(run) > at, process)  # the other goes on undisturbed
        for order in ("inspect", "compare"):
            assert re.search(r"running at round [1-9]\d* of 100000", " ".join(here(order, out).out.split()))
        os.kill(process.pid, signal.SIGKILL)
    finally:
        stop(process)
    for order in ("inspect", "compare"):
        told = f"killed at round {lines_of(run) - 1} of 100000; go on with: fedblend resume {run}"
        assert "".join(told.split()) in "".join(succeeded(here(order, run)).out.split())
    rounds = lines_of(run) + 1
    succeeded(here("run", file, "--resume", "--out", out, "--set", f"rounds={rounds}"))  # a kill frees the folder
    assert lines_of(run) == rounds + 1


@pytest.mark.slow
def test_a_line_cut_in_half_is_dropped_and_made_again(eventful, tmp_path):
    run, file = tmp_path / "out" / SLUG, eventful.parent.parent / "eventful.toml"
    succeeded(here("run", file, "--set", "rounds=6", "--out", tmp_path / "out"))
    with open(run / "metrics.jsonl", "ab") as metrics:
        metrics.write((eventful / "metrics.jsonl").read_bytes().splitlines()[7][:40])
    succeeded(here("run", file, "--resume", "--out", tmp_path / "out"))
    same_end(run, eventful)


def test_a_damaged_configuration_is_told(tiny, tmp_path):
    run = copy_of(tiny, tmp_path)
    other = 'data = "digits"\nrunds = 3'
    mistakes = {"rounds = ": "is not valid TOML", "": "data: is missing", other: "runds: unknown key"}
    for text, told in mistakes.items():
        (run / "config.toml").write_text(text)
        refused(here("resume", run), f"{run}/config.toml: {told}")


def state_of(clients, shared_round=-1):
    """A state of some clients, of which some have downloaded and, if anything was shared, some have shared."""
    rng = np.random.default_rng(clients)
    shared = rng.integers(0, 9, clients) if shared_round >= 0 else np.zeros(clients, np.int64)
    return RunState(3, {"w": torch.ones(2)}, rng.random(clients) < 0.3, shared, shared_round=shared_round)


@pytest.mark.parametrize("clients", [1, 7, 8, 1_000_003])
@pytest.mark.parametrize("shared_round", [-1, 0, 2])
def test_a_checkpoint_gives_back_who_holds_what(clients, shared_round, tmp_path):
    state = state_of(clients, shared_round)

    checkpoint.write(tmp_path, state)

    found = checkpoint.read(tmp_path)
    assert same_state(found, state)
    assert (found.has_pool.dtype, found.shared_sizes.dtype) == (bool, np.int64)
    if shared_round < 0:
        assert (tmp_path / CHECKPOINT).stat().st_size < clients / 8 + 1000


class Killed(BaseException):
    """Ends a run as a kill does: nothing of the run handles it."""


class AfterCalls(fedblend.Callback):
    """Ends the run at its second call; a resumed run counts from 0."""

    def __init__(self):
        self.calls = 0

    def on_round_end(self, state, record):
        self.calls += 1
        return self.calls == 2


STOPPING = {"name": "early-stopping", "monitor": "loss", "mode": "max", "patience": 2}
"""Ends the tiny run after round 3, since its loss falls from round 1 on."""


def run_to_the_end(path, own, resume=False, **changes):
    given = {"callbacks": [AfterCalls()]} if own else {}
    fedblend.run(resolve(changed(TINY, {"rounds": 6, **changes})), path, resume=resume, **given)


def killed_before_its_status(path, monkeypatch, own=False, **changes):
    """Make a run that is killed when all but its last status is written."""
    set_status = RunDirectory.set_status

    def kill(directory, state, *rest):
        if state == "done":
            raise Killed
        set_status(directory, state, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "set_status", kill)
        with pytest.raises(Killed):
            run_to_the_end(path, own, **changes)
    assert status(path)["state"] == "running"


@pytest.mark.parametrize("every", slow_after_first([1, 4]), ids=["kept by its round", "kept by its end"])
@pytest.mark.parametrize(
    ("own", "changes", "rounds", "by"),
    [
        (False, {"callbacks": [STOPPING]}, 3, "early-stopping"),
        (True, {}, 2, "AfterCalls"),
        (True, {"callbacks": [{**STOPPING, "patience": 1}]}, 2, "early-stopping, AfterCalls"),
        (True, {"target": 0.0, "stop_at_target": True, "eval_every": 2}, 2, "AfterCalls, target"),
    ],
)
def test_a_run_that_was_killed_between_its_end_and_its_status_makes_no_further_round(
    own, changes, rounds, by, every, tmp_path, monkeypatch
):
    changes = {**changes, "checkpoint_every": every}
    run_to_the_end(tmp_path / "whole", own, **changes)
    killed_before_its_status(tmp_path / "run", monkeypatch, own, **changes)

    run_to_the_end(tmp_path / "run", own, resume=True, **changes)

    assert status(tmp_path / "run") == {"state": "done", "round": rounds, "reason": f"ended by {by}"}
    same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    "changes", [{"callbacks": []}, {"callbacks": [{**STOPPING, "patience": 9}]}, {"callbacks": [STOPPING], "rounds": 5}]
)
def test_a_run_that_was_killed_after_its_end_goes_on_with_other_callbacks_or_rounds(changes, tmp_path, monkeypatch):
    killed_before_its_status(tmp_path / "run", monkeypatch, callbacks=[STOPPING])

    run_to_the_end(tmp_path / "run", own=False, resume=True, **changes)

    assert status(tmp_path / "run")["round"] > 3


def test_a_time_limit_counts_anew_in_a_run_that_was_killed_after_its_end(tmp_path, monkeypatch):
    limit = {"name": "time-limit", "minutes": 1e-9}  # shorter than any round
    killed_before_its_status(tmp_path / "run", monkeypatch, callbacks=[limit])

    run_to_the_end(tmp_path / "run", own=False, resume=True, callbacks=[limit])

    assert status(tmp_path / "run") == {"state": "done", "round": 2, "reason": "ended by time-limit"}


def test_a_done_run_that_goes_on_and_is_killed_at_once_goes_on_again(tmp_path, monkeypatch):
    changes = {"callbacks": [STOPPING]}
    run_to_the_end(tmp_path / "run", own=False, **changes)

    def kill(*given):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(fedblend.core.loop.RoundLoop, "round", kill)
        with pytest.raises(Killed):
            run_to_the_end(tmp_path / "run", own=False, resume=True, **changes)
    run_to_the_end(tmp_path / "run", own=False, resume=True, **changes)

    assert status(tmp_path / "run") == {"state": "done", "round": 4, "reason": "ended by early-stopping"}


@pytest.mark.slow
def test_ctrl_c_keeps_the_run_and_tells_how_to_go_on(eventful, tmp_path):
    file, run = eventful.parent.parent / "eventful.toml", tmp_path / "out" / SLUG
    process = start("run", file, "--out", tmp_path / "out")
    wait_until(lambda: lines_of(run) >= 5, process)
    os.kill(process.pid, signal.SIGINT)
    outcome = finish(process)
    assert outcome.code == 130, outcome
    assert "Traceback" not in outcome.err
    assert f"fedblend resume {tmp_path / 'out'}" in outcome.err
    assert status(run)["state"] == "stopped"
    assert 3 <= status(run)["round"] < EVENTFUL["rounds"]
    again = succeeded(here("resume", tmp_path / "out"))
    assert "fedmix" in again.out
    same_end(run, eventful)


def test_resuming_a_finished_run_changes_nothing_and_prints_the_table(tiny):
    names = ("config.toml", "facts.json", "split.json", "metrics.jsonl", CHECKPOINT, "status.json")
    before = contents(tiny)
    outcome = succeeded(here("resume", tiny))
    assert "fedavg" in outcome.out
    assert "report.html" in outcome.out
    after = contents(tiny)
    assert {name: after[name] for name in names} == {name: before[name] for name in names}


def test_a_finished_run_may_get_another_target_which_tables_then_have(tiny, tmp_path):
    run, before = copy_of(tiny, tmp_path), contents(tiny)
    words = ("--set", "target=9.0", "--set", "target_metric=loss")
    succeeded(here("run", tiny.parent.parent / "tiny.toml", "--resume", "--out", run.parent, *words))

    after = contents(run)
    assert [name for name in before if after[name] != before[name]] == ["config.toml"]
    (row,) = rows_of(group([RunDirectory(run)]))
    assert (row["target"], row["target_metric"], row["target_by_seed"]) == (9.0, "loss", {0: 1})


STOP_AT_ONCE = {"target": 0.0, "stop_at_target": True}
LATER = [{"target": 1.0}, {"stop_at_target": False}, {"target_metric": "loss"}]
"""Changes with which :data:`STOP_AT_ONCE` does not end the tiny run before its last round."""


@pytest.mark.parametrize("later", slow_except(LATER[:1], LATER))
@pytest.mark.parametrize("cut", [False, True], ids=["done", "killed before its status"])
def test_a_run_that_its_target_ended_goes_on_to_a_later_one(later, cut, tiny, tmp_path, monkeypatch):
    run = tmp_path / "out" / tiny.name
    if cut:
        killed_before_its_status(run, monkeypatch, **STOP_AT_ONCE)
    else:
        run_to_the_end(run, own=False, **STOP_AT_ONCE)
        assert status(run) == {"state": "done", "round": 1, "reason": "ended by target"}
    file = write(tmp_path / "tiny.toml", {"rounds": 6, **STOP_AT_ONCE, **later})

    succeeded(here("run", file, "--resume", "--out", run.parent, "--jobs", 1))

    same_end(run, tiny)
    assert RunDirectory(run).experiment() == resolve(changed(TINY, {"rounds": 6, **STOP_AT_ONCE, **later}))


def test_a_run_that_a_callback_ended_makes_no_further_round_for_another_target(tmp_path):
    changes = {"callbacks": [STOPPING], "rounds": 6}
    run = tmp_path / "out" / "fedavg-seed0"
    run_to_the_end(run, own=False, **changes)
    before = contents(run)
    file = write(tmp_path / "tiny.toml", {**changes, "target": 0.5})

    succeeded(here("run", file, "--resume", "--out", run.parent, "--jobs", 1))

    assert status(run) == {"state": "done", "round": 3, "reason": "ended by early-stopping"}
    assert [name for name, content in contents(run).items() if content != before[name]] == ["config.toml"]
    assert RunDirectory(run).experiment().target == 0.5


def test_going_on_with_another_experiment_names_the_field(tiny):
    file, before = tiny.parent.parent / "tiny.toml", contents(tiny)
    for change, words in (
        ("train.lr=0.5", f"train.lr: 0.5 differs from 0.05 in {tiny.parent}; a run goes on"),
        ("partition.clients=5", "partition.clients: 5 differs from 4"),
        ("scale=unit", "scale.name: 'unit' differs from 'standard'"),
        ("train.clip_norm=1", "train.clip_norm: 1.0 differs from nothing"),
        ("policy.min_mean=3", "policy.min_mean: 3 differs from 2"),
    ):
        outcome = here("run", file, "--resume", "--set", change, "--out", tiny.parent)
        refused(outcome, f"fedavg-seed0: {words}", "may change)")
        assert not outcome.out, "nothing may look like success"
        assert contents(tiny) == before


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_resumed_study_keeps_its_name_and_all_of_its_runs(is_kept, tmp_path):
    ends = {"name": "mine", "seeds": [0, 1], "rounds": 2, "target": 0.0, "stop_at_target": True, "method": "fedavg"}
    fedblend.run_study(TINY | ends, tmp_path / "out", jobs=1)
    listed = tmp_path / "out" / "study.json"
    before = json.loads(listed.read_text(encoding="utf-8"))
    if not is_kept:
        listed.unlink()

    succeeded(here("resume", tmp_path / "out", "--jobs", 1))

    assert json.loads(listed.read_text(encoding="utf-8")) == before | ({} if is_kept else {"name": "out"})


def test_going_on_with_another_experiment_is_told_before_any_run_of_a_study(tmp_path):
    file = write(tmp_path / "study.toml", {"seeds": [0, 1], "rounds": 1})
    folder = tmp_path / "out"
    succeeded(here("run", file, "--out", folder, "--jobs", 1))
    before = contents(folder)
    more = ("--seeds", "2,0,1", "--set", "train.lr=0.5", "--jobs", 1)
    outcome = refused(
        here("run", file, "--resume", "--out", folder, *more), "fedavg-seed0, fedavg-seed1: train.lr: 0.5"
    )
    assert outcome.err.count("differs") == 1
    assert not outcome.out
    assert contents(folder) == before, "the run of seed 2 could have begun, but not in this study"


@pytest.mark.slow
def test_more_rounds_are_as_if_asked_for_at_once(tiny, tmp_path):
    file, run = tiny.parent.parent / "tiny.toml", tmp_path / "out" / "fedavg-seed0"
    succeeded(here("run", file, "--set", "rounds=2", "--out", tmp_path / "out"))
    assert lines_of(run) == 3
    succeeded(here("run", file, "--resume", "--set", "rounds=4", "--out", tmp_path / "out"))
    assert lines_of(run) == 5
    succeeded(here("run", file, "--resume", "--out", tmp_path / "out"))
    same_end(run, tiny)
    assert (run / "config.toml").read_bytes() == (tiny / "config.toml").read_bytes()


def test_more_rounds_of_a_study_hold_for_the_runs_that_ctrl_c_came_before(tmp_path):
    table, folder = {**TINY, "seeds": [0, 1]}, tmp_path / "out"
    fedblend.run_study({**table, "rounds": 1, "target": 0.5}, folder, jobs=1)

    def stop(slug, record):
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(Stopped):
        parallel.run_all(expand({**table, "rounds": 3}), folder, True, 1, stop)
    assert [RunDirectory(folder / f"fedavg-seed{seed}").experiment().rounds for seed in (0, 1)] == [3, 1]
    succeeded(here("resume", folder, "--jobs", 1))

    for seed in (0, 1):
        made = RunDirectory(folder / f"fedavg-seed{seed}")
        assert (made.experiment().rounds, made.experiment().target, made.status()["round"]) == (3, None, 3)
    before = (folder / "study.json").read_bytes()
    failed = parallel.run_all(expand({**table, "rounds": 9}), folder, False, 1, stop)
    assert list(failed) == ["fedavg-seed0", "fedavg-seed1"]
    assert (folder / "study.json").read_bytes() == before, "runs that are refused are those of before"


@pytest.mark.slow
def test_a_new_run_of_the_same_name_leaves_the_old_one_alone(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tiny.parent.parent / "tiny.toml"
    succeeded(here("run", file, "--set", "rounds=1"))
    before = contents(tmp_path / "runs" / "tiny")
    succeeded(here("run", file, "--set", "rounds=1", "--set", "train.lr=0.2"))
    assert contents(tmp_path / "runs" / "tiny") == before
    assert "lr = 0.2" in (tmp_path / "runs" / "tiny-2" / "fedavg-seed0" / "config.toml").read_text()
    # Without --out, the newest of that name goes on.
    succeeded(here("run", file, "--resume", "--set", "rounds=2", "--set", "train.lr=0.2"))
    assert lines_of(tmp_path / "runs" / "tiny-2" / "fedavg-seed0") == 3
    assert contents(tmp_path / "runs" / "tiny") == before


@pytest.mark.slow
def test_a_run_killed_before_its_first_line_can_be_shown_and_resumed(tiny, tmp_path):
    run = copy_of(tiny, tmp_path)
    for name in ("metrics.jsonl", "status.json", CHECKPOINT):
        (run / name).unlink()
    for order in ("inspect", "compare"):
        shown = " ".join(succeeded(here(order, run)).out.split())
        assert "fedavg" in shown
        assert "killed before anything was recorded; go on with: fedblend resume" in shown
    succeeded(here("report", run, "--out", tmp_path / "report.html"))
    succeeded(here("resume", run))
    same_end(run, tiny)


STUDY = {**EVENTFUL, "name": "study", "rounds": 30}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study of two seeds, undisturbed and one after another; its file lies beside its folder."""
    folder = tmp_path_factory.mktemp("study")
    file = write(folder / "study.toml", {"seeds": [0, 1]}, base=STUDY)
    succeeded(here("run", file, "--out", folder / "whole", "--jobs", 1))
    return folder / "whole"


def begin_study(study, out):
    """The study with two runs at once, on its way."""
    process = start("run", study.parent / "study.toml", "--out", out, "--jobs", 2)
    wait_until(lambda: all(lines_of(out / f"fedmix-seed{seed}") >= 4 for seed in (0, 1)), process)
    return process


def go_on_with_study(study, out):
    succeeded(here("resume", out, "--jobs", 1))
    for seed in (0, 1):
        same_end(out / f"fedmix-seed{seed}", study / f"fedmix-seed{seed}")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.slow
def test_a_study_of_two_at_once_killed_and_resumed(study, tmp_path):
    process = begin_study(study, tmp_path / "out")
    try:
        left = kill_alone(process)  # as the system does when memory is short
    finally:
        stop(process)
    go_on_with_study(study, tmp_path / "out")
    assert not left, f"{len(left)} processes go on without the command that began them, and hold the runs' folders"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_run_whose_process_is_killed_is_told_and_can_go_on(study, tmp_path):
    process = begin_study(study, tmp_path / "out")
    lock = str(tmp_path / "out" / "fedmix-seed0" / "run.lock")
    (holder,) = [pid for pid in alive(process) if lock in open_files(pid)]
    os.kill(holder, signal.SIGKILL)  # as the system does when memory is short
    outcome = refused(finish(process), "its process was killed", "resume")
    assert "fedmix-seed0: its process was killed by signal 9" in outcome.err
    assert status(tmp_path / "out" / "fedmix-seed1")["state"] == "done", "the other run does not depend on it"
    go_on_with_study(study, tmp_path / "out")


def open_files(pid):
    return [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ctrl_c_while_runs_at_once_begin_leaves_no_trace(study, tmp_path):
    process = start("run", study.parent / "study.toml", "--out", tmp_path / "out", "--jobs", 2)
    wait_until(lambda: len(alive(process)) >= 3, process)  # itself and the runs'
    os.killpg(process.pid, signal.SIGINT)
    outcome = finish(process)
    assert outcome.code == 130, outcome
    assert "Traceback" not in outcome.err, outcome.err[-3000:]
    if "fedblend resume" in outcome.err:
        assert any((tmp_path / "out").glob("*/config.toml")), "there is nothing yet that could be resumed"


def test_ctrl_c_at_the_moment_at_which_a_worker_begins_to_ignore_it_leaves_no_trace(monkeypatch):
    set_handler, stopped = signal.signal, threading.Event()
    pressed = []

    def press(number, handler):
        if handler is signal.SIG_IGN and not pressed:
            pressed.append(number)
            signal.raise_signal(number)
        return set_handler(number, handler)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(signal, "signal", press)
    stopped.set()
    try:
        assert parallel._run_in_worker(cast(Parent, None), stopped, {}, "", False, 1) == "stopped"
        assert pressed == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        set_handler(signal.SIGINT, before)


@pytest.mark.slow
def test_ctrl_c_stops_runs_at_once_without_a_trace(study, tmp_path):
    process = begin_study(study, tmp_path / "out")
    os.killpg(process.pid, signal.SIGINT)  # a terminal tells the whole group
    outcome = finish(process)
    assert outcome.code == 130, outcome
    assert "Traceback" not in outcome.err, outcome.err[-3000:]
    assert f"fedblend resume {tmp_path / 'out'}" in outcome.err
    assert {status(tmp_path / "out" / f"fedmix-seed{seed}")["state"] for seed in (0, 1)} <= {"stopped", "done"}
    go_on_with_study(study, tmp_path / "out")


@pytest.mark.slow
def test_a_reader_that_goes_away_stops_no_run(tmp_path):
    file, run = write(tmp_path / "long.toml", {"rounds": 60}), tmp_path / "out" / "fedavg-seed0"
    process = start("run", file, "--out", tmp_path / "out")
    process.stdout.close()
    process.stderr.close()
    try:
        process.wait(timeout=PATIENCE_S)
    finally:
        stop(process)
    assert status(run)["state"] == "done"
    assert lines_of(run) == 61


@pytest.mark.slow
def test_resuming_says_where_there_is_nothing_or_too_much(tmp_path):
    file, out = write(tmp_path / "file.toml", {"rounds": 3}), tmp_path / "out"
    assert "nothing to resume" in succeeded(here("run", file, "--resume", "--out", out)).err
    told = succeeded(here("run", file, "--resume", "--set", "rounds=1", "--out", out)).err
    assert "has 3 rounds already, more than rounds = 1" in " ".join(told.split())
