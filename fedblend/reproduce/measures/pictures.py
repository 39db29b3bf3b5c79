"""Figures of papers that are pictures: what a cell gives is the path of one."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from fedblend.errors import FedblendError
from fedblend.parts import part
from fedblend.reproduce.measures.base import Measure, Seen
from fedblend.reproduce.measures.privacy import relative, shared_of
from fedblend.runs.files import write_atomically

GAP = 4
"""Pixels between pictures of a sheet."""


@part("measure", "points-picture")
class PointsPicture(Measure):
    """The class interior points of a run: a row a round (eight at most), a column a class (AggEnhance, Figure 10)."""

    def measured(self, seen: Seen) -> str:
        """The path of a PNG."""
        from fedblend.report.points import sheets
        from fedblend.runs.groups import Group

        found = sheets([Group("points", [seen.outcome])])
        if not found:
            raise FedblendError("the run's server made no points that are pictures")
        path = seen.folder / "points.png"
        seen.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, sheet([row for _, row in found[0].rows]))
        return relative(path, seen.folder)


def sheet(rows: list[list[str]]) -> bytes:
    """Pictures given as data URLs (an empty one leaves a gap), in rows and columns, as one PNG."""
    from PIL import Image

    tiles = [[Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))) if url else None for url in r] for r in rows]
    first = next(tile for row in tiles for tile in row if tile is not None)
    wide, high = first.width + GAP, first.height + GAP
    made = Image.new("RGB", (wide * max(map(len, tiles)) + GAP, high * len(tiles) + GAP), "white")
    for y, row in enumerate(tiles):
        for x, tile in enumerate(row):
            if tile is not None:
                made.paste(tile.convert("RGB"), (GAP + x * wide, GAP + y * high))
    buffer = io.BytesIO()
    made.save(buffer, "PNG")
    return buffer.getvalue()


@part("measure", "seeds-picture")
class SeedsPicture(Measure):
    """Raw, encoded and decoded (or mixed-up) samples of target labels, side by side (XorMixFL, Figure 2)."""

    trains = False

    def measured(self, seen: Seen) -> str:
        """The path of a PNG."""
        from fedblend.privacy.seed_pictures import draw_seeds

        def make(place: Path) -> dict[str, Any]:
            shared, data = shared_of(seen)
            draw_seeds(shared, place / "seeds.png", f"{data.name}: {seen.experiment.method.label}")
            return {"picture": "seeds.png"}

        seen.once("seeds-picture", {}, make)
        return relative(seen.place("seeds-picture", {}) / "seeds.png", seen.folder)
