"""UCI Heart Disease: patients of four hospitals, each hospital a client."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedblend.core.dataset import Dataset, Samples, check
from fedblend.core.errors import FedblendError
from fedblend.core.registry import FilePath, part
from fedblend.data.loaders.files import TestShare, draw_test_half
from fedblend.data.loaders.places import Home, fingerprints

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
CLASSES = ("healthy", "disease")


@dataclass(frozen=True)
class Column:
    """One of the publisher's columns: a number within bounds, or one of some codes.

    ``zero_is_missing`` where a 0 stands for what was not measured: nobody has no blood pressure.
    """

    name: str
    low: float = 0.0
    high: float = 0.0
    codes: tuple[int, ...] = ()
    zero_is_missing: bool = False


COLUMNS = (
    Column("age", 1, 120),
    Column("sex", codes=(0, 1)),
    Column("cp", codes=(1, 2, 3, 4)),
    Column("trestbps", 30, 300, zero_is_missing=True),
    Column("chol", 30, 1000, zero_is_missing=True),
    Column("fbs", codes=(0, 1)),
    Column("restecg", codes=(0, 1, 2)),
    Column("thalach", 30, 300),
    Column("exang", codes=(0, 1)),
    Column("oldpeak", -10, 10),
    Column("slope", codes=(1, 2, 3)),
    Column("ca", 0, 3),
    Column("thal", codes=(3, 6, 7)),
    Column("num", codes=(0, 1, 2, 3, 4)),
)
"""The 14 columns of a file, in order; the last is the diagnosis."""

HOME = Home(
    name="heart",
    files=tuple(f"processed.{name}.data" for name in HOSPITALS),
    folders=("heart-disease", "heart_disease", "heart"),
    address="https://archive.ics.uci.edu/dataset/45/heart+disease",
)


@part("dataset", "heart")
class Heart:
    """UCI Heart Disease: 920 patients of four hospitals, disease or none (Detrano et al. 1989; CC BY 4.0).

    ``folder`` holds ``processed.{cleveland,hungarian,switzerland,va}.data``; without it they are looked for in
    ``$FEDBLEND_DATA/heart-disease``. Each hospital is a client. Disease is a diagnosis (``num``) above 0.

    A column of codes becomes one feature a code (all 0 where it is missing), a number stays one feature: where it is
    missing, its mean over all hospitals' training patients that have it. A further feature a column, ``... missing``,
    is 1 where it was. Blood pressure and cholesterol of 0, which stand for no measurement (all of Switzerland's
    cholesterol), are missing as well. Test are ``test_share`` of the patients of each hospital with and without
    disease, drawn by the data set's name. Raises :class:`FedblendError` that names file, line and column for values
    that cannot be.
    """

    folder: FilePath | None = None
    """The folder with the four files; without it it is looked for under $FEDBLEND_DATA."""
    hospital: Literal["all", "cleveland", "hungarian", "switzerland", "va"] = "all"
    """One hospital, as if alone: its patients only, also for the means that stand for missing values."""
    test_share: TestShare = 0.25
    """Share of each hospital's patients that is test."""

    def load(self) -> Dataset:
        """The data set: x float32 [n, 38], y int64 [n], ``client`` the hospital; ``facts`` names the features."""
        place = HOME.find(self.folder)
        paths = [place / name for name in HOME.files]
        tables = [read_patients(path) for path in paths]
        values = np.concatenate(tables)
        client = np.repeat(np.arange(len(HOSPITALS)), [len(table) for table in tables])
        y = (values[:, -1] > 0).astype(np.int64)
        test = draw_test_half(client * 2 + y, self.test_share, "heart")
        if self.hospital != "all":
            rows = client == HOSPITALS.index(self.hospital)
            values, client, y, test = values[rows], client[rows], y[rows], test[rows]
        x, names = features(values[:, :-1], ~test)
        halves = [Samples(torch.from_numpy(x[rows]), torch.from_numpy(y[rows]), client[rows]) for rows in (~test, test)]
        facts: dict[str, Any] = {
            "source": "Detrano et al. 1989: Heart Disease (UCI; CC BY 4.0)",
            "files": fingerprints(paths, place),
            "notes": f"test: {self.test_share:g} of each hospital's patients with and without disease, drawn by name",
            "features": names,
        }
        return check(Dataset("heart", "features", halves[0], halves[1], CLASSES, HOSPITALS, facts=facts))


def read_patients(path: Path) -> np.ndarray:
    """A hospital's patients, float64 [n, 14], missing values as NaN."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except UnicodeDecodeError:
        raise FedblendError(f"{path}: is no plain text; fetch it anew") from None
    rows = [_patient(line, f"{path}: line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise FedblendError(f"{path}: holds no patients; fetch it anew")
    return np.array(rows)


def _patient(line: str, where: str) -> list[float]:
    """A line's 14 values. Raises for another number of them, and for values that cannot be."""
    words = [word.strip() for word in line.split(",")]
    if len(words) != len(COLUMNS):
        raise FedblendError(f"{where} is truncated or of another file: {len(words)} values; expected {len(COLUMNS)}")
    return [_value(word, column, where) for word, column in zip(words, COLUMNS, strict=True)]


def _value(word: str, column: Column, where: str) -> float:
    if word == "?" and column.name != "num":
        return np.nan
    try:
        number = float(word)
    except ValueError:
        number = np.nan
    if column.zero_is_missing and number == 0:
        return np.nan
    if number in column.codes if column.codes else column.low <= number <= column.high:
        return number
    valid = ", ".join(map(str, column.codes)) or f"{column.low:g} to {column.high:g}"
    raise FedblendError(
        f"{where}: {column.name} is {word!r}; valid: {valid}{'' if column.name == 'num' else ', or ? where missing'}"
    )


def features(values: np.ndarray, train: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """What a model gets of 13 columns [n, 13] with NaN where missing: float32 [n, d], and the features' names.

    Means that stand for missing numbers are over the rows of ``train``; 0 where none of them has the number.
    """
    made: list[np.ndarray] = []
    names: list[str] = []
    for column, column_values in zip(COLUMNS[:-1], values.T, strict=True):
        missing = np.isnan(column_values)
        if column.codes:
            made += [column_values == code for code in column.codes]
            names += [f"{column.name} = {code}" for code in column.codes]
        else:
            seen = column_values[train & ~missing]
            made.append(np.where(missing, seen.mean() if len(seen) else 0.0, column_values))
            names.append(column.name)
        made.append(missing)
        names.append(f"{column.name} missing")
    return np.stack(made, axis=1).astype(np.float32), names
