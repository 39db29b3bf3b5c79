"""A run that begins with another run's last weights."""

import json
from pathlib import Path

import pytest
from cli_helpers import here, records, refused, succeeded, write
from helpers import experiment, federation_of, same, same_state, slow_after_first

from fedblend.core.errors import FedblendError
from fedblend.experiment.make_setup import make_setup
from fedblend.experiment.study import expand
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory
from fedblend.runs.parallel import waves
from fedblend.runs.runner import execute

SMALL = {
    "data": "digits",
    "model": {"name": "mlp", "hidden": [8]},
    "partition": {"name": "xormixfl", "clients": 3, "targets": [3], "samples": 12, "target_samples": 2},
    "train": {"cohort": 3, "epochs": 1, "lr": 0.05},
    "rounds": 2,
}
SHOT = {"name": "xormixfl", "server_step": {"epochs": 3}}
NEVER_DOWN = {"name": "wireless", "power_down": -100.0}
MEANS = {"name": "fedmix", "sharing": {"samples_per_mean": 4}}


@pytest.fixture(scope="module")
def shot(tmp_path_factory):
    """XorMixFL's one shot, seed 1."""
    path = tmp_path_factory.mktemp("study") / "xormixfl-seed1"
    execute(experiment(**{**SMALL, "rounds": 1}, method=SHOT, seed=1), path)
    return path


@pytest.mark.parametrize("method", slow_after_first(["fedavg", MEANS]), ids=["fedavg", "fedmix"])
def test_fedavg_and_fedmix_go_on_from_the_one_shot_model(shot, method):
    warm = experiment(**SMALL, method=method, seed=1, start="xormixfl-seed{seed}")
    name = "warm" if method == "fedavg" else "warm-means"
    made = execute(warm, shot.parent / name)
    begun, ended = checkpoint.read(shot), made.state
    first = RunDirectory(made.directory.path)

    assert begun is not None
    lines = first.truncate_metrics(2)
    shots = RunDirectory(shot).truncate_metrics(1)
    # Nothing was trained before the first record, which is the shot's last.
    assert lines[0].accuracy == shots[-1].accuracy
    assert lines[0].loss == shots[-1].loss
    # The same rounds as those of a federation with these weights.
    fed = federation_of(made.setup)
    state, _ = fed.start({name: begun.weights[name] for name in made.setup.weights()})
    for _ in range(2):
        state, _ = fed.round(state)
    for weight, tensor in ended.weights.items():
        assert tensor.allclose(state.weights[weight], atol=1e-5)
    assert not same(begun.weights, ended.weights)


def test_a_warm_run_that_goes_on_ends_as_if_nothing_had_happened(shot, tmp_path):
    warm = {**SMALL, "method": "fedavg", "seed": 1, "start": str(shot)}
    whole = execute(experiment(**warm), tmp_path / "whole")
    execute(experiment(**{**warm, "rounds": 1}), tmp_path / "half")
    resumed = execute(experiment(**warm), tmp_path / "half", resume=True)
    assert same_state(resumed.state, whole.state)


def test_a_run_that_cannot_be_begun_with_is_named(shot, tmp_path):
    with pytest.raises(FedblendError, match=r"start: 'fedavg-seed\{seed\}': .*fedavg-seed0 has no checkpoint"):
        execute(experiment(**SMALL, start="fedavg-seed{seed}"), tmp_path / "none")
    other = {**SMALL, "model": {"name": "mlp", "hidden": [9]}, "start": str(shot)}
    with pytest.raises(FedblendError, match=r"the model of .*xormixfl-seed1 is another"):
        execute(experiment(**other), tmp_path / "other")
    execute(experiment(**{**SMALL, "rounds": 1}, method="fd"), tmp_path / "fd")
    with pytest.raises(FedblendError) as error:
        execute(experiment(**SMALL, start="fd"), tmp_path / "of-none")
    assert str(error.value) == (
        f"start: 'fd': {tmp_path / 'fd'}: its clients keep models or layers of their own, so that there is no one "
        "model; valid: a run of another method"
    )
    with pytest.raises(FedblendError, match="start"):
        federation_of(make_setup(experiment(**SMALL, start=str(shot)))).start()


def test_a_run_that_is_not_done_is_no_beginning(shot, tmp_path):
    execute(experiment(**{**SMALL, "rounds": 1}), tmp_path / "half")
    half = RunDirectory(tmp_path / "half")
    half.set_status("stopped", 1, "interrupted")
    resume = {
        "loop": f"fedblend resume {half.path}",
        "flower": "the command that began it (flwr run or fedblend federation up)",
    }
    for engine, how in resume.items():
        half.update_facts({"engine": {**half.facts()["engine"], "engine": engine}})
        with pytest.raises(FedblendError) as error:
            execute(experiment(**SMALL, start="half"), tmp_path / f"warm-{engine}")
        assert str(error.value) == f"start: 'half': {half.path} is not done; finish it first with: {how}"


def test_what_others_begin_with_is_run_before_them():
    def named(label, **more):
        return {"method": {"name": "fedavg", "label": label}, **more}

    variants = [named("c", start="b-seed{seed}"), named("b", start="a-seed{seed}"), named("d", start="../e/a-seed0")]
    table = {**SMALL, "seeds": [0, 1], "methods": [{"name": "fedavg", "label": "a"}], "variants": variants}
    made = [list(wave.experiments) for wave in waves(expand(table))]
    assert made == [["a-seed0", "a-seed1", "d-seed0", "d-seed1"], ["b-seed0", "b-seed1"], ["c-seed0", "c-seed1"]]
    round_about = {**table, "variants": [named("b", start="c-seed0"), named("c", start="b-seed{seed}")]}
    with pytest.raises(FedblendError, match="start: 'b-seed0' begins with itself in the end"):
        waves(expand(round_about, [0]))


def test_a_name_is_kept_and_a_folder_made_absolute():
    assert experiment(start="xormixfl-seed{seed}").start == "xormixfl-seed{seed}"
    assert experiment(start="runs/one").start == str(Path("runs/one").absolute())
    assert experiment().start is None


@pytest.mark.slow
def test_one_file_makes_the_shot_and_what_goes_on_from_it(tmp_path):
    file = {
        **SMALL,
        "name": "both",
        "seeds": [0, 1],
        "methods": ["fedavg"],
        "variants": [
            {"rounds": 1, "method": SHOT},
            {"start": "xormixfl-seed{seed}", "method": {"name": "fedavg", "label": "warm"}},
        ],
    }
    succeeded(here("run", str(write(tmp_path / "both.toml", file)), "--out", str(tmp_path / "out")))
    for seed in (0, 1):
        last, first = (
            json.loads(records(tmp_path / "out" / f"{name}-seed{seed}")[at])
            for name, at in (("xormixfl", -1), ("warm", 0))
        )
        assert (first["accuracy"], first["loss"]) == (last["accuracy"], last["loss"])
    alone = {**SMALL, "name": "alone", "start": "nothing"}
    refused(here("run", str(write(tmp_path / "alone.toml", alone)), "--out", str(tmp_path / "a")), "start", "nothing")


@pytest.mark.parametrize(
    "table",
    [{"method": "fd"}, {"method": {"upload": "silent", "stateful_clients": True}}, {"channel": NEVER_DOWN}],
    ids=["fd", "silent", "lost"],
)
def test_clients_that_begin_with_models_of_their_own_begin_with_the_earlier_run(table, shot, tmp_path):
    still = {**SMALL, "seed": 1, "start": str(shot), "evaluate_model": "device", **table}
    still["train"] = {"cohort": 3, "epochs": 1, "lr": 1e-9}
    execute(experiment(**{**still, "rounds": 1}), tmp_path / "run")
    execute(experiment(**still), tmp_path / "run", resume=True)

    begun, *rest = (record.loss for record in RunDirectory(tmp_path / "run").records())

    assert rest == pytest.approx([begun, begun], rel=1e-5)
