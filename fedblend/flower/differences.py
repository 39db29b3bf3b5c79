"""In what a site's data differ from the federation's, for the site's operator."""

from __future__ import annotations

from typing import Any

from fedblend.core.errors import brief, listed


def difference(own: Any, theirs: Any) -> str:
    """Return in what two values of JSON differ; names of lists that only one has, or the places that differ.

    >>> difference({"columns": ["age", "Dose"]}, {"columns": ["age", "dose"]})
    "columns: place 2: 'Dose' here, 'dose' there"
    >>> difference(["a", "b"], ["a", "b", "c"]), difference(3, 4)
    ("only there: 'c'", '3 here, 4 there')
    """
    if isinstance(own, dict) and isinstance(theirs, dict):
        both = {name: (own.get(name), theirs.get(name)) for name in {**own, **theirs}}
        parts = [f"{name}: {difference(*pair)}" for name, pair in both.items() if pair[0] != pair[1]]
        return f"{'; '.join(parts[:10])}{f'; and {len(parts) - 10} more' if len(parts) > 10 else ''}"
    if isinstance(own, list) and isinstance(theirs, list):
        if len(own) == len(theirs):
            pairs = enumerate(zip(own, theirs, strict=True), 1)
            return listed([f"place {n}: {difference(*pair)}" for n, pair in pairs if pair[0] != pair[1]])
        sides = ("only here", own, theirs), ("only there", theirs, own)
        only = [(side, [brief(one) for one in mine if one not in other]) for side, mine, other in sides]
        return "; ".join(f"{side}: {listed(names)}" for side, names in only if names) or (
            f"{len(own)} here, {len(theirs)} there"
        )
    here, there = ("nothing" if value is None else brief(value) for value in (own, theirs))
    return f"{here} here, {there} there"
