"""Objects of the pictures of VOC 2007."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets_helpers import change, load, real, refused
from PIL import Image

from fedblend.data.loaders import voc

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
        ("Annotations/000001.xml", lambda raw: raw.replace(b"cat", b"unicorn"), "the class 'unicorn'; valid: aero"),
        ("Annotations/000001.xml", lambda raw: raw.replace(b"<xmin>3", b"<xmin>"), "four numbers are expected"),
        ("Annotations/000001.xml", lambda raw: raw.replace(b"<xmin>3", b"<xmin>nan"), "four numbers are expected"),
        ("Annotations/000001.xml", lambda raw: raw.replace(b"<xmin>3", b"<xmin>11"), "each maximum at least its min"),
        ("Annotations/000001.xml", lambda raw: raw.replace(b"<xmax>10", b"<xmax>41"), "has 40 x 30 pixels, but"),
        ("Annotations/000001.xml", lambda raw: raw.replace(b"000001", b"000002"), "describes the image '000002.jpg'"),
        ("Annotations/000001.xml", lambda raw: b'<!DOCTYPE a [<!ENTITY b "c">]>' + raw, "holds a declaration"),
        ("JPEGImages/000001.jpg", lambda raw: raw[:200], "000001.jpg: is damaged or no image"),
        ("ImageSets/Main/test.txt", lambda raw: b"000001\n", "'000001' is in trainval.txt and in test.txt"),
        ("ImageSets/Main/test.txt", lambda raw: b"../secret\n", "which is no image's name"),
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
    things = [one for path in sorted((folder / "Annotations").glob("*.xml")) for one in voc.read_objects(path, False)]
    counts = torch.bincount(torch.cat([data.train.y, data.test.y]), minlength=20)
    assert len(data.train) + len(data.test) == len(things) == 53
    assert counts.tolist() == np.bincount([one.label for one in things], minlength=20).tolist()
    assert int(counts.min()) >= 1
