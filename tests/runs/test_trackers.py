"""Callbacks of experiment files: early stopping, the best model, a time limit, and trackers."""

import csv
import json
import struct
import warnings

import pytest
import torch
from cli_helpers import TINY, here, refused, succeeded, write
from helpers import each, same
from safetensors.torch import load_file
from torch import nn

from fedblend.core.errors import FedblendError, Stopped
from fedblend.core.record import RoundRecord
from fedblend.core.state import RunState
from fedblend.experiment.config import resolve
from fedblend.runs import api, checkpoint
from fedblend.runs.directory import RunDirectory
from fedblend.runs.predictor import Predictor
from fedblend.runs.run_callbacks import EarlyStopping, KeepBest, TimeLimit
from fedblend.runs.trackers import numbers_of


def run(folder, *callbacks, stop_after=None, **changes):
    """A run with callbacks of the file; ``stop_after`` interrupts it after so many rounds."""

    def interrupt(record):
        if record["round"] == stop_after:
            raise KeyboardInterrupt

    table = {**TINY, "rounds": 4, "callbacks": list(callbacks), **changes}
    return api.run(resolve(table), folder, resume=True, on_round=interrupt)


def interrupted(folder, *callbacks, after, **changes):
    """The same run, interrupted after so many rounds and resumed."""
    with pytest.raises(Stopped):
        run(folder, *callbacks, stop_after=after, **changes)
    return run(folder, *callbacks, **changes)


def feed(callback, losses):
    """The round after which a callback ends a run with these losses; 0 if it does not."""
    state = [RunState(i, {}, torch.zeros(1).numpy(), torch.zeros(1).numpy()) for i in range(len(losses) + 1)]
    return next(
        (i for i, loss in enumerate(losses, 1) if callback.on_round_end(state[i], RoundRecord(i, loss=loss))), 0
    )


@pytest.mark.parametrize(
    ("patience", "min_delta", "losses", "ends"),
    [
        (2, 0.0, [3.0, 2.0, 2.5, 2.0, 1.0], 4),  # an equal loss is not better
        (2, 0.0, [3.0, 2.0, 2.5, 1.9, 2.0, 2.0], 6),  # a better one begins the count again
        (2, 0.5, [3.0, 2.6, 2.4, 2.3, 2.2], 5),  # 2.4 is better than 3.0 by more than 0.5; 2.6 is not
        (3, 0.0, [3.0, 2.0, 2.5], 0),
    ],
)
def test_early_stopping_counts_evaluated_rounds(patience, min_delta, losses, ends):
    assert feed(EarlyStopping("loss", "min", patience, min_delta), losses) == ends


def test_early_stopping_ends_a_run_and_a_resumed_run_at_the_same_round(tmp_path):
    stop = {"name": "early-stopping", "monitor": "train_loss", "mode": "max", "patience": 2}
    whole = run(tmp_path / "whole", stop, rounds=9)
    again = interrupted(tmp_path / "again", stop, after=2, rounds=9)
    rounds = [RunDirectory(one.path).records()[-1].round for one in (whole, again)]
    values = [record.train_loss for record in RunDirectory(whole.path).records()][1:]
    best = max(range(len(values)), key=lambda i: values[i])
    assert rounds == [best + 1 + 2] * 2
    assert RunDirectory(whole.path).status()["reason"] == "ended by early-stopping"


@each(
    ("monitor", "lacking", "having"),
    [
        ("train_loss", {"uploads": None}, {"uploads": 2, "train_loss": 1.0}),
        ("train_loss", {"uploads": 0}, {"uploads": 2, "train_loss": 1.0}),
        ("metrics.auc", {"metrics": {"auc": None}}, {"metrics": {"auc": 1.0}}),
        (
            "client_metrics.auc.mean",
            {"client_metrics": {"auc": {"tested": 0}}},
            {"client_metrics": {"auc": {"mean": 1.0}}},
        ),
        ("change", {"change": None, "converged": False}, {"change": 1.0}),
        ("bytes_up.weights", {"bytes_up": {"outputs": 9}}, {"bytes_up": {"weights": 1}}),
    ],
)
def test_a_round_that_lacks_the_number_does_not_count(monitor, lacking, having):
    callback = EarlyStopping(monitor, "min", 2)
    records = [RoundRecord(i, loss=1.0, **(having if i in (3, 6, 7) else lacking)) for i in range(1, 8)]
    ends = [callback.on_round_end(None, record) for record in records]
    assert callback.seen == [(3, 1.0), (6, 1.0), (7, 1.0)]
    assert [bool(end) for end in ends] == [False] * 6 + [True]


@each("monitor", ["train_los", "train_loss", "metrics.f1", "client_metrics.f1.mean", "change", "cohort"])
def test_a_number_that_no_round_will_have_ends_the_run_at_its_first_round(monitor):
    record = RoundRecord(
        1, loss=1.0, uploads=2, cohort=[0, 1], metrics={"auc": None}, client_metrics={"auc": {"tested": 0}}
    )
    told = f"monitor: '{monitor}' is not measured in this run" + (
        r" \(did you mean 'client_metrics.auc.tested'\?\)"
        if monitor.startswith("client")
        else "; valid: loss, client_metrics.auc.tested, uploads"
    )
    with pytest.raises(FedblendError, match=told):
        EarlyStopping(monitor).on_round_end(None, record)


@pytest.mark.parametrize("monitor", ["bytes_up.misspelt", "bytes_down.means", "bytes_up"])
def test_bytes_of_a_kind_that_no_round_counts_are_refused(monitor, tmp_path):
    way = monitor.partition(".")[0]
    watched = TINY | {"callbacks": [{"name": "early-stopping", "monitor": monitor}]}
    with pytest.raises(FedblendError) as error:
        api.run(resolve(watched), tmp_path / "run")
    assert str(error.value) == (
        f"callbacks: monitor: '{monitor}' is not measured in this run; valid: {way}. with one of "
        "weights, extras, keys, questions, answers, shared"
    )
    shares = watched | {"method": "fedmix", "callbacks": [{"name": "early-stopping", "monitor": "bytes_down.means"}]}
    assert api.run(resolve(shares), tmp_path / "shares").metrics["round"].max() == 2


def test_a_number_of_training_is_refused_where_no_client_trains(tmp_path):
    method = {"name": "xormixfl", "sharing": {"name": "base-samples"}}
    with pytest.raises(FedblendError, match="'train_loss' is not measured in this run, in which no client trains"):
        run(tmp_path / "run", {"name": "keep-best", "monitor": "train_loss"}, method=method)
    assert not checkpoint.round_of(tmp_path / "run")


def test_the_best_model_is_kept_through_interruptions(tmp_path):
    # The lowest accuracy: the model of an early round, which later rounds must not replace.
    best = {"name": "keep-best", "mode": "min"}
    models = {}

    class Watch(KeepBest):
        def on_round_end(self, state, record):
            models[state.round] = state.weights

    api.run(resolve({**TINY, "rounds": 4}), tmp_path / "watch", callbacks=[Watch()])
    whole, again = run(tmp_path / "whole", best), interrupted(tmp_path / "again", best, after=3)
    scores = [record.accuracy for record in RunDirectory(whole.path).records()][1:]
    expected = scores.index(min(scores)) + 1
    for one in (whole, again):
        round, weights = checkpoint.read_best(one.path)
        assert round == expected
        assert all(torch.equal(weights[name], models[expected][name]) for name in weights)
    predictor = Predictor.of_run(RunDirectory(whole.path), best=True)
    assert predictor.description["round"] == expected
    assert here("export", whole.path, "--best", "--out", tmp_path / "m.safetensors").code == 0
    with pytest.raises(FedblendError, match="keeps no best model; add the callback keep-best"):
        checkpoint.read_best(tmp_path / "watch")


def test_two_callbacks_that_keep_the_best_model_are_refused(tmp_path):
    two = [{"name": "keep-best"}, "csv", {"name": "keep-best", "monitor": "loss", "mode": "min"}]
    told = "callbacks: each of two keep-best would replace the run's best.safetensors; valid: one of them"
    refused(here("run", write(tmp_path / "x.toml", {"callbacks": two}), "--out", tmp_path / "run"), told)
    with pytest.raises(FedblendError, match=told):
        api.run(resolve({**TINY, "callbacks": two[:2]}), tmp_path / "run", callbacks=[KeepBest("loss", "min")])
    assert not (tmp_path / "run").exists()


class Tied(nn.Sequential):
    """A network for digits of which two layers share a weight."""

    def __init__(self):
        first, second = nn.Linear(64, 64), nn.Linear(64, 64)
        second.weight = first.weight
        super().__init__(nn.Flatten(), first, nn.Tanh(), second, nn.Linear(64, 10))


def test_the_best_model_of_layers_that_share_a_weight_is_kept_and_exported(tmp_path):
    best = {"name": "keep-best", "monitor": "loss", "mode": "min"}
    result = run(tmp_path / "run", best, model={"name": "module", "path": "test_trackers:Tied"}, rounds=1)

    kept = checkpoint.read_best(tmp_path / "run")[1]
    assert torch.equal(kept["1.weight"], kept["3.weight"])
    exported = load_file(result.predictor.export(tmp_path / "m.safetensors")[0])
    assert same(kept, result.model.state_dict())
    assert same(exported, kept)


def test_a_best_model_that_was_cut_off_is_written_by_the_resumed_run(tmp_path, monkeypatch):
    experiment = resolve({**TINY, "rounds": 2, "callbacks": [{"name": "keep-best"}]})
    write_best = checkpoint.write_best

    def cut(folder, state, why):
        if state.round == 1:
            raise KeyboardInterrupt
        write_best(folder, state, why)

    monkeypatch.setattr(checkpoint, "write_best", cut)
    # The first round stays the best one.
    numbered(monkeypatch, 2.0, 1.0)
    with pytest.raises(Stopped):
        api.run(experiment, tmp_path / "cut")
    monkeypatch.setattr(checkpoint, "write_best", write_best)
    api.run(experiment, tmp_path / "cut", resume=True)

    assert checkpoint.read_best(tmp_path / "cut")[0] == 1


@pytest.mark.parametrize("changed", [None, {"mode": "max"}, {"monitor": "loss", "mode": "min"}])
def test_keep_best_that_a_resume_adds_or_changes_counts_from_there(changed, tmp_path):
    run(tmp_path / "run", rounds=2)
    if changed:
        # As of a run that was killed after the best model of round 4, and before the checkpoint.
        run(tmp_path / "killed", {"name": "keep-best", **changed})
        (tmp_path / "killed" / checkpoint.BEST).rename(tmp_path / "run" / checkpoint.BEST)
    expected = (
        "callbacks: keep-best was added or changed after round 1, the best one so far, whose model is gone; rounds "
        "count from 2 on"
    )
    with pytest.warns(UserWarning, match=f"^{expected}$") as told:
        result = run(tmp_path / "run", {"name": "keep-best", "mode": "min"})
    assert len(told) == 1
    # The lowest accuracy: that of round 1, whose model is gone.
    assert result.metrics["accuracy"][1:].is_monotonic_increasing
    round, weights = checkpoint.read_best(tmp_path / "run")
    assert round == 2
    assert same(weights, run(tmp_path / "short", rounds=2).model.state_dict())


def numbered(monkeypatch, *numbers):
    """Have `keep-best` monitor these numbers, those of rounds 1, 2, ..."""
    follow = lambda self, record: self.seen.append((record.round, numbers[record.round - 1])) or True  # noqa: E731
    monkeypatch.setattr(KeepBest, "follow", follow)


def test_a_best_model_of_a_later_round_than_the_checkpoints_is_kept(tmp_path, monkeypatch):
    numbered(monkeypatch, 2.0, 1.0, 1.5, 3.0)
    run(tmp_path / "whole", "keep-best")
    run(tmp_path / "killed", "keep-best", rounds=2)
    (tmp_path / "whole" / checkpoint.BEST).rename(tmp_path / "killed" / checkpoint.BEST)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(tmp_path / "killed", "keep-best")
    assert checkpoint.read_best(tmp_path / "killed")[0] == 4


def test_keep_best_that_was_away_for_some_rounds_counts_anew(tmp_path, monkeypatch):
    numbered(monkeypatch, 1.0, 3.0, 2.0, 0.0)
    run(tmp_path / "run", "keep-best", rounds=1)
    assert checkpoint.read_best(tmp_path / "run")[0] == 1
    run(tmp_path / "run", rounds=3)
    with pytest.warns(UserWarning, match=r"after round 2, the best one so far, .* rounds count from 3 on"):
        run(tmp_path / "run", "keep-best", rounds=4)
    assert checkpoint.read_best(tmp_path / "run")[0] == 3


def test_a_time_limit_ends_after_the_round_that_passes_it(monkeypatch):
    clock = iter([0.0, 59.9, 60.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    limit = TimeLimit(1.0)
    limit.on_run_begin(None, None)
    assert [limit.on_round_end(None, None) for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    ("callback", "rounds"),
    [
        ({"name": "time-limit", "minutes": 1e-9}, [1, 2, 3]),
        (
            {"name": "early-stopping", "monitor": "train_loss", "mode": "max", "patience": 1, "min_delta": 9.0},
            [2, 2, 2],
        ),
        ({"name": "stop-at-accuracy", "accuracy": 0.01}, [1, 1, 1]),
    ],
)
def test_a_resume_goes_on_after_a_time_limit_only_or_without_the_callback(callback, rounds, tmp_path):
    file, runs, made = tmp_path / "x.toml", tmp_path / "runs", []
    write(file, {"rounds": 4, "callbacks": [callback], "seeds": [0]})
    without = write(tmp_path / "y.toml", {"rounds": 4, "seeds": [0]})
    for words in (("run", file), ("resume", runs), ("resume", runs), ("run", without, "--resume")):
        succeeded(here(*words, *(["--out", runs] if words[0] == "run" else []), "--jobs", 1))
        made.append(RunDirectory(runs / "fedavg-seed0").records()[-1].round)
    assert made == [*rounds, 4]


def test_a_run_that_a_callback_ends_is_evaluated_in_its_last_round(tmp_path):
    limit = {"name": "time-limit", "minutes": 1e-9}
    made = run(tmp_path / "limited", limit, rounds=9, eval_every=5)
    whole = run(tmp_path / "whole", rounds=1)
    last, same = (RunDirectory(one.path).records()[-1] for one in (made, whole))
    assert (last.round, same.round) == (1, 1)
    assert last.loss is not None
    assert (last.loss, last.accuracy, last.per_class) == (same.loss, same.accuracy, same.per_class)


def test_a_tracker_has_the_scores_of_a_round_that_a_later_callback_makes_the_last(tmp_path):
    run(tmp_path / "run", "csv", {"name": "time-limit", "minutes": 1e-9}, rounds=9, eval_every=5)
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        last = list(csv.DictReader(file))[-1]
    assert float(last["accuracy"]) == RunDirectory(tmp_path / "run").records()[-1].accuracy


def test_validation_samples_come_before_test_samples():
    stop = EarlyStopping(patience=1)
    record = RoundRecord(1, loss=1.0, accuracy=0.9, validation={"clients": {"accuracy": 0.25}})
    assert stop.follow(record)
    assert stop.follow(RoundRecord(2, loss=1.0, accuracy=0.5))
    assert stop.seen == [(1, 0.25), (2, 0.5)]


def expected(folder):
    """All numbers that a run measured, by round."""
    return {record.round: numbers_of(record) for record in RunDirectory(folder).records()}


@pytest.mark.parametrize("after", [None, 2])
def test_the_table_has_each_round_once(after, tmp_path):
    if after is None:
        run(tmp_path / "run", "csv")
    else:
        interrupted(tmp_path / "run", "csv", after=after)
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {int(row.pop("round")): {k: float(v) for k, v in row.items() if v} for row in rows}
    assert len(rows) == 5
    assert found == expected(tmp_path / "run")


def test_tensorboard_shows_each_round_once(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra 'tracking' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    interrupted(tmp_path / "run", "tensorboard", after=2, checkpoint_every=3)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for name in ("loss", "accuracy", "bytes_up/weights"):
        wanted = {
            i: numbers[name.replace("/", ".")]
            for i, numbers in expected(tmp_path / "run").items()
            if name.replace("/", ".") in numbers
        }
        assert {e.step: e.value for e in events.Scalars(name)} == pytest.approx(wanted, rel=1e-6)
        assert len(events.Scalars(name)) == len(wanted)


@pytest.mark.slow
def test_mlflow_keeps_the_configuration_and_each_round(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="the extra 'tracking' is not installed")
    interrupted(tmp_path / "study" / "run", {"name": "mlflow"}, after=2)
    client = mlflow.MlflowClient((tmp_path / "study" / "mlruns").as_uri())
    (kept,) = client.search_runs([client.get_experiment_by_name("study").experiment_id])
    assert kept.info.status == "FINISHED"
    assert kept.data.params["train.lr"] == str(TINY["train"]["lr"])
    history = {m.step: m.value for m in client.get_metric_history(kept.info.run_id, "accuracy")}
    assert history == {i: numbers["accuracy"] for i, numbers in expected(tmp_path / "study" / "run").items()}


def logged(file):
    """The entries of a log in LevelDB's form: blocks of 32 KiB, and parts with a checksum, a length and a type."""
    place, entry = 7, b""
    while place + 7 <= len(file):
        if (left := -place % 32768) and left < 7:
            place += left
            continue
        length, form = struct.unpack_from("<HB", file, place + 4)
        entry += file[place + 7 : place + 7 + length]
        place += 7 + length
        if form in (1, 4):  # whole, or the last part
            yield entry
            entry = b""


@pytest.mark.slow
def test_wandb_works_offline(tmp_path):
    pytest.importorskip("wandb", reason="the extra 'tracking' is not installed")
    from wandb.proto import wandb_internal_pb2

    interrupted(tmp_path / "run", "wandb", after=2)
    history = {}
    for file in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")):
        for data in logged(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            if "accuracy" in items:
                history[items["_step"]] = items["accuracy"]
    assert history == {i: numbers["accuracy"] for i, numbers in expected(tmp_path / "run").items()}


@each(
    ("fields", "told"),
    [
        ({"name": "mlflow", "uri": "gopher://x"}, "'gopher://x' is no store of MLflow"),
        ({"name": "wandb", "mode": "on"}, "mode"),
        ({"name": "mlflow", "uri": "https://me:hunter2@h/"}, "MLFLOW_TRACKING_URI"),
        ({"name": "mlflow", "uri": "postgresql://h/db?user=me&password=hunter2"}, "MLFLOW_TRACKING_URI"),
        ({"name": "mlflow", "uri": "ftp://hunter2@h"}, "MLFLOW_TRACKING_URI"),
    ],
)
def test_bad_fields_of_trackers_are_refused_and_no_password_is_kept(fields, told, tmp_path):
    file = write(tmp_path / "x.toml", {"callbacks": [fields]})
    outcome = refused(here("run", file, "--out", tmp_path / "x"), told)
    assert "hunter2" not in outcome.err + outcome.out
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_an_error_of_a_tracker_shows_no_password_of_the_environment(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="the extra 'tracking' is not installed")
    file = write(tmp_path / "x.toml", {"callbacks": [{"name": "mlflow"}]})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@127.0.0.1:1/")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    outcome = refused(here("run", file, "--out", tmp_path / "x"), "callbacks: mlflow: $MLFLOW_TRACKING_URI: ")
    assert "hunter2" not in outcome.err + outcome.out
    assert not any(b"hunter2" in path.read_bytes() for path in (tmp_path / "x").rglob("*") if path.is_file())
