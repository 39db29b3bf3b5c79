"""A federation over Flower gives the loop engine's weights, and refuses what is wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from fedblend.experiment.setup import make_setup

pytest.importorskip("flwr.serverapp", reason="Flower (extra 'flower') is not installed")

from flower_helpers import WORD, Nodes
from flwr.app import Message

from fedblend import part
from fedblend.core.callbacks import Callback
from fedblend.core.errors import FedblendError
from fedblend.core.evaluation import over_clients
from fedblend.core.loop import RoundLoop
from fedblend.core.sharing import Pool, rows_of
from fedblend.core.state import RunState
from fedblend.core.trees import digest_of
from fedblend.engines.loop import LoopEngine
from fedblend.experiment.config import Experiment, resolve
from fedblend.experiment.tables import write_toml
from fedblend.flower.app_folder import FederationLimits
from fedblend.flower.messages import pack, unpack
from fedblend.flower.server import connect, run
from fedblend.runs.files import read_lines

pytestmark = pytest.mark.usefixtures("no_waits")


def experiment(method: Any = "fedavg", **changes: Any) -> Experiment:
    """Four clients of digits, three of them a round."""
    table = {
        "data": "digits",
        "partition": {"name": "classes", "clients": 4, "classes_per_client": 3},
        "model": {"name": "mlp", "hidden": [8, 7]},
        "train": {"cohort": 3, "epochs": 1, "batch_size": 50, "lr": 0.1},
        "rounds": 2,
        "method": method,
        "unsafe": True,
        "fraction": 0.3,
    }
    return resolve({**table, **changes})


def by_loop(asked: Experiment, shared: Pool | None = None) -> tuple[RunState, list[dict[str, Any]]]:
    """The run by the loop engine, whose clients share the entries ``shared`` where they are given."""
    setup = make_setup(asked)
    engine = LoopEngine(setup)
    if shared is not None:
        payloads = {int(k): rows_of(shared, shared.owner == k).tensors for k in np.unique(shared.owner)}
        engine.share = lambda *_: iter(payloads.items())
    federation = RoundLoop(setup, engine)
    state, record = federation.start()
    records = [record.as_dict()]
    while state.round < asked.rounds:
        state, record = federation.round(state)
        records.append(record.as_dict())
    return state, records


def nodes(number: int = 4, **config: Any) -> Nodes:
    return Nodes({"partition-id": client, "allow": WORD, **config} for client in range(number))


def test_data_that_stay_local_and_a_clients_own_weights_do_not_leave(tmp_path: Path) -> None:
    for i, method in enumerate(["fd", {"name": "fedmix", "sharing": "local-means"}]):
        asked, grid = experiment(method), nodes()

        finished = run(grid, asked, tmp_path / str(i), FederationLimits(deadline=5))

        for name, tensor in by_loop(asked)[0].weights.items():
            assert torch.equal(finished.state.weights[name], tensor), name
        shared = [up for _, kind, _, up in grid.sent if kind == "query.share"]
        assert sum(shared) == 0
    model = sum(t.numel() * 4 for t in finished.state.weights.values())
    assert {up for _, kind, _, up in grid.sent if kind == "train"} == {model}


KEPT: list[dict[int, Any]] = []


@part("callback", "keeps-uploads")
class KeepsUploads(Callback):
    """Keeps each round's uploads, by client."""

    reads_uploads = True

    def on_updates(self, task: Any, result: Any) -> None:
        """Keep them."""
        KEPT.append(dict(result.uploads))


def test_a_callback_at_the_server_reads_each_sites_upload(tmp_path: Path) -> None:
    KEPT.clear()
    asked = experiment(rounds=1, callbacks=["keeps-uploads"])

    run(nodes(), asked, tmp_path / "run", FederationLimits(deadline=5))
    made = make_setup(asked)
    loop = RoundLoop(made, LoopEngine(made), asked.callbacks)
    loop.run(*loop.start())

    sites, alone = KEPT
    assert list(sites) == list(alone)
    assert all(torch.equal(tensor, sites[client][name]) for client in alone for name, tensor in alone[client].items())


# A site's side ---------------------------------------------------------------------------------------------


def site_files(folder: Path, number: int, **fields: Any) -> list[dict[str, Any]]:
    """The node configurations of sites, each with a site file of these fields."""
    configs = []
    for client in range(number):
        path = folder / f"site-{client}.toml"
        path.write_text(write_toml({**fields, "audit": f"audit-{client}.jsonl"}))
        configs.append({"partition-id": client, "site": str(path)})
    return configs


@pytest.mark.slow
def test_a_client_takes_part_again_with_a_personal_model_that_is_made_after_training(tmp_path: Path) -> None:
    """It has no first table of such a model to compare with, unlike Ditto's."""
    asked = experiment({"name": "pfedme", "personal": {"steps": 1}}, rounds=3, train={"cohort": 4, "epochs": 1})

    finished = run(nodes(), asked, tmp_path / "run", FederationLimits(deadline=5))

    records = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [record.get("uploads") for record in records[1:]] == [4] * 3
    assert all(torch.equal(finished.state.weights[n], t) for n, t in by_loop(asked)[0].weights.items())


def audit(folder: Path, client: int) -> list[dict[str, Any]]:
    return read_lines(folder / f"audit-{client}.jsonl")


def test_the_audit_log_records_every_payload_that_left(tmp_path: Path) -> None:
    asked, grid = experiment("fedmix", train={"cohort": 4, "epochs": 1, "batch_size": 50}), nodes()
    grid = Nodes(site_files(tmp_path, 4))

    run(grid, asked, tmp_path / "run", FederationLimits(deadline=5))

    for client in range(4):
        left = [(kind, up) for who, kind, _, up in grid.sent if who == client and kind != "query.hello"]
        lines = audit(tmp_path, client)
        kinds = {"query.share": "means", "train": "weights"}
        losses = [line for line in lines if line["kind"] == "loss"]
        assert [(line["round"], line["bytes"]) for line in losses] == [(0, 8), (1, 8)]
        begun = [(line["kind"], line["round"], line["bytes"]) for line in lines if line.get("begun")]
        assert begun == [("weights", 0, 0), ("weights", 1, 0)]
        lines = [line for line in lines if line["kind"] != "loss" and not line.get("begun")]
        assert [(kinds[kind], up) for kind, up in left] == [(line["kind"], line["bytes"]) for line in lines]
        assert [line["round"] for line in lines] == [0, 0, 1]
        assert lines[0]["tensors"] == {"x": ["float32", 1, 1, 8, 8], "y": ["float32", 1, 10]}
        # Written anew from what the tensors are: name, type, shape, bytes.
        assert len({line["sha256"] for line in lines}) == 3


def test_a_digest_covers_names_shapes_types_and_numbers() -> None:
    tensor = torch.arange(4.0)
    text = b"a\0<f4\0[4]\0" + tensor.numpy().tobytes() + b"b\0<f4\0[4]\0" + tensor.numpy().tobytes()
    assert digest_of({"b": tensor, "a": tensor}) == hashlib.sha256(text).hexdigest()


def test_a_site_refuses_kinds_that_its_file_does_not_allow(tmp_path: Path) -> None:
    grid = Nodes(site_files(tmp_path, 4, allow=["weights"]))
    with pytest.raises(
        FedblendError, match=r"no site shares anything \(clients 0, 1, 2, 3: this site's policy lets no"
    ):
        run(grid, experiment("fedmix"), tmp_path / "run", FederationLimits(deadline=5))
    assert [(line["kind"], "lets no means out" in line["refused"]) for line in audit(tmp_path, 0)] == [("means", True)]
    assert not any(up for _, _, _, up in grid.sent)


def test_a_site_that_refuses_to_share_is_left_out(tmp_path: Path) -> None:
    configs = site_files(tmp_path, 4)
    (tmp_path / "site-2.toml").write_text('allow = ["weights"]\naudit = "audit-2.jsonl"\n')
    finished = run(Nodes(configs), experiment("fedmix"), tmp_path / "run", FederationLimits(deadline=5))
    assert finished.state.entries.owner.tolist() == [0, 1, 3]


def test_a_site_shares_no_mean_of_fewer_samples_than_its_own_minimum(tmp_path: Path) -> None:
    method = {"name": "fedmix", "sharing": {"name": "means", "samples_per_mean": 10}}
    asked = experiment(method, policy={"min_mean": 1})
    sizes = make_setup(asked).population.sizes
    assert all(size % 10 for size in sizes)
    for minimum, each in ((1, -(-sizes // 10)), (10, sizes // 10)):
        folder = tmp_path / str(minimum)
        folder.mkdir()
        finished = run(
            Nodes(site_files(folder, 4, min_mean=minimum)), asked, folder / "run", FederationLimits(deadline=5)
        )
        assert np.bincount(finished.state.entries.owner).tolist() == each.tolist()


def test_a_site_limits_its_rounds_over_all_runs(tmp_path: Path) -> None:
    configs = site_files(tmp_path, 4)
    (tmp_path / "site-1.toml").write_text('rounds = 2\naudit = "audit-1.jsonl"\n')
    asked = experiment(train={"cohort": 4, "epochs": 1, "batch_size": 50}, rounds=1)

    for i, refused in enumerate([None, None, [1]]):
        finished = run(Nodes(configs, run_id=i), asked, tmp_path / f"run-{i}", FederationLimits(deadline=5))
        told = finished.directory.metrics()[1].get("refused")
        assert (told and [one["client"] for one in told]) == refused
    assert "has trained in 2 rounds" in told[0]["reason"]


@pytest.mark.slow
def test_a_site_whose_file_has_no_rounds_trains_in_a_thousand_over_all_runs(tmp_path: Path) -> None:
    configs = site_files(tmp_path, 4)
    asked = experiment(train={"cohort": 4, "epochs": 1, "batch_size": 50}, rounds=1)
    run(Nodes(configs), asked, tmp_path / "first", FederationLimits(deadline=5))
    # Client 0 has trained in 1,000 rounds of many runs, client 1 in 999 rounds, both with version 0.2.
    for client, number in ((0, 1000), (1, 999)):
        (line,) = [line for line in audit(tmp_path, client) if line.get("begun")]
        shutil.rmtree(tmp_path / f"audit-{client}.shared")
        line.pop("chain")
        lines = [{**line, "run": f"another name/{100 + i}"} for i in range(number)]
        (tmp_path / f"audit-{client}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))

    two = asked.model_copy(update={"rounds": 2})
    records = run(Nodes(configs, run_id=2), two, tmp_path / "second", FederationLimits(deadline=5)).directory.metrics()

    assert [[one["client"] for one in line.get("refused", ())] for line in records] == [[], [0], [0, 1]]
    assert records[1]["refused"][0]["reason"] == (
        "this site has trained in 1000 rounds, and takes part in no more (rounds in its site file; default: 1000)"
    )
    (tmp_path / "more.toml").write_text('rounds = 1002\naudit = "audit-0.jsonl"\n')
    configs[0]["site"] = str(tmp_path / "more.toml")
    more = run(Nodes(configs, run_id=3), two, tmp_path / "third", FederationLimits(deadline=5)).directory.metrics()
    assert [[one["client"] for one in line.get("refused", ())] for line in more] == [[], [1], [1]]


def test_a_site_applies_its_own_protection(tmp_path: Path) -> None:
    protection = {"name": "noise", "clip": 1e-3}
    asked = experiment(train={"cohort": 4, "epochs": 1, "batch_size": 50}, rounds=1)
    start = make_setup(asked).weights()

    def moved(folder: str, **table: Any) -> dict[str, torch.Tensor]:
        (tmp_path / folder).mkdir()
        configs = site_files(tmp_path / folder, 4, protection={**protection, **table})
        state = run(Nodes(configs), asked, tmp_path / folder / "run", FederationLimits(deadline=5)).state
        return {name: state.weights[name] - start[name] for name in start}

    norm = torch.cat([t.flatten() for t in moved("clip").values()]).norm()
    assert 0 < float(norm) <= 1e-3
    # Its noise is not the run's own: two runs of one experiment get other noise.
    first, second = (moved(name, multiplier=1.0) for name in "ab")
    assert all(not torch.equal(first[name], second[name]) for name in first)


def test_noise_of_the_experiment_is_drawn_from_system_entropy(tmp_path: Path) -> None:
    noisy = [
        {"protection": {"name": "noise", "scale": 0.1}},
        {"protection": {"name": "noise", "clip": 1.0, "multiplier": 0.1, "side": "server"}},
        {"method": {"name": "fedmix", "sharing": {"name": "means", "noise": 0.1}}},
    ]
    for i, changes in enumerate(noisy):
        asked = experiment(**changes)
        made = [run(nodes(), asked, tmp_path / f"{i}{k}", FederationLimits(deadline=5)).state for k in "ab"]
        for name in made[0].weights:
            assert not torch.equal(made[0].weights[name], made[1].weights[name])


def sites_with_data(folder: Path, asked: Experiment) -> list[dict[str, Any]]:
    """The node configurations of four sites whose files name the samples of the experiment's clients."""
    setup = make_setup(asked)
    test = setup.data.test
    configs = site_files(folder, 4)
    for client, config in enumerate(configs):
        x, y = setup.samples(client, int(setup.population.sizes[client]))
        split = np.repeat([0, 1], [len(y), len(test.y)])
        path = folder / f"data-{client}.npz"
        images, labels = np.concatenate([x.numpy(), test.x.numpy()]), np.concatenate([y.numpy(), test.y.numpy()])
        np.savez(path, x=images, y=labels, split=split, classes=np.array(setup.data.classes))
        table = {"audit": f"audit-{client}.jsonl", "data": {"name": "npz", "path": path.name}}
        Path(config["site"]).write_text(write_toml(table))
    return configs


def test_sites_with_their_own_data_equal_a_partition_of_the_same_data(tmp_path: Path) -> None:
    asked = experiment("fedmix", fraction=1.0)

    finished = run(Nodes(sites_with_data(tmp_path, asked)), asked, tmp_path / "run", FederationLimits(deadline=5))

    for name, tensor in by_loop(asked)[0].weights.items():
        assert torch.equal(finished.state.weights[name], tensor), name
    assert finished.directory.split()["counts"] == []
    assert finished.directory.facts()["clients"]["largest"] == int(make_setup(asked).population.sizes.max())


def test_samples_that_clients_hold_out_are_scored_at_their_sites(tmp_path: Path) -> None:
    asked, grid = experiment("fedavg", holdout=0.3, rounds=1), nodes()

    finished = run(grid, asked, tmp_path / "run", FederationLimits(deadline=5))

    made, expected = finished.directory.metrics(), by_loop(asked)[1]
    for ours, theirs in zip(made, expected, strict=True):
        assert ours["clients"] == theirs["clients"]
    assert {up for _, kind, _, up in grid.sent if kind == "evaluate"} == {0}


NO_COUNT = {"right": None, "metrics": {"loss": 1.0}}


@pytest.mark.parametrize(
    "said", [{"samples": 1}, {"right": -1}, {"right": 10**6}, {"right": True}, {"fault": "no"}, NO_COUNT]
)
def test_invalid_scores_of_a_site_are_left_out(said: dict[str, Any], tmp_path: Path) -> None:
    asked = experiment("fedavg", holdout=0.3, rounds=0)

    def lying(liars: set[int]) -> Nodes:
        def lies(client: int, message: Message, reply: Message) -> Message:
            if client not in liars or message.metadata.message_type != "evaluate":
                return reply
            return Message(pack({**unpack(reply.content)[0], **said}), reply_to=message)

        grid = nodes()
        grid.spoil = lies
        return grid

    (record,) = run(lying({2}), asked, tmp_path / "run", FederationLimits(deadline=5)).directory.metrics()

    setup = make_setup(asked)
    owner = setup.population.owners("holdout")
    right = LoopEngine(setup).score(setup.weights(), "holdout").right
    assert record["clients"] == over_clients(owner[owner != 2], right[owner != 2], setup.population.sizes)
    with pytest.raises(FedblendError, match="holdout: no client sent valid scores"):
        run(lying({0, 1, 2, 3}), asked, tmp_path / "none", FederationLimits(deadline=5))


def test_sites_that_begin_with_models_of_their_own_cannot_begin_with_an_earlier_run() -> None:
    made = make_setup(experiment(method="fd", start="earlier"))
    with pytest.raises(FedblendError, match="start: sites that begin with models of their own"):
        connect(cast(Any, None), made, FederationLimits())
