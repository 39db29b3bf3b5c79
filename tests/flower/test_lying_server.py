"""A server that lies to a site: what it requests beyond the schedule and the site file, and what it gets."""

from __future__ import annotations

import errno
import fcntl
import itertools
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_helpers import (
    ALL,
    LINEAR,
    NOISE,
    SECURE,
    Nodes,
    experiment,
    federate,
    nodes,
    one_round,
    weights_of,
)
from flower_sites import MIN_MEAN, SAMPLES, OwnSite, audit, site_files, sites_of, task_of
from helpers import each, slow_after_first

from fedblend.cli.federation import run_trial, write_app_folder
from fedblend.core import files
from fedblend.core.context import Batch, Context, Net
from fedblend.core.engine import TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.objective import Plain
from fedblend.core.registry import part
from fedblend.core.trees import Tensors
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import TABLES, Experiment
from fedblend.experiment.make_setup import make_setup
from fedblend.flower import audit as audit_log
from fedblend.flower import client as at_site
from fedblend.flower import limits
from fedblend.flower.audit import AuditLog
from fedblend.flower.ledger import SharingLedger
from fedblend.flower.messages import unpack
from fedblend.flower.secrets import site_secret
from fedblend.flower.secure_aggregation import masking_site as masked_site
from fedblend.flower.secure_aggregation import masks
from fedblend.flower.site import RefusedByPolicy, describe_setup


def rank(tables: list[torch.Tensor]) -> int:
    """How many of the samples could be solved for."""
    return int(np.linalg.matrix_rank(torch.cat(tables).flatten(1).double().numpy(), tol=1e-4))


def requests(site: OwnSite, kind: str) -> list[tuple[Experiment, int, int]]:
    """Thirty experiments, each with the round and the run in which the server requests means."""
    if kind == "rounds":
        return [(site.experiment(), round, 1) for round in range(30)]
    if kind == "runs":
        return [(site.experiment(seed=i), 0, i) for i in range(30)]
    asked = [site.experiment({"samples_per_mean": 20 + i}) for i in range(6)]
    asked += [site.experiment({"samples_per_mean": "all"}), site.experiment({"scale": "unit"})]
    asked += [site.experiment({"noise": 0.01 * i}) for i in range(1, 7)]
    asked += [site.experiment({"threshold": 1 + i}) for i in range(1, 5)]
    asked += [site.experiment(holdout=0.05, seed=i) for i in range(6)]
    asked += [site.experiment(scale={"name": "standard"}, seed=i) for i in range(6)]
    return [(one, 0, i) for i, one in enumerate(asked)]


ONCE = "this site has shared 1 payload of its samples in all runs, and shares no other"
IN_ROUND_1 = "this experiment's clients share in round 1 only, not in round 30 (method.sharing)"


@pytest.mark.parametrize(
    ("kind", "why"), slow_after_first([("rounds", IN_ROUND_1), ("runs", None), ("groups, scales and noise", ONCE)])
)
def test_means_requested_thirty_times_have_the_rank_of_one_sharing(kind: str, why: Any, site: OwnSite) -> None:
    replies = [site.shared(*request) for request in requests(site, kind)]
    means = [reply for reply in replies if isinstance(reply, torch.Tensor)]
    assert len(replies) == 30
    assert rank(means) == SAMPLES // MIN_MEAN
    assert all(torch.equal(one, means[0]) for one in means)
    assert len(means) == (1 if why else 30)
    if why:
        assert why in replies[-1]
        assert why in site.log()[-1]["refused"]


def test_noise_on_means_does_not_average_out(site: OwnSite) -> None:
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


def test_a_sharing_that_another_one_overtook_is_not_answered_later(
    site: OwnSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = SharingLedger.payload

    def overtaken(self: SharingLedger, *args: Any) -> Any:
        payload = plain(self, *args)
        monkeypatch.setattr(SharingLedger, "payload", plain)
        assert len(site.shared(site.experiment(), 0, 1)) == 4
        return payload

    monkeypatch.setattr(SharingLedger, "payload", overtaken)
    other = site.experiment({"samples_per_mean": 40})
    for run in (2, 3):
        assert "shares no other (sharings in its site file: 1)" in site.shared(other, 0, run)


def test_samples_that_come_later_make_means_of_their_own(site: OwnSite) -> None:
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
    weights = weights_of(asked)
    replies = [site.shared(asked, i, tensors={n: (1 + i) * t for n, t in weights.items()}) for i in range(4)]
    assert [isinstance(one, torch.Tensor) for one in replies] == [True, True, False, False]
    assert "has shared 2 payloads of its samples in all runs" in replies[2]


@pytest.mark.slow
def test_masked_means_are_not_summed_a_second_time(tmp_path: Path) -> None:
    method = {"name": "fedmix", "sharing": "secure-means"}
    configs = site_files(tmp_path, 4, allow=["masked", "keys", "weights"])
    asked = experiment(method, train=ALL, rounds=1)
    federate(Nodes(configs), asked, tmp_path / "first")
    # The same groups without one site, in another run, would reveal that site's mean.
    with pytest.raises(FedblendError, match="has shared 1 payload of its samples in all runs"):
        federate(Nodes(configs, run_id=2), asked, tmp_path / "second")


def test_the_sites_secret_is_readable_by_its_user_only(site: OwnSite) -> None:
    first = site.shared(site.experiment())
    key = site.folder / "audit.shared" / "key"
    assert (stat.S_IMODE(key.stat().st_mode), len(key.read_bytes())) == (0o600, 32)
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    for mode in (0o640, 0o604):
        key.chmod(mode)
        assert "other users can read this site's secret" in site.shared(site.experiment(), 0, 2)
    key.chmod(0o600)
    key.parent.chmod(0o755)
    with pytest.raises(FedblendError, match=f"other users can read this site's secret; run: chmod 700 {key.parent}"):
        site_secret(key.parent)
    key.parent.chmod(0o700)
    assert torch.equal(site.shared(site.experiment(), 0, 3), first)
    # Without the payloads the secret makes them again; without the secret they are others, and do not leave.
    for path in key.parent.glob("*.safetensors"):
        path.unlink()
    assert torch.equal(site.shared(site.experiment(), 0, 4), first)
    for path in key.parent.iterdir():
        path.unlink()
    assert "audit log is not as the site wrote it" in site.shared(site.experiment(), 0, 5)
    AuditLog(str(site.folder / "audit.jsonl")).accept()
    assert "shares no other" in site.shared(site.experiment(), 0, 6)


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


def test_every_field_of_an_experiment_is_classified() -> None:
    fields = {name for name in Experiment.model_fields if name not in TABLES or name in limits.SIMULATION_ONLY}
    for table, model in TABLES.items():
        if table not in limits.SIMULATION_ONLY:
            fields |= {f"{table}.{name}" for name in model.model_fields}
    classified = [*limits.SIMULATION_ONLY, *limits.AT_SITES, *limits.AT_SERVER]
    assert sorted(classified) == sorted(fields)


def alone_in(asked: Experiment, victim: int) -> tuple[dict[str, torch.Tensor], float]:
    """The model of a site after a round, and its share in the sum."""
    setup = make_setup(asked)
    (trained,) = LoopEngine(setup).train(TrainTask(0, setup.weights(), None, setup.sizes(0)), [victim])
    return trained.weights, float(setup.sizes(0)[victim] / setup.sizes(0).sum())


def test_sites_that_send_noise_do_not_leave_one_model_alone_in_a_masked_sum(tmp_path: Path) -> None:
    asked = one_round(SECURE, adversary={"name": "noise", "share": 0.75, "scale": 0.0})
    setup = make_setup(asked)
    (victim,) = np.flatnonzero(~setup.adversaries).tolist()
    # What sites without a site file do, which follow simulations.
    state, (model, share) = federate(nodes(), asked, tmp_path / "trial").state, alone_in(asked, victim)
    for name, tensor in setup.weights().items():
        rebuilt = tensor + (state.weights[name] - tensor) / share
        torch.testing.assert_close(rebuilt, model[name], rtol=0, atol=1e-6)
    with pytest.raises(FedblendError, match="adversary: real sites refuse this field of simulations"):
        federate(sites_of(tmp_path, allow=["masked", "keys"]), asked, tmp_path / "run")
    assert all("adversary: real sites refuse" in line["refused"] for line in audit(tmp_path, victim))


SIMULATED = {
    "adversary": {"name": "sign-flip"},
    "channel": {"name": "wireless"},
    "arrival": {"first": 0.5},
    "slow": {"epochs": [1, 1, 1, 1]},
    "fraction": 0.01,
}


def test_real_sites_refuse_fields_of_simulations(site: OwnSite) -> None:
    for field, reason in limits.SIMULATION_ONLY.items():
        told, tensors = site.trained(site.experiment(**{"method": "fedavg", field: SIMULATED[field]}))
        fault = f"{field}: real sites refuse this field of simulations: {reason}; valid: leave it out"
        assert (told, tensors, site.log()[-1]["refused"]) == ({"fault": fault}, {}, fault)
        assert field in site.reply("query.hello", site.experiment(**{field: SIMULATED[field]}))[0]["fault"]
    assert site.left() == []


def test_a_server_does_not_leave_a_site_few_samples_to_train_or_score(site: OwnSite) -> None:
    told, tensors = site.trained(site.experiment(method="fedavg", holdout=0.99))
    assert told["fault"] == "holdout: 0.99: real sites train on half of their samples or more; valid: 0 to 0.5"
    assert not tensors
    told, tensors = site.trained(site.experiment(method="fedavg", holdout=0.3, validation={"clients": 0.3}))
    assert told["fault"].startswith("holdout and validation.clients: 0.6: real sites train on half of their samples")
    assert not tensors
    few = "it holds out 8 samples, and tells of 20 or more together (min_mean in its file)"
    assert site.scored(site.experiment(method="fedavg", holdout=0.1))["fault"] == few
    assert "right" in site.scored(site.experiment(method="fedavg", holdout=0.3))


def test_an_app_with_fields_of_simulations_is_not_written(tmp_path: Path) -> None:
    asked = experiment(adversary={"name": "nan"})
    for call in (
        lambda: write_app_folder(asked, tmp_path / "app", tmp_path / "run", 0, None),
        lambda: run_trial(asked, 4, [], 0, None, tmp_path / "trial"),
    ):
        with pytest.raises(FedblendError, match="adversary: real sites refuse this field of simulations"):
            call()
    assert not list(tmp_path.iterdir())


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


@part("objective", "counts-all")
class CountsAll(Plain):
    """Counts every sample."""

    measures = ("all",)

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        """The task's loss."""
        context.count("all", torch.tensor(len(batch.y)))
        return super().loss(net, batch, drawn, context)


def test_what_an_objective_measures_leaves_with_metrics_alone(tmp_path: Path) -> None:
    for allow in (["weights", "loss"], ["weights", "loss", "metrics"]):
        site = OwnSite(tmp_path / str(len(allow)), allow=allow, trusted=[f"{CountsAll.__module__}:CountsAll"])
        told, _ = site.trained(site.experiment(method={"objective": "counts-all"}))
        assert told.get("metrics") == ({"all": 1.0} if "metrics" in allow else None)
        assert ("metrics" in [line["kind"] for line in site.log()]) == ("metrics" in allow)


@pytest.mark.parametrize("aggregator", ["mean", "secure-mean"])
def test_the_server_goes_on_without_training_losses(aggregator: str, tmp_path: Path) -> None:
    grid = Nodes(site_files(tmp_path, 4, {1: {"allow": ["weights", "masked", "keys"]}}))
    asked = one_round({"name": "fedavg", "aggregator": aggregator})
    record = federate(grid, asked, tmp_path / "run").directory.metrics()[1]
    heard = {client: "loss" in unpack(reply.content)[0] for client, kind, _, reply in grid.kept if kind == "train"}
    masked = aggregator == "secure-mean"
    assert heard == {client: client != 1 and not masked for client in range(4)}
    assert record["uploads"] == 4
    assert ("train_loss" in record) == (not masked)


def test_a_site_file_demands_a_least_noise(tmp_path: Path) -> None:
    cases: list[tuple[Any, Any, str]] = [
        ({}, {}, "protection: uploads leave the clients as they are"),
        ({"protection": NOISE}, {}, "protection: 0.5"),
        ({"protection": NOISE | {"side": "server", "multiplier": 9.0}}, {}, "its noise is added at the server"),
        ({"protection": {"name": "noise", "scale": 9.0}}, {}, "protection.clip is not given"),
        ({}, {"protection": NOISE}, "protection in its site file: 0.5"),
        ({"method": "fd"}, {}, "here: nothing adds noise to it"),
        ({"protection": NOISE | {"multiplier": 1.4}}, {}, ""),
        ({}, {"protection": NOISE | {"multiplier": 1.4}}, ""),
    ]
    for number, (changes, fields, why) in enumerate(cases):
        site = OwnSite(tmp_path / str(number), min_noise=0.7, **fields)
        told, tensors = site.trained(site.experiment(**{"method": "fedavg", **changes}))
        assert (bool(tensors), why in told.get("fault", "")) == (not why, True), (changes, fields, told)
        assert not why or "sends only what has noise of 0.7 or more times the largest change" in told["fault"]
    site = OwnSite(tmp_path, min_noise=0.7)
    assert "method.sharing: means get no noise" in site.shared(site.experiment())
    assert "method.sharing: 0.636396" in site.shared(site.experiment({"multiplier": 0.9}))
    assert len(site.shared(site.experiment({"multiplier": 1.0}))) == 4


def test_a_model_after_one_step_on_one_sample_is_that_samples_gradient(site: OwnSite) -> None:
    train = {"cohort": 4, "steps": 1, "batch_size": 1, "lr": 1.0}
    asked = site.experiment(method="fedavg", train=train, model={"name": "mlp", "hidden": []})
    start = make_setup(asked).weights()
    _, tensors = site.trained(asked)
    weight, bias = (next(start[n] - t for n, t in tensors.items() if t.dim() == dims) for dims in (2, 1))
    # Of one linear layer the gradient is (outputs - target) x: a row over its bias is the sample.
    row = int(bias.abs().argmax())
    found = (weight[row] / bias[row]).numpy()
    samples = site.x[:SAMPLES].reshape(SAMPLES, -1)
    low, high = site.x.min(), site.x.max()
    assert np.abs((samples - low) / (high - low) - found).max(1).min() < 1e-3


@pytest.mark.slow
def test_two_runs_of_one_masked_round_reveal_the_site_that_is_in_one_of_them(tmp_path: Path) -> None:
    # A record of the rounds that a site has summed would not help: of the other rate the round is another one.
    asked, again = one_round(SECURE), one_round(SECURE, train=ALL | {"lr": 0.1000001})
    configs = site_files(tmp_path, 4, allow=["masked", "keys"])
    whole = federate(Nodes(configs), asked, tmp_path / "whole").state.weights
    others = federate(Nodes(configs, run_id=2).without(3), again, tmp_path / "others").state.weights
    model, share = alone_in(asked, 3)
    for name, start in make_setup(asked).weights().items():
        rebuilt = start + ((whole[name] - start) - (1 - share) * (others[name] - start)) / share
        torch.testing.assert_close(rebuilt, model[name], rtol=0, atol=1e-5)


def test_without_peers_a_site_accepts_the_servers_keys() -> None:
    here = task_of(one_round(SECURE))
    told = {"experiment": {}, "setup": {}, "quantity": "models", "threshold": 3}
    keys = {f"0/{name}": tensor for name, tensor in masked_site.make_keys(here, told, {})[1].items()}
    keys |= {f"{c}/{n}": masks.bytes_to_tensor(masks.new_key_pair()[1]) for c in (1, 2) for n in ("mask", "box")}
    assert set(masked_site.make_shares(here, told, keys)[1]) == {"1", "2", "commit", "digests"}


@pytest.mark.parametrize(("kind", "at_work"), [("train", "protected"), ("query.share", "shared")])
def test_two_requests_at_once_get_one_payload(
    kind: str, at_work: str, site: OwnSite, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_site_checks_and_records_under_a_lock(site: OwnSite, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Any] = []
    append = audit_log.append_line

    def probe(path: Path, line: Any, remedy: str) -> None:
        with open(site.folder / "audit.jsonl.lock", "ab") as handle, pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lines.append(line)
        append(path, line, remedy)

    monkeypatch.setattr(audit_log, "append_line", probe)
    site.trained(site.experiment(method="fedavg"))
    site.shared(site.experiment())
    assert len(lines) == 4
    # A refusal, too: beside a line that is half written it would remove that line.
    assert "gives them once" in site.shared(site.experiment())
    assert len(lines) == 5


def test_nothing_leaves_where_the_audit_line_cannot_be_written(site: OwnSite, monkeypatch: pytest.MonkeyPatch) -> None:

    def full(path: Path, value: Any, remedy: str) -> None:
        raise FedblendError("no space left")

    monkeypatch.setattr(audit_log, "append_line", full)
    said, tensors = site.reply("query.share", site.experiment())
    assert "no space left" in said["fault"]
    assert tensors == {}


def test_a_site_that_cannot_write_is_not_told_to_resume_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(file: Any, data: bytes) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    # The audit log, the payloads that were shared, and what a method keeps cannot be written.
    for method, kind in (("fedavg", "train"), ("fedmix", "query.share"), ("ditto", "train")):
        site = OwnSite(tmp_path / method)
        site_secret(tmp_path / method / "audit.shared")
        asked = site.experiment(**({} if method == "fedmix" else {"method": method}))
        with monkeypatch.context() as patch:
            patch.setattr(files, "_write_all", read_only)
            fields, tensors = site.reply(kind, asked, tensors=weights_of(asked) if kind == "train" else {})
        assert tensors == {}, method
        assert fields["fault"].replace("the previous file is unchanged; ", "") == (
            "(a path): could not be written: Read-only file system; free disk space, or let this site's user write "
            "there; until then nothing that needs this file leaves"
        )
    # Of a lock that cannot be written it is not told that it cannot be locked.
    site = OwnSite(tmp_path)
    (tmp_path / "audit.jsonl.lock").mkdir()
    told = "(a path): cannot be written: Is a directory; keep the audit log where this site's user can write"
    assert site.trained(site.experiment(method="fedavg")) == ({"fault": told}, {})


NUMBERS = ("factor", "offset", "unit_factor", "unit_offset")
"""What a message says of a scale of numbers."""


def told_scale(asked: Experiment, **numbers: Any) -> dict[str, Any]:
    """What a server says of an experiment, with other numbers of its scale."""
    told = describe_setup(make_setup(asked))
    told["scale"] |= numbers  # type: ignore[operator]
    return told


def test_a_mean_is_not_of_the_sample_beyond_the_servers_bounds_alone(tmp_path: Path) -> None:
    # On a unit scale from 0.95 on 425 of 1,024 numbers of means told one sample's.
    for multiplier in (1e-9, 0):
        site = OwnSite(tmp_path)
        asked = site.experiment({"scale": "unit", "multiplier": multiplier})
        got = site.shared(asked, setup=told_scale(asked, unit_factor=[[[20.0]]], unit_offset=[[[-19.0]]]))
        if multiplier:
            assert "so little noise hides none that is beyond them; valid: 0 (not cut), or 0.5 or more" in got
        else:
            assert not got.any()


def test_a_scale_of_another_shape_is_refused(site: OwnSite) -> None:
    """A factor for each sample would make a raw sample of a mean, and one for all would make its noise too small."""
    asked = site.experiment({"samples_per_mean": "all"})
    factor = torch.zeros(SAMPLES, 1, 1, 1)
    factor[17] = SAMPLES
    forged = {
        "a number for each sample": {"factor": factor.tolist()},
        "one number": {"factor": 1.0, "offset": 0.0, "unit_factor": 1.0, "unit_offset": 0.0},
        "zero": {"factor": [[[0.0]]]},
        "infinite": {"unit_factor": [[[float("inf")]]]},
    }
    for kind, numbers in forged.items():
        assert "the server's scale of inputs" in str(site.shared(asked, setup=told_scale(asked, **numbers))), kind
    assert site.left() == []
    assert site.shared(asked).shape == (1, 1, 16, 16)


def test_a_scale_whose_rounding_moves_more_than_noise_hides_is_refused(tmp_path: Path) -> None:
    cases = [
        # Steps of 8, where factor / unit_factor, for which noise is sized, is 0.0005.
        ((1000.0, 2.0**26, 2e6, -500.0 / 0.0005), True),
        # Two values that are exactly their range apart, and nothing between.
        ((8.0, 2.0**26, 1.0, 0.0), True),
        ((1e38, 0.0, 1e-38, 0.0), True),
        # Values around 2,000 of a range of 1, and a constant of a million, whose range is taken as 1.
        ((1.0, 0.0, 1.0, -2000.0), False),
        ((1.0, -1e6, 1.0, -1e6), False),
    ]
    for number, (numbers, refused) in enumerate(cases):
        site = OwnSite(tmp_path / str(number), min_noise=1.0)
        asked = site.experiment({"multiplier": 2.0})
        forged = {name: [[[one]]] for name, one in zip(NUMBERS, numbers, strict=True)}
        got = site.shared(asked, setup=told_scale(asked, **forged))
        assert ("float32 moves values by more than 0.1 % of their range" in str(got)) == refused, numbers
        assert [line["kind"] for line in site.left()] == ([] if refused else ["means"])


def test_a_masked_sum_takes_no_objective_whose_training_the_servers_word_on_entries_decides(tmp_path: Path) -> None:
    site = OwnSite(tmp_path, allow=["masked", "keys", "means"], min_sum=4)
    method = {"name": "naivemix", "aggregator": {"name": "secure-mean", "fewest": 4}}
    for exclude in (True, False):
        mix = {"name": "naivemix", "lambda": 1.0, "exclude_own": exclude}
        # Also where the objective is the base of another one.
        for objective in (mix, {"name": "fedlc", "base": mix}):
            got = site.shared(site.experiment(method=method | {"objective": objective}))
            assert ("exclude_own" in str(got)) == exclude


def test_losses_of_numbers_count_as_scores(tmp_path: Path) -> None:
    """Losses of sets that differ by one sample would give that sample's."""
    site = OwnSite(tmp_path, allow=["scores", "metrics"], max_scores=1)
    y = np.random.default_rng(1).random(120).astype(np.float32)
    site.label_both(y)
    first, second = (
        site.scored(site.experiment(method="fedavg", model=LINEAR, holdout=held / 80)) for held in (25, 26)
    )
    assert set(first["metrics"]) == {"loss"}
    assert "fault" in second
    assert [line["kind"] for line in site.left()] == ["metrics", "scores"]


def test_metrics_over_classes_leave_where_each_class_has_enough_samples(tmp_path: Path) -> None:
    for classes in (2, 10):
        site = OwnSite(tmp_path / str(classes), allow=["scores", "metrics"], min_mean=10)
        site.label_both(np.arange(120) % classes)
        asked = site.experiment(method="fedavg", model=LINEAR, holdout=0.5, metrics=["balanced-accuracy"])
        assert ("balanced-accuracy" in site.scored(asked)["metrics"]) == (classes == 2)
