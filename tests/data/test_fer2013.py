"""FER2013's faces."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets_helpers import change, load, real, refused


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
        (lambda raw: raw[:-300], r"line 6 is truncated or damaged: it must have three columns"),
        (lambda raw: raw.replace(b"\n1,", b"\n1,7 "), "line 3 .* has 2305 pixels; expected 2304"),
        (lambda raw: raw.replace(b"\n1,", b"\n1,x"), "line 3 .* has words that are no numbers"),
        (lambda raw: re.sub(rb"\n1,\d+", b"\n1,256", raw), "line 3 has pixels that are no whole numbers from 0 to 255"),
        (lambda raw: re.sub(rb"\n1,\d+", b"\n1,1.5", raw), "line 3 has pixels that are no whole"),
        (lambda raw: re.sub(rb"\n1,\d+", b"\n1,nan", raw), "line 3 "),
        (lambda raw: raw.replace(b"\n1,", b"\n7,"), "line 3 has the emotion '7'; valid: 0 to 6"),
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


@pytest.mark.slow
def test_real_fer2013():
    data = load("fer2013", folder=real("fer2013"))
    assert torch.bincount(data.train.y).tolist() == [150] * 7
    assert torch.bincount(data.test.y).tolist() == [50] * 7
