"""Figures of papers that are pictures: the value of a cell is the path of one."""

from __future__ import annotations

import base64
import io
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedblend.core.errors import FedblendError
from fedblend.core.registry import part
from fedblend.papers.measures.base import CellRun, Measure
from fedblend.papers.measures.privacy import first_draw
from fedblend.runs.files import write_atomically

if TYPE_CHECKING:
    from fedblend.analysis.points.sheets import Sheet

INK = "#22303c"
TITLE = "{}: a class interior point of each class, by round"


@part("measure", "points-picture")
class PointsPicture(Measure):
    """The class interior points of a run: a row a round (eight at most), a column a class (AggEnhance, Figure 10)."""

    def measured(self, cell: CellRun) -> str:
        """The path of a PNG."""
        from fedblend.analysis.points.sheets import sheets
        from fedblend.runs.groups import Group

        found = sheets([Group("points", [cell.outcome])])
        if not found:
            raise FedblendError("the run's server made no points that are pictures")
        cell.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(cell.folder / "points.png", draw(found[0], cell.outcome.data))
        return "points.png"


def draw(sheet: Sheet, data: str) -> bytes:
    """The points of a run on ``data`` as one PNG: a row a round, a column a class, blank where there is no point."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    wide, high = 0.9 * len(sheet.classes) + 0.8, len(sheet.rows) + 1.0
    figure = Figure(figsize=(wide, high), dpi=80, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(TITLE.format(data), x=0.01, ha="left", fontsize=9, fontweight="bold", color=INK, parse_math=False)
    for (row, (round, urls)), (column, name) in itertools.product(enumerate(sheet.rows), enumerate(sheet.classes)):
        axes = figure.add_subplot(len(sheet.rows), len(sheet.classes), row * len(sheet.classes) + column + 1)
        if urls[column]:
            axes.imshow(
                Image.open(io.BytesIO(base64.b64decode(urls[column].split(",")[1]))), cmap="gray", vmin=0, vmax=255
            )
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        if row == 0:
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

    def measured(self, cell: CellRun) -> str:
        """The path of a PNG."""
        from fedblend.analysis.privacy.figures import draw_seeds

        def make(folder: Path) -> dict[str, Any]:
            shared, data = first_draw(cell)
            draw_seeds(shared, folder / "seeds.png", f"{data.name}: {cell.experiment.method.label}")
            return {"picture": "seeds.png"}

        cell.cached("seeds-picture", {}, make)
        return f"{cell.work_folder('seeds-picture', {}).name}/seeds.png"
