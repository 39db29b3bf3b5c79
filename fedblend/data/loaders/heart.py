"""UCI Heart Disease: patients of four hospitals, each hospital a client."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError, brief
from fedblend.core.registry import FilePath, part
from fedblend.data.loaders.files import DataFiles, TestShare, by_half, draw_test_half, fingerprints, made, read_ascii

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
CLASSES = ("healthy", "disease")


class Column(NamedTuple):
    """One of the publisher's columns: a number from ``low`` to ``high``, or one of the ``codes``.

    ``zero_is_missing``: 0 stands for a missing measurement, such as of the blood pressure.
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

FILES = DataFiles(
    name="heart",
    files=tuple(f"processed.{name}.data" for name in HOSPITALS),
    folders=("heart-disease", "heart_disease", "heart"),
    address="https://archive.ics.uci.edu/dataset/45/heart+disease",
)


@part("dataset", "heart")
class Heart:
    """UCI Heart Disease: 920 patients of four hospitals, disease or none (Detrano et al. 1989; CC BY 4.0).

    ``folder`` holds ``processed.{cleveland,hungarian,switzerland,va}.data``; the default is
    ``$FEDBLEND_DATA/heart-disease``. Each hospital is a client. Disease is a diagnosis (``num``) above 0.

    A column of codes becomes one feature for each code; all are 0 for a missing code. A column of numbers becomes one
    feature; a missing number is replaced by the mean over the training patients of all hospitals. One more feature for
    each column, ``... missing``, is 1 for a missing value. Blood pressure and cholesterol of 0 are missing values too
    (all of Switzerland's cholesterol). ``test_share`` of the patients of each hospital with and without disease are
    test, drawn by the data set's name. Raises :class:`FedblendError` with file, line and column for invalid values.
    """

    folder: FilePath | None = None
    """The folder with the four files; by default it is searched under $FEDBLEND_DATA."""
    hospital: Literal["all", "cleveland", "hungarian", "switzerland", "va"] = "all"
    """One hospital only, also in the means that replace missing values."""
    test_share: TestShare = 0.25
    """Share of each hospital's patients that is test."""

    def load(self) -> Dataset:
        """Load x float32 [n, 38], y int64 [n], and the hospitals as ``client``; ``facts`` has the features' names."""
        root = FILES.find(self.folder)
        paths = [root / name for name in FILES.files]
        tables = [read_patients(path) for path in paths]
        values = np.concatenate(tables)
        client = np.repeat(np.arange(len(HOSPITALS)), [len(table) for table in tables])
        y = (values[:, -1] > 0).astype(np.int64)
        test = draw_test_half(client * 2 + y, self.test_share, "heart")
        if self.hospital != "all":
            rows = client == HOSPITALS.index(self.hospital)
            values, client, y, test = values[rows], client[rows], y[rows], test[rows]
        x, names = features(values[:, :-1], ~test)
        rule = f"test: {self.test_share:g} of each hospital's patients with and without disease, drawn by name"
        facts = "Detrano et al. 1989: Heart Disease (UCI; CC BY 4.0)", fingerprints(paths, root), rule
        data = made("heart", "features", by_half(test, x, y, client), CLASSES, facts, HOSPITALS)
        data.facts["features"] = names
        return data


def read_patients(path: Path) -> np.ndarray:
    """Read a hospital's patients, float64 [n, 14], missing values as NaN."""
    lines = read_ascii(path).splitlines()
    rows = [_parse_patient(line, f"{path}: line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise FedblendError(f"{path}: holds no patients; download it again")
    return np.array(rows)


def _parse_patient(line: str, where: str) -> list[float]:
    """A line's 14 values. Raises for another number of values, and for invalid values."""
    words = [word.strip() for word in line.split(",")]
    if (count := len(words)) != len(COLUMNS):
        raise FedblendError(f"{where} is truncated, or a line of another file: {count} values; expected {len(COLUMNS)}")
    return [_parse_value(word, column, where) for word, column in zip(words, COLUMNS, strict=True)]


def _parse_value(word: str, column: Column, where: str) -> float:
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
    missing = "" if column.name == "num" else ", or ? where missing"
    raise FedblendError(f"{where}: {column.name} is {brief(word)}; valid: {valid}{missing}")


def features(values: np.ndarray, train: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """A model's features float32 [n, d] from 13 columns [n, 13] with NaN for missing values, and their names.

    A missing number is replaced by the mean over the rows of ``train``, or by 0 if no such row has the number.
    """
    columns: list[np.ndarray] = []
    names: list[str] = []
    for column, column_values in zip(COLUMNS[:-1], values.T, strict=True):
        missing = np.isnan(column_values)
        if column.codes:
            columns += [column_values == code for code in column.codes]
            names += [f"{column.name} = {code}" for code in column.codes]
        else:
            known = column_values[train & ~missing]
            columns.append(np.where(missing, known.mean() if len(known) else 0.0, column_values))
            names.append(column.name)
        columns.append(missing)
        names.append(f"{column.name} missing")
    return np.stack(columns, axis=1).astype(np.float32), names
