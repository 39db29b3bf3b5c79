"""Reading a picture from a file, of those formats only that are meant."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

from fedblend.core.errors import FedblendError, legible

if TYPE_CHECKING:
    from PIL.Image import Image


def read_picture(path: Path, formats: tuple[str, ...], mode: str, advice: str) -> Image:
    """The picture in a file, in a mode of Pillow's such as "RGB".

    ``formats`` are Pillow's names of those that are read, whatever the file is called: left to itself Pillow goes by a
    file's first bytes, and gives an EPS to Ghostscript to be run, whatever its name. Raises :class:`FedblendError` with
    ``advice`` for a file of another format, or a damaged one.
    """
    from PIL import Image, UnidentifiedImageError

    # What a decoder ends in at a damaged file differs between formats.
    damaged = (OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, OverflowError, MemoryError)
    try:
        with Image.open(path, formats=formats) as image:
            return image.convert(mode)
    except UnidentifiedImageError:
        raise FedblendError(f"{path}: is damaged or no picture (valid: {', '.join(formats)}); {advice}") from None
    except (*damaged, struct.error, Image.DecompressionBombError) as error:
        raise FedblendError(f"{path}: is damaged or no picture ({legible(error)}); {advice}") from None
