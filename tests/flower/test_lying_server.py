"""A server that lies to a site: what it requests beyond the schedule and the site file, and what it gets."""

from __future__ import annotations

import errno
import fcntl
import itertools
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import each

from fedblend.experiment.setup import make_setup

pytest.importorskip("flwr.serverapp", reason="Flower (extra 'flower') is not installed")

from flower_helpers import Nodes, fields_of
from flwr.app import Context, Message, RecordDict
from test_flower import audit, experiment, nodes, site_files
from test_flower_faults import QUICK, spoiling

from fedblend.cli.federation import run_trial, write_app_folder
from fedblend.core.engine import TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.trees import add_prefix
from fedblend.engines.loop import LoopEngine
from fedblend.experiment.config import TABLES, Experiment, as_table
from fedblend.experiment.tables import write_toml
from fedblend.flower import audit as audit_log
from fedblend.flower import client as at_site
from fedblend.flower import limits
from fedblend.flower import site as site_policy
from fedblend.flower.app_folder import FederationLimits
from fedblend.flower.audit import AuditLog
from fedblend.flower.client_task import ClientTask, Memory
from fedblend.flower.ledger import SharingLedger
from fedblend.flower.messages import pack, to_record, unpack
from fedblend.flower.secure_aggregation import masks
from fedblend.flower.secure_aggregation import site as masked_site
from fedblend.flower.server import run
from fedblend.flower.site import RefusedByPolicy, Site, describe_setup
from fedblend.runs import files
from fedblend.runs.files import read_lines

pytestmark = pytest.mark.usefixtures("no_waits")

SAMPLES, MIN_MEAN = 80, 20
"""The samples of a site, which have more pixels than that, and the fewest samples in its means."""

ALL = {"cohort": 4, "epochs": 1, "batch_size": 50, "lr": 0.1}
NOISE = {"name": "noise", "clip": 1.0, "multiplier": 1.0}


class OwnSite:
    """Client 0 with a site file and 80 samples of its own, and the server that lies to it."""

    def __init__(self, folder: Path, samples: int = SAMPLES, **fields: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.x = torch.rand(SAMPLES + 80, 1, 16, 16, generator=torch.Generator().manual_seed(0)).numpy()
        self.fields = {"data": {"name": "npz", "path": "own.npz"}, "min_mean": MIN_MEAN, **fields}
        self.hold(samples)
        shutil.copy(folder / "own.npz", folder / "server.npz")
        self.write(**fields)

    def hold(self, samples: int) -> None:
        """Let the site have its first ``samples`` samples; the server tests on 40 of the same file."""
        y = np.arange(samples + 40) % 10
        split = np.repeat([0, 1], [samples, 40])
        np.savez(self.folder / "own.npz", x=self.x[: samples + 40], y=y, split=split, classes=np.arange(10))

    def write(self, **fields: Any) -> None:
        """Write the site file anew."""
        (self.folder / "site.toml").write_text(write_toml(self.fields | fields))
        at_site.engine_of.cache_clear()
        site_policy._read_cached.cache_clear()

    def experiment(self, sharing: Any = None, **changes: Any) -> Experiment:
        """An experiment whose clients share means of 20 samples."""
        sharing = (
            sharing if sharing and "name" in sharing else {"name": "means", "samples_per_mean": 20} | (sharing or {})
        )
        table = {
            "method": {"name": "fedmix", "sharing": sharing},
            "data": {"name": "npz", "path": str(self.folder / "server.npz")},
            "scale": {"name": "unit"},
            "partition": {"name": "iid", "clients": 4},
            "fraction": 1.0,
            "rounds": 40,
        }
        return experiment(**(table | changes))

    def reply(
        self, kind: str, asked: Experiment, round: int = 0, run_id: int = 1, tensors: Any = None, **fields: Any
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The reply of the site's app, which has kept nothing in memory."""
        grid = Nodes([{"partition-id": 0, "site": str(self.folder / "site.toml")}], run_id)
        told = {"experiment": as_table(asked), "setup": describe_setup(make_setup(asked)), "client": 0}
        message = Message(
            pack(fields_of(kind, {**told, "round": round, **fields}), to_record(tensors or {})), 1000, kind
        )
        (reply,) = grid.send_and_receive([message])
        return unpack(reply.content)

    def shared(self, asked: Experiment, round: int = 0, run_id: int = 1, **more: Any) -> Any:
        """The shared inputs, [entries, ...], or why there are none."""
        fields, tensors = self.reply("query.share", asked, round, run_id, **more)
        return tensors["x"] if tensors else fields["fault"]

    def trained(self, asked: Experiment, run_id: int = 1) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The reply to a request for a model."""
        told = {"begins": "round", "mark": None, "state": None, "pool": None, "keep": "0-0"}
        weights = add_prefix("weights/", make_setup(asked).weights())
        return self.reply("train", asked, 0, run_id, weights, **told)

    def log(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "audit.jsonl")


def rank(tables: list[torch.Tensor]) -> int:
    """How many of the samples could be solved for."""
    return int(np.linalg.matrix_rank(torch.cat(tables).flatten(1).double().numpy(), tol=1e-4))


# Shared means ----------------------------------------------------------------------------------------------------


def new_rounds(site: OwnSite) -> list[tuple[Experiment, int, int]]:
    return [(site.experiment(), round, 1) for round in range(30)]


def new_runs(site: OwnSite) -> list[tuple[Experiment, int, int]]:
    return [(site.experiment(seed=i), 0, i) for i in range(30)]


def new_groupings(site: OwnSite) -> list[tuple[Experiment, int, int]]:
    """Other sizes, subsets, scales and noise, each in a run of its own."""
    asked = [site.experiment({"samples_per_mean": 20 + i}) for i in range(6)]
    asked += [site.experiment({"samples_per_mean": "all"}), site.experiment({"scale": "unit"})]
    asked += [site.experiment({"noise": 0.01 * i}) for i in range(1, 7)]
    asked += [site.experiment({"threshold": 1 + i}) for i in range(1, 5)]
    asked += [site.experiment(holdout=0.05, seed=i) for i in range(6)]
    asked += [site.experiment(scale={"name": "standard"}, seed=i) for i in range(6)]
    return [(one, 0, i) for i, one in enumerate(asked)]


@pytest.mark.parametrize(
    ("requests", "why"),
    [
        (new_rounds, "this experiment's clients share in round 1 only, not in round 30 (method.sharing)"),
        (new_runs, None),
        (
            new_groupings,
            "this site has shared 1 payload of its samples in all runs, and shares no other (sharings in its site "
            "file: 1)",
        ),
    ],
)
def test_means_requested_thirty_times_have_the_rank_of_one_sharing(
    requests: Any, why: str | None, tmp_path: Path
) -> None:
    site = OwnSite(tmp_path)
    replies = [site.shared(*request) for request in requests(site)]
    means = [reply for reply in replies if isinstance(reply, torch.Tensor)]

    assert len(replies) == 30
    assert rank(means) == SAMPLES // MIN_MEAN
    assert all(torch.equal(one, means[0]) for one in means)
    if why is None:
        assert len(means) == 30
    else:
        assert len(means) == 1
        assert why in replies[-1]
        assert [why in line.get("refused", "") for line in site.log()][-1]


def test_noise_on_means_does_not_average_out(tmp_path: Path) -> None:
    site = OwnSite(tmp_path)
    for noise in ({"noise": 1.0}, {"multiplier": 2.0}):
        site.write(audit=f"{'-'.join(noise)}.jsonl")
        replies = [site.shared(site.experiment(noise, seed=i), 0, i) for i in range(5)]
        assert all(torch.equal(one, replies[0]) for one in replies)


def test_the_groups_are_the_sites_secret_and_each_sample_is_in_one(tmp_path: Path) -> None:
    sites = [OwnSite(tmp_path / name) for name in "ab"]
    first, second = (site.shared(site.experiment()) for site in sites)
    setup = make_setup(sites[0].experiment(partition={"name": "iid", "clients": 1}, train=ALL | {"cohort": 1}))
    ((_, simulated),) = LoopEngine(setup).share(0, setup.weights(), [0], setup.sizes(0))
    # One data set and one seed: the groups of a simulation, and of each site, are others.
    for one, other in ((first, second), (first, simulated["x"]), (second, simulated["x"])):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one.mean(0), other.mean(0))
    # Each mean is of 20 samples: least squares finds them again, as weights 0 or 1 / 20.
    samples = torch.from_numpy(sites[0].x[:SAMPLES]).flatten(1).double().numpy()
    shares = np.linalg.lstsq(samples.T, first.flatten(1).double().numpy().T, rcond=None)[0]
    np.testing.assert_allclose(np.sort(shares, 0)[-20:], 1 / 20, atol=1e-4)
    np.testing.assert_allclose(shares.sum(1), 1 / 20, atol=1e-4)


def test_samples_that_come_later_make_means_of_their_own(tmp_path: Path) -> None:
    site = OwnSite(tmp_path)
    before = site.shared(site.experiment())
    site.hold(SAMPLES + 40)
    site.write()
    assert "shares no other (sharings in its site file: 1)" in site.shared(site.experiment(), 0, 2)
    site.write(sharings=2)
    after = site.shared(site.experiment(), 0, 3)
    assert torch.equal(after[:4], before)
    assert (len(after), rank([before, after])) == (6, 6)
    # Where samples were withdrawn, no mean of them leaves again.
    site.hold(SAMPLES - 20)
    site.write(sharings=2)
    assert "has shared 2 payloads" in site.shared(site.experiment(), 0, 4)
    site.write(sharings=3)
    assert rank([site.shared(site.experiment(), 0, 5)]) == 3


@pytest.mark.parametrize("split", ["random", "class"])
def test_samples_that_made_no_mean_make_means_with_later_ones(split: str, tmp_path: Path) -> None:
    minimum = {"random": 20, "class": 4}[split]
    site = OwnSite(tmp_path, min_mean=minimum, sharings=9)
    sharing = {"samples_per_mean": minimum, "split": split}
    left = []
    for samples in (90, 95, 100, 110, 120):
        site.hold(samples)
        site.write()
        once, again = (site.shared(site.experiment(sharing), 0, run_id) for run_id in (samples, 1000 + samples))
        assert torch.equal(once, again)
        left.append(once)
    # Classes grow from 9 samples to 12: two means of 4 of each, then three.
    assert [len(means) for means in left] == {"random": [4, 4, 5, 5, 6], "class": [20, 20, 20, 20, 30]}[split]
    assert all(torch.equal(one, two[: len(one)]) for one, two in itertools.pairwise(left))
    # Each sample is in one mean at most: the means are independent, and of their own samples.
    samples = torch.from_numpy(site.x[:120]).flatten(1).double().numpy()
    shares = np.linalg.lstsq(samples.T, left[-1].flatten(1).double().numpy().T, rcond=None)[0]
    np.testing.assert_allclose(shares.sum(1), 1 / minimum, atol=1e-4)


def test_means_that_change_with_the_model_count_each_round(tmp_path: Path) -> None:
    site = OwnSite(tmp_path, sharings=2, allow=["hidden-means"])
    asked = site.experiment(method={"name": "fedmix-hidden", "sharing": {"samples_per_mean": 20}}, rounds=5)
    weights = make_setup(asked).weights()
    replies = [
        site.shared(asked, i, 1, tensors=add_prefix("weights/", {n: (1 + i) * t for n, t in weights.items()}))
        for i in range(4)
    ]
    assert [isinstance(one, torch.Tensor) for one in replies] == [True, True, False, False]
    assert "has shared 2 payloads of its samples in all runs" in replies[2]


@pytest.mark.slow
def test_masked_means_are_not_summed_a_second_time(tmp_path: Path) -> None:
    method = {"name": "fedmix", "sharing": "secure-means"}
    configs = site_files(tmp_path, 4, allow=["masked", "keys", "weights"])
    asked = experiment(method, train=ALL, rounds=1)
    run(Nodes(configs), asked, tmp_path / "first", QUICK)
    # The same groups without one site, in another run, would reveal that site's mean.
    with pytest.raises(FedblendError, match="has shared 1 payload of its samples in all runs"):
        run(Nodes(configs, run_id=2), asked, tmp_path / "second", QUICK)


def test_the_sites_secret_is_readable_by_its_user_only(tmp_path: Path) -> None:
    site = OwnSite(tmp_path)
    first = site.shared(site.experiment())
    key = tmp_path / "audit.shared" / "key"
    assert (stat.S_IMODE(key.stat().st_mode), len(key.read_bytes())) == (0o600, 32)
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    for mode in (0o640, 0o604):
        key.chmod(mode)
        assert "other users can read this site's secret" in site.shared(site.experiment(), 0, 2)
    key.chmod(0o600)
    assert torch.equal(site.shared(site.experiment(), 0, 3), first)
    # Without the payloads the secret makes them again; without the secret they are others, and do not leave.
    for path in key.parent.glob("*.safetensors"):
        path.unlink()
    assert torch.equal(site.shared(site.experiment(), 0, 4), first)
    for path in key.parent.iterdir():
        path.unlink()
    assert "audit log is not as the site wrote it" in site.shared(site.experiment(), 0, 5)
    AuditLog(str(tmp_path / "audit.jsonl")).accept()
    assert "shares no other" in site.shared(site.experiment(), 0, 6)


@pytest.mark.slow
def test_the_server_refuses_more_means_than_a_sites_samples_make(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def many(fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
        return pack(fields, to_record({name: t[:1].expand(300_000, *t.shape[1:]) for name, t in tensors.items()}))

    asked = experiment({"name": "naivemix"}, train=ALL, rounds=1, unsafe=False, model={"name": "mlp", "hidden": []})
    finished = run(spoiling(1, "query.share", many), asked, tmp_path, QUICK)
    assert finished.state.entries.owner.tolist() == [0, 2, 3]
    size = int(make_setup(asked).population.sizes[1])
    assert f"it sent 300,000 entries, and its {size} samples make {size // 2} at most" in caplog.text


@each(
    ("method", "changes", "rounds"),
    [
        ("fedavg", {}, []),
        ("fedmix", {}, [0]),
        ("fedmix-hidden", {}, [0, 1, 2]),
        ("flea", {}, [0, 1, 2]),
        ("ccvr", {}, [2]),
        ({"name": "ccvr", "sharing": {"from_round": 2}}, {}, [1, 2]),
        ("server-matched", {}, [0]),
        ("feddm", {}, [0, 1, 2]),
        ({"name": "fedmix", "sharing": {"refresh": 0.1}}, {}, [0]),
        ({"name": "fedmix", "sharing": {"refresh": 0.1}}, {"arrival": {}}, [0, 1, 2]),
        ("fedmix", {"channel": {"name": "wireless"}}, [0, 1, 2]),
    ],
)
def test_a_site_shares_in_the_rounds_of_the_experiment(method: Any, changes: Any, rounds: list[int]) -> None:
    asked = experiment(method, rounds=3, **changes)
    for round in (-1, 0, 1, 2, 3, 10**9):
        if round in rounds:
            limits.check_schedule(asked, round)
        else:
            with pytest.raises(RefusedByPolicy, match="this experiment's clients share"):
                limits.check_schedule(asked, round)


# Fields of simulations -------------------------------------------------------------------------------------------


def test_every_field_of_an_experiment_is_classified() -> None:
    fields = {name for name in Experiment.model_fields if name not in TABLES or name in limits.SIMULATION_ONLY}
    for table, model in TABLES.items():
        if table not in limits.SIMULATION_ONLY:
            fields |= {f"{table}.{name}" for name in model.model_fields}
    classified = [*limits.SIMULATION_ONLY, *limits.AT_SITES, *limits.AT_SERVER]
    assert sorted(classified) == sorted(fields)


def test_sites_that_send_noise_do_not_leave_one_model_alone_in_a_masked_sum(tmp_path: Path) -> None:
    method = {"name": "fedavg", "aggregator": "secure-mean"}
    asked = experiment(method, train=ALL, rounds=1, adversary={"name": "noise", "share": 0.75, "scale": 0.0})
    setup = make_setup(asked)
    (victim,) = np.flatnonzero(~setup.adversaries).tolist()
    # What sites without a site file do, which follow simulations.
    state = run(nodes(), asked, tmp_path / "trial", FederationLimits(deadline=5)).state
    (expected,) = LoopEngine(setup).train(TrainTask(0, setup.weights(), None, setup.sizes(0)), [victim])
    start, share = setup.weights(), setup.sizes(0)[victim] / setup.sizes(0).sum()
    for name, tensor in start.items():
        rebuilt = tensor + (state.weights[name] - tensor) / share
        torch.testing.assert_close(rebuilt, expected.weights[name], rtol=0, atol=1e-6)

    configs = site_files(tmp_path, 4, allow=["masked", "keys"])
    with pytest.raises(FedblendError, match="adversary: real sites refuse this field of simulations"):
        run(Nodes(configs), asked, tmp_path / "run", QUICK)
    assert all("adversary: real sites refuse" in line["refused"] for line in audit(tmp_path, victim))


SIMULATED = {
    "adversary": {"name": "sign-flip"},
    "channel": {"name": "wireless"},
    "arrival": {"first": 0.5},
    "fraction": 0.01,
}


@pytest.mark.parametrize("field", limits.SIMULATION_ONLY)
def test_real_sites_refuse_fields_of_simulations(field: str, tmp_path: Path) -> None:
    site = OwnSite(tmp_path)
    told, tensors = site.trained(site.experiment(**{"method": "fedavg", field: SIMULATED[field]}))
    assert told == {
        "fault": f"{field}: real sites refuse this field of simulations: "
        f"{limits.SIMULATION_ONLY[field]}; valid: leave it out"
    }
    assert not tensors
    assert [line["refused"] for line in site.log()] == [told["fault"]]
    assert field in site.reply("query.hello", site.experiment(**{field: SIMULATED[field]}))[0]["fault"]


def test_a_server_does_not_leave_a_site_few_samples_to_train_or_score(tmp_path: Path) -> None:
    site = OwnSite(tmp_path)
    told, tensors = site.trained(site.experiment(method="fedavg", holdout=0.99))
    assert told["fault"] == "holdout: 0.99: real sites train on half of their samples or more; valid: 0 to 0.5"
    assert not tensors
    for holdout, scored in ((0.1, False), (0.3, True)):
        asked = site.experiment(method="fedavg", holdout=holdout)
        weights = add_prefix("weights/", make_setup(asked).weights())
        told, _ = site.reply("evaluate", asked, tensors=weights, own=None, split="holdout")
        assert ("right" in told) == scored
        assert (
            scored or told["fault"] == "it holds out 8 samples, and tells of 20 or more together (min_mean in its file)"
        )


def test_an_app_with_fields_of_simulations_is_not_written(tmp_path: Path) -> None:
    asked = experiment(adversary={"name": "nan"})
    for call in (
        lambda: write_app_folder(asked, tmp_path / "app", tmp_path / "run", 0, None),
        lambda: run_trial(asked, 4, [], 0, None, tmp_path / "trial"),
    ):
        with pytest.raises(FedblendError, match="adversary: real sites refuse this field of simulations"):
            call()
    assert not list(tmp_path.iterdir())


# The training loss -----------------------------------------------------------------------------------------------


def test_the_training_loss_leaves_only_beside_models_in_clear_and_is_in_the_audit_log(tmp_path: Path) -> None:
    clear = OwnSite(tmp_path / "clear")
    told, _ = clear.trained(clear.experiment(method="fedavg"))
    assert set(told) == {"samples", "loss"}
    assert [line["kind"] for line in clear.log()] == ["weights", "loss", "weights"]
    cases = {
        "not allowed": (OwnSite(tmp_path / "a", allow=["weights"]), {}),
        "noise of the experiment": (OwnSite(tmp_path / "b"), {"protection": NOISE}),
        "noise of the site": (OwnSite(tmp_path / "c", protection=NOISE), {}),
        "noise at the server": (OwnSite(tmp_path / "d"), {"protection": {**NOISE, "side": "server"}}),
    }
    for case, (site, changes) in cases.items():
        told, tensors = site.trained(site.experiment(method="fedavg", **changes))
        assert (set(told), bool(tensors)) == ({"samples"}, True), case
        assert [line["kind"] for line in site.log()] == ["weights", "weights"], case


@pytest.mark.parametrize("aggregator", ["mean", "secure-mean"])
def test_the_server_goes_on_without_training_losses(aggregator: str, tmp_path: Path) -> None:
    method = {"name": "fedavg", "aggregator": aggregator}
    configs = site_files(tmp_path, 4)
    Path(configs[1]["site"]).write_text('allow = ["weights", "masked", "keys"]\naudit = "audit-1.jsonl"\n')
    heard: dict[int, bool] = {}

    def listen(client: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            heard[client] = "loss" in unpack(reply.content)[0]
        return reply

    grid = Nodes(configs)
    grid.spoil = listen
    record = run(grid, experiment(method, train=ALL, rounds=1), tmp_path / "run", QUICK).directory.metrics()[1]

    masked = aggregator == "secure-mean"
    assert heard == {client: client != 1 and not masked for client in range(4)}
    assert record["uploads"] == 4
    assert ("train_loss" in record) == (not masked)


# Noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "site", "why"),
    [
        ({}, {}, "protection: uploads leave the clients as they are"),
        ({"protection": NOISE}, {}, "protection: 0.5"),
        ({"protection": NOISE | {"side": "server", "multiplier": 9.0}}, {}, "its noise is added at the server"),
        ({"protection": {"name": "noise", "scale": 9.0}}, {}, "protection.clip is not given"),
        ({}, {"protection": NOISE}, "protection in its site file: 0.5"),
        ({"method": "fd"}, {}, "here: nothing adds noise to it"),
        ({"protection": NOISE | {"multiplier": 1.4}}, {}, None),
        ({}, {"protection": NOISE | {"multiplier": 1.4}}, None),
    ],
)
def test_a_site_file_demands_a_least_noise(changes: Any, site: Any, why: str | None, tmp_path: Path) -> None:
    own = OwnSite(tmp_path, min_noise=0.7, **site)
    told, tensors = own.trained(own.experiment(**{"method": "fedavg", **changes}))
    assert bool(tensors) == (why is None)
    if why is not None:
        assert "this site sends only what has noise of 0.7 or more times the largest change" in told["fault"]
        assert why in told["fault"]


def test_a_site_file_demands_a_least_noise_on_means(tmp_path: Path) -> None:
    site = OwnSite(tmp_path, min_noise=0.7)
    assert "method.sharing: means get no noise" in site.shared(site.experiment())
    assert "method.sharing: 0.636396" in site.shared(site.experiment({"multiplier": 0.9}))
    assert len(site.shared(site.experiment({"multiplier": 1.0}))) == 4


# What a server can still do (docs/security.md) -------------------------------------------------------------------


def test_a_model_after_one_step_on_one_sample_is_that_samples_gradient(tmp_path: Path) -> None:
    site = OwnSite(tmp_path)
    train = {"cohort": 4, "steps": 1, "batch_size": 1, "lr": 1.0}
    asked = site.experiment(method="fedavg", train=train, model={"name": "mlp", "hidden": []})
    start = make_setup(asked).weights()
    _, tensors = site.trained(asked)
    (weight,) = (start[n] - tensors[n] for n in start if tensors[n].dim() == 2)
    (bias,) = (start[n] - tensors[n] for n in start if tensors[n].dim() == 1)
    # Of one linear layer the gradient is (outputs - target) x: a row over its bias is the sample.
    row = int(bias.abs().argmax())
    found = (weight[row] / bias[row]).numpy()
    samples = site.x[:SAMPLES].reshape(SAMPLES, -1)
    low, high = site.x.min(), site.x.max()
    assert np.abs((samples - low) / (high - low) - found).max(1).min() < 1e-3


def test_scores_leave_as_often_as_they_are_requested(tmp_path: Path) -> None:
    site = OwnSite(tmp_path)
    asked = site.experiment(method="fedavg", holdout=0.3)
    weights = add_prefix("weights/", make_setup(asked).weights())
    for factor in range(4):
        scaled = {name: factor * tensor for name, tensor in weights.items()}
        assert "right" in site.reply("evaluate", asked, tensors=scaled, own=None, split="holdout")[0]
    assert [line["kind"] for line in site.log()] == ["scores"] * 4
    site.write(allow=["weights"])
    told, _ = site.reply("evaluate", asked, tensors=weights, own=None, split="holdout")
    assert "this site's policy lets no scores out" in told["fault"]


@pytest.mark.slow
@pytest.mark.parametrize("lr", [0.1, 0.1000001])
def test_two_runs_of_one_masked_round_reveal_the_site_that_is_in_one_of_them(lr: float, tmp_path: Path) -> None:
    # A record of the rounds that a site has summed would not help: of the second rate the round is another one.
    asked = experiment({"name": "fedavg", "aggregator": "secure-mean"}, train=ALL, rounds=1)
    again = experiment({"name": "fedavg", "aggregator": "secure-mean"}, train=ALL | {"lr": lr}, rounds=1)
    configs = site_files(tmp_path, 4, allow=["masked", "keys"])
    whole = run(Nodes(configs), asked, tmp_path / "whole", QUICK).state.weights
    without = Nodes(configs, run_id=2)
    without.down = {3}
    others = run(without, again, tmp_path / "others", QUICK).state.weights
    setup = make_setup(asked)
    (expected,) = LoopEngine(setup).train(TrainTask(0, setup.weights(), None, setup.sizes(0)), [3])
    share = setup.sizes(0)[3] / setup.sizes(0).sum()
    for name, start in setup.weights().items():
        rebuilt = start + ((whole[name] - start) - (1 - share) * (others[name] - start)) / share
        torch.testing.assert_close(rebuilt, expected.weights[name], rtol=0, atol=1e-5)


def test_without_peers_a_site_accepts_the_servers_keys(tmp_path: Path) -> None:
    setup = make_setup(experiment({"name": "fedavg", "aggregator": "secure-mean"}, train=ALL))
    here = ClientTask(LoopEngine(setup), Site(), 0, 0, Memory(Context(1, 1, {}, RecordDict(), {})))
    told = {"experiment": {}, "setup": {}, "quantity": "models", "threshold": 3}
    keys = {f"0/{name}": tensor for name, tensor in masked_site.make_keys(here, told, {})[1].items()}
    keys |= {f"{c}/{n}": masks.bytes_to_tensor(masks.new_key_pair()[1]) for c in (1, 2) for n in ("mask", "box")}
    assert set(masked_site.make_shares(here, told, keys)[1]) == {"1", "2", "commit", "digests"}


# At once ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "at_work"), [("train", "leaving"), ("query.share", "shared")])
def test_two_requests_at_once_get_one_payload(
    kind: str, at_work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = OwnSite(tmp_path)
    asked = site.experiment(protection=NOISE, method="fedavg" if kind == "train" else "fedmix")
    during: list[Any] = []
    do = getattr(at_site.work, at_work)

    def request() -> Any:
        return site.trained(asked) if kind == "train" else site.reply(kind, asked)

    def meanwhile(*given: Any) -> Any:
        # Another process answers the same request while this one is at work.
        monkeypatch.setattr(at_site.work, at_work, do)
        during.append(request())
        return do(*given)

    monkeypatch.setattr(at_site.work, at_work, meanwhile)
    fields, tensors = request()

    # A training counts from its beginning, so that the first request gets the model; means from when they are made.
    replies = [(fields, tensors), during[0]]
    (one, left), (fault, nothing) = replies if kind == "train" else reversed(replies)
    assert left
    assert "fault" not in one
    assert not nothing
    assert "of round 1 in this run, and gives them once" in fault["fault"]
    assert len([line for line in site.log() if line.get("bytes")]) == 1


def test_a_site_checks_and_records_under_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = OwnSite(tmp_path)
    free: list[bool] = []
    append = audit_log.append_line

    def probe(path: Path, line: Any, remedy: str) -> None:
        with open(tmp_path / "audit.jsonl.lock", "ab") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free.append(True)
            except BlockingIOError:
                free.append(False)
        append(path, line, remedy)

    monkeypatch.setattr(audit_log, "append_line", probe)
    site.trained(site.experiment(method="fedavg"))
    site.shared(site.experiment())
    assert free == [False, False, False, False]
    # A refusal, too: beside a line that is half written it would remove that line.
    assert "gives them once" in site.shared(site.experiment())
    assert free == [False, False, False, False, False]


def test_nothing_leaves_where_the_audit_line_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = OwnSite(tmp_path)

    def full(path: Path, value: Any, remedy: str) -> None:
        raise FedblendError("no space left")

    monkeypatch.setattr(audit_log, "append_line", full)
    said, tensors = site.reply("query.share", site.experiment())
    assert "no space left" in said["fault"]
    assert tensors == {}


UNWRITTEN = {
    "the audit log": ("fedavg", "train"),
    "the payloads that were shared": ("fedmix", "query.share"),
    "what a method keeps": ("ditto", "train"),
}


@pytest.mark.parametrize("of", UNWRITTEN)
def test_a_site_that_cannot_write_is_not_told_to_resume_a_run(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, (method, kind) = OwnSite(tmp_path), UNWRITTEN[of]
    SharingLedger(AuditLog(str(tmp_path / "audit.jsonl")), 1).secret()

    def read_only(file: Any, data: bytes) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files, "_write_all", read_only)
    asked = site.experiment(**({} if method == "fedmix" else {"method": method}))
    fields, tensors = site.reply(kind, asked) if kind == "query.share" else site.trained(asked)

    assert tensors == {}
    assert fields["fault"].replace("the previous file is unchanged; ", "") == (
        "(a path): could not be written: Read-only file system; free disk space, or let this site's user write there; "
        "until then nothing that needs this file leaves"
    )


def test_of_a_lock_that_cannot_be_written_a_site_is_not_told_that_it_cannot_be_locked(tmp_path: Path) -> None:
    site = OwnSite(tmp_path)
    (tmp_path / "audit.jsonl.lock").mkdir()

    fields, tensors = site.trained(site.experiment(method="fedavg"))

    assert fields == {
        "fault": "(a path): cannot be written: Is a directory; keep the audit log where this site's user can write"
    }
    assert tensors == {}


# What the server says of the data ---------------------------------------------------------------------------------


@pytest.mark.parametrize("multiplier", [0, 1e-9])
def test_a_mean_is_not_of_the_sample_beyond_the_servers_bounds_alone(multiplier: float, tmp_path: Path) -> None:
    # On a unit scale from 0.95 on 425 of 1,024 numbers of means told one sample's.
    site = OwnSite(tmp_path)
    asked = site.experiment({"scale": "unit", "multiplier": multiplier})
    setup = describe_setup(make_setup(asked))
    setup["scale"] |= {"unit_factor": [[[20.0]]], "unit_offset": [[[-19.0]]]}  # type: ignore[operator]
    grid = Nodes([{"partition-id": 0, "site": str(tmp_path / "site.toml")}])
    told = {"experiment": as_table(asked), "setup": setup, "client": 0, "round": 0}
    (reply,) = grid.send_and_receive(
        [Message(pack(fields_of("query.share", told), to_record({})), 1000, "query.share")]
    )
    fields, tensors = unpack(reply.content)
    if multiplier:
        assert "so little noise hides none that is beyond them; valid: 0 (not cut), or 0.5 or more" in fields["fault"]
    else:
        assert not tensors["x"].any()


@pytest.mark.parametrize("kind", ["a number for each sample", "one number", "zero", "infinite", "none"])
def test_a_scale_of_another_shape_is_refused(tmp_path: Path, kind: str) -> None:
    """A factor for each sample would make a raw sample of a mean, and one for all would make its noise too small."""
    site = OwnSite(tmp_path)
    asked = site.experiment({"samples_per_mean": "all"})
    told = describe_setup(make_setup(asked))
    factor = torch.zeros(SAMPLES, 1, 1, 1)
    factor[17] = SAMPLES
    forged = {
        "a number for each sample": {"factor": factor.tolist()},
        "one number": {"factor": 1.0, "offset": 0.0, "unit_factor": 1.0, "unit_offset": 0.0},
        "zero": {"factor": [[[0.0]]]},
        "infinite": {"unit_factor": [[[float("inf")]]]},
        "none": {},
    }
    told["scale"].update(forged[kind])

    got = site.shared(asked, setup=told)

    if kind == "none":
        assert got.shape == (1, 1, 16, 16)
    else:
        assert "the server's scale of inputs" in got
        assert all("refused" in line for line in site.log())


@pytest.mark.parametrize(
    ("numbers", "refused"),
    [
        # Steps of 8, where factor / unit_factor, for which noise is sized, is 0.0005.
        ({"factor": 1000.0, "offset": 2.0**26, "unit_factor": 2e6, "unit_offset": -500.0 / 0.0005}, True),
        # Two values that are exactly their range apart, and nothing between.
        ({"factor": 8.0, "offset": 2.0**26, "unit_factor": 1.0, "unit_offset": 0.0}, True),
        ({"factor": 1e38, "offset": 0.0, "unit_factor": 1e-38, "unit_offset": 0.0}, True),
        # Values around 2,000 of a range of 1, and a constant of a million, whose range is taken as 1.
        ({"factor": 1.0, "offset": 0.0, "unit_factor": 1.0, "unit_offset": -2000.0}, False),
        ({"factor": 1.0, "offset": -1e6, "unit_factor": 1.0, "unit_offset": -1e6}, False),
    ],
)
def test_a_scale_whose_rounding_moves_more_than_noise_hides_is_refused(
    numbers: dict[str, float], refused: bool, tmp_path: Path
) -> None:
    site = OwnSite(tmp_path, min_noise=1.0)
    asked = site.experiment({"multiplier": 2.0})
    told = describe_setup(make_setup(asked))
    told["scale"].update({name: [[[number]]] for name, number in numbers.items()})

    got = site.shared(asked, setup=told)

    assert ("float32 moves values by more than 0.1 % of their range" in str(got)) == refused
    assert [line["kind"] for line in site.log() if "refused" not in line] == ([] if refused else ["means"])


def test_a_masked_sum_takes_no_objective_whose_training_the_servers_word_on_entries_decides(tmp_path: Path) -> None:
    site = OwnSite(tmp_path, allow=["masked", "keys", "means"], min_sum=4)
    method = {"name": "naivemix", "aggregator": {"name": "secure-mean", "fewest": 4}}
    for exclude, refused in ((True, True), (False, False)):
        asked = site.experiment(method=method | {"objective": {"lambda": 1.0, "exclude_own": exclude}})
        got = site.shared(asked)
        assert ("exclude_own" in str(got)) == refused


def test_another_name_of_the_experiment_gets_no_second_model(tmp_path: Path) -> None:
    site = OwnSite(tmp_path)
    first, second, renamed = (
        site.trained(site.experiment(method="fedavg", train=ALL, **name)) for name in ({}, {}, {"name": "other"})
    )
    assert first[1]
    assert not second[1]
    assert not renamed[1]
    assert "gives them once" in renamed[0]["fault"]


def scored_with(site: OwnSite, asked: Experiment) -> dict[str, Any]:
    """The scores of a model of zeros on what the site holds out."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in make_setup(asked).weights().items()}
    return site.reply("evaluate", asked, tensors=add_prefix("weights/", zeros), split="holdout", own=None)[0]


def test_losses_of_numbers_count_as_scores(tmp_path: Path) -> None:
    """Losses of sets that differ by one sample would give that sample's."""
    site = OwnSite(tmp_path, allow=["scores", "metrics"], max_scores=1)
    y = np.random.default_rng(1).random(120).astype(np.float32)
    for file in ("own.npz", "server.npz"):
        np.savez(tmp_path / file, x=site.x[:120], y=y, split=np.repeat([0, 1], [80, 40]))
    site.write()

    first, second = (
        scored_with(site, site.experiment(method="fedavg", model={"name": "mlp", "hidden": []}, holdout=held / 80))
        for held in (25, 26)
    )

    assert set(first["metrics"]) == {"loss"}
    assert "fault" in second
    assert [line["kind"] for line in site.log() if "refused" not in line] == ["metrics", "scores"]


@pytest.mark.parametrize(("classes", "told"), [(2, True), (10, False)])
def test_metrics_over_classes_leave_where_each_class_has_enough_samples(
    tmp_path: Path, classes: int, told: bool
) -> None:
    site = OwnSite(tmp_path, allow=["scores", "metrics"], min_mean=10)
    y = np.arange(120) % classes
    for file in ("own.npz", "server.npz"):
        np.savez(tmp_path / file, x=site.x[:120], y=y, split=np.repeat([0, 1], [80, 40]), classes=np.arange(10))
    site.write(min_mean=10)
    model = {"name": "mlp", "hidden": []}
    asked = site.experiment(method="fedavg", model=model, holdout=0.5, metrics=["balanced-accuracy"])

    assert ("balanced-accuracy" in scored_with(site, asked)["metrics"]) == told
