"""Pages of which some parts are made from data, so that no number is copied by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping


def fill(page: str, makers: Mapping[str, Callable[[], str]]) -> str:
    r"""The page with all between ``<!-- NAME -->`` and ``<!-- end -->`` made anew by the maker of that name.

    >>> fill("<!-- sum -->\nold\n<!-- end -->", {"sum": lambda: "2"})
    '<!-- sum -->\n2\n<!-- end -->'
    """

    def made(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n{makers[found[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (?!end)(.+?) -->\n.*?<!-- end -->", made, page, flags=re.DOTALL)
