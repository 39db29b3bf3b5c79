"""Clients short of samples, runs that go wrong, full disks: nothing that was computed is lost."""

import json
import re
import resource
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from bad_input_helpers import RUN, refused_at_once, run
from cli_helpers import (
    TINY,
    call,
    changed,
    contents,
    here,
    lines_of,
    refused,
    same_end,
    sites_with_own_data,
    status,
    succeeded,
    write,
)

import fedblend
from fedblend.experiment.config import as_table, resolve
from fedblend.runs import checkpoint, runner
from fedblend.runs.directory import RunDirectory, find_runs, write_study
from fedblend.runs.groups import by_data

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.slow
def test_a_resume_and_an_attack_on_changed_data_are_refused(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(80, 3)), np.arange(80) % 2

    def save(shift):
        np.savez("mine.npz", x=x + shift, y=y)

    save(0)
    changes = {"data": {"name": "npz", "path": "mine.npz"}, "partition": {"name": "iid", "clients": 4}, "seeds": [0]}
    file = write(Path("mine.toml"), {**changes, "rounds": 2})
    succeeded(here("run", file, "--out", "a", "--jobs", 1))
    first = find_runs([Path("a")])[0]
    before = contents(first.path)
    save(1)

    words = ("the data have changed since this run began: mine.npz", "a new run in another folder")
    longer = write(Path("longer.toml"), {**changes, "rounds": 4})
    refused(here("run", longer, "--resume", "--out", "a"), *words)
    refused(here("leaks", "a"), *words)
    assert contents(first.path) == before

    succeeded(here("run", file, "--seeds", 1, "--out", "b", "--jobs", 1))
    assert len(by_data(find_runs([Path("a"), Path("b")]))) == 2
    save(0)
    succeeded(here("run", longer, "--resume", "--out", "a"))

    # A run without sums, such as one of data from elsewhere, has nothing to compare.
    first.update_facts({"data": {**first.facts()["data"], "files": {}}})
    save(1)
    succeeded(here("leaks", "a"))


def test_training_that_diverges_names_clients_and_reason():
    outcome = run({"train": {"lr": 1e30, "lr_decay": 1.0}, "rounds": 50}, "--out", "out")
    refused(outcome, "0 good uploads of 2", "(clients ", "NaN or infinity", "learning rate")
    assert outcome.err.count("NaN or infinity") == 1, "what both clients have in common is told once"
    assert "NaN or infinity" not in " ".join(outcome.out.split())
    assert "* fedavg: seed 0: failed at round 0 of 50" in outcome.out
    assert re.search(r"^ fedavg \* +1 +failed +— ", outcome.out, re.M), "of the untrained model nothing is told"
    assert "NaN or infinity" in " ".join(succeeded(here("compare", "out")).out.split())
    page = (Path("out") / "report.html").read_text(encoding="utf-8")
    assert re.search(r">failed<", page)
    stands = status(Path("out") / RUN)
    assert stands["state"] == "failed"
    assert "learning rate" in stands["reason"]
    assert lines_of(Path("out") / RUN) == stands["round"] + 1


WHOLE = """
from torch import nn

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.a = nn.Embedding(64, 2), nn.Linear(128, 10)

    def forward(self, x):
        return self.a(self.e(x.flatten(1).long().clamp(0, 63)).flatten(1))
"""
"""A network that no gradient reaches the inputs of: FedMix fails in the trial before round 1."""


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_fails_in_its_trial_is_failed_with_its_reason_and_a_row(jobs):
    Path("whole.py").write_text(WHOLE)
    model = {"name": "module", "path": "whole:Whole"}
    methods = ["fedavg", {"label": "broken", "name": "fedmix"}]

    changes = {"model": model, "methods": methods, "rounds": 1, "engine": "auto"}
    outcome = run(changes, "--out", "out", "--jobs", jobs)

    assert outcome.code == 2
    assert "broken-seed0: RuntimeError: The differentiated Tensor" in outcome.err
    assert re.search(r"^ broken \* +0 +failed +— ", outcome.out, re.M)
    stands = status(Path("out/broken-seed0"))
    assert (stands["state"], stands["round"]) == ("failed", 0)
    assert "not have been used in the graph" in stands["reason"]
    told = succeeded(here("compare", "out")).out
    assert "Not begun" not in told
    assert "digits (2)" not in told, "the failed run is of the same data"
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert re.search(r">failed<", page)
    assert len(by_data(find_runs([Path("out")]))) == 1


def test_of_runs_that_fail_before_they_begin_beside_others_the_mistake_is_their_status():
    settings = {"grid": {"train.cohort": [2, 5]}, "partition": {"name": "iid", "clients": 4}, "rounds": 1}
    refused(run(settings, "--out", "out", "--jobs", 1), "fedavg-cohort-5-seed0: train.cohort: 5 clients a round")

    failed = Path("out/fedavg-cohort-5-seed0")
    assert status(failed)["reason"].startswith("train.cohort: 5 clients a round, but only 4")
    assert re.search(r"^ .*cohort=5.* \* +0 +failed +— ", succeeded(here("compare", "out")).out, re.M)
    assert "cohort-5" not in succeeded(here("leaks", "out")).out
    refused(here("export", failed, "--out", "model.pt2"), f"{failed}: failed before it began: train.cohort: 5 clients")


def test_runs_that_failed_before_they_began_are_made_with_what_their_study_says_now(monkeypatch):
    before, now = (resolve(changed(TINY, {"train": {"lr": lr}})) for lr in (0.1, 0.2))
    for slug in "ab":
        runner.keep_failure(Path("out", slug), before, "a slip in the user's model")
    write_study(Path("out"), "out", {slug: as_table(now) for slug in "ab"})
    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "set_experiment", Mock(side_effect=InterruptedError("killed")))
        with pytest.raises(InterruptedError):
            runner.execute(now, Path("out/b"), resume=False)
    assert not RunDirectory.has_begun(Path("out/b"))

    succeeded(here("resume", "out", "--jobs", 1))

    assert [RunDirectory(Path("out", slug)).experiment().train.lr for slug in "ab"] == [0.2, 0.2]


def test_a_run_of_a_version_that_sent_frozen_tensors_goes_on_with_a_warning(monkeypatch):
    Path("frozen_net.py").write_text(
        WHOLE.replace("nn.Linear(128, 10)", "nn.Linear(128, 10)\n        self.e.requires_grad_(False)")
    )
    monkeypatch.syspath_prepend(".")
    made = {
        **TINY,
        "data": "digits",
        "model": {"name": "module", "path": "frozen_net:Whole"},
        "rounds": 1,
        "scale": "none",
    }
    fedblend.run(resolve(made), "old")
    facts = json.loads(Path("old/facts.json").read_text())
    assert len(facts["model"].pop("frozen")) == 64
    Path("old/facts.json").write_text(json.dumps(facts))
    with pytest.warns(UserWarning, match="sent frozen tensors; from round 2 they do not travel"):
        fedblend.run(resolve(made | {"rounds": 2}), "old", resume=True)


@pytest.mark.parametrize("place", ["make_setup", "engines.plan_engine", "engines.make"])
def test_a_run_from_python_that_fails_before_it_begins_is_failed_and_goes_on_once_mended(place, monkeypatch):
    made = resolve({**TINY, "rounds": 1})

    def fail(*_, **__):
        raise ZeroDivisionError("nothing to divide by")

    with monkeypatch.context() as broken:
        broken.setattr(f"fedblend.runs.runner.{place}", fail)
        with pytest.raises(ZeroDivisionError):
            fedblend.run(made, "own")
    assert status(Path("own")) == {"state": "failed", "round": 0, "reason": "nothing to divide by"}

    fedblend.run(made, "own", resume=True)

    assert status(Path("own"))["state"] == "done"
    assert find_runs([Path("own")])[0].facts()["clients"]["number"] == 4


def test_a_run_that_is_interrupted_before_it_begins_leaves_no_folder(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedblend.runs.runner.engines.plan_engine", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fedblend.run(resolve(TINY), "own")
    assert not Path("own").exists()


def test_a_mistake_that_runs_share_is_told_once():
    missing = {"name": "npz", "path": "nowhere.npz"}
    shared = run({"data": missing, "methods": ["fedavg", "fedmix"], "seeds": [0, 1, 2]}, "--jobs", 1)
    refused_at_once(shared, "all 6 runs: data.path: ")
    assert shared.err.count("there is no") == 1
    some = run({"grid": {"train.cohort": [2, 5]}, "seeds": [0, 1]}, "--out", "out", "--jobs", 1)
    refused(some, "fedavg-cohort-5-seed0, fedavg-cohort-5-seed1: train.cohort: 5 clients")


BROKEN = '''
from fedblend import part
from fedblend.core.objective import Objective

@part("objective", "broken")
class Broken(Objective):
    """An objective with a fault."""

    def loss(self, net, batch, drawn, context):
        raise KeyError("a fault of the user's own")
'''


@pytest.mark.slow
def test_a_fault_in_ones_own_code_is_shown_and_stops_no_other_run():
    Path("broken_part.py").write_text(BROKEN)
    several = [{"label": "broken", "objective": "broken_part:Broken"}, "fedavg"]
    outcome = run({"methods": several}, "--out", "out", "--jobs", 1)
    assert outcome.code in (1, 2)
    for told in ("a fault of the user's own", "broken_part.py", "client 0", "round 1"):
        # Where in the user's code it happened matters, so here a traceback is right.
        assert told in outcome.err
    assert status(Path("out/broken-seed0"))["state"] == "failed"
    assert "a fault of the user's own" in status(Path("out/broken-seed0"))["reason"]
    assert status(Path("out/fedavg-seed0"))["state"] == "done"


@pytest.mark.slow
def test_mistakes_leave_a_finished_run_as_it_was():
    succeeded(run({}, "--out", "out"))
    before = contents(Path("out"))
    refused(run({}, "--out", "out"), "already holds files")
    refused(run({"train": {"lr": 1e30}}, "--out", "out", "--resume"), "train.lr: 1e+30 differs from 0.05 in out;")
    refused(run({"ruonds": 1}, "--out", "out", "--resume"), "ruonds")
    refused(run({"device": "banana"}, "--out", "out", "--resume"), "device")
    assert contents(Path("out")) == before


@pytest.mark.slow
@pytest.mark.parametrize("federated", [False, True])
def test_no_study_begins_in_the_folder_of_a_run(federated):
    succeeded(run({}, "--out", "out"))
    (path,) = find_runs([Path("out")])
    told = "is itself a run directory, and no folder for runs; go on with its run (fedblend resume "
    if federated:
        sites_with_own_data(path.path, 40, 50, 60, 70)
        told = "is a run of a real federation; resume it as it was started, with flwr run or fedblend federation up"
    before = contents(path.path)
    refused(run({}, "--out", path.path, "--resume"), told)
    refused(run({}, "--out", path.path), told)
    refused(here("tune", write(Path("tune.toml")), "--out", path.path, "--resume"), told)
    assert contents(path.path) == before


LARGE = {"model": {"name": "mlp", "hidden": [600]}, "rounds": 4}
"""Checkpoints of 180 kB, so that one finds no room where a line of metrics still does."""


@pytest.mark.slow
def test_a_file_that_may_not_grow_to_a_checkpoint():
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    file = write(Path("large.toml"), LARGE)
    succeeded(here("run", file, "--out", "whole"))
    succeeded(here("run", file, "--set", "rounds=2", "--out", "out"))
    outcome = call("run", file, "--resume", "--out", "out", before=limit)
    refused(outcome, "checkpoint.safetensors", "File too large", "fedblend resume")
    kept = checkpoint.read(Path("out") / RUN)
    assert kept.round == 2
    assert status(Path("out") / RUN)["state"] == "failed"
    succeeded(here("resume", Path("out") / RUN))
    same_end(Path("out") / RUN, Path("whole") / RUN)
