"""Pictures of every mode, as each loader stores them: as a viewer shows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import each
from PIL import Image

import fedblend
from fedblend.cli.predict import read_samples
from fedblend.core.errors import FedblendError
from fedblend.data.loaders.hub import Hub
from fedblend.data.loaders.image_folder import ImageFolder
from fedblend.data.loaders.voc import Object, Voc2007

RED, BLUE, WHITE = [250, 0, 0], [0, 0, 250], [255, 255, 255]


def of_folder(path: Path) -> np.ndarray:
    copy = path.with_name(f"copy{path.suffix}")
    copy.write_bytes(path.read_bytes())
    return ImageFolder(path=str(path.parent.parent), test_share=0.5).load().train.x[0].numpy()


def stored(pictures: list[Image.Image], path: Path) -> np.ndarray:
    samples = [(picture, i % 2) for i, picture in enumerate(pictures)]
    return fedblend.from_torch(samples, path, test=samples).load().train.x.numpy()


def of_torch(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return stored([picture, picture], path.with_suffix(".npz"))[0]


class Split(dict[str, Any]):
    """A split of the Hub with a column of pictures."""

    def __init__(self, pictures: list[Any]) -> None:
        super().__init__(picture=pictures)
        self.features = {"picture": type("Image", (), {})()}


def of_hub(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        x = Hub("a/set")._array(Split([picture]), "picture")[0]
    return x[None] if x.ndim == 2 else x.transpose(2, 0, 1)


def of_prediction(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        height, width = picture.height, picture.width
    about = {"kind": "image", "shape": [3, height, width]}
    predictor: Any = SimpleNamespace(description=about)
    return read_samples(path, predictor)[1][0]


LOADERS = [of_folder, of_torch, of_hub, of_prediction]
Loader = Callable[[Path], np.ndarray]


def saved(picture: Image.Image, folder: Path, name: str = "own.png", **options: Any) -> Path:
    path = folder / "set" / "a" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, **options)
    return path


def colours(x: np.ndarray) -> list[list[int]]:
    """The colours of a picture, in reading order."""
    return np.broadcast_to(x, (3, *x.shape[1:])).reshape(3, -1).T.tolist()


def rgb(*pixels: list[int]) -> Image.Image:
    """A picture of one row."""
    return Image.fromarray(np.array([pixels], np.uint8))


def with_alpha(mode: str, *pixels: list[int]) -> Image.Image:
    return Image.frombytes(mode, (len(pixels), 1), bytes(value for pixel in pixels for value in pixel))


def palette(**info: Any) -> Image.Image:
    """A red and a blue pixel, as places in a palette."""
    picture = Image.new("P", (2, 1))
    picture.putpalette([*RED, *BLUE])
    picture.putdata([0, 1])
    picture.info.update(info)
    return picture


@pytest.mark.parametrize(
    ("picture", "shown"),
    [
        (palette(), [RED, BLUE]),
        (palette(transparency=1), [RED, WHITE]),
        (with_alpha("RGBA", [*RED, 255], [*RED, 0], [0, 0, 0, 51]), [RED, WHITE, [204, 204, 204]]),
        (with_alpha("LA", [7, 255], [7, 0]), [[7] * 3, WHITE]),
        (Image.frombytes("1", (2, 1), b"\x40"), [[0] * 3, WHITE]),
        (Image.frombytes("L", (2, 1), b"\x07\xc8"), [[7] * 3, [200] * 3]),
    ],
    ids=["palette", "palette with transparency", "alpha", "grey with alpha", "bits", "grey"],
)
def test_colours_are_those_that_a_viewer_shows(picture: Image.Image, shown: list[list[int]], tmp_path: Path) -> None:
    for load in LOADERS:
        assert colours(load(saved(picture, tmp_path / load.__name__))) == shown, load.__name__


@each("load", LOADERS)
def test_a_colour_may_be_transparent_and_four_printing_colours_become_three(load: Loader, tmp_path: Path) -> None:
    path = saved(rgb(RED, BLUE), tmp_path / load.__name__, transparency=tuple(BLUE))
    assert colours(load(path)) == [RED, WHITE]
    path = saved(with_alpha("CMYK", [0, 255, 255, 0], [0, 0, 0, 255]), tmp_path / f"{load.__name__}-4", "own.tif")
    assert colours(load(path)) == [[255, 0, 0], [0, 0, 0]]


UPRIGHT = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
FLIPPED = UPRIGHT.transpose(1, 0, 2)
BY_ORIENTATION = [
    UPRIGHT, np.fliplr(UPRIGHT), np.rot90(UPRIGHT, 2), np.flipud(UPRIGHT),
    FLIPPED, np.rot90(UPRIGHT), np.rot90(UPRIGHT, 2).transpose(1, 0, 2), np.rot90(UPRIGHT, -1),
]  # fmt: skip


@each("load", LOADERS[:3])
def test_pictures_are_upright(load: Loader, tmp_path: Path) -> None:
    for orientation, pixels in enumerate(BY_ORIENTATION, 1):
        exif = Image.Exif()
        exif[0x0112] = orientation
        folder = tmp_path / f"{load.__name__}{orientation}"
        path = saved(Image.fromarray(np.ascontiguousarray(pixels)), folder, exif=exif)
        assert load(path).transpose(1, 2, 0).tolist() == UPRIGHT.tolist(), orientation


def test_boxes_of_voc_count_in_the_pixels_as_stored(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    path = saved(rgb(RED, BLUE), tmp_path, exif=exif)
    (cut,) = Voc2007(size=1)._cut_out(path, [Object(0, (0, 0, 1, 1))])
    assert cut.tolist() == [[RED]]


@each("load", LOADERS)
def test_several_frames_and_more_than_8_bits_are_refused(load: Loader, tmp_path: Path) -> None:
    for name in ("own.gif", "own.tif", "own.png"):
        path = saved(rgb(RED), tmp_path / name / load.__name__, name, save_all=True, append_images=[rgb(BLUE)])
        with pytest.raises(FedblendError, match="holds several frames; valid: one picture"):
            load(path)
    for kind in (np.uint16, np.int32, np.float32):
        folder = tmp_path / kind.__name__ / load.__name__
        path = saved(Image.fromarray(np.full((2, 2), 300, kind)), folder, "own.tif")
        with pytest.raises(FedblendError, match=r"has more than 8 bits a channel \(mode .*\); valid: images of 8 bits"):
            load(path)


@each("load", LOADERS)
def test_a_photo_with_a_preview_is_the_photo(load: Loader, tmp_path: Path) -> None:
    options = {"format": "MPO", "save_all": True, "append_images": [rgb([0, 0, 0])]}
    path = saved(rgb(WHITE), tmp_path / load.__name__, "own.jpg", **options)
    with Image.open(path) as own:
        assert own.n_frames == 2
    assert colours(load(path)) == [WHITE]


def test_a_hub_row_without_a_picture_is_refused() -> None:
    with pytest.raises(FedblendError, match="'picture' in row 1 is empty; valid: an image"):
        Hub("a/set")._array(Split([rgb(RED), None]), "picture")


def test_a_picture_whose_file_is_closed_is_stored(tmp_path: Path) -> None:
    with Image.open(saved(palette(), tmp_path, "own.gif")) as picture:
        picture.load()
    assert colours(stored([picture, picture], tmp_path / "x.npz")[0]) == [RED, BLUE]
