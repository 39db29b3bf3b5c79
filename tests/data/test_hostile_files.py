"""Malicious and unusually damaged data files give one message."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from datasets_helpers import change, refused
from helpers import each
from PIL import Image

from fedblend.core.errors import FedblendError
from fedblend.data.loaders import mnist, voc
from fedblend.data.loaders.image_folder import FORMATS, ImageFolder

X, Y = np.arange(20 * 9, dtype=np.uint8).reshape(20, 3, 3), np.arange(20) % 4


def message_of(path: Path, words: str) -> str:
    """The error message for an archive, which must be one line."""
    message = refused(words, "npz", path=path)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def npy(header: str) -> bytes:
    """The file of an array with any header, and no numbers."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()


def with_member(path: Path, raw: bytes, name: str = "x", others: Sequence[str] = ("y",)) -> Path:
    """An archive whose array ``name`` is ``raw``, with valid other ones."""
    sound = io.BytesIO()
    np.save(sound, Y)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.npy", raw)
        for other in others:
            archive.writestr(f"{other}.npy", sound.getvalue())
    return path


@each(
    ("raw", "words"),
    [
        (npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000000,)}"), "1000000000000000000,"),
        (npy(f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({10**30},)}}"), "no valid .npz archive"),
        (npy("(("), "multi-line statement"),
        (npy("if 1:\n  a\n b"), "no valid .npz archive"),
        (npy("x" * 20_000), "Header info length"),
        (npy("{'descr': 'O', 'fortran_order': False, 'shape': (20,)}"), "holds objects; save plain numbers or text"),
        (b"no array at all", "'x' is no array"),
        (b"", "no valid .npz archive"),
    ],
)
def test_an_invalid_member(tmp_path: Path, raw: bytes, words: str) -> None:
    message_of(with_member(tmp_path / "a.npz", raw), words)


def test_a_half_that_is_no_array_and_a_name_with_a_line_break(tmp_path: Path) -> None:
    path = with_member(tmp_path / "a.npz", b"no array at all", "y_test", ("x_train", "x_test", "y_train"))
    message_of(path, "'y_test' is no array")
    message_of(with_member(tmp_path / "a.npz", b"", "clien\nt"), r"'clien\\nt' is unknown")


@each(
    ("local", "central", "value", "words"), [(6, 8, 1, "encrypted"), (8, 10, 99, "compression method is not supported")]
)
def test_members_that_zipfile_cannot_read(tmp_path: Path, local: int, central: int, value: int, words: str) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    raw = bytearray((tmp_path / "a.npz").read_bytes())
    for sign, offset in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        at = raw.find(sign)
        while at >= 0:
            raw[at + offset] = value
            at = raw.find(sign, at + 4)
    (tmp_path / "a.npz").write_bytes(raw)
    message_of(tmp_path / "a.npz", words)


@each(
    ("name", "array", "words"),
    [
        ("classes", np.array("cat"), r"'classes' is <U3 of shape \[\]; valid: names as text"),
        ("classes", np.array([["a", "b"], ["c", "d"]]), r"'classes' is <U1 of shape \[2, 2\]"),
        ("classes", np.array([b"\xff"] * 4), "'classes' is "),
        ("client_names", np.array(4), r"'client_names' is int64 of shape \[\]; valid: names as text"),
        ("client_names", np.zeros(4, [("a", int)]), "'client_names' is "),
        ("split", np.array([b"\xff"] * 20), "'split' is .*; valid: 0 or 'train'"),
    ],
)
def test_names_that_are_no_list_of_text(tmp_path: Path, name: str, array: np.ndarray, words: str) -> None:
    for y in (Y, np.array(list("abcd") * 5)):
        np.savez(tmp_path / "a.npz", **{"x": X, "y": y, "client": Y, name: array})
        message_of(tmp_path / "a.npz", words)


ENTITY = '<!DOCTYPE a [<!ENTITY b "000001">]><annotation><filename>&b;.jpg</filename></annotation>'


@each(
    "raw",
    [
        ENTITY.encode(),
        ENTITY.encode("utf-16"),
        f'<?xml version="1.0" encoding="UTF-16"?>{ENTITY}'.encode("utf-16-be"),
        ENTITY.encode("utf-8-sig"),
        b'<!DOCTYPE a SYSTEM "http://localhost/a.dtd"><annotation><filename>000001.jpg</filename></annotation>',
        # What follows the beginning is no XML at all, which a parser that went on would find.
        b"<!DOCTYPE a [ & <<< ]>",
    ],
)
def test_a_document_type_is_an_error_in_every_encoding(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "000001.xml").write_bytes(raw)
    with pytest.raises(FedblendError, match="holds a declaration"):
        voc.read_objects(tmp_path / "000001.xml", difficult=False)


@each("encoding", ["utf-7", "nothing", "cp037"])
def test_an_annotation_in_an_unreadable_encoding(tmp_path: Path, encoding: str) -> None:
    text = "<annotation><filename>000001.jpg</filename></annotation>"
    (tmp_path / "000001.xml").write_text(f'<?xml version="1.0" encoding="{encoding}"?>{text}')
    with pytest.raises(FedblendError, match="is truncated or no XML"):
        voc.read_objects(tmp_path / "000001.xml", difficult=False)


PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)


def picture(path: Path, kind: str) -> None:
    """A picture of 8 x 6 pixels in some format, whatever its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(PIXELS).save(path, format=kind)


def pictures(folder: Path, kind: str = "PNG") -> Path:
    """A folder of two classes of two pictures; the path of one of them."""
    for place in ("a/0", "a/1", "b/0", "b/1"):
        picture(folder / f"{place}.png", kind)
    return folder / "a" / "0.png"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The EPS files passed to Ghostscript, which is not run."""
    from PIL import EpsImagePlugin

    handed: list[str] = []

    def run(*arguments: object, **options: object) -> Image.core.ImagingCore:
        handed.append("run")
        raise OSError("it would run")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", run)
    return handed


@pytest.mark.slow
def test_image_folder_does_not_run_ghostscript(tmp_path: Path, seen: list[str]) -> None:
    picture(tmp_path / "a" / "0.jpg", "JPEG")
    picture(tmp_path / "a" / "1.jpg", "EPS")
    with pytest.raises(FedblendError, match=r"1.jpg: is damaged or no image \(valid: PNG, JPEG, .*\); repair"):
        ImageFolder(path=str(tmp_path)).load()
    assert not seen


def test_voc_does_not_run_ghostscript(tmp_path: Path, seen: list[str]) -> None:
    picture(tmp_path / "0.jpg", "EPS")
    with pytest.raises(FedblendError, match=r"0.jpg: is damaged or no image \(valid: JPEG, PNG\); download it again"):
        voc.Voc2007()._cut_out(tmp_path / "0.jpg", [])
    assert not seen


@each("kind", FORMATS)
def test_image_folder_reads_all_formats_of_its_suffixes(tmp_path: Path, kind: str) -> None:
    # A format goes by the file, not by its name.
    x = ImageFolder(path=str(pictures(tmp_path, kind).parents[1]), test_share=0.5).load().train.x
    with Image.open(tmp_path / "a" / "0.png") as own:
        assert x[0].permute(1, 2, 0).tolist() == np.asarray(own.convert("RGB")).tolist()


@pytest.mark.filterwarnings("ignore:Truncated File Read")
@each("damage", [lambda raw: raw[:60], lambda raw: raw[:-30], lambda raw: b""])
@each("kind", ["PNG", "JPEG", "TIFF"])
def test_a_truncated_image(tmp_path: Path, kind: str, damage: Callable[[bytes], bytes]) -> None:
    picture(tmp_path / "a" / "0.png", kind)
    change(tmp_path / "a" / "0.png", damage)
    with pytest.raises(FedblendError, match=r"0.png: is damaged or no image"):
        ImageFolder(path=str(tmp_path)).load()


@each(
    ("put", "words"),
    [
        (os.mkfifo, "is no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: path.symlink_to("nowhere"), "there is no such file"),
    ],
)
def test_what_has_no_end_is_not_read(tmp_path: Path, put: Callable[[Path], object], words: str) -> None:
    shutil.rmtree(tmp_path / "set", ignore_errors=True)
    (tmp_path / "a.npz").unlink(missing_ok=True)
    path = pictures(tmp_path / "set")
    path.unlink()
    put(path)
    with pytest.raises(FedblendError, match=f"0.png: {words}"):
        ImageFolder(path=str(tmp_path / "set")).load()
    if words == "is no regular file":
        put(tmp_path / "a.npz")
        message_of(tmp_path / "a.npz", words)


def test_a_gzipped_file_is_not_unpacked_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "LARGEST", 1_000)
    header = struct.pack(">BBBBI", 0, 0, mnist.UNSIGNED_BYTE, 1, 1_001)
    (tmp_path / "a.gz").write_bytes(gzip.compress(header + bytes(1_001)))
    with pytest.raises(FedblendError, match=r"a.gz: is damaged: its header has shape \[1001\], more than 1000 bytes"):
        mnist.read_idx(tmp_path / "a.gz", 1)


def test_an_archive_larger_than_the_memory_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PAGE_SIZE" else 100)
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    message_of(tmp_path / "a.npz", "its content, unpacked, needs .* GB, and this machine has")
