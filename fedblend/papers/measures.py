"""Measures of an item's cells: parts of the kind ``measure``, named in a paper's file.

A measure returns one number of a cell, or the path of a picture; ``trains`` states whether the cell's experiment is run
first. Long work is kept in files (:meth:`CellRun.cached`), so that it is done once and resumes after a stop.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from fedblend.core.dataset import Dataset, Population
from fedblend.core.errors import FedblendError
from fedblend.core.files import write_atomically, write_json
from fedblend.core.registry import Count, part
from fedblend.data.measures import class_counts, noniid_measures
from fedblend.experiment.config import Experiment
from fedblend.experiment.make_setup import make_setup, split
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory, read_json
from fedblend.runs.groups import Group, Outcome, read
from fedblend.runs.runner import one_thread, repeating
from fedblend.runs.summary import costs

if TYPE_CHECKING:
    from fedblend.analysis.points.sheets import Sheet

OnStep = Callable[[str, int, int], None]
"""Called with the name of a piece of work, the number of its steps that are done, and their total."""


@dataclass(frozen=True)
class CellRun:
    """A cell with one seed."""

    experiment: Experiment
    """The cell's experiment, with this seed."""
    run: Path | None
    """The run's folder; none where nothing is trained."""
    folder: Path
    """The folder in which measures keep their work."""
    on_step: OnStep
    """Shows the progress of a measure."""

    @property
    def directory(self) -> RunDirectory:
        """The run's directory, which every cell of a measure that trains has."""
        assert self.run is not None
        return RunDirectory(self.run)

    @functools.cached_property
    def outcome(self) -> Outcome:
        return read(self.directory)

    def data(self) -> tuple[Dataset, Population]:
        """The cell's data set, and its division among clients."""
        data = self.experiment.data.load()
        return data, split(self.experiment, data)

    def work_folder(self, what: str, settings: Mapping[str, Any]) -> Path:
        """The folder of a piece of work, which follows from its name and settings."""
        text = json.dumps(settings, sort_keys=True, default=str)
        return self.folder / f"{what}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def cached(self, what: str, settings: Mapping[str, Any], make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """The table that ``make`` returns for a piece of work, given its folder; written there and made only once."""
        folder = self.work_folder(what, settings)
        table = folder / "work.json"
        if not table.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_json(table, make(folder))
        return read_json(table)


class Measure:
    """The base of measures. A subclass is a part and defines :meth:`measured`."""

    trains: ClassVar[bool] = True
    """Whether the cell's experiment is run first."""
    infinite: ClassVar[str] = "∞"
    """What an infinite value is in results and tables; "never" in a measure with a target."""

    def measured(self, cell: CellRun) -> float | str | None:
        """The number, the path of a picture relative to ``cell.folder``, or ``None`` where there is none.

        ``inf`` is a target that was never reached, or an infinite value; -inf and NaN are faults. Raises
        :class:`FedblendError` where the cell cannot be measured.
        """
        raise TypeError(f"{type(self).__name__} defines no measured()")

    def is_settled(self, cell: CellRun) -> bool:
        """Whether no later round of an interrupted run can change the number."""
        return False


# A run's log ----------------------------------------------------------------------------------------------------


class LogMeasure(Measure):
    """A measure of a run's log, which is made at once."""


def _smoothed(outcome: Outcome, last: int) -> list[tuple[int, float]]:
    """(round, mean accuracy of the ``last`` evaluations up to it), without the untrained model's."""
    with_accuracy = [(r.round, r.accuracy) for r in outcome.evaluated if r.accuracy is not None]
    evaluated = [(round, accuracy) for round, accuracy in with_accuracy if round] or with_accuracy
    values = [accuracy for _, accuracy in evaluated]
    windows = [values[max(0, i + 1 - last) : i + 1] for i in range(len(values))]
    return [(round, math.fsum(w) / len(w)) for (round, _), w in zip(evaluated, windows, strict=True)]


def _target(cell: CellRun) -> float:
    if cell.experiment.target is None:
        raise FedblendError("target: is missing; give the experiment the accuracy that counts")
    return cell.experiment.target


@part("measure", "accuracy")
class Accuracy(LogMeasure):
    """Test accuracy in per cent: the final one, the mean of the last evaluations, or the best."""

    last: Count = 1
    """The number of last evaluations whose mean is taken."""
    best: bool = False
    """Return the best such mean of the run, not the last."""

    def measured(self, cell: CellRun) -> float | None:
        values = [value for _, value in _smoothed(cell.outcome, self.last)]
        return 100 * (max(values) if self.best else values[-1]) if values else None


@part("measure", "accuracy-at")
class AccuracyAt(LogMeasure):
    """Test accuracy in per cent at a round, as on a curve; of a shorter run the final one."""

    round: Count = 1
    """The round; if it was not evaluated, the last evaluated round before it."""
    last: Count = 1
    """The number of evaluations up to that round whose mean is taken."""

    def measured(self, cell: CellRun) -> float | None:
        values = [value for round, value in _smoothed(cell.outcome, self.last) if round <= self.round]
        return 100 * values[-1] if values else None

    def is_settled(self, cell: CellRun) -> bool:
        return cell.outcome.round >= self.round


@part("measure", "rounds-to")
class RoundsTo(LogMeasure):
    """Rounds until the test accuracy first reached the experiment's ``target``; ``inf`` where it never did."""

    infinite: ClassVar[str] = "never"
    last: Count = 1
    """The number of evaluations whose mean must reach the target; in the first rounds all there are."""

    def measured(self, cell: CellRun) -> float:
        target = _target(cell)
        reached = (round for round, value in _smoothed(cell.outcome, self.last) if value >= target)
        return float(next(reached, math.inf))

    def is_settled(self, cell: CellRun) -> bool:
        return math.isfinite(self.measured(cell))


@part("measure", "share")
class Share(LogMeasure):
    """A share that a part of the method measures in each round (:attr:`fedblend.core.record.RoundRecord.measured`)."""

    figure: str = "interior_own"
    """Its name."""

    def measured(self, cell: CellRun) -> float | None:
        """In per cent, the mean over rounds; ``None`` where nothing was measured."""
        found = (record.measured or {} for record in cell.outcome.records)
        shares = [one[self.figure] for one in found if self.figure in one]
        return 100 * math.fsum(shares) / len(shares) if shares else None


@part("measure", "label-accuracy")
class LabelAccuracy(LogMeasure):
    """Final test accuracy on samples of some labels, in per cent: the mean over these labels."""

    labels: tuple[int, ...] | Literal["targets"] = "targets"
    """The labels, or the labels that the split makes scarce (its ``targets``)."""

    def measured(self, cell: CellRun) -> float | None:
        """In per cent; ``None`` where a label has no test samples."""
        labels = cell.experiment.partition.targets if self.labels == "targets" else self.labels
        by_label: Any = cell.outcome.evaluated[-1].per_class
        found = [by_label[label] for label in labels]
        return None if None in found else 100 * math.fsum(found) / len(found)


@part("measure", "clients")
class Clients(LogMeasure):
    """Final accuracy of the global model on clients' own tests, in per cent (FedMix, Table 13)."""

    figure: Literal["mean", "std", "p10"] = "mean"
    """Mean, standard deviation or 10th percentile over clients."""
    size: Literal["all", "<100", "100-199", ">199"] = "all"
    """Clients by the number of samples that they hold."""

    def measured(self, cell: CellRun) -> float | None:
        """In per cent; ``None`` where there are no such clients."""
        found = cell.outcome.evaluated[-1].clients
        if found is None:
            raise FedblendError("clients hold no tests of their own; give the experiment a holdout")
        group = found if self.size == "all" else found["by_size"].get(self.size)
        return None if group is None or self.figure not in group else 100 * group[self.figure]


@part("measure", "costs")
class Costs(LogMeasure):
    """The costs of a run, in total or until its test accuracy first reached the experiment's ``target``."""

    infinite: ClassVar[str] = "never"
    figure: str = "seconds"
    """``seconds`` of computing, ``clock`` (the federation's simulated time), ``bytes_up``, ``bytes_down``,
    ``peak_memory``, or one kind of them, such as ``bytes_up.weights``."""
    until_target: bool = False
    """Count up to the round that reaches the target; otherwise count the whole run."""
    scale: float = 1.0
    """The factor that converts the number to its unit."""

    def measured(self, cell: CellRun) -> float:
        """In the figure's unit; ``inf`` where the target was never reached."""
        total: dict[str, float] = defaultdict(float)
        target = _target(cell) if self.until_target else None
        reached = target is None
        for record in cell.outcome.records:
            for name, number in costs(record).items():
                total[name] += number
            total["peak_memory"] = max(total["peak_memory"], record.machine.get("peak_memory", 0))
            if target is not None and record.round and record.accuracy is not None and record.accuracy >= target:
                reached = True
                break
        if not reached:
            return math.inf
        if self.figure not in total and not self.figure.startswith(("bytes_", "seconds.")):
            raise FedblendError(f"figure: '{self.figure}' is not valid; valid: {', '.join(total)}")
        return self.scale * total[self.figure]

    def is_settled(self, cell: CellRun) -> bool:
        return self.until_target and math.isfinite(self.measured(cell))


@part("measure", "split")
class Split(Measure):
    """The heterogeneity of clients' data, by a measure of the split (AggEnhance, section 4.3)."""

    figure: str = "divergence"
    """``classes_mean``, ``classes_deviation``, ``divergence``, ``distance``, or of sizes (``size_mean``, ...)."""
    trains = False

    def measured(self, cell: CellRun) -> float:
        data, population = cell.data()
        found = noniid_measures(class_counts(population, data.train.y.numpy(), len(data.classes)))
        if self.figure not in found:
            raise FedblendError(f"figure: '{self.figure}' is not valid; valid: {', '.join(found)}")
        return found[self.figure]


# Models and class interior points -------------------------------------------------------------------------------


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
        found = cell.cached("devices", {}, lambda _: self._score(cell))
        values = 100 * np.array(found["accuracy"])
        return float(values.mean() if self.figure == "mean" else values.var(ddof=1))

    def _score(self, cell: CellRun) -> dict[str, Any]:
        from fedblend.engines.loop_engine import LoopEngine

        state = checkpoint.read(cell.directory.path)
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
        return 100 * float(cell.cached("after-training", {}, lambda _: self._train(cell))["mean"])

    def _train(self, cell: CellRun) -> dict[str, Any]:
        from fedblend.core.evaluation import over_clients

        state = checkpoint.read(cell.directory.path)
        setup = make_setup(cell.experiment)
        population = setup.population
        if state is None or not len(population.held_order):
            raise FedblendError("clients hold no tests of their own; give the experiment a holdout")
        with repeating(cell.directory, setup) as loop:
            engine, task = loop.engine, loop.begin_round(state).task
            tested = np.unique(population.owners("holdout")).tolist()
            models: dict[int, Any] = {}
            for update in engine.train(task, tested):
                cell.on_step("clients trained", len(models), len(tested))
                models[update.client] = update.weights
            scores = engine.score_each(state.weights, models, "holdout")
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
        return float(cell.cached("points", settings, lambda _: self._measure(cell))[self.figure])

    def _measure(self, cell: CellRun) -> dict[str, Any]:
        from fedblend.analysis.points import feature_distances, loaded_run, training

        with one_thread():
            loaded = loaded_run.read(cell.directory.path)
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


# Gradient inversion ---------------------------------------------------------------------------------------------


@part("measure", "attack")
class AttackFigure(Measure):
    """An attack on clients after the run's last round (0 rounds: on the untrained model), mean over their images.

    Each of the first clients that hold a batch is attacked once (:func:`attack_run`). The images are written next to
    the numbers; ``picture`` is the first client's.
    """

    figure: Literal["mse", "psnr", "ssim", "cost", "picture"] = "mse"
    """Mean squared error on normalised data, PSNR in dB on [0, 1], SSIM in per cent, the attack's own cost, or the
    picture."""
    clients: Count = 100
    """Clients that are attacked."""
    images: Count = 4
    """Images that a client trains on."""
    local_steps: Count = 5
    """Steps on these images."""
    iterations: Count = 2500
    """Iterations of the attack."""

    def measured(self, cell: CellRun) -> float | str:
        how = self._how()
        # The folder of single attacks does not depend on the number of clients: each client is attacked only once.
        folder = cell.work_folder("attack", how)
        found = cell.cached("attacks", {**how, "clients": self.clients}, lambda _: self._attack(cell, folder))
        if self.figure == "picture":
            return (folder / f"client{found['clients'][0]}" / "images.png").relative_to(cell.folder).as_posix()
        return float(found[self.figure]) * (100 if self.figure == "ssim" else 1)

    def _how(self) -> dict[str, Any]:
        """Options of the attack. As in the papers, the attacker assumes cross-entropy alone (``plain``)."""
        sizes = {"images": self.images, "steps": self.local_steps, "iterations": self.iterations}
        return {"attack": "invgrad", "attacker": "plain", **sizes}

    def _attack(self, cell: CellRun, folder: Path) -> dict[str, Any]:
        from fedblend.analysis.attacks.snapshot import RoundSnapshot

        with one_thread():
            snapshot = RoundSnapshot.load(cell.directory, cell.outcome.round)
            chosen = np.flatnonzero(snapshot.task.sizes >= self.images)[: self.clients].tolist()
            if not chosen:
                raise FedblendError(f"no client holds {self.images} images to attack")
            tables = []
            for number, client in enumerate(chosen):
                cell.on_step("clients attacked", number, len(chosen))
                tables.append(self._attack_client(snapshot, client, folder / f"client{client}"))
        means = {
            name: math.fsum(_number(table, name) for table in tables) / len(tables)
            for name in ("mse", "psnr", "ssim", "cost")
        }
        return {**means, "clients": chosen, "by_client": {name: [t[name] for t in tables] for name in means}}

    def _attack_client(self, snapshot: Any, client: int, folder: Path) -> dict[str, Any]:
        from fedblend.analysis.attacks.outcome import attack_run

        path = folder / "attack.json"
        if not path.is_file():
            attack = attack_run(snapshot, snapshot.round, client, **self._how())
            if attack.rebuilt.stopped:
                raise KeyboardInterrupt
            attack.write(folder)
        return read_json(path)


def _number(table: Mapping[str, Any], name: str) -> float:
    """A number of a client's table, which has ``None`` for one that is not finite: a PSNR with an exact image."""
    value = table[name]
    if value is None:
        return math.inf if name == "psnr" and table["mse"] is not None else math.nan
    return float(value)


# Sample privacy, measured on the data without any training ------------------------------------------------------

DEVICES = 2  # Devices whose samples are mixed


@part("measure", "sample-privacy")
class SamplePrivacy(Measure):
    """Sample privacy of Mixup or Mix2up (Mix2FLD, Tables II and III; :mod:`fedblend.analysis.privacy.mixup_privacy`).

    The mixing ratio, and whether devices coordinate their labels, are those of the cell's ``method.sharing``.
    """

    figure: Literal[
        "mixup_smallest",
        "mixup_mean",
        "mixup_scaled_smallest",
        "mixup_scaled_mean",
        "mix2up_smallest",
        "mix2up_scaled_smallest",
        "mix2up_scaled_mean",
    ] = "mixup_smallest"
    """Logarithm of the smallest distance, or mean of the logarithms.
    ``scaled``: distances after all shared samples and their raw ones are scaled to a plane together."""
    samples: Count = 100
    """Samples that each device mixes, N_S."""
    repeats: Count = 10
    """Draws that are averaged."""
    trains = False

    def measured(self, cell: CellRun) -> float:
        """A natural logarithm of a distance on stored values."""
        settings = {"samples": self.samples, "devices": DEVICES, "repeats": self.repeats}
        name = "sample-privacy-scaled" if "scaled" in self.figure else "sample-privacy"
        return float(cell.cached(name, settings, lambda _: self._measure(cell))[self.figure])

    def _measure(self, cell: CellRun) -> dict[str, Any]:
        from fedblend.analysis.privacy.mixup_privacy import make_mixtures, measure_mixtures, measure_scaled

        seed, sharing = cell.experiment.seed, cell.experiment.method.sharing
        data, population = cell.data()
        drawn = []
        for repeat in range(self.repeats):
            cell.on_step("draws", repeat, self.repeats)
            drawn.append(make_mixtures(data, population, seed, repeat, DEVICES, self.samples, sharing.coordinated))
        if "scaled" in self.figure:
            return measure_scaled(drawn, sharing.lam, seed)
        return asdict(measure_mixtures(drawn, [sharing.lam])[0])


@part("measure", "seed-privacy")
class SeedPrivacy(Measure):
    """Distances of seeds of target labels from raw samples: the mean over samples (XorMixFL, Table 3).

    See :class:`fedblend.analysis.privacy.xor_privacy.XorPrivacy`.
    """

    figure: Literal["distance", "mds"] = "mds"
    """On pixels, or after all of them are scaled to a plane together."""
    repeats: Count = 1
    """Draws that are averaged."""
    trains = False

    def measured(self, cell: CellRun) -> float:
        """A distance on pixels from 0 to 255."""
        wanted = "mds" if self.figure == "mds" else "plain"
        found = cell.cached(f"seed-privacy-{wanted}", {"repeats": self.repeats}, lambda _: self._measure(cell))
        return float(found[self.figure][0])

    def _measure(self, cell: CellRun) -> dict[str, Any]:
        from fedblend.analysis.privacy.xor_privacy import make_seeds, measure_seeds

        one = cell.experiment
        data, population = cell.data()
        drawn = [make_seeds(data, population, one.method.sharing, one.seed, repeat) for repeat in range(self.repeats)]
        return asdict(measure_seeds(drawn, self.figure == "mds", one.seed))


@part("measure", "seeds-picture")
class SeedsPicture(Measure):
    """Raw, encoded and decoded (or mixed-up) samples of target labels, side by side (XorMixFL, Figure 2)."""

    trains = False

    def measured(self, cell: CellRun) -> str:
        """The path of a PNG."""
        from fedblend.analysis.privacy.sample_figures import draw_seeds
        from fedblend.analysis.privacy.xor_privacy import make_seeds

        def make(folder: Path) -> dict[str, Any]:
            sharing = cell.experiment.method.sharing
            if not hasattr(sharing, "dummies"):
                raise FedblendError(f"method.sharing: '{sharing.name}' shares no seeds of target labels")
            data, population = cell.data()
            shared = make_seeds(data, population, sharing, cell.experiment.seed)
            draw_seeds(shared, folder / "seeds.png", f"{data.name}: {cell.experiment.method.label}")
            return {"picture": "seeds.png"}

        cell.cached("seeds-picture", {}, make)
        return f"{cell.work_folder('seeds-picture', {}).name}/seeds.png"
