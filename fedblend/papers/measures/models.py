"""Measures of the models and class interior points of a run, and a picture of the points."""

from __future__ import annotations

import base64
import io
import itertools
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedblend.core.errors import FedblendError
from fedblend.core.files import write_atomically
from fedblend.core.registry import Count, part
from fedblend.experiment.make_setup import make_setup
from fedblend.papers.measures.base import CellRun, Measure

if TYPE_CHECKING:
    from fedblend.analysis.points.sheets import Sheet


@part("measure", "devices")
class Devices(Measure):
    """Test accuracy over all devices, each with its weights after the last round (Mix2FLD, Figure 3).

    The paper does not define its variance. It is the sum of squares over N - 1 here, whose expectation does not depend
    on the number N of devices: the paper compares 10 devices with 50.
    """

    figure: Literal["mean", "variance"] = "mean"
    """Mean in per cent, or variance (over N - 1) in per cent squared."""

    def measured(self, cell: CellRun) -> float:
        """In per cent, or per cent squared."""
        found = cell.cached("devices", {}, lambda folder: self._score(cell))
        values = 100 * np.array(found["accuracy"])
        return float(values.mean() if self.figure == "mean" else values.var(ddof=1))

    def _score(self, cell: CellRun) -> dict[str, Any]:
        from fedblend.engines.loop_engine import LoopEngine
        from fedblend.runs import checkpoint
        from fedblend.runs.runner import one_thread

        assert cell.run is not None
        state = checkpoint.read(cell.run)
        if state is None or not state.client_states:
            raise FedblendError(
                'devices keep no weights of their own in this run; give the experiment evaluate_model = "device"'
            )
        with one_thread():
            engine = LoopEngine(make_setup(cell.experiment), "cpu")
            found = []
            for number, (_, kept) in enumerate(sorted(state.client_states.items())):
                cell.on_step("devices tested", number, len(state.client_states))
                right = engine.score({**state.weights, **kept.model}).right
                assert right is not None
                found.append(float(right.mean()))
        return {"accuracy": found}


@part("measure", "after-training")
class AfterTraining(Measure):
    """Test accuracy of clients' own models after local training, on their own tests: mean over clients, in per cent.

    Each client that holds tests trains the run's last global model once more, as in the next round. Federated
    benchmarks state this number beside the global model's (FL-bench's "after").
    """

    def measured(self, cell: CellRun) -> float:
        """In per cent."""
        return 100 * float(cell.cached("after-training", {}, lambda folder: self._train(cell))["mean"])

    def _train(self, cell: CellRun) -> dict[str, Any]:
        from fedblend import engines
        from fedblend.core.evaluation import over_clients
        from fedblend.core.loop import RoundLoop
        from fedblend.engines.autotune import EnginePlan
        from fedblend.runs import checkpoint
        from fedblend.runs.directory import RunDirectory
        from fedblend.runs.runner import one_thread

        assert cell.run is not None
        state = checkpoint.read(cell.run)
        setup = make_setup(cell.experiment)
        population = setup.population
        if state is None or not len(population.held_order):
            raise FedblendError("clients hold no tests of their own; give the experiment a holdout")
        with one_thread():
            engine = engines.make(setup, EnginePlan(**{**RunDirectory(cell.run).facts()["engine"], "ranks": 1}))
            task = RoundLoop(setup, engine).begin_round(state).task
            tested = np.unique(population.owners("holdout")).tolist()
            models: dict[int, Any] = {}
            for update in engine.train(task, tested):
                cell.on_step("clients trained", len(models), len(tested))
                models[update.client] = update.weights
            scores = engine.score_each(state.weights, models, "holdout")
            engine.close()
        assert scores.right is not None
        return over_clients(population.owners("holdout"), scores.right, population.sizes)


@part("measure", "points")
class PointsFigure(Measure):
    """A figure of the points that a run's server made (AggEnhance, Figure 8; :mod:`fedblend.analysis.points`)."""

    figure: Literal["accuracy", "first", "last", "noise", "test", "train"] = "accuracy"
    """Test accuracy in per cent of a new model trained on the points alone; or mean cosine distance to the training
    samples in an autoencoder's features: of the first or the last round's points, of noise, of the test samples, of
    the training samples among themselves."""
    epochs: Count = 100
    """Epochs of the new model."""
    vae_epochs: Count = 10
    """Epochs of the autoencoder."""

    def measured(self, cell: CellRun) -> float:
        """In per cent, or a cosine distance from 0 to 2."""
        settings = {"epochs": self.epochs, "vae_epochs": self.vae_epochs}
        return float(cell.cached("points", settings, lambda folder: self._measure(cell))[self.figure])

    def _measure(self, cell: CellRun) -> dict[str, Any]:
        from fedblend.analysis.points import feature_distances, loaded_run, training
        from fedblend.runs.runner import one_thread

        assert cell.run is not None
        with one_thread():
            loaded = loaded_run.read(cell.run)
            chosen = training.TrainingSettings.for_run(loaded, self.epochs)
            cell.on_step("autoencoder", 0, self.vae_epochs)
            far = feature_distances.distances(loaded, feature_distances.train_vae(loaded.setup, self.vae_epochs))
            cell.on_step("new model", 0, 1)
            accuracy = training.fresh_accuracy(loaded, chosen)
        rounds = sorted(far.by_round)
        return {
            "accuracy": 100 * accuracy,
            "first": far.by_round[rounds[0]],
            "last": far.by_round[rounds[-1]],
            **{name: getattr(far, name) for name in ("noise", "test", "train")},
        }


@part("measure", "points-picture")
class PointsPicture(Measure):
    """The class interior points of a run: a row a round (four at most), a column a class (AggEnhance, Figure 10)."""

    def measured(self, cell: CellRun) -> str:
        """The path of a PNG."""
        from fedblend.analysis.points.sheets import sheets
        from fedblend.runs.groups import Group

        found = sheets([Group("points", [cell.outcome])])
        if not found:
            raise FedblendError("the run's server made no points that are pictures")
        cell.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(cell.folder / "points.png", draw(found[0], cell.outcome.data))
        return "points.png"


def draw(sheet: Sheet, data: str) -> bytes:
    """The points of a run on ``data`` as one PNG: a row a round, a column a class, blank where there is no point."""
    from PIL import Image

    from fedblend.analysis import plotting

    rows = plotting.evenly_spaced(range(len(sheet.rows)), 4)
    figure = plotting.blank_figure(0.9 * len(sheet.classes) + 0.8, len(rows) + 1.0, dpi=80)
    plotting.head_figure(figure, f"{data}: a class interior point of each class, by round", 9)
    grid = figure.subplots(len(rows), len(sheet.classes), squeeze=False)
    for (row, number), (column, name) in itertools.product(enumerate(rows), enumerate(sheet.classes)):
        axes, (round, urls) = grid[row, column], sheet.rows[number]
        if urls[column]:
            image = Image.open(io.BytesIO(base64.b64decode(urls[column].split(",")[1])))
            axes.imshow(image, cmap="gray", vmin=0, vmax=255)
        plotting.hide_frame(axes)
        if row == 0:
            axes.set_title(name, fontsize=8, color=plotting.INK, parse_math=False)
        if column == 0:
            axes.set_ylabel(f"round {round}", fontsize=8, color=plotting.INK)
    return plotting.png_bytes(figure)
