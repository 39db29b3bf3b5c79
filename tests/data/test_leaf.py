"""LEAF's FEMNIST and Shakespeare."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets_helpers import change, load, real, refused
from helpers import each

from fedblend.data.loaders import emnist
from fedblend.data.loaders.shakespeare import CHARACTERS


def leaf(folder: Path, half: str, data: dict[str, tuple[list, list]], number: int = 0, **changes) -> None:
    table = {user: {"x": x, "y": y} for user, (x, y) in data.items()}
    document = {"users": [*data], "num_samples": [len(y) for _, y in data.values()], "user_data": table, **changes}
    (folder / half).mkdir(parents=True, exist_ok=True)
    (folder / half / f"all_data_{number}_niid_0_keep_0_{half}_9.json").write_text(json.dumps(document))


def scanned(n: int, seed: int) -> tuple[np.ndarray, list, list]:
    """Characters as uint8 [n, 1, 28, 28], and as LEAF writes them."""
    pictures = np.random.default_rng(seed).integers(0, 256, (n, 1, 28, 28), np.uint8)
    return pictures, (pictures.reshape(n, -1) / 255).round(6).tolist(), list(range(seed, seed + n))


def test_leaf_femnist_keeps_pixels_and_writers(tmp_path):
    (a, ax, ay), (b, bx, by) = scanned(3, 0), scanned(2, 50)
    leaf(tmp_path, "train", {"f0002_01": (ax, ay)})
    leaf(tmp_path, "train", {"f0001_40": (bx, by)}, number=1)
    leaf(tmp_path, "test", {"f0002_01": (ax[:1], ay[:1]), "f0001_40": (bx[1:], by[1:]), "none": ([], [])})
    data = load("femnist", path=tmp_path)
    assert np.array_equal(data.train.x.numpy(), np.concatenate([a, b]))
    assert data.train.y.tolist() == [0, 1, 2, 50, 51]
    assert data.client_names == ("f0001_40", "f0002_01", "none")
    assert (data.train.client.tolist(), data.test.client.tolist()) == ([1, 1, 1, 0, 0], [1, 0])
    assert (len(data.classes), data.classes[10], data.classes[61]) == (62, "A", "z")
    assert len(data.facts["files"]) == 3


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p, x, y: leaf(p, "train", {"w": (x, y)}, num_samples=[4]), "user 'w' has 4 samples by num_samples"),
        (lambda p, x, y: leaf(p, "train", {"w": (x, y)}, users=["v"]), "they must be the same users"),
        (lambda p, x, y: leaf(p, "train", {"w": (x, y)}, user_data=[]), "not in LEAF's form"),
        (lambda p, x, y: leaf(p, "train", {"w": ([v[:-1] for v in x], y)}), "no lists of 784 numbers"),
        (lambda p, x, y: leaf(p, "train", {"w": ([[10**400, *v[1:]] for v in x], y)}), "no lists of 784 numbers"),
        (lambda p, x, y: leaf(p, "train", {"w": ([[255 * n for n in v] for v in x], y)}), "pixels are from 0 to 1"),
        (lambda p, x, y: leaf(p, "train", {"w": ([[float("nan")] * 784] * 3, y)}), "pixels are from 0 to 1"),
        (lambda p, x, y: leaf(p, "train", {"w": (x, [60, 61, 62])}), "y must hold labels from 0 to 61 only"),
        (lambda p, x, y: leaf(p, "train", {"w": (["speech"] * 3, y)}), "another data set's file"),
        (lambda p, x, y: leaf(p, "train", {"w": (x[:2], y[:2])}, number=1), "who is in another file too"),
        (lambda p, x, y: leaf(p, "test", {"w": (x, y)}), "is the same file as train"),
    ],
)
def test_leaf_femnist_damaged(tmp_path, spoil, message):
    _, x, y = scanned(3, 0)
    leaf(tmp_path, "train", {"w": (x, y)})
    leaf(tmp_path, "test", {"w": (x[:1], y[:1])})
    spoil(tmp_path, x, y)
    assert str(tmp_path) in refused(message, "femnist", path=tmp_path)


@each("damage", [lambda raw: raw[:-9], lambda raw: b"", lambda raw: b"[1]", lambda raw: b"\xff" + raw])
def test_leaf_truncated(tmp_path, damage):
    _, x, y = scanned(2, 0)
    for half in ("train", "test"):
        leaf(tmp_path, half, {"w": (x, y)})
    (file,) = (tmp_path / "train").iterdir()
    change(file, damage)
    assert str(file) in refused("is truncated or no JSON|not in LEAF's form", "femnist", path=tmp_path)


def test_femnist_archive(tmp_path):
    pictures, _, _ = scanned(6, 0)
    good = {"x": pictures[:, 0], "y": np.array([0, 61, 2, 3, 4, 5]), "client": np.array([0, 0, 0, 1, 1, 1]),
            "split": np.array(["train", "train", "test"] * 2), "classes": np.array(emnist.CHARACTERS)}  # fmt: skip
    np.savez(tmp_path / "femnist.npz", **good)
    data = load("femnist", path=tmp_path / "femnist.npz")
    assert (data.name, data.train.y.tolist(), data.classes) == ("femnist", [0, 61, 3, 4], emnist.CHARACTERS)
    np.savez(tmp_path / "a.npz", **{k: v for k, v in good.items() if k != "client"})
    refused("holds no array 'client'", "femnist", path=tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", **{**good, "x": pictures[:, 0, :27]})
    refused(r"is not FEMNIST: samples of shape \[1, 27, 28\]", "femnist", path=tmp_path / "b.npz")


@pytest.mark.slow
def test_real_femnist_is_equal_in_both_formats():
    archive, folder = load("femnist", path=real("femnist.npz")), load("femnist", path=real("leaf/femnist"))
    assert (len(archive.train), len(archive.test), len(archive.client_names)) == (14_708, 1_685, 105)
    assert len(folder.client_names) == 10
    for half in ("train", "test"):
        one, other = getattr(archive, half), getattr(folder, half)
        of = np.array([archive.client_names.index(name) for name in folder.client_names])
        for number, place in enumerate(of):
            rows, same = one.client == place, other.client == number
            assert torch.equal(one.x[rows], other.x[same])
            assert torch.equal(one.y[rows], other.y[same])


def test_leaf_shakespeare(tmp_path):
    text = "The quality of mercy is not strain'd, It droppeth as the gentle rain from heaven upon the place"
    x, y = [text[i : i + 80] for i in range(4)], [text[i + 80] for i in range(4)]
    leaf(tmp_path, "train", {"THE_MERCHANT_PORTIA": (x[:3], y[:3]), "A_ROLE": (x[:1], y[:1])})
    leaf(tmp_path, "test", {"THE_MERCHANT_PORTIA": (x[3:], y[3:])})
    data = load("leaf-shakespeare", folder=tmp_path)
    assert (data.kind, data.vocabulary, data.client_names) == ("text", 80, ("A_ROLE", "THE_MERCHANT_PORTIA"))
    assert "".join(CHARACTERS[c] for c in data.train.x[1].tolist()) == text[1:81]
    assert [CHARACTERS[c] for c in data.train.y.tolist()] == [*y[:3], y[0]]
    assert data.train.client.tolist() == [1, 1, 1, 0]
    for bad, message in (
        ((["short"], ["a"]), "x holds 'short', not a text of 80"),
        ((x[:1], ["ab"]), "y holds 'ab', not a text of 1"),
        ((["é" + x[0][1:]], y[:1]), "x holds 'é', which is none of LEAF's 80"),
        (([[0.5] * 784], [3]), "x holds list, not a text"),
    ):
        leaf(tmp_path, "train", {"ROLE": bad})
        refused(message, "leaf-shakespeare", folder=tmp_path)
