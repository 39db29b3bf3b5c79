"""Sample privacy of what devices share, in numbers and as a picture, measured on the data without any training."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, part
from fedblend.papers.measures.base import CellRun, Measure

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
        return float(cell.cached(name, settings, lambda folder: self._measure(cell))[self.figure])

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
        found = cell.cached(f"seed-privacy-{wanted}", {"repeats": self.repeats}, lambda folder: self._measure(cell))
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
