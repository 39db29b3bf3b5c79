"""CIFAR10 and CIFAR100: the binary form, the Python form read as data only, and the real files."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets_helpers import change, cifar, load, real, refused
from hypothesis import given
from hypothesis import strategies as st

from fedblend.core.errors import FedblendError
from fedblend.data.loaders.cifar import TEN_CLASSES
from fedblend.data.loaders.plain_pickle import read_plain


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


@pytest.mark.parametrize(
    ("file", "damage", "told"),
    [
        ("data_batch_3.bin", lambda raw: raw[:-1], "data_batch_3.bin: is truncated or another file: 61459 bytes"),
        ("test_batch.bin", lambda raw: b"", "test_batch.bin: is truncated or another file: 0 bytes"),
        (
            "data_batch_1.bin",
            lambda raw: raw[:3073] + b"\x0b" + raw[3074:],
            "record 1 holds the label 11; valid: 0 ",
        ),
    ],
)
def test_cifar10_damaged(tmp_path, file, damage, told):
    cifar(tmp_path)
    change(tmp_path / file, damage)
    refused(told, "cifar10", folder=tmp_path)


def test_cifar_cut_between_two_records(tmp_path):
    cifar(tmp_path / "10")
    change(tmp_path / "10" / "data_batch_3.bin", lambda raw: raw[: 10 * 3073])
    refused("data_batch_3.bin: is cut short: it holds 10 pictures, others 20", "cifar10", folder=tmp_path / "10")
    for name, count in (("train.bin", 50), ("test.bin", 10)):
        cifar(tmp_path / "100", hundred=True)
        change(tmp_path / "100" / name, lambda raw, end=count * 3074: raw[:end])
        refused(f"{name}: is cut short", "cifar100", folder=tmp_path / "100")


def test_cifar10_mislabelled(tmp_path):
    cifar(tmp_path)
    (tmp_path / "batches.meta.txt").write_text("\n".join(load("cifar10", folder=tmp_path).classes[::-1]))
    refused("calls label 0 'truck'; in CIFAR10 it is 'airplane'", "cifar10", folder=tmp_path)
    (tmp_path / "batches.meta.txt").unlink()
    (tmp_path / "test_batch.bin").write_bytes((tmp_path / "data_batch_2.bin").read_bytes())
    refused("test_batch.bin: is the same file as data_batch_2.bin", "cifar10", folder=tmp_path)


def python2(value: object) -> bytes:
    """What cPickle of Python 2 wrote with protocol 2: byte strings as BINSTRING, arrays as NumPy then pickled them."""
    if isinstance(value, np.ndarray):
        kind = b"cnumpy\ndtype\n" + python2("u1") + b"K\x00K\x01\x87R(K\x03" + python2("|") + b"NNNJ\xff\xff\xff\xffJ"
        kind += b"\xff\xff\xff\xffK\x00tb"
        start = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + python2("b") + b"\x87R"
        shape = b"".join(b"J" + struct.pack("<i", side) for side in value.shape) + b"\x86"
        return start + b"(K\x01" + shape + kind + b"\x89" + python2(value.tobytes().decode("latin-1")) + b"tb"
    if isinstance(value, str):
        raw = value.encode("latin-1")
        return b"U" + bytes([len(raw)]) + raw if len(raw) < 256 else b"T" + struct.pack("<i", len(raw)) + raw
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, list):
        return b"](" + b"".join(map(python2, value)) + b"e"
    return b"}(" + b"".join(python2(k) + python2(v) for k, v in value.items()) + b"u"


PICKLERS = [lambda v: b"\x80\x02" + python2(v) + b"."] + [partial(pickle.dumps, protocol=p) for p in (2, 3, 4)]


@pytest.mark.parametrize("pickled", PICKLERS, ids=["python2", "protocol2", "protocol3", "protocol4"])
def test_cifars_python_form_is_the_binary_one(tmp_path, pickled):
    cifar(tmp_path / "bin")
    data = load("cifar10", folder=tmp_path / "bin")
    place = tmp_path / "cifar-10-batches-py"
    place.mkdir()
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        half = data.test if name == "test_batch" else data.train
        rows = slice(0, 20) if name == "test_batch" else slice(20 * i, 20 * i + 20)
        batch = {"batch_label": name, "labels": half.y[rows].tolist(), "data": half.x[rows].flatten(1).numpy()}
        (place / name).write_bytes(pickled(batch))
    (place / "batches.meta").write_bytes(pickled({"num_cases_per_batch": 20, "label_names": list(data.classes)}))
    other = load("cifar10", folder=place)
    for half in ("train", "test"):
        assert torch.equal(getattr(other, half).x, getattr(data, half).x)
        assert torch.equal(getattr(other, half).y, getattr(data, half).y)
    (place / "batches.meta").write_bytes(pickled({"label_names": list(data.classes[::-1])}))
    refused("calls label 0 'truck'", "cifar10", folder=place)
    change(place / "data_batch_2", lambda raw: raw[:1000])
    (place / "batches.meta").write_bytes(pickled({"label_names": list(data.classes)}))
    refused("data_batch_2: is damaged or no pickle", "cifar10", folder=place)


def test_cifar100s_python_form(tmp_path, monkeypatch):
    cifar(tmp_path / "bin", hundred=True)
    place = tmp_path / "cifar-100-python"
    place.mkdir()
    fine, coarse = (load("cifar100", folder=tmp_path / "bin", labels=labels) for labels in ("fine", "coarse"))
    for half in ("train", "test"):
        one, other = getattr(fine, half), getattr(coarse, half)
        batch = {"fine_labels": one.y.tolist(), "coarse_labels": other.y.tolist(), "data": one.x.flatten(1).numpy()}
        (place / half).write_bytes(PICKLERS[0](batch))
    names = {"fine_label_names": list(fine.classes), "coarse_label_names": list(coarse.classes)}
    (place / "meta").write_bytes(PICKLERS[0](names))
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path))  # found there by the folder's usual name
    for labels, data in (("fine", fine), ("coarse", coarse)):
        read = load("cifar100", labels=labels)
        assert torch.equal(read.train.x, data.train.x)
        assert (read.train.y.tolist(), read.classes) == (data.train.y.tolist(), data.classes)


class Ask:
    """Something that runs a command when it is unpickled."""

    def __init__(self, folder) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: {"data": a}, lambda a: [1, [a]]])
def test_what_a_pickle_asks_for_is_not_run(tmp_path, protocol, wrap):
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (tmp_path / name).write_bytes(pickle.dumps({name: wrap(Ask(tmp_path / "run"))}, protocol))
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": list(TEN_CLASSES)}, 2))
    refused("data_batch_1: is not data only: it asks for .*mkdir", "cifar10", folder=tmp_path)
    assert not (tmp_path / "run").exists()


@given(st.binary(max_size=60))
def test_no_bytes_make_the_plain_reader_do_more_than_refuse(raw):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some"
        path.write_bytes(b"\x80\x02" + raw + b".")
        with contextlib.suppress(FedblendError):
            read_plain(path)


def test_cifar100_mislabelled(tmp_path):
    cifar(tmp_path, hundred=True)
    change(tmp_path / "test.bin", lambda raw: b"\x07" + raw[1:])
    refused(r"the fine label 0 comes with the coarse labels \[0, 7\]", "cifar100", folder=tmp_path)
    change(tmp_path / "test.bin", lambda raw: b"\x14" + raw[1:])
    refused("record 0 holds the coarse label 20; valid: 0 to 19", "cifar100", folder=tmp_path)
    cifar(tmp_path, hundred=True)
    (tmp_path / "fine_label_names.txt").write_text("one\ntwo\n")
    refused("holds 2 different names in 2; expected 100", "cifar100", folder=tmp_path)


def test_real_cifar():
    real("cifar-10-batches-bin"), real("cifar-100-binary")
    ten, hundred = load("cifar10"), load("cifar100")
    assert (torch.bincount(ten.train.y).tolist(), torch.bincount(ten.test.y).tolist()) == ([5000] * 10, [1000] * 10)
    # The first training picture of CIFAR10 is the well-known frog, whose first red values are these.
    assert (int(ten.train.y[0]), ten.train.x[0, 0, 0, :4].tolist()) == (6, [59, 43, 50, 68])
    assert (torch.bincount(hundred.train.y).tolist(), hundred.classes[0]) == ([500] * 100, "apple")
