"""What goes wrong: sites that are absent, silent, failing or wrong, and servers that are killed."""

from __future__ import annotations

import itertools
import json
import logging
import re
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_helpers import (
    ALL,
    QUICK,
    Nodes,
    by_loop,
    experiment,
    fields_only,
    is_loops,
    nodes,
    spoiling,
    tensors_only,
    trained_in,
)
from flower_sites import sites_with_data
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from helpers import same, slow_after_first, slow_except

from fedblend.core.errors import FedblendError, Stopped
from fedblend.experiment.config import Experiment
from fedblend.flower import client as at_site
from fedblend.flower.app_folder import FederationLimits
from fedblend.flower.messages import find_mismatched, pack, to_record, unpack
from fedblend.flower.server import RUN_NAME, run
from fedblend.flower.work import runs_of
from fedblend.methods.aggregators.mean import WeightedMean
from fedblend.runs import checkpoint, groups
from fedblend.runs.directory import RunDirectory

pytestmark = pytest.mark.usefixtures("no_waits")


def test_a_site_that_sends_nan_is_one_of_krums_byzantine_and_one_that_sends_nothing_is_not(tmp_path: Path) -> None:
    method = {"name": "fedavg", "aggregator": {"name": "krum", "byzantine": 1}}
    clients = {
        "partition": {"name": "iid", "clients": 5},
        "train": {"cohort": 5, "epochs": 1, "batch_size": 50, "lr": 0.1},
    }
    asked = experiment(method, rounds=1, **clients)
    grid = nodes(5)
    grid.spoil = spoiling(1, "train", tensors_only(lambda n, t: t * torch.nan)).spoil
    assert run(grid, asked, tmp_path / "nan", FederationLimits(5, 5)).directory.metrics()[1]["uploads"] == 4
    grid = nodes(5)
    grid.spoil = spoiling(1, "train", lambda fields, tensors: pack({"fault": "no"})).spoil
    with pytest.raises(FedblendError, match=r"byzantine: 1 needs 5 uploads .* but valid uploads are 4"):
        run(grid, asked, tmp_path / "nothing", FederationLimits(5, 5))


def pickled(fields: Any, tensors: Any) -> RecordDict:
    record = pack(fields)
    record["tensors0"] = ArrayRecord({"a": Array("object", (1,), "pickle", b"cos\nsystem\n(S'true'\ntR.")})
    return record


WRONG = {
    "nan": (tensors_only(lambda n, t: t * torch.nan), "holds NaN or infinity"),
    "shape": (tensors_only(lambda n, t: t[..., :-1]), "is of shape"),
    "type": (tensors_only(lambda n, t: t.double()), "is of type torch.float64"),
    "names": (lambda fields, tensors: pack(fields, to_record({"x": torch.ones(1)})), "are not the model's"),
    "nothing": (lambda fields, tensors: pack(fields), "are not the model's"),
    "more samples": (fields_only(samples=10**9), "trained on 1000000000 samples, and holds"),
    "samples as a word": (fields_only(samples="many"), "trained on 'many' samples"),
    "true samples": (fields_only(samples=True), "trained on True samples"),
    "loss as a word": (fields_only(loss="low"), "its loss is 'low'"),
    "a loss beyond float32": (fields_only(loss=1e308), "its loss is NaN or infinite"),
    "no loss": (fields_only(loss=None), "its loss is NaN or infinite"),
    "no fields": (lambda fields, tensors: RecordDict({"a": ConfigRecord({})}), "not fedblend's"),
    "a list": (lambda fields, tensors: RecordDict({"fields": ConfigRecord({"fields": "[1]"})}), "no JSON object"),
    "a pickle": (pickled, "not fedblend's"),
    "silence": (lambda fields, tensors: None, "no answer within 0.4 seconds"),
    "complex numbers": (
        tensors_only(lambda n, t: t.to(torch.complex64)),
        "it sent a tensor of type torch.complex64; valid:",
    ),
    "lacking": (lambda fields, tensors: pack({"lacks": "model"}), "lacks what it was sent twice"),
}


@pytest.fixture(scope="module")
def of_the_others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The mean of the models of all clients but 2, in float64, after a round."""
    grid = spoiling(2, "train", lambda fields, tensors: pack({"fault": "no"}))
    return run(grid, experiment(train=ALL, rounds=1), tmp_path_factory.mktemp("others"), QUICK).state.weights


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_upload_is_refused_and_the_round_uses_the_others(
    fault: str, of_the_others: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    change, reason = WRONG[fault]
    asked = experiment(train=ALL, rounds=1)

    finished = run(spoiling(2, "train", change), asked, tmp_path, QUICK)

    record = finished.directory.metrics()[1]
    assert [one["client"] for one in record["refused"]] == [2]
    assert reason in record["refused"][0]["reason"]
    assert record["uploads"] == 3
    assert all(torch.equal(finished.state.weights[n], t) for n, t in of_the_others.items())


def extras_only(change: Any) -> Any:
    """Change what goes beside the model only."""
    return tensors_only(lambda n, t: change(t) if n.startswith("extras/") else t)


BESIDE = {
    "nan": (extras_only(lambda t: t * torch.nan), "'terms.0/.*' holds NaN or infinity"),
    "infinity": (extras_only(lambda t: t + torch.inf), "'terms.0/.*' holds NaN or infinity"),
    "shape": (extras_only(lambda t: t[..., :-1]), "'terms.0/.*' is of shape"),
    "type": (extras_only(lambda t: t.double()), "'terms.0/.*' is of type torch.float64"),
    "nothing": (
        lambda fields, tensors: pack(fields, to_record({n: t for n, t in tensors.items() if "extras/" not in n})),
        r"missing \['terms.0/",
    ),
}


@pytest.mark.parametrize("fault", slow_after_first(BESIDE))
def test_what_is_wrong_beside_a_model_is_refused_with_the_model(fault: str, tmp_path: Path) -> None:
    change, reason = BESIDE[fault]
    asked = experiment("scaffold", train=ALL, rounds=1)

    finished = run(spoiling(2, "train", change), asked, tmp_path, QUICK)

    ((client, told),) = [(one["client"], one["reason"]) for one in finished.directory.metrics()[1]["refused"]]
    assert client == 2
    assert re.search(reason, told)
    without = run(spoiling(2, "train", lambda w, t: pack({"fault": "no"})), asked, tmp_path / "b", QUICK)
    for table in ("weights", "server_state"):
        made, expected = getattr(finished.state, table), getattr(without.state, table)
        assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())


def test_an_upload_that_the_aggregator_refuses_is_refused_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def far(self: Any, upload: Any, start: Any) -> str:
        return "it moved too far" if any(bool(((upload[n] - t).abs() > 10).any()) for n, t in start.items()) else ""

    monkeypatch.setattr(WeightedMean, "fault", far)
    grid = spoiling(2, "train", tensors_only(lambda n, t: t + 100))
    record = run(grid, experiment(train=ALL, rounds=1), tmp_path, QUICK).directory.metrics()[1]
    assert record["refused"] == [{"client": 2, "reason": "it moved too far"}]


def test_an_app_that_fails_is_refused_with_its_reason(tmp_path: Path) -> None:
    grid = nodes()

    def fail(who: int, message: Message, reply: Message) -> Message:
        broken = who == 1 and message.metadata.message_type == "train"
        return Message(Error(2, "Traceback\nValueError: no disk"), reply_to=message) if broken else reply

    grid.spoil = fail
    record = run(grid, experiment(train=ALL, rounds=1), tmp_path, QUICK).directory.metrics()[1]
    assert record["refused"] == [{"client": 1, "reason": "its app failed (code 2): ValueError: no disk"}]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (3, "no answer within 0.4 seconds (deadline)"),
        (5, "its site is no longer connected"),
        (7, "does not trust this app"),
        (8, "its app was killed"),
    ],
)
def test_flowers_error_codes_become_reasons_about_sites(code: int, reason: str, tmp_path: Path) -> None:
    grid = nodes()

    def fail(who: int, message: Message, reply: Message) -> Message:
        gone = who == 1 and message.metadata.message_type == "train"
        return Message(Error(code, "<Message Unavailable>"), reply_to=message) if gone else reply

    grid.spoil = fail
    (refused,) = run(grid, experiment(train=ALL, rounds=1), tmp_path, QUICK).directory.metrics()[1]["refused"]
    assert refused["client"] == 1
    assert reason in refused["reason"]


def test_a_round_without_enough_valid_uploads_stops_the_run_before_it(tmp_path: Path) -> None:
    asked = experiment(train=ALL, rounds=2, min_uploads=4)
    with pytest.raises(FedblendError) as raised:
        run(spoiling(3, "train", lambda w, t: None), asked, tmp_path, QUICK)
    assert str(raised.value) == (
        f"round 1: 3 good uploads of 4, but min_uploads is 4 (client 3: no answer within {QUICK.deadline:g} seconds "
        "(deadline)); earlier rounds are kept: remove the cause or lower min_uploads, and continue the run"
    )

    finished = run(nodes(), asked, tmp_path, QUICK)

    state, records = by_loop(asked)
    assert all(torch.equal(finished.state.weights[n], t) for n, t in state.weights.items())
    assert [one["loss"] for one in finished.directory.metrics()] == [one["loss"] for one in records]


def test_a_run_whose_site_is_gone_for_good_continues_with_a_lower_min_uploads(tmp_path: Path) -> None:
    asked = experiment("fedmix", train=ALL, rounds=2, min_uploads=4)
    grid = nodes()
    grid.spoil = lambda who, message, reply: None if (who, trained_in(message)) == (3, 1) else reply
    with pytest.raises(FedblendError, match="round 2: 3 good uploads of 4, but min_uploads is 4"):
        run(grid, asked, tmp_path, QUICK)
    kept = (tmp_path / "metrics.jsonl").read_bytes()

    grid = nodes()
    grid.down = {3}
    lower = asked.model_copy(update={"min_uploads": 3})
    finished = run(grid, lower, tmp_path, FederationLimits(3, QUICK.deadline))

    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(kept)
    assert [line.get("uploads") for line in finished.directory.metrics()] == [None, 4, 3]
    assert finished.directory.experiment().min_uploads == 3


def test_a_site_that_is_down_is_refused_while_enough_others_are_connected(tmp_path: Path) -> None:
    grid = nodes()
    grid.down = {2}
    record = run(grid, experiment(train=ALL, rounds=1), tmp_path, QUICK).directory.metrics()[1]
    assert record["refused"] == [{"client": 2, "reason": "its site is not connected"}]


def test_too_few_sites_stop_the_run_with_the_missing_ones_named(tmp_path: Path) -> None:
    grid = nodes()
    grid.down = {1, 3}
    with pytest.raises(FedblendError, match=r"min_sites: 3, but only 2 of 4 sites are connected .* missing: 1, 3"):
        run(grid, experiment(), tmp_path, FederationLimits(min_sites=3, deadline=0.2))
    with pytest.raises(FedblendError, match="min_sites: 5: the experiment has 4 clients; valid: 1 to 4"):
        run(grid, experiment(), tmp_path, FederationLimits(min_sites=5, deadline=0.2))
    with pytest.raises(FedblendError, match=r"min_sites: 4: .* of which client 0 is the server; valid: 1 to 3"):
        run(grid, experiment("xormixfl"), tmp_path, FederationLimits(min_sites=4, deadline=0.2))
    with pytest.raises(FedblendError, match="deadline: inf is not valid"):
        run(grid, experiment(), tmp_path, FederationLimits(deadline=float("inf")))


@pytest.mark.slow
def test_sites_with_their_own_data_begin_without_one_that_is_absent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = experiment(train=ALL, fraction=1.0)
    grid = Nodes(configs := sites_with_data(tmp_path, asked))
    grid.down = {2}
    caplog.set_level(logging.INFO, "flwr")

    finished = run(grid, asked, tmp_path / "run", QUICK)

    assert finished.directory.metrics()[2]["cohort"] == [0, 1, 3]
    assert "3 of 4 sites are connected; the run waits 0.4 seconds (deadline) at most; missing: 2" in caplog.text
    assert "clients 2 are not connected, or have no samples, and take no part in the run; 3 clients a" in caplog.text
    few = asked.model_copy(update={"min_uploads": 4})
    with pytest.raises(FedblendError, match=r"clients 2 are not connected.*too few for a round: min_uploads: 4"):
        run(grid, few, tmp_path / "few", QUICK)
    method = {"name": "fedavg", "aggregator": {"name": "secure-mean", "fewest": 3}}
    again = Nodes(configs, run_id=2)
    again.down = {2}
    summed = run(again, experiment(method, train=ALL, fraction=1.0, rounds=1), tmp_path / "summed", QUICK)
    assert summed.directory.metrics()[1]["uploads"] == 3, "as many as min_sum of each site file"
    method["aggregator"]["fewest"] = 4
    masked = experiment(method, train=ALL, fraction=1.0)
    with pytest.raises(FedblendError, match=r"clients 2 are not connected.*fewest: 4 clients to a sum"):
        run(grid, masked, tmp_path / "masked", QUICK)


@pytest.mark.parametrize("late", slow_after_first([False, True]))
def test_a_continued_run_keeps_the_numbers_of_samples_that_it_began_with(late: bool, tmp_path: Path) -> None:
    """A site that is absent in the second round is refused, and one that connects then takes no part: both the same."""
    asked = experiment(rounds=1, fraction=1.0)
    two, (first, second) = asked.model_copy(update={"rounds": 2}), ({3}, set()) if late else (set(), {2})

    configs = sites_with_data(tmp_path, asked)

    def grid(down: set[int], run_id: int) -> Nodes:
        made = Nodes(configs, run_id)
        made.down = down
        return made

    whole = grid(first, 1)

    def change(who: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            whole.down = second
        return reply

    whole.spoil = change
    expected = run(whole, two, tmp_path / "whole", QUICK)
    run(grid(first, 2), asked, tmp_path / "run", QUICK)
    finished = run(grid(second, 3), two, tmp_path / "run", QUICK)

    lines = [[{**one, "machine": None} for one in made.directory.metrics()] for made in (finished, expected)]
    assert lines[0][2] == lines[1][2]
    assert same(finished.state.weights, expected.state.weights)


def test_samples_that_changed_before_a_restart_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = experiment(train=ALL, rounds=1, fraction=1.0)
    two = asked.model_copy(update={"rounds": 2})
    configs = sites_with_data(tmp_path, asked)
    run(Nodes(configs), asked, tmp_path / "run", QUICK)
    run(nodes(), asked, tmp_path / "none", QUICK)
    shutil.copy(tmp_path / "data-1.npz", tmp_path / "data-2.npz")

    record = run(Nodes(configs), two, tmp_path / "run", QUICK).directory.metrics()[2]

    (refused,) = record["refused"]
    assert (refused["client"], "it says that it trained on" in refused["reason"]) == (2, True)
    assert "client 2 has other samples" in caplog.text
    with pytest.raises(FedblendError, match=r"sites \[0, 1, 2, 3\] have data of their own .* the run began with sites"):
        run(Nodes(configs), two, tmp_path / "none", QUICK)
    with pytest.raises(FedblendError, match=r"have data of their own .*, sites \[0, 1, 2, 3\] have not"):
        run(nodes(), two.model_copy(update={"rounds": 3}), tmp_path / "run", QUICK)


def test_a_restarted_site_is_queried_and_receives_everything_again(tmp_path: Path) -> None:
    asked = experiment("fedmix", train=ALL, rounds=3)
    grid = nodes()

    def restart(who: int, message: Message, reply: Message) -> Message:
        if who == 0 and message.metadata.message_type == "train" and unpack(message.content)[0]["round"] == 1:
            # A restarted process has no memory, and its node has another number.
            (old,) = [node for node in grid.contexts if grid.client(node) == 0]
            context = grid.contexts.pop(old)
            context.state = RecordDict()
            grid.contexts[4711] = context
        return reply

    grid.spoil = restart
    finished = run(grid, asked, tmp_path, QUICK)

    is_loops(finished, asked)
    model = sum(t.numel() * 4 for t in finished.state.weights.values())
    pools = [down > model for who, kind, down, _ in grid.sent if who == 0 and kind == "train"]
    assert pools == [True, False, True]


def test_a_site_that_lost_its_memory_receives_the_pool_again_in_the_same_round(tmp_path: Path) -> None:
    asked = experiment("fedmix", train=ALL)
    grid = nodes()

    def forget(who: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            for context in grid.contexts.values():
                if grid.client(context.node_id) == who:
                    context.state = RecordDict()
        return reply

    grid.spoil = forget
    finished = run(grid, asked, tmp_path, QUICK)
    is_loops(finished, asked)
    assert "refused" not in finished.directory.metrics()[2]


def test_a_killed_server_continues_with_the_same_bytes_in_its_metrics(tmp_path: Path) -> None:
    asked = experiment("fedmix", rounds=3)
    grid = nodes()

    class Killed(BaseException):
        pass

    def kill(who: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and unpack(message.content)[0]["round"] == 2:
            raise Killed
        return reply

    grid.spoil = kill
    with pytest.raises(Killed):
        run(grid, asked, tmp_path / "killed", QUICK)

    # Flower gives a new run a new number and its nodes an empty memory.
    again = run(nodes(), asked, tmp_path / "killed", QUICK)
    whole = run(nodes(), asked, tmp_path / "whole", QUICK)

    lines = [[{**one, "machine": None} for one in made.directory.metrics()] for made in (again, whole)]
    assert json.dumps(lines[0]) == json.dumps(lines[1])
    assert all(torch.equal(again.state.weights[n], t) for n, t in whole.state.weights.items())


def test_a_federation_that_was_stopped_or_killed_goes_on_with_what_began_it(tmp_path: Path) -> None:
    """``fedblend resume`` has no sites, and refuses its run."""
    grid = nodes()

    def stop(who: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and unpack(message.content)[0]["round"] == 1:
            raise KeyboardInterrupt
        return reply

    grid.spoil = stop
    with pytest.raises(Stopped) as told:
        run(grid, experiment(), tmp_path, QUICK)

    how = "o on with: the command that began it (flwr run or fedblend federation up)"
    assert str(told.value) == f"stopped; kept up to round 1. G{how}"
    directory = RunDirectory(tmp_path)
    directory.set_status("running", 1)
    assert groups.read(directory).status_text == f"killed at round 1 of 2; g{how}"


def test_lost_client_weights_are_an_error(tmp_path: Path) -> None:
    asked = experiment("fd", train=ALL, rounds=1)
    run(nodes(), asked, tmp_path, QUICK)
    with pytest.raises(FedblendError, match=r"0 good uploads of 4.*no longer has its own weights of round 0"):
        run(nodes(), asked.model_copy(update={"rounds": 2}), tmp_path, QUICK)


# What only a site keeps ----------------------------------------------------------------------------------------

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

    def spoil(who: int, message: Message, reply: Message) -> Message:
        if trained_in(message) == who % 2:
            grid.restart(who)
        return reply

    grid.spoil = spoil
    finished = run(grid, asked, tmp_path / "restarted", QUICK)

    whole = run(sites_of(tmp_path / "others"), asked, tmp_path / "whole", QUICK)
    lines = [[{**one, "machine": None} for one in made.directory.metrics()] for made in (finished, whole)]
    assert lines[0] == lines[1]
    assert same(finished.state.weights, whole.state.weights)


def test_a_site_without_a_file_that_lost_its_own_means_does_not_train_without_them(tmp_path: Path) -> None:
    grid = nodes()

    def spoil(who: int, message: Message, reply: Message) -> Message:
        if (who, trained_in(message)) == (0, 0):
            grid.restart(who)
        return reply

    grid.spoil = spoil
    records = run(grid, keeping("local means"), tmp_path, QUICK).directory.metrics()
    assert [[one["client"] for one in line.get("refused", ())] for line in records] == [[], [], [0], [0]]
    assert "no longer has its own data to mix with" in records[2]["refused"][0]["reason"]


@pytest.mark.slow
def test_a_site_that_ends_before_its_reply_goes_on_with_what_the_server_knows_of(tmp_path: Path) -> None:
    asked = keeping("scaffold")

    def finished(folder: str, restarts: bool) -> Any:
        grid = sites_of(tmp_path / folder)

        def spoil(who: int, message: Message, reply: Message) -> Message | None:
            if (who, trained_in(message)) != (0, 1):
                return reply
            if restarts:
                grid.restart(who)
            return None

        grid.spoil = spoil
        return run(grid, asked, tmp_path / f"{folder}-run", QUICK)

    restarted, silent = finished("restarted", True), finished("silent", False)
    refused = [[one["client"] for one in line.get("refused", ())] for line in restarted.directory.metrics()]
    assert refused == [[], [], [0], []]
    assert all(torch.equal(restarted.state.weights[n], t) for n, t in silent.state.weights.items())


class Killed(BaseException):
    """The end of a server that nothing in it handles."""


@pytest.mark.parametrize("kills", [(1,), pytest.param((0, 1, 1, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("keeper", FEW_KEEPERS)
def test_a_server_that_is_killed_goes_on_with_what_sites_keep(
    keeper: str, kills: tuple[int, ...], tmp_path: Path
) -> None:
    """In the killed round clients 0 and 1 have trained, and the server has received no reply of it."""
    asked = keeping(keeper)
    for run_id, killed in enumerate(kills, 1):
        grid = sites_of(tmp_path / "sites", run_id)

        def kill(who: int, message: Message, reply: Message, killed: int = killed) -> Message:
            if (who, trained_in(message)) == (1, killed):
                raise Killed
            return reply

        grid.spoil = kill
        with pytest.raises(Killed):
            run(grid, asked, tmp_path / "run", QUICK)
    finished = run(sites_of(tmp_path / "sites", 9), asked, tmp_path / "run", QUICK)

    whole = run(sites_of(tmp_path / "others"), asked, tmp_path / "whole", QUICK)
    refused = [line.get("refused") for line in finished.directory.metrics()]
    assert refused == [line.get("refused") for line in whole.directory.metrics()]
    for table in ("weights", "global_outputs", "server_state"):
        made, expected = getattr(finished.state, table), getattr(whole.state, table)
        assert set(made) == set(expected)
        assert all(torch.equal(made[n], t) for n, t in expected.items())
    for client in range(4):
        kept = [
            checkpoint.read_table(*(tmp_path / folder / f"audit-{client}.state").iterdir())
            for folder in ("sites", "others")
        ]
        assert kept[0][0]["marks"] == kept[1][0]["marks"]
        assert list(kept[0][1]) == list(kept[1][1])
        assert all(torch.equal(kept[0][1][n], t) for n, t in kept[1][1].items())


@pytest.mark.slow
def test_means_that_a_site_made_after_the_servers_checkpoint_are_not_used_before_it(tmp_path: Path) -> None:
    """Three clients make means again in round 6, and the server goes on from its checkpoint after round 4."""
    method = {"name": "fedmix", "sharing": {"name": "local-means", "refresh": 0.6}}
    arrival = {"first": 0.3, "clients": 0.3, "portion": 0.1}
    changes = {"checkpoint_every": 4, "rounds": 6, "arrival": arrival}
    asked = experiment(method, train=ALL, partition={"name": "iid", "clients": 4}, **changes)
    # Means of other samples are another sharing.
    grid = sites_of(tmp_path / "sites", sharings=3)

    def kill(who: int, message: Message, reply: Message) -> Message:
        if (who, trained_in(message)) == (3, 5):
            raise Killed
        return reply

    grid.spoil = kill
    with pytest.raises(Killed):
        run(grid, asked, tmp_path / "run", QUICK)
    grid = sites_of(tmp_path / "sites", 2, sharings=3)
    lines = run(grid, asked, tmp_path / "run", QUICK).directory.metrics()
    again = [line["shared"]["asked"] for line in lines if line.get("shared")]
    refused = [[one["client"] for one in line.get("refused", ())] for line in lines]
    assert (again, refused) == ([4, 3, 3], [[], [], [], [], [], [0, 1, 3], []])
    assert "no longer has its own data to mix with" in lines[5]["refused"][0]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("keeper", ["scaffold", "ditto"])
def test_sites_do_not_mix_two_copies_of_a_run(keeper: str, tmp_path: Path) -> None:
    asked = keeping(keeper)

    def go_on(copy: str, rounds: int, run_id: int, silent: int | None = None) -> list[int]:
        """Make the next round of a copy; return the clients whose uploads were refused in it."""
        grid = sites_of(tmp_path / "sites", run_id)
        grid.spoil = lambda who, message, reply: None if (who, trained_in(message)) == (silent, 1) else reply
        made = run(grid, asked.model_copy(update={"rounds": rounds}), tmp_path / copy, QUICK).directory.metrics()
        return [one["client"] for one in made[-1].get("refused", ())]

    assert go_on("one", 1, 1) == []
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    # In round 2 the copies differ in client 3, and from round 3 on in what the other clients keep.
    assert go_on("one", 2, 2, silent=3) == [3]
    assert go_on("two", 2, 3) == []
    assert go_on("one", 3, 4) == []
    assert go_on("two", 3, 5) == [3]
    assert go_on("one", 4, 6) == [0, 1, 2]


def test_a_second_server_of_a_run_sends_sites_nothing_while_the_first_one_is_at_work(tmp_path: Path) -> None:
    asked = keeping("scaffold").model_copy(update={"rounds": 1})
    second = sites_of(tmp_path / "sites", 2)
    faults = []

    def start_again(who: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "query.hello" and not faults:
            with pytest.raises(FedblendError) as raised:
                run(second, asked, tmp_path / "run", QUICK)
            faults.append(str(raised.value))
        return reply

    first = sites_of(tmp_path / "sites")
    first.spoil = start_again
    finished = run(first, asked, tmp_path / "run", QUICK)

    assert faults == [
        f"{tmp_path / 'run'}: this run directory is in use by another process; wait for it, stop it, or give another "
        "folder (--out on the command line)"
    ]
    assert second.sent == []
    assert finished.state.round == 1


@pytest.mark.slow
def test_another_run_does_not_take_what_a_site_keeps(tmp_path: Path) -> None:
    asked = keeping("scaffold")
    first = run(sites_of(tmp_path / "sites"), asked.model_copy(update={"rounds": 1}), tmp_path / "run", QUICK)
    # A new run begins as the first one did, and each has a file of its own.
    new = run(sites_of(tmp_path / "sites", 3), asked.model_copy(update={"rounds": 1}), tmp_path / "new", QUICK)
    assert all(torch.equal(new.state.weights[n], t) for n, t in first.state.weights.items())
    folder = tmp_path / "sites" / "audit-0.state"
    assert len({path.name for path in folder.glob("*-0.safetensors")}) == len([*folder.iterdir()]) == 2
    assert folder.stat().st_mode & 0o777 == 0o700
    # A server that has not the name of the run has not what sites keep for it.
    (tmp_path / "run" / RUN_NAME).unlink()
    with pytest.raises(FedblendError, match=r"0 good uploads of 4.*no longer has what the method keeps at it since"):
        run(sites_of(tmp_path / "sites", run_id=2), asked, tmp_path / "run", QUICK)


@pytest.mark.parametrize(("content", "shown"), [("", "''"), ("0123abc", "'0123abc'")])
def test_a_damaged_name_of_a_run_is_not_sent_to_sites(content: str, shown: str, tmp_path: Path) -> None:
    asked = keeping("scaffold")
    run(sites_of(tmp_path / "sites"), asked.model_copy(update={"rounds": 1}), tmp_path / "run", QUICK)
    name = tmp_path / "run" / RUN_NAME
    name.write_text(content)
    grid = sites_of(tmp_path / "sites", run_id=2)
    with pytest.raises(FedblendError) as raised:
        run(grid, asked, tmp_path / "run", QUICK)
    remedy = "restore it from a copy, or begin again in another folder"
    assert str(raised.value) == f"{name}: is damaged: {shown}, not 32 hexadecimal digits; {remedy}"
    assert grid.sent == []


WRITER = """
import os, signal, sys
from pathlib import Path
import torch
from flwr.app import Context, RecordDict
from fedblend.flower.audit import AuditLog
from fedblend.flower.client_task import Memory
from fedblend.flower.ledger import SharingLedger
from fedblend.flower.site import Site

audit, kill = sys.argv[1], sys.argv[2]
if kill == "killed":
    os.replace = os.link = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[3] == "state":
    memory = Memory(Context(1, 1, {}, RecordDict(), {}), Site(audit=audit), 0, "name")
    memory.keep("parts", "0", {"c": torch.zeros(3)})
    memory.save()
else:
    SharingLedger(AuditLog(audit), 1).secret()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@pytest.mark.parametrize("kept", ["state", "shared"])
def test_what_a_killed_site_leaves_half_written_is_removed_at_the_next_write(kept: str, tmp_path: Path) -> None:
    folder = tmp_path / f"audit.{kept}"

    def write(how: str) -> tuple[int, list[str]]:
        command = [sys.executable, "-c", WRITER, str(tmp_path / "audit.jsonl"), how, kept]
        return subprocess.run(command, check=False).returncode, sorted(path.suffix for path in folder.iterdir())

    assert write("killed") == (-signal.SIGKILL, [".tmp"])
    assert write("killed") == (-signal.SIGKILL, [".tmp"])
    assert write("whole") == (0, [".safetensors" if kept == "state" else ""])


def damaged(folder: Path) -> None:
    (path,) = folder.glob("*-0.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


SPOILED = {
    "a changed bit": (damaged, "does not have the checksum .* restore it from a copy, or begin a new run"),
    "a file cut short": (
        lambda folder: next(folder.glob("*-0.safetensors")).write_bytes(b"x"),
        "is damaged: .* begin a",
    ),
    "a folder that others read": (lambda folder: folder.chmod(0o755), "other users can read .* chmod 700"),
}


@pytest.mark.parametrize("how", slow_except(["a changed bit"], SPOILED))
def test_a_site_whose_kept_state_is_spoiled_says_so_and_takes_no_part(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil_folder, reason = SPOILED[how]
    grid = sites_of(tmp_path / "sites")

    def spoil(who: int, message: Message, reply: Message) -> Message:
        if (who, trained_in(message)) == (0, 0):
            grid.restart(who)
            spoil_folder(tmp_path / "sites" / "audit-0.state")
        return reply

    grid.spoil = spoil
    records = run(grid, keeping("scaffold"), tmp_path / "run", QUICK).directory.metrics()

    for record in records[2:]:
        ((client, told),) = [(one["client"], one["reason"]) for one in record["refused"]]
        assert client == 0
        assert re.search(reason, told)
        assert str(tmp_path) not in told
    assert str(tmp_path / "sites" / "audit-0.state") in caplog.text


@pytest.mark.slow
def test_a_changed_experiment_does_not_take_what_a_site_keeps_of_another(tmp_path: Path) -> None:
    grid, asked = sites_of(tmp_path / "sites"), keeping("scaffold")

    def spoil(who: int, message: Message, reply: Message) -> Message:
        if (who, trained_in(message)) == (0, 0):
            # What a site of another model would have kept in the same run.
            kept = at_site.Memory(*[c for c in grid.contexts.values() if grid.client(c.node_id) == 0])
            mark = kept.mark("parts")
            kept.keep("parts", mark, {name: t[:-1] for name, t in kept.recall("parts", mark).items()})
        return reply

    grid.spoil = spoil
    (refused,) = run(grid, asked, tmp_path / "run", QUICK).directory.metrics()[2]["refused"]
    assert refused["client"] == 0
    assert re.search(r"keeps since round 0 is not of this experiment: .* is of shape", refused["reason"])


def test_a_node_that_is_no_client_of_this_experiment_takes_no_part(tmp_path: Path) -> None:
    grid = Nodes([{"partition-id": c} for c in (0, 1, 2, 3, 9)] + [{"partition-id": "1"}, {}])
    asked = experiment(rounds=1)
    finished = run(grid, asked, tmp_path, QUICK)
    is_loops(finished, asked)


UNSHARED = {"fedmix": "y", "mix2fld": "y", "statmix": "std"}


@pytest.mark.parametrize(
    "kind", slow_except([torch.uint16], [torch.complex64, torch.uint16, torch.uint32, torch.uint64])
)
@pytest.mark.parametrize("method", UNSHARED)
def test_shared_tensors_of_a_type_that_no_site_sends_are_left_out(
    method: str, kind: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change = tensors_only(lambda n, t: t.to(kind) if n == UNSHARED[method] else t)
    short = {"server_step": {"steps": 2}} if method == "mix2fld" else {}
    asked = experiment({"name": method, **short}, rounds=1)
    finished = run(spoiling(1, "query.share", change), asked, tmp_path, QUICK)
    assert f"client 1 shares nothing: it sent a tensor of type {kind}; valid: torch.float16, " in caplog.text
    assert finished.state.round == 1


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("statmix", "tensors of shapes {'mean': (), 'std': ()}; valid: mean and std, each of images and 1 channels"),
        ("ccvr", "it sent {'y': (), 'count': (), 'mean': (), 'covariance': ()}, not statistics of the shapes"),
        ("feddm", "it sent {'x': (), 'y': ()}, not inputs and targets of the shapes"),
    ],
)
def test_shared_tensors_without_rows_are_left_out(
    method: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change = tensors_only(lambda n, t: t.flatten()[0].clone())
    short = {"sharing": {"steps": 2}} if method == "feddm" else {}
    run(spoiling(1, "query.share", change), experiment({"name": method, **short}, rounds=1), tmp_path, QUICK)
    assert f"client 1 shares nothing: {told}" in caplog.text


FORMS = {
    "shape": lambda x, y: {"x": x[..., 1:], "y": y},
    "type": lambda x, y: {"x": x.double(), "y": y},
    "names": lambda x, y: {"x": x},
    "rows": lambda x, y: {"x": x, "y": y.repeat(2, 1)},
    "none": lambda x, y: {"x": x.sum(), "y": y},
}


@pytest.mark.parametrize(
    ("form", "liars"),
    slow_except(
        [*((form, {1}) for form in FORMS), ("shape", {1, 2}), ("shape", {0, 1, 2})],
        itertools.product(FORMS, [{1}, {1, 2}, {0, 1, 2}]),
    ),
)
def test_means_of_a_wrong_form_are_left_out_and_recorded(form: str, liars: set[int], tmp_path: Path) -> None:
    grid = nodes().changing("query.share", liars, lambda t: FORMS[form](t["x"], t["y"]))
    finished = run(grid, experiment("fedmix", rounds=1), tmp_path, QUICK)

    assert set(finished.state.entries.owner.tolist()) == {0, 1, 2, 3} - liars
    refused = finished.directory.metrics()[1]["shared"]["refused"]
    assert {one["client"] for one in refused} == liars
    assert all("it sent means of the form" in one["reason"] for one in refused)


@pytest.mark.parametrize("kind", ["nan", "more means", "nothing", "beyond bounds", "no shares of classes"])
def test_every_fault_of_what_a_site_shares_is_recorded(kind: str, tmp_path: Path) -> None:
    change, reason = {
        "nan": (tensors_only(lambda n, t: t * torch.nan), "holds NaN or infinity"),
        "more means": (
            tensors_only(lambda n, t: t.repeat(1000, *[1] * (t.dim() - 1))),
            "it sent 1,000 entries, and its",
        ),
        "nothing": (lambda fields, tensors: pack({"fault": "no"}), "no"),
        "beyond bounds": (tensors_only(lambda n, t: t * 1e4 if n == "x" else t), "means 'x' with a number beyond"),
        "no shares of classes": (
            tensors_only(lambda n, t: t - 0.5 if n == "y" else t),
            "means 'y' with a number beyond",
        ),
    }[kind]
    finished = run(spoiling(1, "query.share", change), experiment("fedmix", rounds=1), tmp_path, QUICK)
    (refused,) = finished.directory.metrics()[1]["shared"]["refused"]
    assert (refused["client"], reason in refused["reason"]) == (1, True)


def test_a_payload_of_another_form_than_most_is_left_out(tmp_path: Path) -> None:
    grid = spoiling(1, "query.share", lambda fields, tensors: pack(fields, to_record({"x": tensors["x"][..., 1:]})))
    hidden = run(grid, experiment("fedmix-hidden", rounds=1), tmp_path, QUICK)
    assert hidden.state.entries.owner.tolist() == [0, 2, 3]


def test_equally_frequent_forms_and_unequal_rows_are_reported() -> None:
    a, b = {"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}
    assert find_mismatched({0: a, 1: {"x": torch.ones(5, 3)}, 2: b}, rows=True).keys() == {2}
    assert find_mismatched({0: a, 1: {"x": torch.ones(5, 3)}, 2: {"x": torch.ones(2, 3)}}, rows=False).keys() == {1}
    assert find_mismatched({0: a, 1: {"x": torch.ones(2, 3), "y": torch.ones(3)}}, rows=True).keys() == {1}
    assert find_mismatched({}, rows=True) == {}
    with pytest.raises(FedblendError, match=r"disagree on the form.*clients 0, 5: .*\(3,\).*; clients 1, 4: .*\(4,\)"):
        find_mismatched({0: a, 1: b, 4: b, 5: a}, rows=True)


def test_owners_as_runs_are_restored() -> None:
    for owner in ([], [3], [-1, -1, -1], [0, 0, 2, 2, 2, 1, 0], [-1, 5, 5]):
        runs = runs_of(torch.tensor(owner, dtype=torch.int64).numpy())
        assert [who for who, count in runs for _ in range(count)] == owner
        assert all(a[0] != b[0] for a, b in pairwise(runs))
