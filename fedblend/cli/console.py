"""The terminal of all commands: texts are printed as they are, and control characters of foreign texts are not."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich import console
from rich.box import SIMPLE_HEAD
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from fedblend.core.errors import encodable


class Console(console.Console):
    """Rich's console without markup: ``s[/x]`` in a path is text.

    Control characters in texts, such as the escape sequences in the name of a run or a class, become blanks.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def tell(self, text: str | Text, **options: Any) -> None:
        """Print a text that is not wrapped, so that paths and commands in it can be copied."""
        self.print(text, soft_wrap=True, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text of what the terminal can show, before its width is measured."""
        return super().render_str(encodable(_printable(text), self.encoding), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Segments with ``control`` are those of the console itself, such as the cursor's moves of a progress bar.
            yield segment if segment.control else Segment(_printable(segment.text), segment.style)


def table(
    texts: Sequence[str], numbers: Sequence[str], ruled: bool = False, no_wrap: bool = False, **options: Any
) -> Table:
    """An empty table of columns with texts, and columns with numbers after them, which wrap unless ``no_wrap``."""
    made = Table(box=SIMPLE_HEAD if ruled else None, pad_edge=False, header_style="bold", **options)
    for heading in texts:
        made.add_column(heading, overflow="fold")
    for heading in numbers:
        made.add_column(heading, justify="right", no_wrap=no_wrap, vertical="bottom", overflow="fold")
    return made


def number(value: float, digits: int) -> str:
    """A number with so many digits after the point; nothing for NaN (not measured)."""
    if math.isnan(value):
        return ""
    return "∞" if math.isinf(value) else f"{value:.{digits}f}"


def note(text: str) -> None:
    """Print a line on the standard error."""
    Console(stderr=True).tell(text)


def write_line(text: str) -> None:
    """Write one line to standard error, for output that is no terminal."""
    sys.stderr.write(f"{_printable(text)}\n")
    sys.stderr.flush()


def _printable(text: str) -> str:
    return "".join(sign if sign.isprintable() or sign == "\n" else " " for sign in text)
