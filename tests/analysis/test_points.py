"""Probes of class interior points and of boundaries: worked by hand, and through the real command on a small run."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from cli_helpers import PNG, contents, here, refused, succeeded
from helpers import experiment, setup
from PIL import Image
from report_helpers import pixels
from torch import nn
from torch.nn import functional as F

from fedblend import report
from fedblend.analysis.points import boundaries
from fedblend.analysis.points import sheets as sheets_of_points
from fedblend.analysis.points.alignment import alignment_by_round, cosine, gradient, replay, replay_run
from fedblend.analysis.points.boundaries import GRID, Plane
from fedblend.analysis.points.feature_distances import Vae, distance, distances, train_vae
from fedblend.analysis.points.loaded_run import LoadedRun, Points, chunks, read, with_weights
from fedblend.analysis.points.point_metrics import measure_points
from fedblend.analysis.points.training import TrainingSettings, fresh_accuracy, fresh_model, train
from fedblend.core.dataset import Dataset, Samples
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.state import RunState
from fedblend.data.loaders.small import Toy
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.make_setup import make_setup
from fedblend.runs import checkpoint
from fedblend.runs.api import run
from fedblend.runs.directory import RunDirectory, find_runs
from fedblend.runs.groups import group
from fedblend.runs.runner import execute

ROOT = Path(__file__).parents[2]
STEP = {"name": "aggenhance", "steps": 4, "step_size": 0.5, "epochs": 2}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two runs on digits: one with points of three rounds, one without."""
    folder = tmp_path_factory.mktemp("study")
    for name, step in (("enhanced", STEP), ("plain", "none")):
        method = {"name": "fedavg", "label": name, "server_step": step}
        execute(experiment(method=method, rounds=3, scale="unit", engine="loop"), folder / name)
    return folder


@pytest.fixture(scope="module")
def loaded_run(study: Path) -> LoadedRun:
    return read(study / "enhanced")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of examples/toy.toml."""
    folder = tmp_path_factory.mktemp("toy") / "runs"
    succeeded(here("run", ROOT / "examples" / "toy.toml", "--out", folder, "--jobs", 1))
    return folder


@pytest.fixture(scope="module")
def plane(toy: Path) -> Plane:
    return boundaries.plane(find_runs([toy]))


def flat_model(inputs: int = 2, classes: int = 2) -> nn.Linear:
    """A linear model of zeros: each class has the same probability everywhere."""
    model = nn.Linear(inputs, classes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def some(n: int, classes: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 5, generator=draw), torch.randint(classes, (n,), generator=draw)


def alignment(model: nn.Module, points: torch.Tensor, labels: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> float:
    return cosine(gradient(model, chunks(points, labels)), gradient(model, chunks(x, y)))


def test_points_that_are_the_real_samples_align_fully_in_any_order_and_number() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    x, y = some(700)
    assert alignment(model, x, y, x, y) == pytest.approx(1, abs=1e-9)
    assert alignment(model, x.flip(0), y.flip(0), x, y) == pytest.approx(1, abs=1e-6)
    assert alignment(model, x.repeat(2, 1), y.repeat(2), x, y) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("point", "label", "wanted"),
    [
        # At zero weights a sample's gradient is (1/2 - one-hot) (x, 1): the cosine is that of (x, 1), with a sign.
        ((0.0, 1.0), 0, 1 / 2),
        ((0.0, 1.0), 1, -1 / 2),
        ((1.0, 0.0), 1, -1.0),
        ((3.0, 0.0), 0, 4 / math.sqrt(20)),
    ],
)
def test_alignment_by_hand(point: tuple[float, float], label: int, wanted: float) -> None:
    real = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    assert alignment(flat_model(), torch.tensor([point]), torch.tensor([label]), *real) == pytest.approx(wanted)


def test_alignment_is_undefined_where_a_gradient_is_zero() -> None:
    # Two samples of one place and both classes: their gradients cancel.
    x, y = torch.ones(2, 2), torch.tensor([0, 1])
    assert math.isnan(alignment(flat_model(), x, y, torch.ones(1, 2), torch.tensor([0])))


def test_the_gradient_of_many_chunks_is_that_of_the_mean_loss_of_trained_weights_in_evaluation_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.9), nn.Linear(6, 3))
    model[0].bias.requires_grad_(False)
    model.train()
    x, y = some(1203)
    found = gradient(model, zip(x.split(500), y.split(500), strict=True))
    assert model.training
    parameters = [p for p in model.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(F.cross_entropy(model.eval()(x), y), parameters)
    assert len(parameters) == 3
    torch.testing.assert_close(found, torch.cat([s.flatten() for s in slopes]).double(), rtol=1e-4, atol=1e-7)


def test_alignment_by_round_is_that_of_each_rounds_points_with_all_that_clients_hold(loaded_run: LoadedRun) -> None:
    made = loaded_run.setup
    rows = torch.from_numpy(made.population.order)
    x, y = made.scale(made.data.train.x[rows]), made.data.train.y[rows]
    model = with_weights(made.model, loaded_run.state.weights)
    found = alignment_by_round(loaded_run)
    assert list(found) == [1, 2, 3]
    for round, value in found.items():
        own = loaded_run.points.made_in(round)
        assert len(own) == 10
        # On the unit scale of these pictures points are as the model takes them.
        assert value == pytest.approx(alignment(model, own.x, own.labels, x, y), abs=1e-5)


def test_a_replay_makes_the_same_rounds_and_leaves_the_federation_as_it_was(loaded_run: LoadedRun) -> None:
    seen: list[Mapping[str, float]] = []
    rows = replay_run(loaded_run, seen.append)
    records = loaded_run.directory.metrics()[1:]
    assert rows == seen
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert [row["points"] for row in rows] == [10, 20, 30]
    assert [row["accuracy"] for row in rows] == [record["accuracy"] for record in records]
    assert rows[0]["alignment"] == rows[0]["alignment_new"]
    assert all(-1 <= row[name] <= 1 for row in rows for name in ("alignment", "alignment_new"))


def test_a_replay_looks_at_the_aggregate_before_it_is_tuned() -> None:
    # Without epochs the refined model is the aggregate, so that the checkpoint's model shows what was looked at.
    made = setup(method={"server_step": {**STEP, "epochs": 0}}, scale="unit")
    untuned = RoundLoop(made, LoopEngine(made))
    rows = replay(untuned, 2)
    assert untuned.method.server_step.name == "aggenhance"
    state, _ = untuned.start()
    for _ in range(2):
        state, _ = untuned.round(state)
    points = Points.from_server_state(state.server_part("server_step"))
    train_x, train_y = made.scale(made.data.train.x), made.data.train.y
    model = with_weights(made.model, state.weights)
    assert rows[1]["alignment"] == pytest.approx(alignment(model, points.x, points.labels, train_x, train_y), abs=1e-5)
    # With tuning, the first round's aggregate is the same, and so is what is seen at it.
    tuned = setup(method={"server_step": STEP}, scale="unit")
    assert replay(RoundLoop(tuned, LoopEngine(tuned)), 1)[0]["alignment"] == rows[0]["alignment"]


def test_a_replay_of_a_warm_started_run_begins_as_the_run(study: Path, tmp_path: Path) -> None:
    warm = experiment(method={"server_step": STEP}, rounds=1, scale="unit", engine="loop", start=str(study / "plain"))
    finished = execute(warm, tmp_path / "warm")
    rows = replay_run(read(tmp_path / "warm"))
    assert [row["accuracy"] for row in rows] == [finished.directory.metrics()[1]["accuracy"]]
    assert rows[0]["accuracy"] > RunDirectory(study / "enhanced").metrics()[1]["accuracy"]


@pytest.mark.slow
def test_a_replay_of_rounds_without_good_uploads(tmp_path: Path) -> None:
    lossy = {"name": "wireless", "t_max": 0.002, "power_up": 17.0}
    fields = {"model": {"name": "mlp", "hidden": [2]}, "min_uploads": 0, "train": {"cohort": 1}}
    fields |= {"scale": "unit", "engine": "loop", "channel": lossy, "rounds": 8}
    execute(experiment(method={"server_step": STEP}, seed=1, **fields), tmp_path)
    uploads = {record.round: record.uploads for record in RunDirectory(tmp_path).records() if record.round}

    rows = replay_run(read(tmp_path))

    first = min(round for round, number in uploads.items() if number)
    assert first > 1
    assert not all(uploads[round] for round in range(first, 9))
    assert [row["round"] for row in rows] == list(range(first, 9))
    assert [math.isnan(row["alignment_new"]) for row in rows] == [not uploads[round] for round in range(first, 9)]
    assert not any(math.isnan(row["alignment"]) for row in rows)


def test_a_replay_of_a_method_without_points_is_refused() -> None:
    plain = setup(method={"server_step": "none"})
    with pytest.raises(FedblendError, match=r"method\.server_step: 'none' makes no points"):
        replay(RoundLoop(plain, LoopEngine(plain)), 1)


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        ([[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0]], 0.5),
        ([[1.0, 1.0]], [[1.0, 0.0]], 1 - 1 / math.sqrt(2)),
        ([[1.0, 2.0]], [[-10.0, -20.0]], 2.0),
        ([[0.0, 0.0], [5.0, 0.0]], [[1.0, 0.0]], 0.5),
        ([[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [4.0, 3.0]], 1 - (1 + 0 + 0.8 + 0.6) / 4),  # all pairs
    ],
)
def test_equation_19_by_hand(a: list[list[float]], b: list[list[float]], wanted: float) -> None:
    assert distance(torch.tensor(a), torch.tensor(b)) == pytest.approx(wanted, abs=1e-7)


def test_the_loss_of_the_autoencoder_by_hand() -> None:
    model = Vae(4, hidden=3, latent=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    unit, noise = torch.rand(6, 1, 2, 2), torch.randn(6, 2)
    # All outputs are 1/2 whatever the input; the code is standard normal.
    assert model.loss(unit, noise).item() == pytest.approx(4 * math.log(2), rel=1e-6)
    with torch.no_grad():
        model.mean.bias.fill_(3.0)
        model.log_variance.bias.fill_(math.log(4.0))
    divergence = 2 * 0.5 * (9 + 4 - 1 - math.log(4))
    assert model.loss(unit, noise).item() == pytest.approx(4 * math.log(2) + divergence, rel=1e-6)


def test_distances_are_those_of_each_rounds_points(loaded_run: LoadedRun) -> None:
    vae = train_vae(loaded_run.setup, 1)
    found = distances(loaded_run, vae)
    data = loaded_run.setup.data
    with torch.no_grad():
        of_train, of_test = (vae.features(half.x / 255) for half in (data.train, data.test))
        assert found.train == pytest.approx(distance(of_train, of_train), abs=1e-6)
        assert found.test == pytest.approx(distance(of_test, of_train), abs=1e-6)
        for round, value in found.by_round.items():
            own = vae.features(loaded_run.points.x[10 * (round - 1) : 10 * round])
            assert value == pytest.approx(distance(own, of_train), abs=1e-6)
    assert list(found.by_round) == [1, 2, 3]
    assert found.noise > found.test
    again = train_vae(loaded_run.setup, 1)
    assert all(torch.equal(a, b) for a, b in zip(vae.parameters(), again.parameters(), strict=True))


def apart() -> LoadedRun:
    """Two classes far from each other in a plane, and one point in the middle of each."""
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    x = (rng.uniform(-1, 1, (60, 2)) + 5 * (2 * y[:, None] - 1)).astype(np.float32)
    half = Samples(torch.from_numpy(x), torch.from_numpy(y))
    made = setup(Dataset("apart", "features", half, half, ("low", "high")), scale="symmetric", model="mlp")
    low, high = half.x.min(0).values, half.x.max(0).values
    points = (torch.tensor([[-5.0, -5.0], [5.0, 5.0]]) - low) / (high - low)
    state = RunState(1, made.weights(), np.zeros(4, bool), np.zeros(4, np.int64))
    return LoadedRun(
        RunDirectory(Path("none")), made, state, Points(points, torch.tensor([0, 1]), torch.tensor([1, 1]))
    )


def test_a_new_model_learns_a_separable_set_from_a_point_of_each_class() -> None:
    settings = TrainingSettings(epochs=50, lr=0.1, batch_size=2)
    assert fresh_accuracy(apart(), settings) == 1.0
    swapped = apart()
    swapped.points.labels.copy_(torch.tensor([1, 0]))
    assert fresh_accuracy(swapped, settings) == 0.0


def test_training_is_plain_sgd() -> None:
    model, (x, y) = flat_model(5, 3), some(8)
    before = [p.detach().clone() for p in model.parameters()]
    slopes = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    train(model, x, y, TrainingSettings(1, 0.3, 8), np.random.default_rng(0))
    for after, start, slope in zip(model.parameters(), before, slopes, strict=True):
        torch.testing.assert_close(after.detach(), start - 0.3 * slope)


def test_training_that_diverges_is_told() -> None:
    with pytest.raises(FedblendError, match=r"lr: 1e\+38: the weights became NaN"):
        train(flat_model(5, 3), *some(8), TrainingSettings(20, 1e38, 2), np.random.default_rng(0))


def test_a_new_model_sees_only_points_until_a_round_and_begins_afresh(loaded_run: LoadedRun) -> None:
    settings = TrainingSettings(epochs=1, lr=0.1, batch_size=32)
    until = fresh_model(loaded_run, settings, round=2)
    cut = LoadedRun(loaded_run.directory, loaded_run.setup, loaded_run.state, loaded_run.points.until(2))
    assert len(cut.points) == 20
    again = fresh_model(cut, settings)
    assert all(torch.equal(a, b) for a, b in zip(until.parameters(), again.parameters(), strict=True))
    begun = fresh_model(loaded_run, TrainingSettings(0, 0.1, 32))
    for (name, fresh), first in zip(begun.named_parameters(), loaded_run.setup.weights().values(), strict=True):
        assert not torch.equal(fresh, first), name


def test_learning_rate_and_batch_come_from_the_server_step_unless_given(loaded_run: LoadedRun) -> None:
    assert TrainingSettings.for_run(loaded_run) == TrainingSettings(100, loaded_run.setup.experiment.train.lr, 32)
    assert TrainingSettings.for_run(loaded_run, epochs=7, lr=0.5, batch_size=3) == TrainingSettings(7, 0.5, 3)


@pytest.mark.slow
def test_the_command_prints_and_writes_what_python_gives(study: Path, loaded_run: LoadedRun, tmp_path: Path) -> None:
    before = contents(study)
    out = tmp_path / "new" / "measurements"
    told = succeeded(here("points", study, "--vae-epochs", 1, "--epochs", 3, "--replay", "--out", out)).out
    assert contents(study) == before, "a probe changes nothing in a run's folder"

    measurements = measure_points(loaded_run, TrainingSettings.for_run(loaded_run, epochs=3), vae_epochs=1)
    frame = pd.read_csv(out / "points.csv")
    pd.testing.assert_frame_equal(frame, measurements.rounds)
    assert frame["round"].tolist() == [1, 2, 3]
    assert frame["points"].tolist() == [10, 20, 30]
    assert frame.notna().all().all()
    levels: dict[str, float] = pd.read_csv(out / "levels.csv").set_index("name")["value"].to_dict()
    assert levels == pytest.approx(measurements.levels)
    assert levels["accuracy"] == pytest.approx(loaded_run.directory.metrics()[-1]["accuracy"])
    assert pd.read_csv(out / "replay.csv")["points"].tolist() == [10, 20, 30]
    names = {"accuracy.png", "alignment.png", "distance.png", "replay.png"}
    assert {path.name for path in out.glob("*.png")} == names
    assert all((out / name).read_bytes().startswith(PNG) for name in names)

    last = frame.iloc[-1]
    row = rf"^ *3 +30 +{last['alignment']:.3f} +{last['distance']:.4f} +{100 * last['accuracy']:.1f} *$"
    assert re.search(row, told, re.M), told
    assert f"uniform noise {levels['noise']:.4f}" in " ".join(told.split())
    assert "3 epochs, lr 0.1, batch 32" in " ".join(told.split())


@pytest.mark.slow
def test_of_a_run_that_removes_points_only_the_kept_ones_are_told(tmp_path: Path) -> None:
    step, folder = {**STEP, "keep": 25}, tmp_path / "kept"
    execute(experiment(method={"server_step": step}, rounds=4, scale="unit", engine="loop"), folder)

    told = succeeded(
        here("points", folder, "--vae-epochs", 0, "--epochs", 1, "--replay", "--out", tmp_path / "out")
    ).out

    words = " ".join(told.split())
    assert "trained only on the kept points made until then" in words
    assert "kept points: the run removes its oldest ones" in words
    assert pd.read_csv(tmp_path / "out" / "points.csv")["points"].tolist() == [5, 15, 25]  # of rounds 2 to 4
    assert "points so far" not in words
    assert words.count("kept points") == 4
    report.write(find_runs([folder]), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "3 rounds with 25 kept points (older ones are removed)" in page


def test_the_command_without_autoencoder_and_replay(study: Path, tmp_path: Path) -> None:
    told = succeeded(here("points", study / "enhanced", "--vae-epochs", 0, "--out", tmp_path)).out
    assert "uniform noise" not in told
    assert {path.name for path in tmp_path.glob("*.*")} == {"points.csv", "levels.csv", "accuracy.png", "alignment.png"}
    assert pd.read_csv(tmp_path / "points.csv")["distance"].isna().all()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plain"], ("plain: no points in its checkpoint", 'method = "aggenhance"')),
        (["nowhere", "--out", "left-empty"], ("nowhere: no such run",)),
        (["enhanced", "--lr", "-1"], ("lr: -1.0 is not valid", "above 0")),
        (["enhanced", "--lr", "inf"], ("lr: inf is not valid",)),
        (["enhanced", "--out", "enhanced/config.toml"], ("--out", "config.toml", "cannot be used as a folder")),
    ],
)
def test_bad_input_ends_in_one_message(
    study: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], told: tuple[str, ...]
) -> None:
    monkeypatch.chdir(study)
    refused(here("points", *words), *told)
    assert not (study / "left-empty").exists()


def test_a_folder_of_several_runs_with_points_or_of_none_is_told_so(study: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(study / "enhanced", tmp_path / name)
    refused(here("points", tmp_path), "several runs hold points; name one: one, two")
    for name in ("one", "two"):
        (tmp_path / name / checkpoint.NAME).unlink()
    refused(here("points", tmp_path), "none of its 2 runs holds points")
    refused(here("points", tmp_path / "one"), "no checkpoint yet")
    (tmp_path / "two" / checkpoint.NAME).write_bytes(b"nothing")
    refused(here("points", tmp_path / "two"), checkpoint.NAME, "is damaged")


def test_the_report_shows_the_points_by_round_and_class(study: Path, loaded_run: LoadedRun, tmp_path: Path) -> None:
    (sheet,) = sheets_of_points.sheets(group(find_runs([study])))
    assert (sheet.method, sheet.rounds, sheet.points) == ("enhanced", 3, 30)
    assert [round for round, _ in sheet.rows] == [1, 2, 3]
    for round, urls in sheet.rows:
        for label, url in enumerate(urls):
            point = loaded_run.points.x[10 * (round - 1) + label, 0].numpy()
            times = len(pixels(url)) // 8
            assert np.array_equal(pixels(url), np.kron(np.rint(255 * point), np.ones((times, times))))
    report.write(find_runs([study]), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count('alt="round ') == 30
    assert '<section id="points">' in page
    assert "Shown: 3 of 3 rounds that made 30 points" in page


def test_a_class_without_a_point_leaves_a_gap(tmp_path: Path) -> None:
    method = {"server_step": {**STEP, "keep": 4}}
    execute(experiment(method=method, rounds=2, scale="unit", engine="loop"), tmp_path / "queue")
    (sheet,) = sheets_of_points.sheets(group(find_runs([tmp_path])))
    assert [(round, [bool(url) for url in urls]) for round, urls in sheet.rows] == [(2, [False] * 6 + [True] * 4)]


@pytest.mark.slow
def test_neither_plain_runs_nor_points_in_a_plane_have_pictures(study: Path, toy: Path, tmp_path: Path) -> None:
    assert checkpoint.read(toy / "aggenhance-seed0").server_part("server_step")["points"].shape[1:] == (2,)
    assert sheets_of_points.sheets(group(find_runs([toy]))) == []
    assert sheets_of_points.sheets(group(find_runs([study / "plain"]))) == []
    report.write(find_runs([toy]), tmp_path / "report.html")
    assert '<section id="points">' not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_toy_is_always_the_same_and_its_clients_hold_what_it_says() -> None:
    data = Toy().load()
    assert torch.equal(data.train.x, Toy().load().train.x)
    client, y = data.train.client, data.train.y.numpy()
    held = [[int(((client == k) & (y == c)).sum()) for c in range(2)] for k in range(3)]
    assert held == [[320, 40], [40, 280], [40, 80]]
    height = data.train.x[:, 1].numpy()
    assert height[(client == 0) & (y == 1)].min() >= height[(client != 0) & (y == 1)].max()
    assert torch.bincount(data.test.y).tolist() == [2000, 2000]
    # The line x = 0 is right for Phi(0.74) = 77 %, give or take three standard errors of 4,000 samples.
    right = float(((data.test.x[:, 0] > 0) == (data.test.y == 1)).float().mean())
    assert right == pytest.approx(0.5 * (1 + math.erf(0.74 / math.sqrt(2))), abs=3 * math.sqrt(0.77 * 0.23 / 4000))


@pytest.mark.slow
def test_boundaries_are_those_of_the_runs_models(toy: Path, plane: Plane, tmp_path: Path) -> None:
    assert [model.name for model in plane.models] == ["fedavg", "aggenhance"]
    assert [(h.name, len(h.y)) for h in plane.clients] == [("D1", 360), ("D2", 320), ("D3", 120)]
    assert len(plane.whole.y) == 800
    for model in plane.models:
        run = RunDirectory(toy / f"{model.name}-seed0")
        assert model.accuracy == pytest.approx(run.metrics()[-1]["accuracy"])
        made, state = make_setup(run.experiment()), checkpoint.read(run.path)
        weight, bias = sorted(state.weights.values(), key=lambda tensor: -tensor.dim())
        at = made.scale(torch.tensor([[plane.axes[0][7], plane.axes[1][31]]]))
        lead = (at @ weight.T + bias)[0]
        # Rows of the grid are the second feature, as contours take them.
        assert model.margin.shape == (2, GRID, GRID)
        assert model.margin[0, 31, 7] == pytest.approx(float(lead[0] - lead[1]), abs=1e-4)
    assert len(plane.models[0].labels) == 0
    low, high = plane.whole.x.min(0), plane.whole.x.max(0)
    assert (plane.models[1].points >= low - 1e-5).all()
    assert (plane.models[1].points <= high + 1e-5).all()

    told = succeeded(here("boundaries", toy, "--out", tmp_path / "new" / "toy.png")).out
    assert Image.open(tmp_path / "new" / "toy.png").size[0] > 900
    for name, value in (("fedavg", plane.models[0].accuracy), ("all samples at once", plane.whole.best.accuracy)):
        assert re.search(rf"{name} +{100 * value:.1f}", told), told


@pytest.mark.slow
def test_the_best_boundary_is_trained_on_all_samples_at_once(plane: Plane) -> None:
    accuracies = [samples.best.accuracy for samples in plane.clients]
    assert plane.whole.best.accuracy > max(accuracies[:2])
    assert plane.whole.best.accuracy == pytest.approx(0.77, abs=0.02)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{study}"], ("'digits' has image of shape [1, 8, 8]", "two features")),
        (["{study}", "{toy}"], ("several data sets (digits, toy)",)),
        (["{toy}", "--out", "toy.txt"], ("--out toy.txt", ".png")),
        (["nowhere"], ("nowhere: no such run",)),
    ],
)
def test_boundaries_of_other_data_are_refused(
    study: Path, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], told: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(here("boundaries", *(word.format(study=study, toy=toy) for word in words)), *told)


def test_runs_without_one_model_have_no_boundary(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    np.savez(tmp_path / "two.npz", x=x, y=np.where(x[:, 0] > 0, "right", "left"))
    run(experiment(data={"name": "npz", "path": str(tmp_path / "two.npz")}, method="fd", rounds=1), tmp_path / "fd")
    refused(
        here("boundaries", tmp_path / "fd", "--out", tmp_path / "b.png"),
        f"{tmp_path / 'fd'}: its clients keep models or layers of their own",
    )
