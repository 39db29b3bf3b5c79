"""scikit-learn's small digits: the quickest real data set there is."""

from __future__ import annotations

import numpy as np
import torch

from fedblend.core.dataset import Dataset, Samples, check
from fedblend.core.registry import part
from fedblend.data.loaders.files import sha256_array

STEPS = 16
"""The package stores how many pixels of a 4 x 4 block carry ink: 0 to 16."""

EVERY = 5
"""Every fifth sample is test."""


@part("dataset", "digits")
class Digits:
    """1,797 digits of 8 x 8 pixels, 10 classes, ink as 255, from scikit-learn (UCI Optdigits, CC BY 4.0).

    Samples 4, 9, 14, ... in stored order are test (359), the others training (1,438). The stored
    values 0 to 16 become round(value * 255 / 16).
    """

    def load(self) -> Dataset:
        """The data set: x uint8 [1438 and 359, 1, 8, 8], y int64."""
        from sklearn.datasets import load_digits  # a second's import that other data sets do without

        stored = load_digits()
        x = np.rint(stored.images * (255 / STEPS)).astype(np.uint8)[:, None]
        y = stored.target.astype(np.int64)
        test = np.arange(len(y)) % EVERY == EVERY - 1
        facts = {
            "source": "UCI Optdigits (CC BY 4.0) from scikit-learn",
            "files": {"load_digits() images": sha256_array(x), "load_digits() target": sha256_array(y)},
            "notes": "test: every fifth sample in stored order",
        }
        halves = [Samples(torch.from_numpy(x[rows]), torch.from_numpy(y[rows])) for rows in (~test, test)]
        return check(Dataset("digits", "image", halves[0], halves[1], tuple("0123456789"), facts=facts))
