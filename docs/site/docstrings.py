"""Docstrings as Markdown, for the Python reference."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from reference import markdown


class DocstringsAsMarkdown(griffe.Extension):
    """Roles such as ``:func:`run``` become code, as in the reference of fields."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert an object's docstring."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
