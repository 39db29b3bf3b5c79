"""Sample privacy of what devices share, measured on the data without any training."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
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
        "mixup_smallest", "mixup_mean", "mixup_recognised", "mix2up_smallest", "mix2up_mean", "mix2up_recognised"
    ] = "mixup_smallest"
    """Logarithm of the smallest distance, mean of the logarithms, or share of samples that are recognised."""
    samples: Count = 100
    """Samples that each device mixes, N_S."""
    devices: Count = 2
    """Devices whose samples are mixed."""
    repeats: Count = 10
    """Draws that are averaged."""
    trains = False

    def measured(self, seen: CellRun) -> float:
        """A natural logarithm of a distance on stored values, or a share."""
        settings = {"samples": self.samples, "devices": self.devices, "repeats": self.repeats}
        return float(seen.once("sample-privacy", settings, lambda place: self._measure(seen))[self.figure])

    def _measure(self, seen: CellRun) -> dict[str, Any]:
        from fedblend.analysis.privacy.mixup import make_mixtures, measure_mixtures
        from fedblend.data.partitions import prepare

        one, sharing = seen.experiment, seen.experiment.method.sharing
        data = one.data.load()
        population = prepare(one.partition, data, one.seed, one.fraction, one.holdout)
        drawn = []
        for repeat in range(self.repeats):
            seen.tick("draws", repeat, self.repeats)
            drawn.append(
                make_mixtures(data, population, one.seed, repeat, self.devices, self.samples, sharing.coordinated)
            )
        return asdict(measure_mixtures(drawn, [sharing.lam])[0])

    def steps(self, experiment: Any) -> float:
        """About a hundred training steps a draw."""
        return 100.0 * self.repeats


@part("measure", "seed-privacy")
class SeedPrivacy(Measure):
    """How far seeds of target labels lie from raw samples, and what is told of these (XorMixFL, Table 3).

    See :class:`fedblend.analysis.privacy.xor.XorPrivacy`.
    """

    figure: Literal["distance", "mds", "sent_recognised", "made_recognised", "clear", "clear_ink", "bits", "blind"] = (
        "mds"
    )
    """The figure; of a distance the mean, or its ``deviation``."""
    deviation: bool = False
    """The standard deviation of a distance over samples, not its mean."""
    repeats: Count = 1
    """Draws that are averaged."""
    trains = False

    def measured(self, seen: CellRun) -> float | None:
        """A distance on pixels from 0 to 255, or a share; nothing of an XOR where there is none."""
        wanted = "mds" if self.figure == "mds" else "plain"
        found = seen.once(f"seed-privacy-{wanted}", {"repeats": self.repeats}, lambda place: self._measure(seen))
        value = found[self.figure]
        return value[int(self.deviation)] if isinstance(value, list) else value

    def _measure(self, seen: CellRun) -> dict[str, Any]:
        from fedblend.analysis.privacy.xor import make_seeds, measure_seeds
        from fedblend.data.partitions import prepare

        one = seen.experiment
        data = one.data.load()
        population = prepare(one.partition, data, one.seed, one.fraction, one.holdout)
        drawn = [make_seeds(data, population, one.method.sharing, one.seed, repeat) for repeat in range(self.repeats)]
        return asdict(measure_seeds(drawn, self.figure == "mds", one.seed))

    def steps(self, experiment: Any) -> float:
        """Multidimensional scaling of each seed takes most of the time."""
        return (20_000.0 if self.figure == "mds" else 500.0) * self.repeats


def shared_of(seen: CellRun, p: int | None = None) -> Any:
    """What the devices of a cell share in its first draw; with ``p`` samples blended, if given."""
    from fedblend.analysis.privacy.xor import make_seeds
    from fedblend.data.partitions import prepare

    one = seen.experiment
    if not hasattr(one.method.sharing, "dummies"):
        raise FedblendError(f"method.sharing: '{one.method.sharing.name}' shares no seeds of target labels")
    sharing = one.method.sharing if p is None else replace(one.method.sharing, p=p)
    data = one.data.load()
    population = prepare(one.partition, data, one.seed, one.fraction, one.holdout)
    return make_seeds(data, population, sharing, one.seed), data


def relative(path: Path, folder: Path) -> str:
    """A path below a folder, as text."""
    return path.relative_to(folder).as_posix()
