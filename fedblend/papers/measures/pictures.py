"""Figures of papers that are pictures: what a cell gives is the path of one."""

from __future__ import annotations

import base64
import io
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedblend.core.errors import FedblendError
from fedblend.core.registry import part
from fedblend.papers.measures.base import CellRun, Measure
from fedblend.papers.measures.privacy import relative, shared_of
from fedblend.runs.files import write_atomically

if TYPE_CHECKING:
    from fedblend.analysis.points.sheets import Sheet

INK = "#22303c"


@part("measure", "points-picture")
class PointsPicture(Measure):
    """The class interior points of a run: a row a round (eight at most), a column a class (AggEnhance, Figure 10)."""

    def measured(self, seen: CellRun) -> str:
        """The path of a PNG."""
        from fedblend.analysis.points.sheets import sheets
        from fedblend.runs.groups import Group

        found = sheets([Group("points", [seen.outcome])])
        if not found:
            raise FedblendError("the run's server made no points that are pictures")
        path = seen.folder / "points.png"
        seen.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, draw(found[0]))
        return relative(path, seen.folder)


def draw(sheet: Sheet) -> bytes:
    """The points of a run as one PNG: classes above, rounds beside; a gap where a round made no point of a class."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    wide, high = 0.9 * len(sheet.classes) + 0.8, len(sheet.rows) + 0.7
    figure = Figure(figsize=(wide, high), dpi=80, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for (place, (round, urls)), (column, name) in itertools.product(enumerate(sheet.rows), enumerate(sheet.classes)):
        axes = figure.add_subplot(len(sheet.rows), len(sheet.classes), place * len(sheet.classes) + column + 1)
        if urls[column]:
            axes.imshow(
                Image.open(io.BytesIO(base64.b64decode(urls[column].split(",")[1]))), cmap="gray", vmin=0, vmax=255
            )
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        if place == 0:
            axes.set_title(name, fontsize=8, color=INK, parse_math=False)
        if column == 0:
            axes.set_ylabel(f"round {round}", fontsize=8, color=INK)
    buffer = io.BytesIO()
    figure.savefig(buffer)
    return buffer.getvalue()


@part("measure", "seeds-picture")
class SeedsPicture(Measure):
    """Raw, encoded and decoded (or mixed-up) samples of target labels, side by side (XorMixFL, Figure 2)."""

    trains = False

    def measured(self, seen: CellRun) -> str:
        """The path of a PNG."""
        from fedblend.analysis.privacy.figures import draw_seeds

        def make(place: Path) -> dict[str, Any]:
            shared, data = shared_of(seen)
            draw_seeds(shared, place / "seeds.png", f"{data.name}: {seen.experiment.method.label}")
            return {"picture": "seeds.png"}

        seen.once("seeds-picture", {}, make)
        return relative(seen.place("seeds-picture", {}) / "seeds.png", seen.folder)
