"""EMNIST: its splits, and the transposed images."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from datasets_helpers import idx, load, refused

from fedblend.data.loaders import emnist


def write_emnist(folder: Path, split: str, labels: np.ndarray, ending: str = "") -> np.ndarray:
    """Files in the publisher's format; returns the images as they should be loaded."""
    pictures = np.random.default_rng(0).integers(0, 256, (len(labels), 28, 28), np.uint8)
    pack = gzip.compress if ending else bytes
    for half in ("train", "test"):
        x = pictures if half == "train" else pictures[::-1]
        stem = f"emnist-{split}-{half}"
        (folder / f"{stem}-images-idx3-ubyte{ending}").write_bytes(pack(idx(x.transpose(0, 2, 1))))
        y = labels if half == "train" else labels[::-1]
        (folder / f"{stem}-labels-idx1-ubyte{ending}").write_bytes(pack(idx(y)))
    return pictures


@pytest.mark.parametrize(("ending", "split", "first"), [("", "balanced", 0), (".gz", "letters", 1)])
def test_emnist_is_transposed(tmp_path, monkeypatch, ending, split, first):
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path))
    classes, folder = len(emnist.CLASSES[split]), tmp_path / "EMNIST" / "raw"
    folder.mkdir(parents=True)
    pictures = write_emnist(folder, split, np.arange(classes) + first, ending)
    data = load("emnist", split=split)
    assert np.array_equal(data.train.x[:, 0].numpy(), pictures)
    assert data.train.y.tolist() == list(range(classes))
    assert (data.name, data.outputs) == (f"emnist-{split}", classes)


def test_emnist_classes():
    assert {name: len(classes) for name, classes in emnist.CLASSES.items()} == {
        "balanced": 47, "byclass": 62, "bymerge": 47, "letters": 26, "digits": 10, "mnist": 10,
    }  # fmt: skip
    # The labels that the publisher's mapping gives: 10 is A, 36 is a; of the merged ones 38 is d, 46 is t.
    assert [emnist.CHARACTERS[i] for i in (10, 36)] == ["A", "a"]
    assert [emnist.CLASSES["balanced"][i] for i in (36, 38, 46)] == ["a", "d", "t"]


def test_emnist_of_another_split(tmp_path):
    write_emnist(tmp_path, "letters", np.arange(26))
    refused("has the label 0; valid: 1 to 26", "emnist", folder=tmp_path, split="letters")
    write_emnist(tmp_path, "letters", np.arange(47))
    refused("has the label 46; valid: 0 to 26", "emnist", folder=tmp_path, split="letters")
    refused("holds no emnist-balanced-train-images-idx3-ubyte", "emnist", folder=tmp_path)
