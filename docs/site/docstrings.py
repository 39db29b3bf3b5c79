"""Docstrings as Markdown, for the Python reference."""

from __future__ import annotations

from typing import Any

import griffe

from fedblend.experiment.reference import markdown


class DocstringsAsMarkdown(griffe.Extension):
    """Roles such as ``:func:`run``` become code, as in the reference of fields."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert an object's docstring."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
