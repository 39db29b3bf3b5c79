"""Sample privacy of what devices share, measured on the data without any training."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, part
from fedblend.papers.measures.base import CellRun, Measure


@part("measure", "sample-privacy")
class SamplePrivacy(Measure):
    """Sample privacy of Mixup or Mix2up (Mix2FLD, Tables II and III; :mod:`fedblend.analysis.privacy.mixup`).

    The mixing ratio, and whether devices coordinate their labels, are those of the cell's ``method.sharing``.
    """

    figure: Literal[
        "mixup_smallest",
        "mixup_mean",
        "mixup_recognised",
        "mixup_scaled_smallest",
        "mixup_scaled_mean",
        "mix2up_smallest",
        "mix2up_mean",
        "mix2up_recognised",
        "mix2up_scaled_smallest",
        "mix2up_scaled_mean",
    ] = "mixup_smallest"
    """Logarithm of the smallest distance, mean of the logarithms, or share of samples that are recognised.
    ``scaled``: distances after all shared samples and their raw ones are scaled to a plane together."""
    samples: Count = 100
    """Samples that each device mixes, N_S."""
    devices: Count = 2
    """Devices whose samples are mixed."""
    repeats: Count = 10
    """Draws that are averaged."""
    trains = False

    def measured(self, cell: CellRun) -> float:
        """A natural logarithm of a distance on stored values, or a share."""
        settings = {"samples": self.samples, "devices": self.devices, "repeats": self.repeats}
        name = "sample-privacy-scaled" if "scaled" in self.figure else "sample-privacy"
        return float(cell.cached(name, settings, lambda folder: self._measure(cell))[self.figure])

    def _measure(self, cell: CellRun) -> dict[str, Any]:
        from fedblend.analysis.privacy.mixup import make_mixtures, measure_mixtures, measure_scaled

        seed, sharing = cell.experiment.seed, cell.experiment.method.sharing
        data, population = cell.data()
        drawn = []
        for repeat in range(self.repeats):
            cell.on_step("draws", repeat, self.repeats)
            drawn.append(make_mixtures(data, population, seed, repeat, self.devices, self.samples, sharing.coordinated))
        if "scaled" in self.figure:
            return measure_scaled(drawn, sharing.lam, seed)
        return asdict(measure_mixtures(drawn, [sharing.lam])[0])


@part("measure", "seed-privacy")
class SeedPrivacy(Measure):
    """Distances of seeds of target labels from raw samples, and how much of these is revealed (XorMixFL, Table 3).

    See :class:`fedblend.analysis.privacy.xor.XorPrivacy`.
    """

    figure: Literal["distance", "mds", "sent_recognised", "made_recognised", "clear", "clear_ink", "bits", "blind"] = (
        "mds"
    )
    """The figure; of a distance the mean, or its ``deviation``."""
    deviation: bool = False
    """Return the standard deviation of a distance over samples, not its mean."""
    repeats: Count = 1
    """Draws that are averaged."""
    trains = False

    def measured(self, cell: CellRun) -> float | None:
        """A distance on pixels from 0 to 255, or a share; ``None`` for a figure of the XOR where there is none."""
        wanted = "mds" if self.figure == "mds" else "plain"
        found = cell.cached(f"seed-privacy-{wanted}", {"repeats": self.repeats}, lambda folder: self._measure(cell))
        value = found[self.figure]
        return value[int(self.deviation)] if isinstance(value, list) else value

    def _measure(self, cell: CellRun) -> dict[str, Any]:
        from fedblend.analysis.privacy.xor import make_seeds, measure_seeds

        one = cell.experiment
        data, population = cell.data()
        drawn = [make_seeds(data, population, one.method.sharing, one.seed, repeat) for repeat in range(self.repeats)]
        return asdict(measure_seeds(drawn, self.figure == "mds", one.seed))


def first_draw(cell: CellRun) -> Any:
    """The seeds that the devices of a cell share in its first draw, and the data set."""
    from fedblend.analysis.privacy.xor import make_seeds

    sharing = cell.experiment.method.sharing
    if not hasattr(sharing, "dummies"):
        raise FedblendError(f"method.sharing: '{sharing.name}' shares no seeds of target labels")
    data, population = cell.data()
    return make_seeds(data, population, sharing, cell.experiment.seed), data
