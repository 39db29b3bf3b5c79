"""Data sets in their publishers' formats: small files made here, and the real ones where FEDBLEND_DATA has them."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import re
import struct
import tempfile
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_helpers import here, succeeded
from cli_helpers import refused as refused_by_cli
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedblend.cli.showing import new_file
from fedblend.config import resolve
from fedblend.data.loaders import emnist, har, heart, voc
from fedblend.data.loaders.cifar import TEN_CLASSES
from fedblend.data.loaders.plain_pickle import read_plain
from fedblend.data.loaders.shakespeare import CHARACTERS
from fedblend.errors import FedblendError
from fedblend.parts import build

SHARED = Path(os.environ["FEDBLEND_DATA"]) if os.environ.get("FEDBLEND_DATA") else None
OURS = ("cifar10", "cifar100", "emnist", "femnist", "fer2013", "har", "heart", "leaf-shakespeare", "voc2007")


def real(path: str) -> Path:
    """A file or folder of the real data; the test is skipped where it is absent."""
    if SHARED is None or not (SHARED / path).exists():
        pytest.skip(f"FEDBLEND_DATA {'holds no ' + path if SHARED else 'is not set'}")
    return SHARED / path


def load(name: str, **options):
    return build(
        "dataset", {"name": name, **{k: str(v) if isinstance(v, Path) else v for k, v in options.items()}}
    ).load()


def refused(told: str, name: str, **options) -> str:
    """The one message with which a data set is refused."""
    with pytest.raises(FedblendError, match=told) as caught:
        load(name, **options)
    return str(caught.value)


def change(path: Path, damage: Callable[[bytes], bytes]) -> None:
    path.write_bytes(damage(path.read_bytes()))


# What all have in common -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_without_data_the_message_names_files_address_and_place(name, monkeypatch, tmp_path):
    monkeypatch.delenv("FEDBLEND_DATA", raising=False)
    told = refused(r"\$FEDBLEND_DATA is not set", name)
    assert re.search(r"take them from http\S+", told)
    assert re.search(r"put them into .+/ under the folder that \$FEDBLEND_DATA names", told)
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path))
    assert str(tmp_path) in refused("they are not in", name)


@pytest.mark.parametrize("name", OURS)
def test_a_folder_without_the_files(name, tmp_path):
    option = "path" if name in ("femnist", "har") else "folder"
    assert str(tmp_path) in refused("holds no", name, **{option: tmp_path})
    refused(rf"data.{option}: there is no", name, **{option: tmp_path / "nowhere"})


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("method", ["fedavg", "fedprox+fedmix"])
def test_new_files(name, method):
    experiment = resolve(tomllib.loads(new_file(method, name)))
    assert (experiment.data.name, experiment.method.name) == (name, method)


def test_a_folder_of_data_sets_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path / "elsewhere"))  # is set anew by the command, and back after it
    cifar(tmp_path / "sets" / "cifar10")
    file = tmp_path / "some.toml"
    file.write_text('rounds = 0\ndata = "cifar10"\npartition = {name = "iid", clients = 2}\ntrain.cohort = 2\n')
    succeeded(here("run", file, "--data", "sets", "--out", "out"))
    refused_by_cli(here("run", file, "--data", "nowhere", "--out", "out2"), "--data nowhere: there is no such folder")


# CIFAR -----------------------------------------------------------------------------------------------------


def cifar(folder: Path, hundred: bool = False) -> np.ndarray:
    """Small files in the binary form; the pictures of the first file."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, first = np.random.default_rng(0), None
    names = ["train.bin", "test.bin"] if hundred else [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for name in names:
        count = 100 if name == "train.bin" else 20
        pictures = rng.integers(0, 256, (count, 3, 32, 32), np.uint8)
        fine = np.arange(count) * 5 % 100 if hundred else np.arange(count) % 10
        labels = np.stack([fine // 5, fine], 1) if hundred else fine[:, None]
        (folder / name).write_bytes(np.hstack([labels.astype(np.uint8), pictures.reshape(count, -1)]).tobytes())
        first = pictures if first is None else first
    if hundred:
        (folder / "fine_label_names.txt").write_text("\n".join(f"fine{i}" for i in range(100)) + "\n")
        (folder / "coarse_label_names.txt").write_text("\n".join(f"coarse{i}" for i in range(20)) + "\n\n")
    return first


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


# EMNIST ----------------------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_emnist(folder: Path, split: str, labels: np.ndarray, ending: str = "") -> np.ndarray:
    """Files as the publisher has them; the pictures as they should be read, upright."""
    pictures = np.random.default_rng(0).integers(0, 256, (len(labels), 28, 28), np.uint8)
    pack = gzip.compress if ending else bytes
    for half in ("train", "test"):
        x = pictures if half == "train" else pictures[::-1]
        stem = f"emnist-{split}-{half}"
        (folder / f"{stem}-images-idx3-ubyte{ending}").write_bytes(pack(idx(x.transpose(0, 2, 1))))
        (folder / f"{stem}-labels-idx1-ubyte{ending}").write_bytes(
            pack(idx(labels if half == "train" else labels[::-1]))
        )
    return pictures


@pytest.mark.parametrize(("ending", "split", "first"), [("", "balanced", 0), (".gz", "letters", 1)])
def test_emnist_stands_upright(tmp_path, ending, split, first):
    classes = len(emnist.CLASSES[split])
    pictures = write_emnist(tmp_path, split, np.arange(classes) + first, ending)
    data = load("emnist", folder=tmp_path, split=split)
    assert np.array_equal(data.train.x[:, 0].numpy(), pictures)
    assert data.train.y.tolist() == list(range(classes))
    assert (data.name, data.outputs) == (f"emnist-{split}", classes)


def test_emnist_arrangements():
    assert {name: len(classes) for name, classes in emnist.CLASSES.items()} == {
        "balanced": 47, "byclass": 62, "bymerge": 47, "letters": 26, "digits": 10, "mnist": 10,
    }  # fmt: skip
    # The labels that the publisher's mapping gives: 10 is A, 36 is a; of the merged ones 38 is d, 46 is t.
    assert [emnist.ALL[i] for i in (10, 36)] == ["A", "a"]
    assert [emnist.CLASSES["balanced"][i] for i in (36, 38, 46)] == ["a", "d", "t"]


def test_emnist_of_another_arrangement(tmp_path):
    write_emnist(tmp_path, "letters", np.arange(26))
    refused("holds the label 0; valid: 1 to 26", "emnist", folder=tmp_path, split="letters")
    write_emnist(tmp_path, "letters", np.arange(47))
    refused("holds the label 46; valid: 0 to 26", "emnist", folder=tmp_path, split="letters")
    refused("holds no emnist-balanced-train-images-idx3-ubyte", "emnist", folder=tmp_path)


def test_real_digits_in_emnists_format(tmp_path, monkeypatch):
    folder = real("MNIST/raw")
    mnist = load("mnist", folder=folder)
    place = tmp_path / "EMNIST" / "raw"
    place.mkdir(parents=True)
    for half, samples in (("train", mnist.train), ("test", mnist.test)):
        x, y = samples.x[:500, 0].numpy(), samples.y[:500].numpy()
        (place / f"emnist-mnist-{half}-images-idx3-ubyte").write_bytes(idx(x.transpose(0, 2, 1)))
        (place / f"emnist-mnist-{half}-labels-idx1-ubyte").write_bytes(idx(y))
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path))
    assert torch.equal(load("emnist", split="mnist").test.x, mnist.test.x[:500])


# LEAF ------------------------------------------------------------------------------------------------------


def leaf(folder: Path, half: str, data: dict[str, tuple[list, list]], number: int = 0, **changes) -> None:
    table = {user: {"x": x, "y": y} for user, (x, y) in data.items()}
    document = {"users": [*data], "num_samples": [len(y) for _, y in data.values()], "user_data": table, **changes}
    (folder / half).mkdir(parents=True, exist_ok=True)
    (folder / half / f"all_data_{number}_niid_0_keep_0_{half}_9.json").write_text(json.dumps(document))


def scanned(n: int, seed: int) -> tuple[np.ndarray, list, list]:
    """Characters as uint8 [n, 1, 28, 28], and as LEAF writes them."""
    pictures = np.random.default_rng(seed).integers(0, 256, (n, 1, 28, 28), np.uint8)
    return pictures, (pictures.reshape(n, -1) / 255).round(6).tolist(), list(range(seed, seed + n))


def test_femnist_of_leaf_keeps_pixels_and_writers(tmp_path):
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
    ("spoil", "told"),
    [
        (lambda p, x, y: leaf(p, "train", {"w": (x, y)}, num_samples=[4]), "user 'w' has 4 samples by num_samples"),
        (lambda p, x, y: leaf(p, "train", {"w": (x, y)}, users=["v"]), "they must be the same users"),
        (lambda p, x, y: leaf(p, "train", {"w": (x, y)}, user_data=[]), "not in LEAF's form"),
        (lambda p, x, y: leaf(p, "train", {"w": ([v[:-1] for v in x], y)}), "no lists of 784 numbers"),
        (lambda p, x, y: leaf(p, "train", {"w": ([[255 * n for n in v] for v in x], y)}), "pixels are from 0 to 1"),
        (lambda p, x, y: leaf(p, "train", {"w": ([[float("nan")] * 784] * 3, y)}), "pixels are from 0 to 1"),
        (lambda p, x, y: leaf(p, "train", {"w": (x, [60, 61, 62])}), "other than labels 0 to 61"),
        (lambda p, x, y: leaf(p, "train", {"w": (["speech"] * 3, y)}), "another data set's file"),
        (lambda p, x, y: leaf(p, "train", {"w": (x[:2], y[:2])}, number=1), "of whom another file told"),
        (lambda p, x, y: leaf(p, "test", {"w": (x, y)}), "is the same file as train"),
    ],
)
def test_femnist_of_leaf_damaged(tmp_path, spoil, told):
    _, x, y = scanned(3, 0)
    leaf(tmp_path, "train", {"w": (x, y)})
    leaf(tmp_path, "test", {"w": (x[:1], y[:1])})
    spoil(tmp_path, x, y)
    assert str(tmp_path) in refused(told, "femnist", path=tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-9], lambda raw: b"", lambda raw: b"[1]", lambda raw: b"\xff" + raw]
)
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
            "split": np.array(["train", "train", "test"] * 2), "classes": np.array(emnist.ALL)}  # fmt: skip
    np.savez(tmp_path / "femnist.npz", **good)
    data = load("femnist", path=tmp_path / "femnist.npz")
    assert (data.name, data.train.y.tolist(), data.classes) == ("femnist", [0, 61, 3, 4], emnist.ALL)
    np.savez(tmp_path / "a.npz", **{k: v for k, v in good.items() if k != "client"})
    refused("holds no array 'client'", "femnist", path=tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", **{**good, "x": pictures[:, 0, :27]})
    refused(r"is not FEMNIST: samples of shape \[1, 27, 28\]", "femnist", path=tmp_path / "b.npz")


def test_real_femnist_is_the_same_in_both_forms():
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


def test_shakespeare_of_leaf(tmp_path):
    text = "The quality of mercy is not strain'd, It droppeth as the gentle rain from heaven upon the place"
    x, y = [text[i : i + 80] for i in range(4)], [text[i + 80] for i in range(4)]
    leaf(tmp_path, "train", {"THE_MERCHANT_PORTIA": (x[:3], y[:3]), "A_ROLE": (x[:1], y[:1])})
    leaf(tmp_path, "test", {"THE_MERCHANT_PORTIA": (x[3:], y[3:])})
    data = load("leaf-shakespeare", folder=tmp_path)
    assert (data.kind, data.vocabulary, data.client_names) == ("text", 80, ("A_ROLE", "THE_MERCHANT_PORTIA"))
    assert "".join(CHARACTERS[c] for c in data.train.x[1].tolist()) == text[1:81]
    assert [CHARACTERS[c] for c in data.train.y.tolist()] == [*y[:3], y[0]]
    assert data.train.client.tolist() == [1, 1, 1, 0]
    for bad, told in (
        ((["short"], ["a"]), "x holds 'short', not a text of 80"),
        ((x[:1], ["ab"]), "y holds 'ab', not a text of 1"),
        ((["é" + x[0][1:]], y[:1]), "x holds 'é', which is none of LEAF's 80"),
        (([[0.5] * 784], [3]), "x holds list, not a text"),
    ):
        leaf(tmp_path, "train", {"ROLE": bad})
        refused(told, "leaf-shakespeare", folder=tmp_path)


# FER2013 ---------------------------------------------------------------------------------------------------


def faces(path: Path, usages: list[str], header: str = "emotion,pixels,Usage") -> np.ndarray:
    pictures = np.random.default_rng(0).integers(0, 256, (len(usages), 1, 48, 48), np.uint8)
    texts = [" ".join(map(str, pixels.ravel())) for pixels in pictures]
    rows = [f"{i % 7},{text},{usage}" for i, (text, usage) in enumerate(zip(texts, usages, strict=True))]
    path.write_text("\n".join([header, *rows]) + "\n")
    return pictures


USAGES = ["Training"] * 3 + ["PublicTest", "PrivateTest"]


def test_fer2013(tmp_path):
    pictures = faces(tmp_path / "fer2013.csv", USAGES)
    data = load("fer2013", folder=tmp_path)
    assert np.array_equal(torch.cat([data.train.x, data.test.x]).numpy(), pictures)
    assert (data.train.y.tolist(), data.test.y.tolist(), len(data.classes)) == ([0, 1, 2], [3, 4], 7)
    assert load("fer2013", folder=tmp_path, test="private").test.y.tolist() == [4]


def test_fer2013_with_columns_in_another_order(tmp_path):
    faces(tmp_path / "fer2013.csv", USAGES)
    rows = [line.split(",") for line in (tmp_path / "fer2013.csv").read_text().splitlines()]
    (tmp_path / "fer2013.csv").write_text("".join(f"{e}, {u}, {p}\n" for e, p, u in rows))
    assert load("fer2013", folder=tmp_path).test.y.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda raw: raw[:-300], r"line 6 is truncated or damaged: it must hold three columns"),
        (lambda raw: raw.replace(b"\n1,", b"\n1,7 "), "line 3 .* holds 2305 pixels; expected 2304"),
        (lambda raw: raw.replace(b"\n1,", b"\n1,x"), "line 3 .* holds other than numbers"),
        (
            lambda raw: re.sub(rb"\n1,\d+", b"\n1,256", raw),
            "line 3 holds pixels that are no whole numbers from 0 to 255",
        ),
        (lambda raw: re.sub(rb"\n1,\d+", b"\n1,1.5", raw), "line 3 holds pixels that are no whole"),
        (lambda raw: re.sub(rb"\n1,\d+", b"\n1,nan", raw), "line 3 "),
        (lambda raw: raw.replace(b"\n1,", b"\n7,"), "line 3 holds the emotion '7'; valid: 0 to 6"),
        (lambda raw: raw.replace(b"Usage", b"Use"), "has the columns emotion, pixels, use; expected"),
        (lambda raw: raw.replace(b"PublicTest", b"Public"), "line 5 is truncated or damaged"),
        (lambda raw: raw[: raw.index(b"\n4,")].replace(b"PublicTest", b"Training"), "holds no samples of the kind"),
        (lambda raw: b"\xff\xd8" + raw, "damaged or no CSV"),
        (lambda raw: b"", "has the columns ; expected"),
    ],
)
def test_fer2013_damaged(tmp_path, damage, told):
    faces(tmp_path / "fer2013.csv", USAGES)
    change(tmp_path / "fer2013.csv", damage)
    assert "fer2013.csv" in refused(told, "fer2013", folder=tmp_path)


def test_real_fer2013():
    data = load("fer2013", folder=real("fer2013"))
    assert torch.bincount(data.train.y).tolist() == [150] * 7
    assert torch.bincount(data.test.y).tolist() == [50] * 7


# VOC -------------------------------------------------------------------------------------------------------

THING = "<object><name>{0}</name><difficult>{1}</difficult><bndbox>{2}</bndbox></object>"


def picture(folder: Path, name: str, *things: tuple[str, int, tuple]) -> np.ndarray:
    """A picture of 40 x 30 pixels (a lossless one, under the name of a JPEG) and its annotation."""
    pixels = np.random.default_rng(int(name)).integers(0, 256, (30, 40, 3), np.uint8)
    for sub in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(folder / "JPEGImages" / f"{name}.jpg", format="png")
    box = "<xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax>"
    boxes = [THING.format(kind, hard, box.format(*sides)) for kind, hard, sides in things]
    text = f"<annotation><filename>{name}.jpg</filename>{''.join(boxes)}</annotation>"
    (folder / "Annotations" / f"{name}.xml").write_text(text)
    return pixels


@pytest.fixture
def pictures(tmp_path):
    """Two pictures to train with three objects, one of them difficult, and one to test on."""
    first = picture(tmp_path, "000001", ("cat", 0, (3, 5, 10, 12)), ("dog", 1, (1, 1, 40, 30)))
    picture(tmp_path, "000002", ("tvmonitor", 0, (1, 1, 40, 30)))
    picture(tmp_path, "000003", ("person", 0, (5.0, "6.0", 20, 21)))
    (tmp_path / "ImageSets/Main/trainval.txt").write_text("000001\n000002\n")
    (tmp_path / "ImageSets/Main/test.txt").write_text("000003\n")
    return tmp_path, first


def test_voc_cuts_objects_out(pictures):
    folder, first = pictures
    data = load("voc2007", folder=folder, size=8)
    assert [data.classes[i] for i in data.train.y] == ["cat", "tvmonitor"]
    # The box is of 8 x 8 pixels, counted from 1 with both ends inside, and so is not resized at all.
    assert np.array_equal(data.train.x[0].numpy(), first[4:12, 2:10].transpose(2, 0, 1))
    assert "2 objects of 2 pictures to train, 1 of 1 to test on" in data.facts["notes"]
    assert load("voc2007", folder=folder).train.x.shape == (2, 3, 32, 32)


def test_voc_options(pictures):
    folder, _ = pictures
    assert load("voc2007", folder=folder, difficult=True).train.y.tolist() == [7, 11, 19]
    assert load("voc2007", folder=folder, min_side=9).train.y.tolist() == [19]


def test_voc_of_one_list_draws_pictures_not_objects(pictures):
    folder, _ = pictures
    (folder / "ImageSets/Main/trainval.txt").unlink()
    (folder / "ImageSets/Main/test.txt").write_text("000001\n000002\n000003\n")
    data = load("voc2007", folder=folder, difficult=True, test_share=0.34)
    assert len(data.train) + len(data.test) == 4
    assert torch.equal(load("voc2007", folder=folder, difficult=True, test_share=0.34).test.x, data.test.x)
    assert "drawn by name" in data.facts["notes"]


@pytest.mark.parametrize(
    ("file", "damage", "told"),
    [
        ("Annotations/000001.xml", lambda raw: raw[:-20], "000001.xml: is truncated or no XML"),
        (
            "Annotations/000001.xml",
            lambda raw: raw.replace(b"cat", b"unicorn"),
            "the class 'unicorn'; valid: aero",
        ),
        ("Annotations/000001.xml", lambda raw: raw.replace(b"<xmin>3", b"<xmin>"), "four numbers are expected"),
        ("Annotations/000001.xml", lambda raw: raw.replace(b"<xmin>3", b"<xmin>nan"), "four numbers are expected"),
        ("Annotations/000001.xml", lambda raw: raw.replace(b"<xmin>3", b"<xmin>11"), "no maximum below its minimum"),
        ("Annotations/000001.xml", lambda raw: raw.replace(b"<xmax>10", b"<xmax>41"), "is of 40 x 30 pixels, but"),
        ("Annotations/000001.xml", lambda raw: raw.replace(b"000001", b"000002"), "tells of the picture '000002.jpg'"),
        ("Annotations/000001.xml", lambda raw: b'<!DOCTYPE a [<!ENTITY b "c">]>' + raw, "holds a declaration"),
        ("JPEGImages/000001.jpg", lambda raw: raw[:200], "000001.jpg: is damaged or no picture"),
        ("ImageSets/Main/test.txt", lambda raw: b"000001\n", "'000001' is in trainval.txt and in test.txt"),
        ("ImageSets/Main/test.txt", lambda raw: b"../secret\n", "which is no picture's name"),
        ("ImageSets/Main/test.txt", lambda raw: b"000009\n", "000009.xml: is missing"),
    ],
)
def test_voc_damaged(pictures, file, damage, told):
    folder, _ = pictures
    change(folder / file, damage)
    refused(told, "voc2007", folder=folder)


def test_real_voc():
    folder = real("VOCdevkit/VOC2007")
    data = load("voc2007", folder=folder)
    things = [one for path in sorted((folder / "Annotations").glob("*.xml")) for one in voc.read_things(path, False)]
    counts = torch.bincount(torch.cat([data.train.y, data.test.y]), minlength=20)
    assert len(data.train) + len(data.test) == len(things) == 53
    assert counts.tolist() == np.bincount([one.label for one in things], minlength=20).tolist()
    assert int(counts.min()) >= 1


# HAR -------------------------------------------------------------------------------------------------------


def walk(windows: int, rng: np.random.Generator) -> np.ndarray:
    """A recording: windows that overlap by half, [windows, 9, 128]."""
    signal = rng.standard_normal((9, 64 * (windows + 1))).round(4)
    return np.stack([signal[:, 64 * i : 64 * i + 128] for i in range(windows)])


@pytest.fixture
def motions():
    """Two people, two activities, four recordings of each, of 1 to 4 windows; in a random order."""
    rng = np.random.default_rng(0)
    made = [(walk(1 + k, rng), y, who) for who in (3, 8) for y in (0, 5) for k in range(4)]
    x = np.concatenate([one for one, _, _ in made])
    of = np.repeat(np.arange(len(made)), [len(one) for one, _, _ in made])
    order = rng.permutation(len(x))
    y, who = (np.array([made[i][k] for i in of])[order] for k in (1, 2))
    split = np.where(rng.random(len(x)) < 0.3, "test", "train")
    return x[order], y, who, split, of[order]


def test_har_recordings_are_found_whatever_the_order(motions):
    x, _, _, _, of = motions
    found = har.recordings(x)
    assert len(np.unique(found)) == 16
    # The same partition into sets: each found number goes with one true number.
    assert len(np.unique(np.stack([found, of], 1), axis=0)) == 16
    first = np.unique(found, return_index=True)[1]
    assert np.array_equal(first, np.sort(first))


def test_har_archive_never_tests_on_a_recording_of_training(tmp_path, motions):
    x, y, who, split, of = motions
    np.savez(tmp_path / "h.npz", x=x.astype(np.float32), y=y, client=who, split=split)
    data = load("har", path=tmp_path / "h.npz")
    assert (data.kind, data.train.x.shape[1:], data.client_names) == ("features", (9, 128), ("person 3", "person 8"))
    halves = [
        {of[i] for i in range(len(x)) if (torch.from_numpy(x[i]).float() == half.x).flatten(1).all(1).any()}
        for half in (data.train, data.test)
    ]
    assert not halves[0] & halves[1]
    assert len(halves[1]) == 4  # one of four recordings of each person and activity
    own = load("har", path=tmp_path / "h.npz", split="file")
    assert own.test.y.tolist() == y[split == "test"].tolist()
    alone = load("har", path=tmp_path / "h.npz", person=8)
    assert set(alone.train.client.tolist()) == set(alone.test.client.tolist()) == {1}
    assert torch.equal(alone.test.x, data.test.x[torch.from_numpy(data.test.client == 1)])
    refused(r"data.person: 4 is nobody in .*; valid: \[3, 8\]", "har", path=tmp_path / "h.npz", person=4)


def publish(folder: Path, motions: tuple, features: bool = True) -> None:
    """The publisher's folder: two halves, a file a channel, labels from 1."""
    x, y, who, split, _ = motions
    for half in ("train", "test"):
        rows = split == half
        (folder / half / "Inertial Signals").mkdir(parents=True)
        for channel, name in enumerate(har.SIGNALS):
            text = "\n".join("  " + " ".join(f"{v: .7e}" for v in window[channel]) for window in x[rows])
            (folder / half / "Inertial Signals" / f"{name}_{half}.txt").write_text(text + "\n")
        (folder / half / f"y_{half}.txt").write_text("".join(f"{label + 1}\n" for label in y[rows]))
        (folder / half / f"subject_{half}.txt").write_text("".join(f"{one}\n" for one in who[rows]))
        if features:
            np.savetxt(folder / half / f"X_{half}.txt", np.tile(y[rows][:, None], (1, 561)))


def test_har_of_the_publisher(tmp_path, motions):
    publish(tmp_path, motions)
    x, y, who, split, _ = motions
    data = load("har", path=tmp_path, split="file")
    assert torch.equal(data.train.x, torch.from_numpy(x[split == "train"].astype(np.float32)))
    assert data.test.y.tolist() == y[split == "test"].tolist()
    assert data.train.client.tolist() == (who[split == "train"] == 8).astype(int).tolist()
    features = load("har", path=tmp_path, inputs="features")
    assert features.train.x.shape[1:] == (561,)
    assert torch.equal(features.train.x[:, 7].long(), features.train.y)
    assert torch.equal(load("har", path=tmp_path).test.y, features.test.y)
    assert len(data.facts["files"]) == 24


@pytest.mark.parametrize(
    ("file", "damage", "told"),
    [
        ("train/y_train.txt", lambda raw: b"7" + raw[1:], "y_train.txt: holds the label 7.0; valid: 1 to 6"),
        ("train/y_train.txt", lambda raw: raw[2:], "windows, but .*y_train.txt holds"),
        ("test/subject_test.txt", lambda raw: raw[:-2] + b"x\n", "holds other than numbers"),
        ("test/Inertial Signals/total_acc_y_test.txt", lambda raw: raw[:-30], "is truncated or another file"),
        ("test/Inertial Signals/total_acc_y_test.txt", lambda raw: b"", "holds other than numbers"),
        ("test/Inertial Signals/total_acc_y_test.txt", lambda raw: b"\xff" + raw, "is no plain text"),
        ("test/X_test.txt", lambda raw: raw[raw.index(b"\n") + 1 :], "but there are .* labels"),
    ],
)
def test_har_damaged(tmp_path, motions, file, damage, told):
    publish(tmp_path, motions)
    change(tmp_path / file, damage)
    refused(told, "har", path=tmp_path)


def test_har_without_features(tmp_path, motions):
    publish(tmp_path, motions, features=False)
    assert refused("holds no features", "har", path=tmp_path, inputs="features").endswith('valid: inputs = "windows"')


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"x": np.zeros((4, 6, 128))}, r"'x' is float64 of shape \[4, 6, 128\]; expected floats \[4, 9, 128\]"),
        ({"y": np.array([1, 2, 3, 6])}, "holds the label 6; valid: 0 to 5"),
        ({"client": np.zeros(4)}, "'client' is float64"),
        ({"split": np.array(["train", "test", "train", "valid"])}, "'split' holds other than train and test"),
        ({"x": np.full((4, 9, 128), np.nan)}, "NaN or infinity"),
    ],
)
def test_har_archive_damaged(tmp_path, changes, told):
    good = {"x": np.random.default_rng(0).random((4, 9, 128)), "y": np.zeros(4, int), "client": np.ones(4, int),
            "split": np.array(["train", "test"] * 2)}  # fmt: skip
    np.savez(tmp_path / "h.npz", **{**good, **changes})
    refused(told, "har", path=tmp_path / "h.npz")


def test_real_har():
    data = load("har", path=real("uci-har.npz"))
    assert len(data.train) + len(data.test) == 10_299
    assert (len(data.client_names), len(np.unique(data.test.client))) == (30, 30)
    # Walking .. laying, as the publisher counts them; gravity is on the x axis of total acceleration.
    assert torch.bincount(torch.cat([data.train.y, data.test.y])).tolist() == [1722, 1544, 1406, 1777, 1906, 1944]
    assert float(data.train.x[:, 6].mean()) > 0.7 > float(data.train.x[:, :6].mean((0, 2)).abs().max()) * 10
    halves = [{half.tobytes() for x in s.x.numpy() for half in (x[:, :64], x[:, 64:])} for s in (data.train, data.test)]
    assert not halves[0] & halves[1], "no half of a window is in training and in test"


# Heart disease ---------------------------------------------------------------------------------------------

SICK = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,2"
WELL = "41,0,2,?,0,?,0,172,0,1.4,1,?,?,0"


@pytest.fixture
def hospitals(tmp_path):
    for i, name in enumerate(heart.HOSPITALS):
        lines = [SICK.replace("63.0", f"{60 + i}") if k % 2 else WELL for k in range(8)]
        (tmp_path / f"processed.{name}.data").write_text("\n".join([*lines, str(SICK)]) + "\n")
    return tmp_path


def test_heart_features_by_hand(hospitals):
    data = load("heart", folder=hospitals)
    names = data.facts["features"]
    assert (data.client_names, len(names), data.train.x.shape[1]) == (heart.HOSPITALS, 38, 38)
    assert np.bincount(data.train.client).tolist() == [7] * 4  # 4 well and 5 sick patients: one of each is test
    well = dict(zip(names, data.train.x[data.train.y == 0][0].tolist(), strict=True))
    sick = dict(zip(names, data.train.x[data.train.y == 1][0].tolist(), strict=True))
    assert (well["age"], well["sex = 0"], well["sex = 1"], well["cp = 2"], well["restecg = 0"]) == (41, 1, 0, 1, 1)
    assert (well["fbs = 0"], well["fbs = 1"], well["fbs missing"]) == (0, 0, 1)
    # Missing, or 0 for cholesterol: the mean of those that have it, and a mark.
    assert (well["trestbps"], well["trestbps missing"], well["chol"], well["chol missing"]) == (145, 1, 233, 1)
    assert (sick["chol"], sick["chol missing"], sick["thal = 6"], sick["thal missing"]) == (233, 0, 1, 0)
    assert well["oldpeak"] == pytest.approx(1.4)


def test_heart_means_are_of_training_patients_only():
    values = np.full((3, 13), np.nan)
    values[:, 3] = [100, 140, np.nan]
    x, names = heart.features(values, np.array([True, False, True]))
    assert x[:, names.index("trestbps")].tolist() == [100, 140, 100]
    assert x[:, names.index("age")].tolist() == [0, 0, 0]  # nobody has it


def test_heart_one_hospital_has_the_same_test(hospitals):
    data, va = load("heart", folder=hospitals), load("heart", folder=hospitals, hospital="va")
    assert torch.equal(va.test.x, data.test.x[torch.from_numpy(data.test.client == 3)])
    assert set(va.train.client.tolist()) == {3}


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda raw: raw[:-9], "va.data: line 9 is truncated or of another file: 12 values; expected 14"),
        (lambda raw: raw.replace(b"63", b"163"), "line 2: age is '163'; valid: 1 to 120"),
        (lambda raw: raw.replace(b"41,0,", b"41,2,", 1), r"line 1: sex is '2'; valid: 0, 1, or \? where missing"),
        (lambda raw: raw.replace(b"172", b"fast", 1), "line 1: thalach is 'fast'"),
        (lambda raw: raw.replace(b"172", b"nan", 1), "line 1: thalach is 'nan'"),
        (lambda raw: raw.replace(b"?,0\n", b"?,?\n", 1), r"line 1: num is '\?'; valid: 0, 1, 2, 3, 4$"),
        (lambda raw: b"", "holds no patients"),
        (lambda raw: b"\xfe" + raw, "is no plain text"),
        (lambda raw: raw.replace(b"63", b"62", 4), "processed.va.data: is the same file as processed.switzerland.data"),
    ],
)
def test_heart_damaged(hospitals, damage, told):
    change(hospitals / "processed.va.data", damage)
    refused(told, "heart", folder=hospitals)


def test_real_heart():
    data = load("heart", folder=real("heart-disease"))
    both = np.concatenate([data.train.client, data.test.client])
    assert np.bincount(both).tolist() == [303, 294, 123, 200]
    sick = torch.cat([data.train.y, data.test.y]).numpy() == 1
    assert np.bincount(both[sick]).tolist() == [139, 106, 115, 149]
    x, names = torch.cat([data.train.x, data.test.x]).numpy(), data.facts["features"]
    unmeasured = x[:, names.index("chol missing")] == 1
    assert np.bincount(both[unmeasured], minlength=4).tolist() == [0, 23, 123, 56]
