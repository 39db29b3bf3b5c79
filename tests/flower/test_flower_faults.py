"""What goes wrong: sites that are absent, silent, failing or wrong, and servers that are killed."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_helpers import (
    ALL,
    POWER,
    TWO,
    Nodes,
    by_loop,
    experiment,
    federate,
    fields_only,
    is_loops,
    nodes,
    one_round,
    refusals,
    refuses,
    spoiling,
    table_only,
    tensors_only,
)
from flower_sites import sites_of, sites_with_data
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from helpers import same, slow_after_first, slow_except, without_machine

from fedblend.core.errors import FedblendError, Stopped
from fedblend.experiment.config import Experiment
from fedblend.flower import client as at_site
from fedblend.flower.audit import AuditLog
from fedblend.flower.client_task import Memory
from fedblend.flower.messages import find_mismatched, pack
from fedblend.flower.secrets import site_secret
from fedblend.flower.server import RUN_NAME
from fedblend.flower.site import Site
from fedblend.methods.aggregators.mean import WeightedMean
from fedblend.runs import checkpoint, groups
from fedblend.runs.directory import RunDirectory
from fedblend.runs.runner import FinishedRun


def test_a_site_that_sends_nan_is_one_of_krums_byzantine_and_one_that_sends_nothing_is_not(tmp_path: Path) -> None:
    method = {"name": "fedavg", "aggregator": {"name": "krum", "byzantine": 1}}
    asked = one_round(method, partition={"name": "iid", "clients": 5}, train=ALL | {"cohort": 5})
    assert federate(nodes(5).lying("train", {1}, NAN), asked, tmp_path / "nan").directory.metrics()[1]["uploads"] == 4
    with pytest.raises(FedblendError, match=r"byzantine: 1 needs 5 uploads .* but valid uploads are 4"):
        federate(nodes(5).lying("train", {1}, refuses), asked, tmp_path / "nothing")


class Killed(BaseException):
    """The end of a server that nothing in it handles."""


NAN = tensors_only(lambda n, t: t * torch.nan)


def pickled(fields: Any, tensors: Any) -> RecordDict:
    record = pack(fields)
    record["tensors0"] = ArrayRecord({"a": Array("object", (1,), "pickle", b"cos\nsystem\n(S'true'\ntR.")})
    return record


WRONG: dict[str, tuple[Any, str]] = {
    "nan": (NAN, "holds NaN or infinity"),
    "shape": (tensors_only(lambda n, t: t[..., :-1]), "is of shape"),
    "type": (tensors_only(lambda n, t: t.double()), "is of type torch.float64"),
    "names": (table_only(lambda t: {"x": torch.ones(1)}), "are not the model's"),
    "nothing": (table_only(lambda t: {}), "are not the model's"),
    "more samples": (fields_only(samples=10**9), "trained on 1000000000 samples, and holds"),
    "samples as a word": (fields_only(samples="many"), "trained on 'many' samples"),
    "true samples": (fields_only(samples=True), "trained on True samples"),
    "loss as a word": (fields_only(loss="low"), "its loss is 'low'"),
    "a loss beyond float32": (fields_only(loss=1e308), "its loss is NaN or infinite"),
    "a huge loss": (fields_only(loss=10**400), "its loss is NaN or infinite"),
    "a low loss": (fields_only(loss=-(10**400)), "its loss is NaN or infinite"),
    "a loss of nan": (fields_only(loss=float("nan")), "its loss is NaN or infinite"),
    "an infinite loss": (fields_only(loss=float("inf")), "its loss is NaN or infinite"),
    "no loss": (fields_only(loss=None), "its loss is NaN or infinite"),
    "a long loss": (fields_only(loss="x" * 10**4), "its loss is 'xxx"),
    "many words": (
        fields_only(loss="x" * 10**6),
        "it sent 1,000,028 characters beside its tensors; valid: 100,000 at most",
    ),
    "more words": (fields_only(more="x" * 10**6), "characters beside its tensors; valid: 100,000 at most"),
    "a long fault": (fields_only(fault="a\nb\x1b[2J" + "c" * 10_000), "a b"),
    "long names": (table_only(lambda t: {f"{'n' * 1000}{i}\n": torch.zeros(1) for i in range(50)}), "nnn"),
    "no fields": (lambda fields, tensors: RecordDict({"a": ConfigRecord({})}), "not fedblend's"),
    "a list": (lambda fields, tensors: RecordDict({"fields": ConfigRecord({"fields": "[1]"})}), "no JSON object"),
    "a pickle": (pickled, "not fedblend's"),
    "silence": (lambda fields, tensors: None, "no answer within 0.4 seconds"),
    "complex numbers": (tensors_only(lambda n, t: t.to(torch.complex64)), "it sent a tensor of type torch.complex64"),
    "lacking": (lambda fields, tensors: pack({"lacks": "model"}), "lacks what it was sent twice"),
    "an error of its app": ((2, "Traceback\nValueError: no disk"), "its app failed (code 2): ValueError: no disk"),
    "a late message": ((3, "<Message Unavailable>"), "no answer within 0.4 seconds (deadline)"),
    "no connection": ((5, "<Message Unavailable>"), "its site is no longer connected"),
    "no trust": ((7, "<Message Unavailable>"), "does not trust this app"),
    "a killed app": ((8, "<Message Unavailable>"), "its app was killed"),
}


def extras_only(change: Any) -> Any:
    """Change what goes beside the model only."""
    return tensors_only(lambda n, t: change(t) if n.startswith("extras/") else t)


BESIDE: dict[str, tuple[Any, str]] = {
    "nan": (extras_only(lambda t: t * torch.nan), "holds NaN or infinity"),
    "infinity": (extras_only(lambda t: t + torch.inf), "holds NaN or infinity"),
    "shape": (extras_only(lambda t: t[..., :-1]), "is of shape"),
    "type": (extras_only(lambda t: t.double()), "is of type torch.float64"),
    "nothing": (table_only(lambda t: {n: one for n, one in t.items() if "extras/" not in n}), "missing ['terms.0/"),
}


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_wrong_upload_is_refused_and_the_round_uses_the_others(method: str, tmp_path: Path) -> None:
    """Also where what SCAFFOLD sends beside the model is wrong."""
    without = federate(spoiling(2, "train", refuses), one_round(method), tmp_path / "others").state
    for fault, (change, reason) in {"fedavg": WRONG, "scaffold": BESIDE}[method].items():
        grid = nodes().failing(2, *change) if isinstance(change, tuple) else spoiling(2, "train", change)
        finished = federate(grid, one_round(method), tmp_path / fault)
        ((client, told),) = refusals(finished).items()
        assert (client, reason in told, len(told) < 400, told.isprintable()) == (2, True, True, True), (fault, told)
        assert ("'terms.0/" in told) == (method == "scaffold"), (fault, told)
        assert finished.directory.metrics()[1]["uploads"] == 3, fault
        assert same(finished.state.weights, without.weights), fault
        assert same(finished.state.server_state, without.server_state), fault


def test_an_upload_that_the_aggregator_refuses_is_refused_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def far(self: Any, upload: Any, start: Any) -> str:
        return "it moved too far" if any(bool(((upload[n] - t).abs() > 10).any()) for n, t in start.items()) else ""

    monkeypatch.setattr(WeightedMean, "fault", far)
    grid = spoiling(2, "train", tensors_only(lambda n, t: t + 100))
    assert refusals(federate(grid, one_round(), tmp_path)) == {2: "it moved too far"}


def test_a_round_without_enough_valid_uploads_stops_the_run_before_it(tmp_path: Path) -> None:
    asked = experiment(train=ALL, rounds=2, min_uploads=4)
    with pytest.raises(FedblendError) as raised:
        federate(nodes().silent(3, 0), asked, tmp_path)
    assert str(raised.value) == (
        "round 1: 3 good uploads of 4, but min_uploads is 4 (client 3: no answer within 0.4 seconds (deadline)); "
        "earlier rounds are kept: remove the cause or lower min_uploads, and continue the run"
    )
    finished, (state, records) = federate(nodes(), asked, tmp_path), by_loop(asked)
    assert same(finished.state.weights, state.weights)
    assert [one["loss"] for one in finished.directory.metrics()] == [one["loss"] for one in records]


def test_a_run_whose_site_is_gone_for_good_continues_with_a_lower_min_uploads(tmp_path: Path) -> None:
    asked = experiment("fedmix", train=ALL, min_uploads=4)
    with pytest.raises(FedblendError, match="round 2: 3 good uploads of 4, but min_uploads is 4"):
        federate(nodes().silent(3, 1), asked, tmp_path)
    kept = (tmp_path / "metrics.jsonl").read_bytes()
    finished = federate(nodes().without(3), asked.model_copy(update={"min_uploads": 3}), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(kept)
    assert [line.get("uploads") for line in finished.directory.metrics()] == [None, 4, 3]
    assert finished.directory.experiment().min_uploads == 3
    assert refusals(finished, 2) == {3: "its site is not connected"}


def test_too_few_sites_stop_the_run_with_the_missing_ones_named(tmp_path: Path) -> None:
    for method, least, deadline, told in (
        ("fedavg", 3, 0.2, r"min_sites: 3, but only 2 of 4 sites are connected .* missing: 1, 3"),
        ("fedavg", 5, 0.2, "min_sites: 5: the experiment has 4 clients; valid: 1 to 4"),
        ("xormixfl", 4, 0.2, r"min_sites: 4: .* of which client 0 is the server; valid: 1 to 3"),
        ("fedavg", 0, float("inf"), "deadline: inf is not valid"),
    ):
        with pytest.raises(FedblendError, match=told):
            federate(nodes().without(1, 3), experiment(method), tmp_path, deadline, least)


@pytest.mark.slow
def test_sites_with_their_own_data_begin_without_one_that_is_absent(tmp_path: Path, caplog: Any) -> None:
    asked = experiment(train=ALL, fraction=1.0)
    grid = Nodes(configs := sites_with_data(tmp_path, asked)).without(2)
    caplog.set_level(logging.INFO, "flwr")

    finished = federate(grid, asked, tmp_path / "run", 60, 2)

    assert finished.directory.metrics()[2]["cohort"] == [0, 1, 3]
    assert "3 of 4 sites are connected; the run waits 60 seconds (deadline) at most; missing: 2" in caplog.text
    assert "clients 2 are not connected, or have no samples, and take no part in the run; 3 clients a" in caplog.text
    few = asked.model_copy(update={"min_uploads": 4})
    with pytest.raises(FedblendError, match=r"clients 2 are not connected.*too few for a round: min_uploads: 4"):
        federate(grid, few, tmp_path / "few")
    method = {"name": "fedavg", "aggregator": {"name": "secure-mean", "fewest": 3}}
    again = experiment(method, train=ALL, fraction=1.0, rounds=1)
    summed = federate(Nodes(configs, run_id=2).without(2), again, tmp_path / "summed")
    assert summed.directory.metrics()[1]["uploads"] == 3, "as many as min_sum of each site file"
    method["aggregator"]["fewest"] = 4
    masked = experiment(method, train=ALL, fraction=1.0)
    with pytest.raises(FedblendError, match=r"clients 2 are not connected.*fewest: 4 clients to a sum"):
        federate(grid, masked, tmp_path / "masked")


@pytest.mark.parametrize("late", slow_after_first([False, True]))
def test_a_continued_run_keeps_the_numbers_of_samples_that_it_began_with(late: bool, tmp_path: Path) -> None:
    """A site that is absent in the second round is refused, and one that connects then takes no part: both the same."""
    asked = experiment(rounds=1, fraction=1.0)
    two, (first, second) = asked.model_copy(update={"rounds": 2}), ({3}, set()) if late else (set(), {2})
    configs = sites_with_data(tmp_path, asked)
    whole = Nodes(configs).without(*first)
    expected = federate(whole.after(0, None, lambda: whole.without(*second)), two, tmp_path / "whole")
    federate(Nodes(configs, 2).without(*first), asked, tmp_path / "run")
    finished = federate(Nodes(configs, 3).without(*second), two, tmp_path / "run")

    lines = [[{**one, "machine": None} for one in made.directory.metrics()] for made in (finished, expected)]
    assert lines[0][2] == lines[1][2]
    assert same(finished.state.weights, expected.state.weights)


def test_samples_that_changed_before_a_restart_are_refused(tmp_path: Path, caplog: Any) -> None:
    asked = experiment(train=ALL, rounds=1, fraction=1.0)
    two = asked.model_copy(update={"rounds": 2})
    configs = sites_with_data(tmp_path, asked)
    federate(Nodes(configs), asked, tmp_path / "run")
    federate(nodes(), asked, tmp_path / "none")
    shutil.copy(tmp_path / "data-1.npz", tmp_path / "data-2.npz")

    record = federate(Nodes(configs), two, tmp_path / "run").directory.metrics()[2]

    (refused,) = record["refused"]
    assert (refused["client"], "it says that it trained on" in refused["reason"]) == (2, True)
    assert "client 2 has other samples" in caplog.text
    with pytest.raises(FedblendError, match=r"sites \[0, 1, 2, 3\] have data of their own .* the run began with sites"):
        federate(Nodes(configs), two, tmp_path / "none")
    with pytest.raises(FedblendError, match=r"have data of their own .*, sites \[0, 1, 2, 3\] have not"):
        federate(nodes(), two.model_copy(update={"rounds": 3}), tmp_path / "run")


def test_a_restarted_site_is_queried_and_receives_everything_again(tmp_path: Path) -> None:
    asked, grid = experiment("fedmix", train=ALL, rounds=3), nodes()
    finished = federate(grid.after(1, 0, lambda: grid.restart(0)), asked, tmp_path)
    is_loops(finished, asked)
    model = sum(t.numel() * 4 for t in finished.state.weights.values())
    pools = [down > model for who, kind, down, _ in grid.sent if who == 0 and kind == "train"]
    assert pools == [True, False, True]


@pytest.mark.parametrize(
    "asked", [experiment("fedmix", train=ALL), experiment(selection=POWER, train=TWO)], ids=["pool", "model"]
)
def test_a_site_that_lost_its_memory_receives_everything_again_in_the_same_round(
    asked: Experiment, tmp_path: Path
) -> None:
    grid = nodes()

    def forget(who: int, message: Message, reply: Message) -> Message:
        grid.contexts[message.metadata.dst_node_id].state = RecordDict()
        return reply

    finished = federate(grid.spoiled(forget), asked, tmp_path)
    is_loops(finished, asked)
    assert (refusals(finished), refusals(finished, 2)) == ({}, {})


def killing(grid: Nodes, round: int, client: int | None = None, end: type[BaseException] = Killed) -> Nodes:
    """The same nodes, whose server ends when a client (default: the first) has trained in a round."""

    def kill() -> None:
        raise end

    return grid.after(round, client, kill)


def same_runs(made: FinishedRun, whole: FinishedRun) -> None:
    """Assert that two runs have the same metrics and weights."""
    assert without_machine(made.directory.metrics()) == without_machine(whole.directory.metrics())
    assert same(made.state.weights, whole.state.weights)


def test_a_killed_server_continues_with_the_same_bytes_in_its_metrics(tmp_path: Path) -> None:
    asked = experiment("fedmix", rounds=3)
    with pytest.raises(Killed):
        federate(killing(nodes(), 2), asked, tmp_path / "killed")
    # Flower gives a new run a new number and its nodes an empty memory.
    same_runs(federate(nodes(), asked, tmp_path / "killed"), federate(nodes(), asked, tmp_path / "whole"))


def test_a_federation_that_was_stopped_or_killed_goes_on_with_what_began_it(tmp_path: Path) -> None:
    """``fedblend resume`` has no sites, and refuses its run."""
    with pytest.raises(Stopped) as told:
        federate(killing(nodes(), 1, end=KeyboardInterrupt), experiment(), tmp_path)
    how = "o on with: the command that began it (flwr run or fedblend federation up)"
    assert str(told.value) == f"stopped; kept up to round 1. G{how}"
    directory = RunDirectory(tmp_path)
    directory.set_status("running", 1)
    assert groups.read(directory).status_text == f"killed at round 1 of 2; g{how}"


def test_lost_client_weights_are_an_error(tmp_path: Path) -> None:
    asked = experiment("fd", train=ALL, rounds=1)
    federate(nodes(), asked, tmp_path)
    with pytest.raises(FedblendError, match=r"0 good uploads of 4.*no longer has its own weights of round 0"):
        federate(nodes(), asked.model_copy(update={"rounds": 2}), tmp_path)


KEEPERS: dict[str, dict[str, Any]] = {
    "scaffold": {"method": "scaffold"},
    "fedper": {"method": "fedper", "holdout": 0.2},
    "ditto": {"method": "ditto"},
    "moon": {"method": "moon"},
    "fd": {"method": "fd"},
    "adam": {"method": "fedavg", "train": {**ALL, "optimizer": "adam", "optimizer_state": "keep"}},
    "local means": {"method": {"name": "fedmix", "sharing": "local-means"}},
}

FEW_KEEPERS = slow_except(["scaffold"], KEEPERS)
"""All of them, of which the quick tests have one."""


def keeping(keeper: str) -> Experiment:
    return experiment(**{"train": ALL, "rounds": 3, "partition": {"name": "iid", "clients": 4}, **KEEPERS[keeper]})


@pytest.mark.parametrize("keeper", FEW_KEEPERS)
def test_a_site_that_restarts_goes_on_with_what_only_it_keeps(keeper: str, tmp_path: Path) -> None:
    asked, grid = keeping(keeper), sites_of(tmp_path / "sites")
    for client in range(4):
        grid.after(client % 2, client, functools.partial(grid.restart, client))
    finished = federate(grid, asked, tmp_path / "restarted")
    same_runs(finished, federate(sites_of(tmp_path / "others"), asked, tmp_path / "whole"))


def test_a_site_without_a_file_that_lost_its_own_means_does_not_train_without_them(tmp_path: Path) -> None:
    grid = nodes()
    finished = federate(grid.after(0, 0, lambda: grid.restart(0)), keeping("local means"), tmp_path)
    assert [list(refusals(finished, round)) for round in range(4)] == [[], [], [0], [0]]
    assert "no longer has its own data to mix with" in refusals(finished, 2)[0]


@pytest.mark.slow
def test_a_site_that_ends_before_its_reply_goes_on_with_what_the_server_knows_of(tmp_path: Path) -> None:
    grid = sites_of(tmp_path / "restarted")
    grid.after(1, 0, lambda: grid.restart(0)).silent(0, 1)
    restarted = federate(grid, keeping("scaffold"), tmp_path / "restarted-run")
    silent = federate(sites_of(tmp_path / "silent").silent(0, 1), keeping("scaffold"), tmp_path / "silent-run")
    assert [list(refusals(restarted, round)) for round in range(4)] == [[], [], [0], []]
    assert same(restarted.state.weights, silent.state.weights)


@pytest.mark.parametrize("keeper", FEW_KEEPERS)
def test_a_server_that_is_killed_goes_on_with_what_sites_keep(keeper: str, tmp_path: Path) -> None:
    """In the killed rounds clients 0 and 1 have trained, and the server has received no reply of it."""
    asked = keeping(keeper)
    for run_id, killed in enumerate((0, 1, 1, 2), 1):
        with pytest.raises(Killed):
            federate(killing(sites_of(tmp_path / "sites", run_id), killed, 1), asked, tmp_path / "run")
    finished = federate(sites_of(tmp_path / "sites", 9), asked, tmp_path / "run")

    whole = federate(sites_of(tmp_path / "others"), asked, tmp_path / "whole")
    assert [refusals(finished, round) for round in range(4)] == [refusals(whole, round) for round in range(4)]
    for table in ("weights", "global_outputs", "server_state"):
        assert same(getattr(finished.state, table), getattr(whole.state, table))
    for client in range(4):
        (ours, made), (theirs, expected) = (
            checkpoint.read_table(*(tmp_path / folder / f"audit-{client}.state").iterdir())
            for folder in ("sites", "others")
        )
        assert ours["marks"] == theirs["marks"]
        assert list(made) == list(expected)
        assert same(made, expected)


@pytest.mark.slow
def test_means_that_a_site_made_after_the_servers_checkpoint_are_not_used_before_it(tmp_path: Path) -> None:
    """Three clients make means again in round 6, and the server goes on from its checkpoint after round 4."""
    method = {"name": "fedmix", "sharing": {"name": "local-means", "refresh": 0.6}}
    arrival = {"first": 0.3, "clients": 0.3, "portion": 0.1}
    changes = {"checkpoint_every": 4, "rounds": 6, "arrival": arrival}
    asked = one_round(method, partition={"name": "iid", "clients": 4}, **changes)
    # Means of other samples are another sharing.
    with pytest.raises(Killed):
        federate(killing(sites_of(tmp_path / "sites", sharings=3), 5, 3), asked, tmp_path / "run")
    finished = federate(sites_of(tmp_path / "sites", 2, sharings=3), asked, tmp_path / "run")
    again = [line["shared"]["asked"] for line in finished.directory.metrics() if line.get("shared")]
    refused = [list(refusals(finished, round)) for round in range(7)]
    assert (again, refused) == ([4, 3, 3], [[], [], [], [], [], [0, 1, 3], []])
    assert "no longer has its own data to mix with" in refusals(finished, 5)[0]


@pytest.mark.slow
@pytest.mark.parametrize("keeper", ["scaffold", "ditto"])
def test_sites_do_not_mix_two_copies_of_a_run(keeper: str, tmp_path: Path) -> None:
    asked, numbers = keeping(keeper), itertools.count(1)

    def go_on(copy: str, rounds: int, silent: int = -1) -> list[int]:
        """Make the next round of a copy; return the clients whose uploads were refused in it."""
        grid = sites_of(tmp_path / "sites", next(numbers)).silent(silent, 1)
        made = federate(grid, asked.model_copy(update={"rounds": rounds}), tmp_path / copy)
        return list(refusals(made, rounds))

    assert go_on("one", 1) == []
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    # In round 2 the copies differ in client 3, and from round 3 on in what the other clients keep.
    assert [go_on("one", 2, silent=3), go_on("two", 2), go_on("one", 3), go_on("two", 3)] == [[3], [], [], [3]]
    assert go_on("one", 4) == [0, 1, 2]


def test_a_second_server_of_a_run_sends_sites_nothing_while_the_first_one_is_at_work(tmp_path: Path) -> None:
    asked, sites, folder = keeping("scaffold").model_copy(update={"rounds": 1}), tmp_path / "sites", tmp_path / "run"
    second, told = sites_of(sites, 2), f"{folder}: this run directory is in use by another process; wait for it, stop "

    def start_again() -> None:
        with pytest.raises(FedblendError) as raised:
            federate(second, asked, folder)
        assert str(raised.value) == f"{told}it, or give another folder (--out, or --folder of federation app)"

    finished = federate(sites_of(sites).after(0, 0, start_again), asked, folder)
    assert (second.sent, finished.state.round) == ([], 1)


@pytest.mark.slow
def test_another_run_does_not_take_what_a_site_keeps(tmp_path: Path) -> None:
    one, sites = keeping("scaffold").model_copy(update={"rounds": 1}), tmp_path / "sites"
    first = federate(sites_of(sites), one, tmp_path / "run")
    # A new run begins as the first one did, and each has a file of its own.
    new = federate(sites_of(sites, 3), one, tmp_path / "new")
    assert same(new.state.weights, first.state.weights)
    folder = sites / "audit-0.state"
    assert len({path.name for path in folder.glob("*-0.safetensors")}) == len([*folder.iterdir()]) == 2
    assert folder.stat().st_mode & 0o777 == 0o700
    name, grid = tmp_path / "run" / RUN_NAME, sites_of(sites, 2)
    for content in ("", "0123abc"):
        name.write_text(content)
        with pytest.raises(FedblendError) as raised:
            federate(grid, keeping("scaffold"), tmp_path / "run")
        remedy = "restore it from a copy, or begin again in another folder"
        assert str(raised.value) == f"{name}: is damaged: {content!r}, not 32 hexadecimal digits; {remedy}"
        assert grid.sent == []
    # A server that has not the name of the run has not what sites keep for it.
    name.unlink()
    with pytest.raises(FedblendError, match=r"0 good uploads of 4.*no longer has what the method keeps at it since"):
        federate(grid, keeping("scaffold"), tmp_path / "run")


def keep_state(audit: str) -> None:
    memory = Memory(Context(1, 1, {}, RecordDict(), {}), Site(audit=audit), 0, "name")
    memory.keep("parts", "0", {"c": torch.zeros(3)})
    memory.save()


def keep_secret(audit: str) -> None:
    site_secret(AuditLog(audit).folder)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    ("folder", "keep", "ending"), [("audit.state", keep_state, ".safetensors"), ("audit.shared", keep_secret, "")]
)
def test_what_a_killed_site_leaves_half_written_is_removed_at_the_next_write(
    folder: str, keep: Callable[[str], None], ending: str, tmp_path: Path
) -> None:
    def write(killed: bool) -> tuple[int, list[str]]:
        process = os.fork()
        if not process:
            try:
                if killed:
                    os.replace = os.link = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
                keep(str(tmp_path / "audit.jsonl"))
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        return status, sorted(path.suffix for path in (tmp_path / folder).iterdir())

    assert write(killed=True) == (-signal.SIGKILL, [".tmp"])
    assert write(killed=True) == (-signal.SIGKILL, [".tmp"])
    assert write(killed=False) == (0, [ending])


SPOILED: dict[str, tuple[Any, str]] = {
    "a changed bit": (
        lambda folder, file, content: file.write_bytes(content[:-1] + bytes([content[-1] ^ 1])),
        "does not have the checksum .* restore it from a copy, or begin a new run",
    ),
    "a file cut short": (lambda folder, file, content: file.write_bytes(b"x"), "is damaged: .* begin a"),
    "a folder that others read": (lambda folder, *_: folder.chmod(0o755), "other users can read .* chmod 700"),
}


@pytest.mark.parametrize("how", slow_except(["a changed bit"], SPOILED))
def test_a_site_whose_kept_state_is_spoiled_says_so_and_takes_no_part(how: str, tmp_path: Path, caplog: Any) -> None:
    spoil_folder, reason = SPOILED[how]
    grid, folder = sites_of(tmp_path / "sites"), tmp_path / "sites" / "audit-0.state"

    def spoil() -> None:
        grid.restart(0)
        (file,) = folder.glob("*-0.safetensors")
        spoil_folder(folder, file, file.read_bytes())

    finished = federate(grid.after(0, 0, spoil), keeping("scaffold"), tmp_path / "run")
    for round in (2, 3):
        ((client, told),) = refusals(finished, round).items()
        assert (client, bool(re.search(reason, told)), str(tmp_path) in told) == (0, True, False)
    assert str(folder) in caplog.text


@pytest.mark.slow
def test_a_changed_experiment_does_not_take_what_a_site_keeps_of_another(tmp_path: Path) -> None:
    grid = sites_of(tmp_path / "sites")

    def cut() -> None:
        # What a site of another model would have kept in the same run.
        kept = at_site.Memory(grid.contexts[grid.node(0)])
        mark = kept.mark("parts")
        kept.keep("parts", mark, {name: t[:-1] for name, t in kept.recall("parts", mark).items()})

    refused = refusals(federate(grid.after(0, 0, cut), keeping("scaffold"), tmp_path / "run"), 2)
    assert list(refused) == [0]
    assert re.search(r"keeps since round 0 is not of this experiment: .* is of shape", refused[0])


def test_a_node_that_is_no_client_of_this_experiment_takes_no_part(tmp_path: Path) -> None:
    grid = Nodes([{"partition-id": c} for c in (0, 1, 2, 3, 9)] + [{"partition-id": "1"}, {}])
    asked = experiment(rounds=1)
    is_loops(federate(grid, asked, tmp_path), asked)


def typed(name: str, kind: torch.dtype) -> Any:
    return tensors_only(lambda n, t: t.to(kind) if n == name else t)


STEPS = {"mix2fld": {"server_step": {"steps": 2}}, "feddm": {"sharing": {"steps": 2}}}
TYPE, FORM = "it sent a tensor of type torch.{}; valid: torch.float16, ", "it sent tensors of shapes"
FLAT = tensors_only(lambda n, t: t.flatten()[0].clone())
SHARED: list[tuple[str, Any, str]] = [
    ("fedmix", typed("y", torch.uint16), TYPE.format("uint16")),
    ("mix2fld", typed("y", torch.complex64), TYPE.format("complex64")),
    ("statmix", typed("std", torch.uint32), TYPE.format("uint32")),
    ("fedmix", typed("x", torch.uint64), TYPE.format("uint64")),
    ("statmix", FLAT, "it sent tensors of shapes {'mean': (torch.float32,), 'std': (torch.float32,)}, not"),
    ("ccvr", FLAT, "it sent tensors of shapes {'y': (torch.int64,), 'count': (torch.int64,), 'mean'"),
    ("feddm", FLAT, "it sent tensors of shapes {'x': (torch.float32,), 'y': (torch.float32,)}, not"),
    ("fedmix", table_only(lambda t: {"x": t["x"][..., 1:], "y": t["y"]}), FORM),
    ("fedmix", typed("x", torch.float64), FORM),
    ("fedmix", table_only(lambda t: {"x": t["x"]}), FORM),
    ("fedmix", table_only(lambda t: {"x": t["x"], "y": t["y"].repeat(2, 1)}), FORM),
    ("fedmix", table_only(lambda t: {"x": t["x"].sum(), "y": t["y"]}), FORM),
    ("fedmix-hidden", table_only(lambda t: {"x": t["x"][..., 1:]}), ""),
    ("fedmix", NAN, "holds NaN or infinity"),
    (
        "fedmix",
        tensors_only(lambda n, t: t.repeat(1000, *[1] * (t.dim() - 1))),
        "it sent 1,000 entries, and its 127 samples make 63 at most",
    ),
    ("fedmix", refuses, "no"),
    ("fedmix", tensors_only(lambda n, t: t * 1e4 if n == "x" else t), "means 'x' with a number beyond"),
    ("fedmix", tensors_only(lambda n, t: t - 0.5 if n == "y" else t), "means 'y' with a number beyond"),
]


def test_every_fault_of_what_a_site_shares_is_recorded_and_the_others_are_used(tmp_path: Path) -> None:
    cases = [*((*case, {1}) for case in SHARED), (*SHARED[7], {1, 2}), (*SHARED[10], {0, 1, 2})]
    for number, (method, change, reason, liars) in enumerate(cases):
        asked = experiment({"name": method, **STEPS.get(method, {})}, rounds=1)
        finished = federate(nodes().lying("query.share", liars, change), asked, tmp_path / str(number))
        refused = finished.directory.metrics()[1]["shared"]["refused"]
        assert {one["client"]: reason in one["reason"] for one in refused} == dict.fromkeys(liars, True), number
        assert liars.isdisjoint(finished.state.entries.owner.tolist()), number


def test_equally_frequent_forms_and_unequal_rows_are_reported() -> None:
    a, b = {"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}
    assert find_mismatched({0: a, 1: {"x": torch.ones(5, 3)}, 2: b}, rows=True).keys() == {2}
    assert find_mismatched({0: a, 1: {"x": torch.ones(5, 3)}, 2: {"x": torch.ones(2, 3)}}, rows=False).keys() == {1}
    assert find_mismatched({0: a, 1: {"x": torch.ones(2, 3), "y": torch.ones(3)}}, rows=True).keys() == {1}
    assert find_mismatched({}, rows=True) == {}
    with pytest.raises(FedblendError, match=r"disagree on the form.*clients 0, 5: .*\(3,\).*; clients 1, 4: .*\(4,\)"):
        find_mismatched({0: a, 1: b, 4: b, 5: a}, rows=True)
