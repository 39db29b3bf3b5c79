"""Data sets of the Hugging Face Hub: the true files of one, in a folder."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from helpers import each
from PIL import Image

from fedblend.core.errors import FedblendError
from fedblend.core.paths import FileText
from fedblend.core.registry import build

pytestmark = pytest.mark.slow


def load(folder, **options):
    return build("dataset", {"name": "hub", "dataset": str(folder), **options}).load()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Twelve pictures of three writers to train on and six to test on, as Parquet files like the Hub's."""
    datasets = pytest.importorskip("datasets", reason="the extra 'hub' is not installed")
    pytest.importorskip("flwr_datasets", reason="the extra 'hub' is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    kinds = datasets.Features(
        picture=datasets.Image(), digit=datasets.ClassLabel(names=["nought", "one"]), writer=datasets.Value("string")
    )
    rng = np.random.default_rng(0)
    (tmp_path / "set" / "data").mkdir(parents=True)
    for split, count in (("train", 12), ("test", 6)):
        pixels = rng.integers(0, 256, (count, 8, 6), dtype=np.uint8)
        rows = {
            "picture": [Image.fromarray(p) for p in pixels],
            "digit": [i % 2 for i in range(count)],
            "writer": ["abc"[i % 3] for i in range(count)],
        }
        made = datasets.Dataset.from_dict(rows, features=kinds)
        made.to_parquet(tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet")
        np.save(tmp_path / f"{split}.npy", pixels)
    return tmp_path / "set"


def test_images_labels_and_writers(folder):
    data = load(folder, client="writer")
    for half, samples in (("train", data.train), ("test", data.test)):
        assert np.array_equal(samples.x[:, 0].numpy(), np.load(folder.parent / f"{half}.npy"))
        assert samples.client.tolist() == [i % 3 for i in range(len(samples))]
    assert data.train.y.tolist() == [0, 1] * 6
    assert (data.classes, data.client_names, data.kind) == (("nought", "one"), ("a", "b", "c"), "image")


def test_a_folder_named_in_a_file_lies_beside_it(folder):
    named = FileText(folder.name, str(folder.parent))

    assert build("dataset", {"name": "hub", "dataset": named}).dataset == str(folder)
    assert build("dataset", {"name": "hub", "dataset": FileText("a/name", "/")}).dataset == "a/name"


def test_without_a_test_split_a_half_is_drawn(folder):
    data = load(folder, client="writer", test="", test_share=0.5)
    assert [len(data.train), len(data.test)] == [6, 6]
    assert np.bincount(data.test.client).tolist() == [2, 2, 2]
    assert load(folder, colour="rgb").train.x.shape == (12, 3, 8, 6)


@each(
    ("options", "message"),
    [
        ({"client": "writers"}, r"data.client: there is no column 'writers' in '.+' \(did you mean 'writer'\?\)"),
        ({"label": "writer2"}, "data.label: there is no column"),
        ({"test": "validation"}, "cannot load the splits train, validation"),
        ({"subset": "other"}, "cannot load the splits train, test"),
    ],
)
def test_unknown_columns_splits_and_subsets(folder, options, message):
    with pytest.raises(FedblendError, match=message):
        load(folder, **options)


def test_without_flwr_datasets_or_with_one_that_cannot_be_imported(tmp_path, monkeypatch):
    (tmp_path / "flwr_datasets.py").write_text("raise ImportError('pyarrow requires NumPy 2.0')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flwr_datasets", raising=False)
    with pytest.raises(FedblendError, match=r"flwr-datasets, which cannot be imported \(pyarrow requires NumPy 2.0\)"):
        load(tmp_path)
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(FedblendError, match=r'needs the package flwr-datasets.*pip install "\.\[hub\]"'):
        load(tmp_path)


def test_ids_of_tokens_in_a_column_of_lists(tmp_path, folder):
    datasets = pytest.importorskip("datasets")
    rows = [[i, i + 1, 0] for i in range(10)]
    for name, ids in (("ids", rows), ("uneven", [[1], [2, 3]])):
        (tmp_path / name).mkdir()
        made = datasets.Dataset.from_dict({"input_ids": ids, "label": [i % 2 for i in range(len(ids))]})
        made.to_parquet(tmp_path / name / "train.parquet")
    options = {"inputs": "input_ids", "label": "label", "test": "", "kind": "tokens"}
    data = load(tmp_path / "ids", **options)
    assert (data.kind, data.train.x.dtype) == ("tokens", torch.int64)
    assert sorted(torch.cat([data.train.x, data.test.x]).tolist()) == rows
    with pytest.raises(FedblendError, match=r"'x' is object of shape \[2\]; valid for data.kind = \"tokens\""):
        load(tmp_path / "uneven", **options)
