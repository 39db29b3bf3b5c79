"""CIFAR10 and CIFAR100: the binary version, and the real files."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from datasets_helpers import change, cifar, load, real, refused
from helpers import each


def test_cifar10(tmp_path):
    first = cifar(tmp_path)
    data = load("cifar10", folder=tmp_path)
    assert (data.train.x.shape, data.test.x.shape) == ((100, 3, 32, 32), (20, 3, 32, 32))
    assert np.array_equal(data.train.x[:20].numpy(), first)
    assert data.train.y[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert (data.classes[0], data.classes[9]) == ("airplane", "truck")
    assert set(data.facts["files"]) == {f"data_batch_{i}.bin" for i in range(1, 6)} | {"test_batch.bin"}


def test_cifar100_has_two_kinds_of_labels(tmp_path):
    first = cifar(tmp_path, hundred=True)
    fine, coarse = load("cifar100", folder=tmp_path), load("cifar100", folder=tmp_path, labels="coarse")
    assert np.array_equal(fine.train.x.numpy(), first)
    assert (fine.train.y[:3].tolist(), fine.classes[5]) == ([0, 5, 10], "fine5")
    assert (coarse.train.y[:3].tolist(), len(coarse.classes)) == ([0, 1, 2], 20)


@each(
    ("file", "damage", "message"),
    [
        ("data_batch_3.bin", lambda raw: raw[:-1], "data_batch_3.bin: is truncated or another file: 61459 bytes"),
        ("test_batch.bin", lambda raw: b"", "test_batch.bin: is truncated or another file: 0 bytes"),
        ("data_batch_1.bin", lambda raw: raw[:3073] + b"\x0a" + raw[3074:], "record 1 has the label 10; valid: 0 "),
    ],
)
def test_cifar10_damaged(tmp_path, file, damage, message):
    cifar(tmp_path)
    change(tmp_path / file, damage)
    refused(message, "cifar10", folder=tmp_path)


def test_cifar_truncated_between_two_records(tmp_path):
    cifar(tmp_path / "10")
    change(tmp_path / "10" / "data_batch_3.bin", lambda raw: raw[: 10 * 3073])
    refused("data_batch_3.bin: is truncated: it has 10 images, others 20", "cifar10", folder=tmp_path / "10")
    for name, count in (("train.bin", 50), ("test.bin", 10)):
        cifar(tmp_path / "100", hundred=True)
        change(tmp_path / "100" / name, lambda raw, end=count * 3074: raw[:end])
        refused(f"{name}: is truncated", "cifar100", folder=tmp_path / "100")


def test_cifar10_mislabelled(tmp_path):
    cifar(tmp_path)
    (tmp_path / "batches.meta.txt").write_text("\n".join(load("cifar10", folder=tmp_path).classes[::-1]))
    refused("names label 0 'truck'; in CIFAR10 it is 'airplane'", "cifar10", folder=tmp_path)
    (tmp_path / "batches.meta.txt").unlink()
    (tmp_path / "test_batch.bin").write_bytes((tmp_path / "data_batch_2.bin").read_bytes())
    refused("test_batch.bin: is the same file as data_batch_2.bin", "cifar10", folder=tmp_path)


@each(
    ("name", "usual", "first"),
    [("cifar10", "cifar-10-batches-py", "data_batch_1"), ("cifar100", "cifar-100-python", "train")],
)
def test_the_python_version_is_not_read(tmp_path, monkeypatch, name, usual, first):
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path))
    (tmp_path / usual).mkdir()
    (tmp_path / usual / first).write_bytes(pickle.dumps({"data": b""}))
    archive = f"cifar-{name[5:]}-binary.tar.gz"
    for options in ({"folder": tmp_path / usual}, {}):
        told = f"'{tmp_path / usual}' holds the Python version of {name}, .*{archive}.* data set 'hub'"
        refused(told, name, **options)
    cifar(tmp_path / name, hundred=name == "cifar100")
    assert len(load(name).train) == 100


def test_cifar100_mislabelled(tmp_path):
    cifar(tmp_path, hundred=True)
    change(tmp_path / "test.bin", lambda raw: b"\x07" + raw[1:])
    refused(r"the fine label 0 comes with the coarse labels \[0, 7\]", "cifar100", folder=tmp_path)
    change(tmp_path / "test.bin", lambda raw: b"\x14" + raw[1:])
    refused("record 0 has the coarse label 20; valid: 0 to 19", "cifar100", folder=tmp_path)
    cifar(tmp_path, hundred=True)
    (tmp_path / "fine_label_names.txt").write_text("one\ntwo\n")
    refused("has 2 different names in 2; expected 100", "cifar100", folder=tmp_path)


@pytest.mark.slow
def test_real_cifar():
    real("cifar-10-batches-bin"), real("cifar-100-binary")
    ten, hundred = load("cifar10"), load("cifar100")
    assert (torch.bincount(ten.train.y).tolist(), torch.bincount(ten.test.y).tolist()) == ([5000] * 10, [1000] * 10)
    # The first training picture of CIFAR10 is the well-known frog, whose first red values are these.
    assert (int(ten.train.y[0]), ten.train.x[0, 0, 0, :4].tolist()) == (6, [59, 43, 50, 68])
    assert (torch.bincount(hundred.train.y).tolist(), hundred.classes[0]) == ([500] * 100, "apple")
