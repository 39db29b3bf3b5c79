"""Variants of a study, clients that stay alone, and accuracy by site."""

import io
import re

import numpy as np
import pytest
from cli_helpers import here, refused, succeeded
from helpers import each, engine_of, experiment, federation_of, images, run, same, setup
from rich.console import Console

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError
from fedblend.core.evaluation import evaluate
from fedblend.core.record import RoundRecord
from fedblend.experiment.study import expand
from fedblend.report.terminal import sites_table
from fedblend.runs.directory import RunDirectory

ALONE = {"label": "alone", "upload": "silent", "stateful_clients": True}
BASE = {
    "data": "digits",
    "partition": {"name": "iid", "clients": 4},
    "train": {"cohort": 4, "lr": 0.5},
    "method": {"name": "fedmix", "label": "ours"},
    "seeds": [0, 1],
}


def two_sites(test=12):
    """Forty samples of two sites, 10 and 30; its test samples are theirs by turns."""
    data = images(40, client=np.repeat([0, 1], [10, 30]), test=test)
    return Dataset(data.name, data.kind, data.train, data.test, data.classes, ("north", "south"))


def alone(**changes):
    settings = {"partition": "natural", "method": ALONE, "evaluate_model": "each", **changes}
    return setup(two_sites(), **settings)


def test_variants_are_laid_over_the_file():
    variant = {"method": {"name": "fedavg", "label": "pooled"}, "partition": {"clients": 1}, "train": {"cohort": 1}}
    made = expand({**BASE, "grid": {"train.epochs": [1, 3]}, "variants": [variant]}).experiments
    assert list(made)[-2:] == ["pooled-seed0", "pooled-seed1"]
    assert len(made) == 2 * 2 + 2
    pooled = made["pooled-seed1"]
    assert (pooled.seed, pooled.partition.name, pooled.partition.clients) == (1, "iid", 1)
    assert (pooled.train.cohort, pooled.train.lr, pooled.train.epochs) == (1, 0.5, 2)
    assert (pooled.method.objective.name, made["ours-epochs-3-seed0"].method.objective.name) == ("plain", "fedmix")
    assert made["ours-epochs-1-seed0"].partition.clients == 4


def test_variants_have_methods_grids_and_parts_of_their_own():
    variants = [
        {"methods": ["fedavg", "fedprox"], "partition": {"name": "classes", "clients": 6}},
        {"method": {"name": "fedavg", "label": "wide"}, "data": {"name": "mnist5k"}, "grid": {"train.lr": [0.1, 1.0]}},
    ]
    made = expand({**BASE, "seeds": [3], "variants": variants}, seeds=[7]).experiments
    assert list(made) == ["ours-seed7", "fedavg-seed7", "fedprox-seed7", "wide-lr-0.1-seed7", "wide-lr-1.0-seed7"]
    assert (made["fedprox-seed7"].partition.clients, made["wide-lr-1.0-seed7"].data.name) == (6, "mnist5k")


@each(
    ("variants", "told"),
    [
        ({"a": 1}, r"variants: \{'a': 1\} is not valid: write a table"),
        ([{"seeds": [1]}], r"variants.seeds: applies to the whole file"),
        ([{"seed": 1}], r"variants.seed: applies to the whole file"),
        ([{"method": {"name": "fedavg", "label": "ours"}}], "two runs would both be called 'ours-seed0'"),
        ([{"method": "fedavg", "rond": 1}], r"rond: unknown key \(did you mean 'rounds'"),
    ],
)
def test_bad_variants(variants, told):
    with pytest.raises(FedblendError, match=told):
        expand({**BASE, "variants": variants})


def test_a_client_alone_trains_as_if_there_were_no_other():
    both, _ = run(federation_of(alone()), 3)
    for client in (0, 1):
        # Nobody else ever takes part: a cohort of one in every round, drawn from a population of that one.
        made = alone(train={"cohort": 2})
        only = made.population.indices(client)
        others = [[], []]
        others[client] = only
        single = setup(two_sites(), others, partition="natural", method=ALONE, train={"cohort": 1})
        state, _ = run(federation_of(single), 3)
        assert same(both.client_states[client].to_tensors(), state.client_states[client].to_tensors())


def test_nothing_is_sent_and_the_servers_model_stays():
    made = alone()
    state, records = run(federation_of(made), 2)
    assert same(state.weights, made.weights())
    assert all(record["bytes_up"] == record["bytes_down"] == {} for record in records)
    assert records[-1]["uploads"] == 2


def test_each_is_judged_by_its_own_model_on_its_own_samples():
    made = alone(rounds=2)
    state, records = run(federation_of(made), 2)
    engine = engine_of(made)
    owner = made.data.test.client
    right, loss = np.zeros(12, bool), np.zeros(12)
    for client in (0, 1):
        scores = engine.score(state.client_states[client].model)
        right[owner == client], loss[owner == client] = scores.right[owner == client], scores.loss[owner == client]
    assert records[-1]["accuracy"] == right.mean()
    assert records[-1]["loss"] == pytest.approx(loss.mean())
    assert records[-1]["sites"] == {"north": right[owner == 0].mean(), "south": right[owner == 1].mean()}
    assert records[-1]["clients"]["mean"] == pytest.approx(np.mean(list(records[-1]["sites"].values())))


def test_before_any_training_each_is_judged_by_the_first_weights():
    made = alone()
    _, record = federation_of(made).start()
    assert record.accuracy == evaluate(engine_of(made), made.weights(), made)["accuracy"]


def test_judge_each_needs_weights_and_tests_of_the_clients_own():
    with pytest.raises(FedblendError, match="evaluate_model: 'each' needs clients that keep their own weights"):
        experiment(evaluate_model="each")
    for settings in ({"partition": {"name": "iid", "clients": 2}}, {"partition": {"name": "natural", "clients": 1}}):
        with pytest.raises(
            FedblendError, match="evaluate_model: 'each' needs test samples that all belong to a client"
        ):
            federation_of(alone(train={"cohort": 1}, **settings))


def test_accuracy_by_site_whoever_holds_what():
    made = setup(two_sites(), partition={"name": "iid", "clients": 1}, train={"cohort": 1})
    result = evaluate(engine_of(made), made.weights(), made)
    right = engine_of(made).score(made.weights()).right
    assert result["sites"] == {"north": right[0::2].mean(), "south": right[1::2].mean()}
    assert "sites" not in evaluate(engine_of(setup()), setup().weights(), setup())


def test_accuracy_is_not_told_of_each_of_many_clients():
    data = images(40, client=np.arange(40), test=12)
    many = Dataset(data.name, data.kind, data.train, data.test, data.classes, tuple(map(str, range(51))))
    made = setup(many)
    assert "sites" not in evaluate(engine_of(made), made.weights(), made)


def test_the_table_of_sites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).random((40, 3), np.float32)
    client, y = np.repeat(["north", "south"], 20), np.arange(40) % 2
    np.savez("sites.npz", x=x, y=y, client=client, split=np.tile(["train", "train", "test", "test"], 10))
    (tmp_path / "sites.toml").write_text("""
name = "sites"
rounds = 1
data = { name = "npz", path = "sites.npz" }
partition = "natural"
model = { name = "mlp", hidden = [] }
train = { cohort = 2 }
method = "fedavg"
[[variants]]
method = { label = "alone", upload = "silent", stateful_clients = true }
evaluate_model = "each"
""")
    succeeded(here("run", "sites.toml", "--jobs", "1"))
    shown = succeeded(here("compare", "--sites", "runs/sites")).out
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.split()}
    assert rows["site"] == ["fedavg", "alone"]
    assert {"north", "south", "mean", "worst"} <= set(rows)
    worst = [min(float(rows[site][i]) for site in ("north", "south")) for i in (0, 1)]
    assert [float(v) for v in rows["worst"][1:]] == worst


def test_the_worst_site_of_the_means_is_never_bold(tmp_path):
    """The worst sites of seeds differ: here by 11 and 11.5 points, that of the means by 1.5."""
    runs = []
    for method, seeds in (("fedavg", ((0.60, 0.80), (0.80, 0.605))), ("fedmix", ((0.71, 0.71), (0.72, 0.73)))):
        for seed, (north, south) in enumerate(seeds):
            run = RunDirectory(tmp_path / f"{method}{seed}")
            run.path.mkdir()
            run.create(experiment(method=method, seed=seed, rounds=0), {}, {})
            scores = {"accuracy": 0.7, "sites": {"north": north, "south": south}}
            run.add_record(RoundRecord(0, loss=1.0, **scores, bytes_up={}, bytes_down={}, machine={}))
            run.set_status("done", 0)
            runs.append(run)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(sites_table(runs))
    (line,) = (one for one in console.export_text(styles=True).splitlines() if "worst site" in one)
    assert re.sub(r"\x1b\[[\d;]*m", "", line).split() == ["worst", "site", "70.0", "71.5"]
    assert "\x1b[1m" not in line


def test_runs_that_tell_of_no_sites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text('rounds = 0\nname = "a"\ndata = "digits"\npartition = "iid"\nmodel = "mlp"\n')
    succeeded(here("run", "a.toml"))
    refused(here("compare", "--sites", "runs/a"), "sites: none of these runs has accuracies by site")
