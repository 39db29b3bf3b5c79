"""A data dictionary: the columns that all tables of a federation have, and how one table comes to have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedblend.core.errors import FedblendError, legible, listed, or_valid
from fedblend.data.loaders.files import trimmed

if TYPE_CHECKING:
    import pandas as pd

Columns = Mapping[str, str | Sequence[str]]
"""By name the unit of a column of numbers ("" for none), or the values of a column of text."""


def conformed(
    frame: pd.DataFrame,
    columns: Columns | None,
    rename: Mapping[str, str],
    categories: Mapping[str, Mapping[str, str]],
    targets: Sequence[str],
    besides: Sequence[str],
    path: Path,
) -> pd.DataFrame:
    """Return a table with its columns and texts renamed, and of ``columns`` those, in their order, and ``besides``.

    Raises :class:`FedblendError` with all columns that are missing, or that hold what ``columns`` does not allow.
    """
    from fedblend.data.loaders.table import Faults, read_frame

    if strange := [name for name in rename if name not in frame.columns]:
        raise FedblendError(f"data.rename: {path} has no column '{strange[0]}'{or_valid(strange[0], frame.columns)}")
    own = {new: old for old, new in rename.items()}
    frame = frame.rename(columns=dict(rename))
    if len(double := frame.columns[frame.columns.duplicated()]):
        raise FedblendError(f"data.rename: two columns become '{double[0]}'; valid: a name for each")
    faults = Faults()
    if columns is not None:
        for name in (name for name in [*targets, *categories] if name not in columns):
            faults[name] = f"data.columns: '{name}' is missing{or_valid(name, columns)}"
    for name in (name for name in columns or categories if name not in frame.columns):
        faults[name] = (
            f"data.columns: {path} has no column '{name}'{or_valid(name, frame.columns)}; data.rename gives a column "
            f'that is there this name: "ITS NAME" = "{name}"'
        )
    faults.require_none()
    if columns is not None:
        frame = frame[list(dict.fromkeys([*columns, *besides]))]
    values = {name: None if isinstance(given, str) else given for name, given in (columns or {}).items()}
    texts = [name for name in values | dict.fromkeys(categories) if values.get(name) or name in categories]
    if coded := [name for name in texts if frame[name].dtype.kind in "iufb"]:
        # Codes such as 1 and 02 as they stand there.
        as_text = read_frame(path, categories=[own.get(name, name) for name in coded])
        frame = frame.assign(**{name: as_text[own.get(name, name)] for name in coded})
    for name in texts:
        frame = frame.assign(**{name: renamed(frame[name], categories.get(name, {}))})
        with faults.of(name):
            _require_known(frame[name], values.get(name))
    for name in (name for name in columns or {} if name not in texts and frame[name].dtype.kind not in "iufb"):
        faults[name] = f"data.columns: '{legible(name)}' holds text; valid: numbers ({(columns or {})[name]})"
    faults.require_none()
    return frame


def renamed(cells: pd.Series[Any], names: Mapping[str, str]) -> pd.Series[Any]:
    """Return cells as trimmed texts, those in ``names`` under their other name; empty cells stay empty."""
    texts = cells.map(lambda cell: trimmed(str(cell)), na_action="ignore")
    return texts.map(lambda text: names.get(text, text), na_action="ignore")


def _require_known(cells: pd.Series[Any], values: Sequence[str] | None) -> None:
    strange = cells.dropna() if values is None else cells[~cells.isin(list(values))].dropna()
    if values is not None and len(strange):
        name, found = legible(cells.name), listed([f"'{legible(text)}'" for text in dict.fromkeys(strange)])
        raise FedblendError(
            f"data.columns: '{name}' holds {found} in {len(strange)} rows; valid: {listed(list(values))}, or a line in "
            f'data.categories.{name}: "ITS TEXT" = "{values[0]}"'
        )
