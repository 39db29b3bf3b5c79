"""What a site lets no server have, and what a server lets no site do."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from flower_helpers import ALL, NOISE, QUICK, Nodes, experiment, nodes, spoiling, through, weights_of
from flower_sites import sites_with_data
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from google.protobuf.message import DecodeError
from helpers import each, slow_after_first

from fedblend.core.errors import FedblendError
from fedblend.core.trees import add_prefix
from fedblend.experiment.config import as_table
from fedblend.experiment.setup import make_setup
from fedblend.experiment.tables import write_toml
from fedblend.flower import client as at_site
from fedblend.flower import sites as sites_module
from fedblend.flower import work
from fedblend.flower.messages import APP_FIELDS, detach, fault_of_shared, pack, to_record, unpack
from fedblend.flower.server import run
from fedblend.flower.site import RefusedByPolicy, describe_setup
from fedblend.flower.sites import ClientRequest, Sites
from fedblend.methods.sharing.means import SharedMeans
from fedblend.methods.sharing.secure_means import SecureMeans
from fedblend.runs.directory import RunDirectory
from fedblend.runs.files import BLOCK, append_line, read_lines

ASKED = {"request": None}


# At a site ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forgets", [False, True], ids=["by its memory", "by its audit log"])
def test_a_site_sends_its_model_and_its_means_once_a_round(forgets: bool, tmp_path: Path) -> None:
    asked = experiment("fedmix", train=ALL, protection=NOISE)
    (tmp_path / "site.toml").write_text(write_toml({"audit": "audit.jsonl", "rounds": 2}))
    grid = Nodes({"partition-id": c} | ({"site": str(tmp_path / "site.toml")} if c == 0 else {}) for c in range(4))
    told: list[tuple[str, int, str]] = []

    def again(who: int, message: Message, reply: Message) -> Message:
        kind = message.metadata.message_type
        if who == 0 and kind in ("train", "query.share"):
            (context,) = [c for c in grid.contexts.values() if grid.client(c.node_id) == 0]
            if forgets:
                context.state = RecordDict()
            fields, tensors = unpack(grid.app(through(message), context).content)
            told.append((kind, len(tensors), fields.get("fault", "")))
        return reply

    grid.spoil = again
    finished = run(grid, asked, tmp_path / "run", QUICK)

    assert finished.state.round == 2
    assert {size for _, size, _ in told} == {0}
    for kind, round in (("query.share", 1), ("train", 1)):
        assert any(k == kind and f"of round {round} in this run, and gives them once" in fault for k, _, fault in told)
    assert any("has trained in 2 rounds" in fault for _, _, fault in told)
    lines = [line for line in read_lines(tmp_path / "audit.jsonl") if "refused" not in line]
    assert [line["kind"] for line in lines if not line.get("begun")] == ["means", "weights", "weights"]


def test_a_payload_of_an_earlier_round_is_refused() -> None:
    asked = experiment("fedavg", train=ALL)
    once = at_site.ReplayGuard(task_of(asked).memory, at_site.AuditLog(None), "run", 5, 0, "weights")
    once.check("upload", True)
    once.mark_sent("upload")
    for round in (0, 4, 5):
        with pytest.raises(RefusedByPolicy, match=f"of round {round + 1} in this run, and gives them once"):
            at_site.ReplayGuard(once.memory, once.audit, "run", round, 0, "weights").check("upload", True)
    at_site.ReplayGuard(once.memory, once.audit, "run", 6, 0, "weights").check("upload", True)


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
    assert [at_site.kind_of(task_of(one).engine, "sharing") for one in (raw, mixed)] == ["raw", "seeds"]
    features = task_of(experiment({"name": "flea", "sharing": {"fraction": 1}}), max_seeds=1)
    assert at_site.kind_of(features.engine, "sharing") == "features"
    weights = add_prefix("weights/", features.setup.weights())
    with pytest.raises(RefusedByPolicy, match=r"single samples \(features\), and its policy gives 1"):
        work.share(features, ASKED, weights)
    for one in (raw, mixed):
        assert len(work.share(task_of(one, max_seeds=4), ASKED, {})[1]["x"]) == 4
        with pytest.raises(RefusedByPolicy, match=r"it is asked for 4 single samples .*, and its policy gives 3"):
            work.share(task_of(one, max_seeds=3), ASKED, {})
    # A mean of many is none.
    assert len(work.share(task_of(experiment("fedmix"), max_seeds=1), ASKED, {})[1]["x"]) == 1


@pytest.mark.parametrize("kind", [SharedMeans, SecureMeans])
def test_noise_on_means_is_drawn_from_system_entropy(kind: type) -> None:
    assert not work.hides(kind())
    assert work.hides(kind(noise=0.1))
    assert work.hides(kind(multiplier=2.0))
    if kind is SharedMeans:
        assert work.hides(SharedMeans(split="class", multiplier=2.0))  # which earns no epsilon, and yet is noise


@pytest.mark.parametrize("where", ["experiment", "site"])
def test_a_model_leaves_only_clipped_against_the_rounds_model(where: str) -> None:
    lossy = {"channel": {"name": "wireless"}, "train": ALL}
    fields = {"begins": "own", "mark": None, "state": None, "pool": None, "keep": "0-0"}
    clipped = task_of(experiment(**lossy, **({"protection": NOISE} if where == "experiment" else {})))
    if where == "site":
        clipped = task_of(experiment(**lossy), protection=NOISE)
    with pytest.raises(FedblendError, match="it did not receive the round's model, from which its protection clips"):
        work.train(clipped, fields, {})
    assert work.train(task_of(experiment(**lossy)), fields, {})[1]


def test_an_audit_log_cut_short_by_a_kill_continues_with_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for torn in ("", '{"a": 1', "x" * (2 * BLOCK + 3)):
        for before in ("", '{"b": 2}\n', json.dumps({"b": "y" * BLOCK}) + "\n"):
            path.write_text(before + torn)
            append_line(path, {"c": 3})
            append_line(path, {"d": 4})
            assert path.read_text() == before + '{"c": 3}\n{"d": 4}\n'
            assert read_lines(path)[-2:] == [{"c": 3}, {"d": 4}]


# At the server --------------------------------------------------------------------------------------------------


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


def test_a_reply_that_flower_cannot_parse_is_a_fault_of_its_site_alone(tmp_path: Path) -> None:
    grid = nodes()
    pull = grid.pull_messages

    def parsing(ids: list[str]) -> list[Message]:
        replies = list(pull(ids))
        if any(r.metadata.message_type == "train" and grid.client(r.metadata.src_node_id) == 2 for r in replies):
            raise DecodeError("Error parsing message with type 'flwr.proto.ConfigRecord'")
        return replies

    grid.pull_messages = parsing
    record = run(grid, experiment(train=ALL, rounds=1), tmp_path, QUICK).directory.metrics()[1]
    assert [one["client"] for one in record["refused"]] == [2]
    assert record["refused"][0]["reason"] == "it sent what cannot be read: DecodeError"
    assert record["uploads"] == 3


def test_an_error_of_the_superlink_is_not_a_fault_of_sites(tmp_path: Path) -> None:
    """Else all sites were refused, and with min_uploads = 0 rounds without them would count."""
    grid = nodes()
    pull = grid.pull_messages

    def failing(ids: list[str]) -> list[Message]:
        replies = list(pull(ids))
        if any(reply.metadata.message_type == "train" for reply in replies):
            request = httpx.Request("POST", "https://127.0.0.1:8000/v1/runtime/pull-messages")
            raise httpx.HTTPStatusError("500", request=request, response=httpx.Response(500, request=request))
        return replies

    grid.pull_messages = failing
    with pytest.raises(httpx.HTTPStatusError):
        run(grid, experiment(train=ALL, rounds=1, min_uploads=0), tmp_path, QUICK)
    assert [line["round"] for line in RunDirectory(tmp_path).metrics()] == [0]


def test_unreadable_fields_beside_another_apps_are_an_error_of_the_message() -> None:
    deep = RecordDict({APP_FIELDS: ConfigRecord({APP_FIELDS: "[" * 100_000})})
    with pytest.raises(FedblendError, match="a message whose fields are not fedblend's"):
        detach(deep)


@pytest.mark.parametrize("loss", [10**400, -(10**400), float("nan"), float("inf")], ids=["huge", "low", "nan", "inf"])
def test_a_loss_that_is_not_a_number_is_refused(loss: float, tmp_path: Path) -> None:
    grid = spoiling(2, "train", lambda fields, tensors: pack({**fields, "loss": loss}, to_record(tensors)))
    record = run(grid, experiment(train=ALL, rounds=1), tmp_path, QUICK).directory.metrics()[1]
    assert [one["client"] for one in record["refused"]] == [2]
    assert "its loss is NaN or infinite" in record["refused"][0]["reason"]


@each(
    ("payload", "told"),
    [
        ({"x": torch.zeros(2, 3), "y": torch.tensor([0, 9], dtype=torch.uint8)}, None),
        ({"x": torch.zeros(2, 3), "y": torch.tensor([0, 10], dtype=torch.uint8)}, "'y' holds labels from 0 to 10; val"),
        ({"x": torch.zeros(2, 3), "y": torch.tensor([[-1, 3]])}, "'y' holds labels from -1 to 3; valid: 0 to 9"),
        (
            {"seeds": torch.zeros(1, 3), "y": torch.tensor([1]), "dummies": torch.tensor([200])},
            "'dummies' holds labels",
        ),
        ({"x": torch.tensor([[1.0, torch.nan]]), "y": torch.zeros(1, 10)}, "'x' holds NaN or infinity"),
        ({"x": torch.zeros(0, 3), "y": torch.zeros(0, dtype=torch.int64)}, None),
        ({"x": torch.zeros(1, 3), "y": torch.full((1, 10), 40.0)}, None),  # noisy means are no distributions
    ],
)
def test_shared_numbers_and_labels_are_checked(payload: Any, told: str | None) -> None:
    fault = fault_of_shared(payload, 10)
    assert fault is None if told is None else told in fault


def test_shared_labels_of_no_class_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = experiment({"name": "mixfld", "server_step": {"steps": 2}}, train=ALL, rounds=1)

    def unheard(fields: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> RecordDict:
        return pack(fields, to_record({**tensors, "y": tensors["y"] + 200}))

    finished = run(spoiling(1, "query.share", unheard), asked, tmp_path, QUICK)

    assert finished.state.round == 1
    assert set(finished.state.entries.owner.tolist()) == {0, 2, 3}
    assert "client 1 shares nothing: 'y' holds labels from 20" in caplog.text


def sites_of(grid: Nodes) -> Sites:
    asked = experiment()
    made = Sites(grid, 4, 2, 0.4, {"experiment": as_table(asked), "setup": describe_setup(make_setup(asked))})
    made.wait_until_connected()
    return made


def test_a_node_that_claims_the_client_of_a_live_node_takes_no_part(caplog: pytest.LogCaptureFixture) -> None:
    grid = nodes()
    sites = sites_of(grid)
    honest = dict(sites.nodes)
    grid.contexts[5000] = Context(1, 5000, {"partition-id": 0}, RecordDict(), {})

    for _ in range(3):
        sites.wait_until_connected()
    assert sites.nodes == honest
    assert caplog.text.count("node 5000 claims to be client 0") == 1  # it is not asked again and again

    del grid.contexts[honest[0]]
    sites.wait_until_connected()
    assert sites.nodes == {**honest, 0: 5000}


def test_a_site_that_is_too_busy_to_answer_keeps_its_place_while_it_is_connected() -> None:
    grid = nodes()
    sites = sites_of(grid)
    honest = dict(sites.nodes)
    grid.contexts[5000] = Context(1, 5000, {"partition-id": 0}, RecordDict(), {})
    grid.spoil = lambda who, message, reply: None if message.metadata.dst_node_id == honest[0] else reply

    for _ in range(3):
        sites.wait_until_connected()
    assert sites.nodes == honest
    del grid.contexts[honest[0]]
    sites.wait_until_connected()
    assert sites.nodes == {**honest, 0: 5000}


@pytest.mark.parametrize("reconnects", slow_after_first([False, True]))
def test_a_site_that_never_answers_is_asked_less_and_less_also_if_it_connects_anew(
    reconnects: bool, caplog: pytest.LogCaptureFixture
) -> None:
    grid, asked = nodes(), []
    sites = sites_of(grid)

    def silent(who: int, message: Message, reply: Message) -> Message | None:
        if who != 1 or message.metadata.message_type != "train":
            return reply
        asked.append(unpack(message.content)[0]["round"])
        if reconnects:
            (old,) = [node for node in grid.contexts if grid.client(node) == 1]
            grid.contexts[old + 5000] = grid.contexts.pop(old)
        return None

    grid.spoil = silent
    told = [sites.exchange("train", r, {1: ClientRequest({})})[1].fault or "" for r in range(22)]

    assert asked == [0, 1, 2, 4, 7, 12, 21]
    assert told[3] == "no answer 3 times in a row; it takes part again from round 5"
    assert told[11] == "no answer 5 times in a row; it takes part again from round 13"
    assert "client 1 has not answered 4 times in a row, and takes no part until round 8" in caplog.text


@pytest.mark.slow
def test_a_site_that_answers_again_is_asked_in_each_round() -> None:
    grid, asked = nodes(), []
    sites = sites_of(grid)

    def late(who: int, message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type == "train":
            asked.append(unpack(message.content)[0]["round"])
        return None if message.metadata.message_type == "train" and len(asked) in (1, 2, 3, 5, 6) else reply

    grid.spoil = late
    for r in range(9):
        sites.exchange("train", r, {1: ClientRequest({})})
    assert asked == [0, 1, 2, 4, 5, 6, 7, 8]


def test_a_node_that_connects_again_and_again_without_an_answer_costs_less_and_less_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sites_module, "HELLO_S", 0.32)
    caplog.set_level("INFO", "flwr")
    grid = nodes()
    grid.spoil = lambda who, message, reply: None if who == 1 else reply
    sites = sites_of(grid)
    for _ in range(9):
        grid.down = {1} - grid.down
        sites.wait_until_connected()
    waits = re.findall(r"new nodes: 1; each has ([0-9.]+) seconds", caplog.text)
    assert waits == ["0.32", "0.32", "0.16", "0.08"]


def test_the_log_states_that_a_node_that_does_not_reply_is_queried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sites_module, "HELLO_S", 0.1)
    grid = nodes()
    silent = next(node for node in grid.contexts if grid.client(node) == 1)
    grid.spoil = lambda who, message, reply: None if who == 1 else reply
    sites = sites_of(grid)
    for _ in range(4):
        sites.wait_until_connected()
    why = "no answer within 0.1 seconds"
    told = [record.message for record in caplog.records if str(silent) in record.message]
    assert told == [
        f"fedblend: node {silent} will be queried again: {why} (attempt 1 of 3)",
        f"fedblend: node {silent} will be queried again: {why} (attempt 2 of 3)",
        f"fedblend: node {silent} takes no part: {why}",
    ]


@each("stated", [(60, 20, 20), (61, 20, 20), (60, 20, 21), (0, 50, 50), (1, 0, 0), (100, 0, 0)])
def test_a_sites_numbers_of_samples_are_those_of_the_experiments_shares(stated: tuple[int, int, int]) -> None:
    """With others a site could weigh its scores at will."""
    asked = as_table(experiment(holdout=0.2, validation={"clients": 0.2}))
    fields = dict(zip(("samples", "holds_out", "validates"), stated, strict=True))
    assert sites_module.states_its_samples(fields, asked) == (stated in ((60, 20, 20), (61, 20, 20), (1, 0, 0)))
    plain = as_table(experiment())
    assert sites_module.states_its_samples(fields, plain) == (stated in ((1, 0, 0), (100, 0, 0)))


@pytest.mark.parametrize("by", ["samples", "clients"])
def test_a_site_that_states_more_samples_weighs_more_where_clients_weigh_by_samples(by: str, tmp_path: Path) -> None:
    asked = experiment({"name": "fedavg", "aggregator": {"name": "mean", "by": by}}, fraction=1.0, train=ALL, rounds=1)
    uploads: list[dict[str, torch.Tensor]] = []

    def states_more(who: int, message: Message, reply: Message) -> Message:
        if who != 1 or message.metadata.message_type not in ("query.hello", "train"):
            return reply
        fields, tensors = unpack(reply.content)
        uploads.extend([tensors] if tensors else [])
        return Message(pack({**fields, "samples": 100 * fields["samples"]}, to_record(tensors)), reply_to=message)

    made = []
    for name, spoil in (("lying", states_more), ("honest", None)):
        (tmp_path / name).mkdir()
        grid = Nodes(sites_with_data(tmp_path / name, asked))
        grid.spoil = spoil or grid.spoil
        made.append(run(grid, asked, tmp_path / name / "run", QUICK).state.weights)
    ours, theirs = made

    if by == "clients":
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    else:
        shift, gap = (sum(float((w[n] - uploads[0][n]).square().sum()) ** 0.5 for n in ours) for w in made)
        assert shift < 0.1 * gap


@each(
    "said",
    [{"samples": 2**63}, {"samples": -1}, {"samples": True}, {"holds_out": 10**13}, {"samples": 9, "validates": None}],
)
def test_a_site_with_an_invalid_number_of_samples_takes_no_part(said: dict[str, Any]) -> None:
    grid = spoiling(1, "query.hello", lambda fields, tensors: pack({**fields, **said}))
    assert sorted(sites_of(grid).nodes) == [0, 2, 3]


def test_a_sites_fault_is_recorded_in_one_short_line(tmp_path: Path) -> None:
    grid = spoiling(1, "train", lambda fields, tensors: pack({"fault": "a\nb\x1b[2J" + "c" * 10_000}))
    record = run(grid, experiment(train=ALL, rounds=1), tmp_path, QUICK).directory.metrics()[1]
    (refused,) = record["refused"]
    assert refused["reason"].startswith("a b [2Jccc")
    assert len(refused["reason"]) < 400
    names = {f"{'n' * 1000}{i}\n": torch.zeros(1) for i in range(50)}
    grid = spoiling(1, "train", lambda fields, tensors: pack(fields, to_record(names)))
    (refused,) = run(grid, experiment(train=ALL, rounds=1), tmp_path / "b", QUICK).directory.metrics()[1]["refused"]
    assert len(refused["reason"]) < 400


# Found by the fuzzer --------------------------------------------------------------------------------------------


def answer_to(fields: Any, tensors: Mapping[str, torch.Tensor], kind: str = "train") -> dict[str, Any]:
    """What a site of the experiment replies to a message."""
    message = Message(pack(fields, to_record(tensors)), 1, kind, group_id="0")
    message.metadata.__dict__["_message_id"] = "1"
    reply = at_site.app(message, Context(1, 1, {"partition-id": 0}, RecordDict(), {}))
    assert reply.has_content(), reply.error
    return unpack(reply.content)[0]


def order(method: str = "fedavg", **changes: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A server's request to train, with changed fields."""
    setup = make_setup(experiment(method))
    fields = {"experiment": as_table(setup.experiment), "setup": describe_setup(setup), "client": 0, "round": 0}
    fields |= {"begins": "round", "mark": None, "state": None, "pool": None, "keep": "0-0"}
    return {**fields, **changes}, add_prefix("weights/", setup.weights())


@each("lacking", ["experiment", "setup", "client", "round", "begins"])
def test_a_message_without_a_field_is_answered_with_a_fault(lacking: str) -> None:
    fields, tensors = order()
    assert "fault" not in answer_to(fields, tensors)
    del fields[lacking]
    assert answer_to(fields, tensors)["fault"] == f"a request that is none: {lacking}: is missing; it must be given"


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {name: tensor[..., :-1] for name, tensor in tensors.items()},
        lambda tensors: {name: tensor.double() for name, tensor in tensors.items()},
        lambda tensors: dict(list(tensors.items())[1:]),
        lambda tensors: {},
    ],
    ids=["shape", "type", "names", "nothing"],
)
def test_a_site_does_not_train_another_model(change: Any) -> None:
    fields, tensors = order()
    assert "the server sent another model than the experiment's" in answer_to(fields, change(tensors))["fault"]


@each("owners", [3, [[0]], [["a", 1]], [[0, -1]], [[0, 10**12]], [[0, 2**70]], [[0.5, 1]], [[-2, 1]]])
def test_owners_of_a_pool_are_checked_before_they_are_made(owners: Any) -> None:
    fields, tensors = order("fedmix", pool="a" * 64, owners=owners)
    assert re.match("(a request|owners of a pool) that (is|are) none: ", answer_to(fields, tensors)["fault"])


def test_control_characters_in_a_message_do_not_come_back() -> None:
    fields, tensors = order()
    fields["experiment"]["\x1b[31m\x07"] = 1
    fault = answer_to(fields, tensors)["fault"]
    assert fault.isprintable()
    assert ": unknown key" in fault
