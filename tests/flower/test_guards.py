"""What a site lets no server have, and what a server lets no site do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from flower_helpers import (
    ALL,
    NOISE,
    Nodes,
    experiment,
    federate,
    is_loops,
    nodes,
    one_round,
    order,
    refusals,
    refuses,
    spoiling,
    tensors_only,
    through,
    trained_in,
    weights_of,
)
from flower_sites import audit, sites_of, sites_with_data, task_of
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from google.protobuf.message import DecodeError
from helpers import each, same, slow_after_first
from test_flower_faults import extras_only

from fedblend.core.errors import FedblendError
from fedblend.core.files import BLOCK, append_line, read_lines
from fedblend.core.trees import add_prefix
from fedblend.experiment.config import as_table
from fedblend.experiment.make_setup import make_setup
from fedblend.flower import client as at_site
from fedblend.flower import sites as sites_module
from fedblend.flower import work
from fedblend.flower.messages import APP_FIELDS, detach, fault_of_shared, pack, to_record, unpack
from fedblend.flower.site import RefusedByPolicy, describe_setup
from fedblend.flower.sites import ClientRequest, Sites
from fedblend.methods.sharing.means import SecureMeans, SharedMeans
from fedblend.runs.directory import RunDirectory

ASKED = {"request": None}


@pytest.mark.parametrize("forgets", [False, True], ids=["by its memory", "by its audit log"])
def test_a_site_sends_its_model_and_its_means_once_a_round(forgets: bool, tmp_path: Path) -> None:
    asked = experiment("fedmix", train=ALL, protection=NOISE)
    grid = sites_of(tmp_path, rounds=2)
    told: list[tuple[str, int, str]] = []

    def again(who: int, message: Message, reply: Message) -> Message:
        kind = message.metadata.message_type
        if who == 0 and kind in ("train", "query.share"):
            context = grid.contexts[message.metadata.dst_node_id]
            if forgets:
                context.state = RecordDict()
            fields, tensors = unpack(grid.app(through(message), context).content)
            told.append((kind, len(tensors), fields.get("fault", "")))
        return reply

    assert federate(grid.spoiled(again), asked, tmp_path / "run").state.round == 2
    assert {size for _, size, _ in told} == {0}
    for one in ("query.share", "train"):
        assert any(kind == one and "of round 1 in this run, and gives them once" in fault for kind, _, fault in told)
    assert any("has trained in 2 rounds" in fault for _, _, fault in told)
    lines = [line for line in audit(tmp_path, 0) if "refused" not in line and not line.get("begun")]
    assert [line["kind"] for line in lines if line["kind"] != "loss"] == ["means", "weights", "weights"]


def test_a_payload_of_an_earlier_round_is_refused_also_by_a_site_without_a_file(monkeypatch: Any) -> None:
    asked, grid = experiment("fedavg", train=ALL, rounds=9), nodes(1)

    def fault(round: int) -> str:
        return grid.reply(order("train", asked, weights_of(asked), round=round))[0].get("fault", "")

    assert fault(5) == ""
    assert [f"of round {n + 1} in this run, and gives them once" in fault(n) for n in (0, 4, 5)] == [True] * 3
    assert fault(6) == ""
    # A training that fails has begun.
    with monkeypatch.context() as patch:
        patch.setattr(work, "_trained", None)
        assert "its app failed" in fault(7)
    assert "of round 8 in this run, and gives them once" in fault(7)


def test_scores_of_a_sites_single_test_samples_do_not_leave() -> None:
    asked = experiment("fedavg", holdout=0.3)
    weights = weights_of(asked)
    own = task_of(asked, data="digits")
    with pytest.raises(RefusedByPolicy, match="its test samples are its own"):
        work.score(own, {"own": None, "personal": None, "split": "test"}, weights)
    said, tensors = work.score(own, {"own": None, "personal": None, "split": "holdout"}, weights)
    assert (set(said), tensors) == ({"right", "samples"}, {})
    # The experiment's test samples are not secret.
    assert len(work.score(task_of(asked), {"own": None, "personal": None, "split": "test"}, weights)[1]["loss"]) > 0


def test_policy_bounds_single_samples_of_any_kind() -> None:
    raw, mixed = (
        experiment({"name": name, "sharing": {"samples": 4}, "server_step": {"steps": 1}}) for name in ("fld", "mixfld")
    )
    assert [at_site.kind_of(one.method, "sharing") for one in (raw, mixed)] == ["raw", "seeds"]
    features = task_of(experiment({"name": "flea", "sharing": {"fraction": 1}}), max_seeds=1)
    assert at_site.kind_of(features.setup.experiment.method, "sharing") == "features"
    weights = add_prefix("weights/", features.setup.weights())
    with pytest.raises(RefusedByPolicy, match=r"single samples \(features\), and its policy gives 1"):
        work.share(features, ASKED, weights)
    for one in (raw, mixed):
        assert len(work.share(task_of(one, max_seeds=4), ASKED, {})[1]["x"]) == 4
        with pytest.raises(RefusedByPolicy, match=r"it is asked for 4 single samples .*, and its policy gives 3"):
            work.share(task_of(one, max_seeds=3), ASKED, {})
    # A mean of many is none.
    assert len(work.share(task_of(experiment("fedmix"), max_seeds=1), ASKED, {})[1]["x"]) == 1


def test_noise_on_means_is_drawn_from_system_entropy() -> None:
    for kind in (SharedMeans, SecureMeans):
        assert [work.hides(kind(**noise)) for noise in ({}, {"noise": 0.1}, {"multiplier": 2.0})] == [False, True, True]
    assert work.hides(SharedMeans(split="class", multiplier=2.0))  # which earns no epsilon, and yet is noise


def test_an_audit_log_cut_short_by_a_kill_continues_with_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for torn in ("", '{"a": 1', "x" * (2 * BLOCK + 3)):
        for before in ("", '{"b": 2}\n', json.dumps({"b": "y" * BLOCK}) + "\n"):
            path.write_text(before + torn)
            append_line(path, {"c": 3})
            append_line(path, {"d": 4})
            assert path.read_text() == before + '{"c": 3}\n{"d": 4}\n'
            assert read_lines(path)[-2:] == [{"c": 3}, {"d": 4}]


def npy(header: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


HOSTILE = {
    "a terabyte": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (300000000000,), }"),
    "no end": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3,"),
    "minus": npy("-" * 20_000 + "1"),
    "no type": npy("{'descr': ',', 'fortran_order': False, 'shape': (3,), }"),
    "an archive": b"PK\x03\x04" + bytes(40),
}


@each("name", HOSTILE)
def test_unreadable_tensors_are_an_error_of_the_message(name: str) -> None:
    content = pack({"a": 1})
    content["tensors0"] = ArrayRecord({"x": Array("float32", (3,), "numpy.ndarray", HOSTILE[name])})
    with pytest.raises(FedblendError, match="a message that is not fedblend's"):
        unpack(content)


def test_unreadable_fields_are_an_error_of_the_message() -> None:
    for fields in ("[" * 100_000, '{"a": ' * 100_000, "{", "7"):
        with pytest.raises(FedblendError, match="a message that is not fedblend's"):
            unpack(RecordDict({"fields": ConfigRecord({"fields": fields})}))
        with pytest.raises(FedblendError, match="a message whose fields are not fedblend's"):
            detach(RecordDict({APP_FIELDS: ConfigRecord({APP_FIELDS: fields})}))


def failing_to_pull(error: Exception, client: int | None = None) -> Nodes:
    """Nodes of which a reply to a request to train, of one client or of any, cannot be pulled."""
    grid = nodes()
    pull = grid.pull_messages

    def failing(ids: list[str]) -> list[Message]:
        replies = list(pull(ids))
        trained = [grid.client(r.metadata.src_node_id) for r in replies if r.metadata.message_type == "train"]
        if client in trained or (client is None and trained):
            raise error
        return replies

    grid.pull_messages = failing
    return grid


def test_a_reply_that_flower_cannot_parse_is_a_fault_of_its_site_alone(tmp_path: Path) -> None:
    grid = failing_to_pull(DecodeError("Error parsing message with type 'flwr.proto.ConfigRecord'"), 2)
    finished = federate(grid, one_round(), tmp_path)
    assert refusals(finished) == {2: "it sent what cannot be read: DecodeError"}
    assert finished.directory.metrics()[1]["uploads"] == 3


def test_an_error_of_the_superlink_is_not_a_fault_of_sites(tmp_path: Path) -> None:
    """Else all sites were refused, and with min_uploads = 0 rounds without them would count."""
    request = httpx.Request("POST", "https://127.0.0.1:8000/v1/runtime/pull-messages")
    error = httpx.HTTPStatusError("500", request=request, response=httpx.Response(500, request=request))
    with pytest.raises(httpx.HTTPStatusError):
        federate(failing_to_pull(error), one_round(min_uploads=0), tmp_path)
    assert [line["round"] for line in RunDirectory(tmp_path).metrics()] == [0]


@each(
    ("payload", "told"),
    [
        ({"x": torch.zeros(2, 3), "y": torch.tensor([0, 9], dtype=torch.uint8)}, None),
        ({"x": torch.zeros(2, 3), "y": torch.tensor([0, 10], dtype=torch.uint8)}, "'y' holds labels from 0 to 10; val"),
        ({"x": torch.zeros(2, 3), "y": torch.tensor([[-1, 3]])}, "'y' holds labels from -1 to 3; valid: 0 to 9"),
        ({"x": torch.zeros(1, 3), "y": torch.tensor([1]), "dummies": torch.tensor([200])}, "'dummies' holds labels"),
        ({"x": torch.tensor([[1.0, torch.nan]]), "y": torch.zeros(1, 10)}, "'x' holds NaN or infinity"),
        ({"x": torch.zeros(0, 3), "y": torch.zeros(0, dtype=torch.int64)}, None),
        ({"x": torch.zeros(1, 3), "y": torch.full((1, 10), 40.0)}, None),  # noisy means are no distributions
    ],
)
def test_shared_numbers_and_labels_are_checked(payload: Any, told: str | None) -> None:
    fault = fault_of_shared(payload, 10)
    assert fault is None if told is None else told in fault


def sites_behind(grid: Nodes) -> Sites:
    asked = experiment()
    made = Sites(grid, 4, 2, 0.4, {"experiment": as_table(asked), "setup": describe_setup(make_setup(asked))})
    made.wait_until_connected()
    return made


def test_a_site_that_is_too_busy_to_answer_keeps_its_place_while_it_is_connected(caplog: Any) -> None:
    for busy in (False, True):
        caplog.clear()
        grid = nodes()
        sites = sites_behind(grid)
        honest = dict(sites.nodes)
        grid.contexts[5000] = Context(1, 5000, {"partition-id": 0}, RecordDict(), {})
        if busy:
            grid.spoiled(
                lambda who, message, reply, node=honest[0]: reply if message.metadata.dst_node_id != node else None
            )
        for _ in range(3):
            sites.wait_until_connected()
        assert sites.nodes == honest
        assert caplog.text.count("node 5000 claims to be client 0") == 1  # it is not asked again and again
        del grid.contexts[honest[0]]
        sites.wait_until_connected()
        assert sites.nodes == {**honest, 0: 5000}


def rounds_asked(grid: Nodes, sites: Sites, silent: Any, rounds: int, reconnects: bool = False) -> tuple[Any, Any]:
    """The rounds in which client 1 is asked, and its faults; it does not answer the requests ``silent``, from 1."""
    asked: list[int] = []

    def spoil(who: int, message: Message, reply: Message) -> Message | None:
        if (round := trained_in(message)) is None:
            return reply
        asked.append(round)
        if reconnects:
            grid.restart(1)
        return None if len(asked) in silent else reply

    grid.spoil = spoil
    return asked, [sites.exchange("train", r, {1: ClientRequest({})})[1].fault or "" for r in range(rounds)]


@pytest.mark.parametrize("reconnects", slow_after_first([False, True]))
def test_a_site_that_never_answers_is_asked_less_and_less_also_if_it_connects_anew(
    reconnects: bool, caplog: Any
) -> None:
    asked, told = rounds_asked(grid := nodes(), sites_behind(grid), range(100), 22, reconnects)
    assert asked == [0, 1, 2, 4, 7, 12, 21]
    assert told[3] == "no answer 3 times in a row; it takes part again from round 5"
    assert told[11] == "no answer 5 times in a row; it takes part again from round 13"
    assert "client 1 has not answered 4 times in a row, and takes no part until round 8" in caplog.text


@pytest.mark.slow
def test_a_site_that_answers_again_is_asked_in_each_round() -> None:
    asked, _ = rounds_asked(grid := nodes(), sites_behind(grid), (1, 2, 3, 5, 6), 9)
    assert asked == [0, 1, 2, 4, 5, 6, 7, 8]


def test_a_node_that_connects_again_and_again_without_an_answer_costs_less_and_less_time(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(sites_module, "HELLO_S", 0.32)
    caplog.set_level("INFO", "flwr")
    grid = nodes().silent(1)
    sites = sites_behind(grid)
    for _ in range(9):
        grid.down = {1} - grid.down
        sites.wait_until_connected()
    waits = re.findall(r"new nodes: 1; each has ([0-9.]+) seconds", caplog.text)
    assert waits == ["0.32", "0.32", "0.16", "0.08"]


def test_the_log_states_that_a_node_that_does_not_reply_is_queried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(sites_module, "HELLO_S", 0.1)
    grid = nodes().silent(1)
    silent, sites = grid.node(1), sites_behind(grid)
    for _ in range(4):
        sites.wait_until_connected()
    again = [f"will be queried again: no answer within 0.1 seconds (attempt {n} of 3)" for n in (1, 2)]
    told = [record.message for record in caplog.records if str(silent) in record.message]
    assert told == [f"fedblend: node {silent} {why}" for why in (*again, "takes no part: no answer within 0.1 seconds")]


def test_a_node_that_was_refused_and_is_silent_then_is_queried_three_times_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sites_module, "HELLO_S", 0.1)
    grid, queried = nodes(), []
    grid.spoiled(lambda who, message, reply: queried.append(who) or reply)
    sites = sites_behind(grid.lying("query.hello", {1}, refuses))
    grid.silent(1)
    for _ in range(9):
        sites.wait_until_connected()
    assert queried.count(1) == 1 + 3


@each("stated", [(60, 20, 20), (61, 20, 20), (60, 20, 21), (0, 50, 50), (1, 0, 0), (100, 0, 0)])
def test_a_sites_numbers_of_samples_are_those_of_the_experiments_shares(stated: tuple[int, int, int]) -> None:
    """With others a site could weigh its scores at will."""
    asked = as_table(experiment(holdout=0.2, validation={"clients": 0.2}))
    fields = dict(zip(("samples", "holds_out", "validates"), stated, strict=True))
    assert sites_module.states_its_samples(fields, asked) == (stated in ((60, 20, 20), (61, 20, 20), (1, 0, 0)))
    plain = as_table(experiment())
    assert sites_module.states_its_samples(fields, plain) == (stated in ((1, 0, 0), (100, 0, 0)))


@pytest.mark.parametrize("by", slow_after_first(["samples", "clients"]))
def test_a_site_that_states_more_samples_weighs_more_where_clients_weigh_by_samples(by: str, tmp_path: Path) -> None:
    asked = one_round({"name": "fedavg", "aggregator": {"name": "mean", "by": by}}, fraction=1.0)
    uploads: list[dict[str, torch.Tensor]] = []

    def more(fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> RecordDict:
        uploads.extend([tensors] if tensors else [])
        return pack({**fields, "samples": 100 * fields["samples"]}, to_record(tensors))

    grids = {name: Nodes(sites_with_data(tmp_path / name, asked)) for name in ("lying", "honest")}
    grids["lying"].lying("query.hello", {1}, more).lying("train", {1}, more)
    ours, theirs = (federate(grid, asked, tmp_path / name / "run").state.weights for name, grid in grids.items())
    if by == "clients":
        assert same(ours, theirs)
    else:
        shift, gap = (
            sum(float((w[n] - t).square().sum()) ** 0.5 for n, t in uploads[0].items()) for w in (ours, theirs)
        )
        assert shift < 0.1 * gap


@each(
    "said",
    [{"samples": 2**63}, {"samples": -1}, {"samples": True}, {"holds_out": 10**13}, {"samples": 9, "validates": None}],
)
def test_a_site_with_an_invalid_number_of_samples_takes_no_part(said: dict[str, Any]) -> None:
    grid = spoiling(1, "query.hello", lambda fields, tensors: pack({**fields, **said}))
    assert sorted(sites_behind(grid).nodes) == [0, 2, 3]


def answer_to(changes: Any = lambda tensors: tensors, method: str = "fedavg", **fields: Any) -> str:
    """Why a site does not answer a request to train with changed tensors and fields."""
    asked = experiment(method)
    return nodes(1).reply(order("train", asked, changes(weights_of(asked)), **fields))[0].get("fault", "")


def test_a_site_does_not_train_another_model() -> None:
    for change in (
        lambda tensors: {name: tensor[..., :-1] for name, tensor in tensors.items()},
        lambda tensors: {name: tensor.double() for name, tensor in tensors.items()},
        lambda tensors: dict(list(tensors.items())[1:]),
        lambda tensors: {},
    ):
        assert "the server sent another model than the experiment's" in answer_to(change)
    assert answer_to() == ""
    assert answer_to(client=1) == "this is client 0, not 1"


def test_owners_of_a_pool_are_checked_before_they_are_made() -> None:
    for owners in (3, [[0]], [["a", 1]], [[0, -1]], [[0, 10**12]], [[0, 2**70]], [[0.5, 1]], [[-2, 1]]):
        fault = answer_to(method="fedmix", pool="a" * 64, owners=owners)
        assert re.match("(a request|owners of a pool) that (is|are) none: ", fault), owners


def test_control_characters_in_a_message_do_not_come_back() -> None:
    fault = answer_to(experiment={**as_table(experiment()), "\x1b[31m\x07": 1})
    assert fault.isprintable()
    assert ": unknown key" in fault


# Uploads of finite numbers that make a round's model, or its loss, overflow -------------------------------


def filled(value: float) -> Any:
    return tensors_only(lambda n, t: torch.full_like(t, value))


SQUARES = "the squares of the aggregate's numbers are not finite"
OVERFLOWING = {
    "model": ("fedavg", filled(3e38), SQUARES),
    "by steps": ({"name": "fedavg", "aggregator": "fednova"}, filled(3e38), SQUARES),
    "server step": ({"name": "fedavg", "server_step": "fedadam"}, filled(-3e30), SQUARES),
    "loss": ("fedavg", filled(1e18), "the model's loss is not finite"),
    "beside a model": ("scaffold", extras_only(lambda t: torch.full_like(t, 3e38)), SQUARES),
}


@pytest.mark.parametrize("case", OVERFLOWING)
def test_a_finite_upload_that_makes_the_model_overflow_is_left_out(case: str, tmp_path: Path) -> None:
    method, change, reason = OVERFLOWING[case]
    asked = experiment(method, train=ALL, rounds=2)

    finished = federate(spoiling(2, "train", change), asked, tmp_path / "run")

    for round in (1, 2):
        ((client, told),) = refusals(finished, round).items()
        assert (client, reason in told, finished.directory.metrics()[round]["uploads"]) == (2, True, 3)
    without = federate(spoiling(2, "train", refuses), asked, tmp_path / "b")
    for table in ("weights", "server_state"):
        assert same(getattr(finished.state, table), getattr(without.state, table))


def test_a_robust_aggregator_keeps_an_upload_that_it_bounds(tmp_path: Path) -> None:
    asked = experiment({"name": "fedavg", "aggregator": "median"}, train=ALL, rounds=1)
    record = federate(spoiling(2, "train", filled(3e38)), asked, tmp_path).directory.metrics()[1]
    assert record["uploads"] == 4
    assert "refused" not in record


ALL_4 = r"round 1: .* not finite, with the uploads of clients 0, 1, 2, 3 .*earlier"
ONE = r"round 1: 3 good uploads of 4, but min_uploads is 4 \(client 2: with its changes of up to 3e\+38 .*\); earlier"


@pytest.mark.parametrize(
    ("clients", "value", "told"), [(range(4), 3e38, ALL_4), (range(4), 1e18, ALL_4), ([2], 3e38, ONE)]
)
def test_a_round_whose_uploads_all_overflow_stops_the_run_before_it(
    clients: Any, value: float, told: str, tmp_path: Path
) -> None:
    asked = experiment(train=ALL, rounds=2, min_uploads=4 if told == ONE else 1)
    with pytest.raises(FedblendError, match=told):
        federate(nodes().lying("train", clients, filled(value)), asked, tmp_path)
    is_loops(federate(nodes(), asked, tmp_path), asked)


def test_a_masked_sum_that_overflows_stops_the_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    method = {"name": "fedavg", "aggregator": {"name": "secure-mean", "range": 1e22}}
    asked = experiment(method, train=ALL, rounds=1)
    wrong = tensors_only(lambda n, t: t + 2**30 if n == "masked" else t)
    with pytest.raises(FedblendError) as raised:
        federate(spoiling(2, "train", wrong), asked, tmp_path)
    told = r"round 1: the squares .* not finite, with the uploads of clients 0, 1, 2, 3, which are masked"
    assert re.match(told, str(raised.value))
    assert federate(nodes(), asked, tmp_path).state.round == 1


@pytest.mark.parametrize("aggregator", ["mean", "median"])
def test_large_numbers_with_a_finite_loss_stop_the_next_round_of_a_mean(aggregator: str, tmp_path: Path) -> None:
    asked = experiment({"name": "fedavg", "aggregator": aggregator}, train=ALL, rounds=2, min_uploads=2)
    grid = spoiling(2, "train", filled(1e9))
    if aggregator == "median":
        assert federate(grid, asked, tmp_path).state.round == 2
    else:
        with pytest.raises(FedblendError, match=r"round 2: [01] good uploads of 4"):
            federate(grid, asked, tmp_path)
