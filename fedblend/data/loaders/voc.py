"""PASCAL VOC 2007 as a classification data set: each annotated object is cut out of its image."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree
from xml.parsers.expat import ParserCreate

import numpy as np

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError, legible
from fedblend.core.registry import Count, FilePath, part
from fedblend.data.loaders.files import DataFiles, TestShare, by_half, draw_test_half, made, read_image, regular_file

CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip

FORMATS = ("JPEG", "PNG")  # Formats of the images, under any suffix: the publisher's, and a lossless one

FILES = DataFiles(
    name="voc2007",
    files=("Annotations", "JPEGImages", "ImageSets/Main/test.txt"),
    folders=("VOCdevkit/VOC2007", "VOC2007"),
    address=(
        "http://host.robots.ox.ac.uk/pascal/VOC/voc2007/VOCtrainval_06-Nov-2007.tar and "
        "VOCtest_06-Nov-2007.tar in the same folder"
    ),
)


class Object(NamedTuple):
    """An object of an image: its class, 0 to 19, and (left, top, right, bottom) in pixels from 0, the last two out."""

    label: int
    box: tuple[int, int, int, int]


@part("dataset", "voc2007")
class Voc2007:
    """PASCAL VOC 2007 as classification: objects cut out of their images, resized to 32 x 32, 20 classes.

    After AggEnhance (section 4.1), which derives such a data set and gives only its sizes: 8,243 samples to train and
    5,000 to test on. Here every annotated object is a sample, cut out by its box and resized (bilinear, width and
    height scaled separately). Boxes of one image may overlap, but no image is in both halves: the training half is the
    publisher's list "trainval" and the test half "test". With only one list, ``test_share`` of its images, drawn by
    name, are test. ``folder`` holds Annotations, JPEGImages and ImageSets; the default is
    ``$FEDBLEND_DATA/VOCdevkit/VOC2007``. Raises :class:`FedblendError` with the file for missing or damaged files,
    unknown classes, and boxes outside of their images.
    """

    folder: FilePath | None = None
    """The folder VOC2007; by default it is searched under $FEDBLEND_DATA."""
    size: Count = 32
    """Height and width in pixels to which objects are resized."""
    difficult: bool = False
    """Whether to include objects marked as difficult to recognise, which the publisher does not count."""
    min_side: Count = 1
    """Height and width in pixels, before resizing, below which an object is left out."""
    test_share: TestShare = 0.2
    """Share of the images that is test, with only one of the lists "trainval" and "test"."""

    def load(self) -> Dataset:
        """Load x uint8 [n, 3, size, size] and y int64 [n]."""
        root = FILES.find(self.folder)
        train, test, rule = self._lists(root / "ImageSets" / "Main")
        digest = hashlib.sha256()
        halves = [self._objects(root, names, digest) for names in (train, test)]
        count = len(train) + len(test)
        files = {f"{count} pictures and annotations, names and contents": digest.hexdigest()}
        objects, held_out = (len(y) for _, y in halves)
        notes = f"{objects} objects of {len(train)} pictures to train, {held_out} of {len(test)} to test on; {rule}"
        source = "Everingham et al. 2010: PASCAL VOC 2007 (images of flickr, research use)"
        return made("voc2007", "image", halves, CLASSES, (source, files, notes))

    def _lists(self, folder: Path) -> tuple[list[str], list[str], str]:
        lists = {name: _names(folder / f"{name}.txt") for name in ("trainval", "test")}
        if all(lists.values()):
            both = sorted({*lists["trainval"]} & {*lists["test"]})
            if both:
                raise FedblendError(f"{folder}: the image '{both[0]}' is in trainval.txt and in test.txt")
            return lists["trainval"], lists["test"], "the publisher's lists trainval and test"
        names = lists["test"] or lists["trainval"]
        if len(names) < 2:
            raise FedblendError(f"{folder}: its lists name {len(names)} images; at least two are needed")
        test = draw_test_half(np.zeros(len(names)), self.test_share, "voc2007")
        ((train,), (held_out,)) = by_half(test, np.array(names))
        rule = f"test: {self.test_share:g} of the pictures of one list, drawn by name"
        return train.tolist(), held_out.tolist(), rule

    def _objects(self, root: Path, names: list[str], digest: hashlib._Hash) -> tuple[np.ndarray, np.ndarray]:
        """All objects of these images; the names and bytes of their files are added to ``digest``."""
        cut: list[np.ndarray] = []
        labels: list[int] = []
        for name in names:
            paths = root / "Annotations" / f"{name}.xml", root / "JPEGImages" / f"{name}.jpg"
            for path in paths:
                if not path.is_file():
                    raise FedblendError(f"{path}: is missing, but the lists in ImageSets/Main name '{name}'")
                digest.update(path.name.encode() + b"\0" + regular_file(path).read_bytes())
            objects = read_objects(paths[0], self.difficult)
            sides = [min(right - left, bottom - top) for _, (left, top, right, bottom) in objects]
            objects = [one for one, side in zip(objects, sides, strict=True) if side >= self.min_side]
            cut += self._cut_out(paths[1], objects)
            labels += [label for label, _ in objects]
        x = np.stack(cut).transpose(0, 3, 1, 2) if cut else np.empty((0, 3, self.size, self.size), np.uint8)
        return np.ascontiguousarray(x), np.array(labels, np.int64)

    def _cut_out(self, path: Path, objects: list[Object]) -> list[np.ndarray]:
        """The objects of one image, each uint8 [size, size, 3]."""
        from PIL import Image

        # Boxes count in the pixels as they are stored.
        image = read_image(path, FORMATS, "RGB", "download it again", upright=False)
        for label, (_, _, right, bottom) in objects:
            if right > image.width or bottom > image.height:
                found = f"its annotation has a {CLASSES[label]} up to {right} x {bottom}"
                raise FedblendError(f"{path}: has {image.width} x {image.height} pixels, but {found}; another image?")
        size, bilinear = (self.size, self.size), Image.Resampling.BILINEAR
        return [np.asarray(image.resize(size, bilinear, box=box)) for _, box in objects]


def _names(path: Path) -> list[str]:
    """The names of images in a list; empty if there is no such list."""
    if not path.is_file():
        return []
    names = regular_file(path).read_bytes().decode("ascii", "replace").split()
    bad = [name for name in names if not name.isalnum()]
    if bad or len(set(names)) < len(names):
        fault = f"holds {bad[0]!r}, which is no image's name" if bad else "names an image twice"
        raise FedblendError(f"{path}: {fault}; it must have one name a line, such as 000005")
    return names


def read_objects(path: Path, difficult: bool) -> list[Object]:
    """Read the objects of an annotation, with ``difficult`` also those marked as difficult.

    VOC counts the pixels of a box from 1 and includes both ends.
    """
    raw = regular_file(path).read_bytes()

    def refuse(*_: object) -> None:
        raise FedblendError(f"{path}: holds a declaration (<!DOCTYPE), which no annotation of VOC has; it is not read")

    # A document type can define entities that grow without bound. A parser looks for it, because some encodings such as
    # UTF-16 do not contain the bytes "<!"; it stops there and does not read the content.
    parser = ParserCreate()
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(raw, True)
        root = ElementTree.fromstring(raw)
    except FedblendError:
        raise
    # The file may name an unknown encoding, or the codec of any installed package, which raises what it likes.
    except Exception as error:
        raise FedblendError(f"{path}: is truncated or no XML ({legible(error)}); download it again") from None
    if root.findtext("filename", "").strip() != f"{path.stem}.jpg":
        raise FedblendError(f"{path}: describes the image '{root.findtext('filename', '')}', not {path.stem}.jpg")
    objects = [one for one in root.findall("object") if difficult or one.findtext("difficult", "0").strip() != "1"]
    return [_parse_object(one, path) for one in objects]


def _parse_object(one: ElementTree.Element, path: Path) -> Object:
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
        raise FedblendError(f"{path}: the box of a {name} is {words}; from 1 up, and each maximum at least its minimum")
    return Object(CLASSES.index(name), (left - 1, top - 1, right, bottom))
