"""Tables II and III of Mix2FLD: sample privacy of Mixup and Mix2up on four data sets, beside the paper's numbers.

    python evidence/mix2fld-privacy.py [--pictures FOLDER]

FEDBLEND_DATA names a folder with MNIST/raw, cifar-10-batches-bin and cifar-100-binary; Fashion-MNIST is found or
downloaded as the data set does. Two devices with 500 samples of equally many of every label mix 100 samples each; means
over ten draws. CIFAR-100's devices coordinate their labels: of those drawn at random hardly any two match.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedblend.analysis.privacy.figures import draw_mixtures
from fedblend.analysis.privacy.mixup import LAMBDAS, SAMPLES, MixupPrivacy, make_mixtures, measure_mixtures
from fedblend.core.registry import build
from fedblend.data.partitions import prepare

RESULTS = Path(__file__).resolve().parent / "results" / "mix2fld-privacy.json"
DRAWS = 10
DEVICES, HELD = 2, 500
"""Devices, and samples that each one holds."""

PICTURED = (0.1, 0.4)

PAPER = {
    "mnist": ((2.163, 4.465, 5.158, 5.564, 5.852, 6.055), (2.557, 4.639, 5.469, 6.140, 7.007, 9.366)),
    "fashion-mnist": ((1.825, 4.127, 4.821, 5.226, 5.514, 5.717), (2.196, 4.568, 5.410, 6.143, 6.925, 9.273)),
    "cifar10": ((2.582, 4.884, 5.577, 5.983, 6.270, 6.473), (2.824, 5.228, 6.076, 6.766, 7.662, 10.143)),
    "cifar100": ((2.442, 4.744, 5.438, 5.843, 6.131, 6.334), (2.737, 5.151, 6.050, 6.782, 7.652, 10.104)),
}
"""The paper's Tables II and III, by lambda."""


def measured(name: str, pictures: Path | None) -> dict[str, Any]:
    """Both tables' rows of a data set, and the paper's."""
    data, coordinated = build("dataset", name).load(), name == "cifar100"
    split = build("partition", {"name": "mix2fld", "form": "iid", "clients": DEVICES, "samples": HELD})
    population = prepare(split, data, 0)
    drawn = [make_mixtures(data, population, 0, k, DEVICES, SAMPLES, coordinated) for k in range(DRAWS)]
    rows = measure_mixtures(drawn, LAMBDAS)
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        for lam in PICTURED:
            title = f"{name}: Mixup and inverse Mixup at lambda = {lam:g}"
            draw_mixtures(drawn[0], data.classes, lam, pictures / f"{name}-{lam:g}.png", title)
    mixup, mix2up = PAPER[name]
    return {
        "data": name,
        "coordinated": coordinated,
        "repeated": sum(one.pairs.repeated for one in drawn),
        "rows": [asdict(row) for row in rows],
        "paper": {"mixup": mixup, "mix2up": mix2up},
        "apart": {"mixup": apart(rows, "mixup", mixup), "mix2up": apart(rows, "mix2up", mix2up)},
    }


def apart(rows: Sequence[MixupPrivacy], which: str, paper: Sequence[float]) -> dict[str, float]:
    """The largest difference from the paper's row: of the smallest distances, and of the mean of all."""
    return {
        kind: max((getattr(row, f"{which}_{kind}") - told for row, told in zip(rows, paper, strict=True)), key=abs)
        for kind in ("smallest", "mean")
    }


def main() -> None:
    """Measure all data sets and write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, help="a folder for pictures of samples")
    given = parser.parse_args()
    found = {
        "command": "python evidence/mix2fld-privacy.py",
        "lambdas": LAMBDAS,
        "samples": SAMPLES,
        "devices": DEVICES,
        "held": HELD,
        "draws": DRAWS,
        "sets": [measured(name, given.pictures) for name in PAPER],
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
