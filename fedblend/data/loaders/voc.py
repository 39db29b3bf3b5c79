"""PASCAL VOC 2007 as a classification set: each annotated object cut out of its picture."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.parsers.expat import ExpatError, ParserCreate

import numpy as np
import torch

from fedblend.core.dataset import Dataset, Samples, check
from fedblend.core.errors import FedblendError, legible
from fedblend.core.registry import Count, FilePath, part
from fedblend.data.loaders.files import TestShare, draw_test_half
from fedblend.data.loaders.pictures import read_picture
from fedblend.data.loaders.places import Home

CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip

FORMATS = ("JPEG", "PNG")
"""The formats of pictures, whatever their names end in: the publisher's, and one without losses."""

HOME = Home(
    name="voc2007",
    files=("Annotations", "JPEGImages", "ImageSets/Main/test.txt"),
    folders=("VOCdevkit/VOC2007", "VOC2007"),
    address=(
        "http://host.robots.ox.ac.uk/pascal/VOC/voc2007/VOCtrainval_06-Nov-2007.tar and "
        "VOCtest_06-Nov-2007.tar beside it"
    ),
)


@dataclass(frozen=True)
class Thing:
    """An object of a picture: its class, and its box (left, top, right, bottom) in pixels, the right and lower open."""

    label: int
    box: tuple[int, int, int, int]


@part("dataset", "voc2007")
class Voc2007:
    """PASCAL VOC 2007 as classification: objects cut out of their pictures, resized to 32 x 32, 20 classes.

    After AggEnhance (section 4.1), which derives such a set and tells no more than its numbers: 8,243 to train and
    5,000 to test on. Here every annotated object is a sample, cut out by its box and resized (bilinear, its sides
    scaled each for itself). Boxes of one picture may overlap, but no picture is in both halves: the training half is
    the publisher's list "trainval" and the test half "test"; where only one list is there, ``test_share`` of its
    pictures, drawn by name, are test. ``folder`` holds Annotations, JPEGImages and ImageSets; without it it is looked
    for in ``$FEDBLEND_DATA/VOCdevkit/VOC2007``. Raises :class:`FedblendError` that names the file for what is missing,
    damaged, of another class, or has a box outside of its picture.
    """

    folder: FilePath | None = None
    """The folder VOC2007; without it it is looked for under $FEDBLEND_DATA."""
    size: Count = 32
    """Height and width in pixels to which objects are resized."""
    difficult: bool = False
    """Whether to take objects that are marked as difficult to recognise, which the publisher does not count."""
    min_side: Count = 1
    """Height and width in pixels, before resizing, below which an object is left out."""
    test_share: TestShare = 0.2
    """Share of the pictures that is test, where only one of the lists "trainval" and "test" is there."""

    def load(self) -> Dataset:
        """The data set: x uint8 [n, 3, size, size], y int64 [n]."""
        place = HOME.find(self.folder)
        train, test, rule = self._lists(place / "ImageSets" / "Main")
        digest = hashlib.sha256()
        halves = [self._objects(place, names, digest) for names in (train, test)]
        count = len(train) + len(test)
        facts: dict[str, Any] = {
            "source": "Everingham et al. 2010: PASCAL VOC 2007 (pictures of flickr, research use)",
            "files": {f"{count} pictures and annotations, names and contents": digest.hexdigest()},
            "notes": f"{len(halves[0])} objects of {len(train)} pictures to train, {len(halves[1])} of {len(test)} to "
            f"test on; {rule}",
        }
        return check(Dataset("voc2007", "image", halves[0], halves[1], CLASSES, facts=facts))

    def _lists(self, folder: Path) -> tuple[list[str], list[str], str]:
        """The names of the pictures of both halves, and how they were told apart."""
        lists = {name: _names(folder / f"{name}.txt") for name in ("trainval", "test")}
        if all(lists.values()):
            both = sorted({*lists["trainval"]} & {*lists["test"]})
            if both:
                raise FedblendError(f"{folder}: the picture '{both[0]}' is in trainval.txt and in test.txt")
            return lists["trainval"], lists["test"], "the publisher's lists trainval and test"
        names = lists["test"] or lists["trainval"]
        if len(names) < 2:
            raise FedblendError(f"{folder}: its lists name {len(names)} pictures; at least two are needed")
        held = draw_test_half(np.zeros(len(names)), self.test_share, "voc2007")
        halves = [[name for name, one in zip(names, held, strict=True) if one == half] for half in (False, True)]
        return halves[0], halves[1], f"test: {self.test_share:g} of the pictures of one list, drawn by name"

    def _objects(self, place: Path, names: list[str], digest: hashlib._Hash) -> Samples:
        """All objects of these pictures; their files' names and bytes go into ``digest``."""
        cut: list[np.ndarray] = []
        labels: list[int] = []
        for name in names:
            paths = place / "Annotations" / f"{name}.xml", place / "JPEGImages" / f"{name}.jpg"
            for path in paths:
                if not path.is_file():
                    raise FedblendError(f"{path}: is missing, but the lists in ImageSets/Main name '{name}'")
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
            things = [one for one in read_things(paths[0], self.difficult) if self._wants(one)]
            cut += self._cut(paths[1], things)
            labels += [one.label for one in things]
        x = np.stack(cut).transpose(0, 3, 1, 2) if cut else np.empty((0, 3, self.size, self.size), np.uint8)
        return Samples(torch.from_numpy(np.ascontiguousarray(x)), torch.tensor(labels, dtype=torch.int64))

    def _wants(self, thing: Thing) -> bool:
        left, top, right, bottom = thing.box
        return min(right - left, bottom - top) >= self.min_side

    def _cut(self, path: Path, things: list[Thing]) -> list[np.ndarray]:
        """The objects of one picture, uint8 [size, size, 3] each."""
        from PIL import Image

        picture = read_picture(path, FORMATS, "RGB", "fetch it anew")
        for thing in things:
            if thing.box[2] > picture.width or thing.box[3] > picture.height:
                raise FedblendError(
                    f"{path}: is of {picture.width} x {picture.height} pixels, but its annotation has a "
                    f"{CLASSES[thing.label]} up to {thing.box[2]} x {thing.box[3]}; is it another picture?"
                )
        way = Image.Resampling.BILINEAR
        return [np.asarray(picture.resize((self.size, self.size), way, box=thing.box)) for thing in things]


def _names(path: Path) -> list[str]:
    """The pictures that a list names; none if there is no such list."""
    if not path.is_file():
        return []
    names = path.read_bytes().decode("ascii", "replace").split()
    bad = [name for name in names if not name.isalnum()]
    if bad or len(set(names)) < len(names):
        fault = f"holds {bad[0]!r}, which is no picture's name" if bad else "names a picture twice"
        raise FedblendError(f"{path}: {fault}; it must hold one name a line, such as 000005")
    return names


def read_things(path: Path, difficult: bool) -> list[Thing]:
    """The objects that an annotation tells of, without the difficult ones unless these are wanted.

    Boxes are counted from 1 with both ends inside, as VOC has them. Raises :class:`FedblendError` that names the file
    for what is no annotation of VOC.
    """
    raw = path.read_bytes()
    try:
        if _declares(raw):
            raise FedblendError(
                f"{path}: holds a declaration (<!DOCTYPE), which no annotation of VOC does; it is not read"
            )
        root = ElementTree.fromstring(raw)
    # Beside what is no XML: an encoding that is unknown, or has no table.
    except (ExpatError, ElementTree.ParseError, LookupError, ValueError) as error:
        raise FedblendError(f"{path}: is truncated or no XML ({legible(error)}); fetch it anew") from None
    if root.findtext("filename", "").strip() != f"{path.stem}.jpg":
        raise FedblendError(f"{path}: tells of the picture '{root.findtext('filename', '')}', not of {path.stem}.jpg")
    found = []
    for one in root.findall("object"):
        if difficult or one.findtext("difficult", "0").strip() != "1":
            found.append(_thing(one, path))
    return found


def _declares(raw: bytes) -> bool:
    """Whether XML has a document type, in which entities can be defined that grow without bound.

    It is read in its own encoding, since the bytes of UTF-16 and others show no "<!", up to the document type at most:
    what stands in it is not read. Raises :class:`ExpatError` for what is no XML.
    """

    def stop(*_: object) -> None:
        raise _Declared

    parser = ParserCreate()
    parser.StartDoctypeDeclHandler = stop
    try:
        parser.Parse(raw, True)
    except _Declared:
        return True
    return False


class _Declared(Exception):
    """A document type begins here."""


def _thing(one: ElementTree.Element, path: Path) -> Thing:
    name = one.findtext("name", "").strip()
    if name not in CLASSES:
        raise FedblendError(f"{path}: holds an object of the class '{name}'; valid: {', '.join(CLASSES)}")
    words = [one.findtext(f"bndbox/{side}", "") for side in ("xmin", "ymin", "xmax", "ymax")]
    try:
        # Some boxes of VOC are written as fractions of pixels.
        left, top, right, bottom = (round(float(word)) for word in words)
    except (ValueError, OverflowError):
        raise FedblendError(f"{path}: the box of a {name} is {words}; four numbers are expected") from None
    if not (1 <= left <= right and 1 <= top <= bottom):
        raise FedblendError(f"{path}: the box of a {name} is {words}; from 1 up, and no maximum below its minimum")
    return Thing(CLASSES.index(name), (left - 1, top - 1, right, bottom))
