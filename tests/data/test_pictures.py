"""Pictures of every mode, as each loader stores them: as a viewer shows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedblend
from fedblend.cli.predict import read_samples
from fedblend.core.errors import FedblendError
from fedblend.data.loaders.hub import Hub
from fedblend.data.loaders.image_folder import ImageFolder
from fedblend.data.loaders.voc import AnnotatedObject, Voc2007

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
    path.parent.mkdir(parents=True)
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


@pytest.mark.parametrize("load", LOADERS)
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
def test_colours_are_those_that_a_viewer_shows(
    picture: Image.Image, shown: list[list[int]], load: Loader, tmp_path: Path
) -> None:
    assert colours(load(saved(picture, tmp_path))) == shown


@pytest.mark.parametrize("load", LOADERS)
def test_one_colour_may_be_transparent(load: Loader, tmp_path: Path) -> None:
    path = saved(rgb(RED, BLUE), tmp_path, transparency=tuple(BLUE))
    assert colours(load(path)) == [RED, WHITE]


@pytest.mark.parametrize("load", LOADERS)
def test_four_printing_colours_become_three(load: Loader, tmp_path: Path) -> None:
    path = saved(with_alpha("CMYK", [0, 255, 255, 0], [0, 0, 0, 255]), tmp_path, "own.tif")
    assert colours(load(path)) == [[255, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("load", LOADERS[:3])
@pytest.mark.parametrize(
    ("orientation", "stored"),
    [
        (1, lambda x: x),
        (2, np.fliplr),
        (3, lambda x: np.rot90(x, 2)),
        (4, np.flipud),
        (5, lambda x: x.transpose(1, 0, 2)),
        (6, np.rot90),
        (7, lambda x: np.rot90(x, 2).transpose(1, 0, 2)),
        (8, lambda x: np.rot90(x, -1)),
    ],
)
def test_pictures_are_upright(
    orientation: int, stored: Callable[[np.ndarray], np.ndarray], load: Loader, tmp_path: Path
) -> None:
    upright = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(Image.fromarray(np.ascontiguousarray(stored(upright))), tmp_path, exif=exif)
    assert load(path).transpose(1, 2, 0).tolist() == upright.tolist()


def test_boxes_of_voc_count_in_the_pixels_as_stored(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    path = saved(rgb(RED, BLUE), tmp_path, exif=exif)
    (cut,) = Voc2007(size=1)._cut_out(path, [AnnotatedObject(0, (0, 0, 1, 1))])
    assert cut.tolist() == [[RED]]


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("name", ["own.gif", "own.tif", "own.png"])
def test_several_frames_are_no_picture(name: str, load: Loader, tmp_path: Path) -> None:
    path = saved(rgb(RED), tmp_path, name, save_all=True, append_images=[rgb(BLUE)])
    with pytest.raises(FedblendError, match="holds several frames; valid: one picture"):
        load(path)


@pytest.mark.parametrize("load", LOADERS)
def test_a_photo_with_a_preview_is_the_photo(load: Loader, tmp_path: Path) -> None:
    path = saved(rgb(WHITE), tmp_path, "own.jpg", format="MPO", save_all=True, append_images=[rgb([0, 0, 0])])
    with Image.open(path) as own:
        assert own.n_frames == 2
    assert colours(load(path)) == [WHITE]


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_more_than_8_bits_are_refused(kind: type[np.generic], load: Loader, tmp_path: Path) -> None:
    path = saved(Image.fromarray(np.full((2, 2), 300, kind)), tmp_path, "own.tif")
    with pytest.raises(FedblendError, match="has more than 8 bits a channel"):
        load(path)


def test_a_hub_row_without_a_picture_is_refused() -> None:
    with pytest.raises(FedblendError, match="'picture' is empty in row 1; valid: an image"):
        Hub("a/set")._array(Split([rgb(RED), None]), "picture")


def test_a_picture_whose_file_is_closed_is_stored(tmp_path: Path) -> None:
    with Image.open(saved(palette(), tmp_path, "own.gif")) as picture:
        picture.load()
    assert colours(stored([picture, picture], tmp_path / "x.npz")[0]) == [RED, BLUE]
