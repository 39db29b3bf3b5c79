"""A data set in one table, CSV or Parquet: a row a sample, with columns for target, client and split."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError, brief, legible, listed, missing_package, or_valid
from fedblend.core.paths import absolute_file
from fedblend.core.registry import Count, FilePath, part
from fedblend.data.loaders.files import (
    TestShare,
    draw_test_half,
    existing_path,
    regular_file,
    sha256_file,
    trimmed,
    warn_of_blanks,
)
from fedblend.data.loaders.npz import dataset_of, test_rows
from fedblend.data.texts import PANGRAM, known_tokenizer, tokens_of

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".tsv", ".parquet")

MAX_CATEGORIES = 1000  # Most values of a column of text; a column with more holds names or free text

OWN_TEXTS = 0.9
"""A column of text with more different values than this share of its rows names rows: its values are no categories."""

MAX_CODES, STRAY, MARKS = 20, 0.1, 3
"""A column with more than so many different numbers, and text in at most this share of its cells, is one of numbers; so
is one with any share of so few different texts, such as ? for unknown."""

FEW = 256
"""A column keeps so many levels, as many as a pixel has, or half of its different numbers in float32, or is refused."""

ROOM = 700  # Characters of messages that a list of faults gives in full


@part("dataset", "table")
class TableFile:
    """A table of your own, `.csv`, `.tsv` or `.parquet`, with a row for each sample and a header.

    The columns of a `.csv` file are separated by commas, semicolons or tabs, whichever the header has most of; with
    semicolons, numbers may have decimal commas. Columns of numbers are features as they are. A column of text is one
    feature for each of its values among the training samples (one-hot); a value that only test samples have is none of
    them. The target is a class if it is text or whole numbers from 0, and a number to predict if it has a decimal
    point, or with ``task = "regression"``. Several targets of 0 and 1, or true and false, are labels, of which a sample
    may have any number. Missing targets are refused. Without a column for the split, ``test_share`` of each client's
    samples (without clients: of each class's) is test.

    With ``text``, a sample is a text of this column: ids of tokens and their mask, int64 [n, 2, length].
    """

    path: FilePath
    """The file; in an experiment file relative to that file."""
    target: str | list[str]
    """The column to predict; several columns of numbers in regression, or one for each label in multi-label data."""
    task: Literal["auto", "regression"] = "auto"
    """What is predicted: by the target's type (`auto`), or numbers also where the target is whole numbers."""
    client: str | None = None
    """The column with each sample's client: a number or a name."""
    split: str | None = None
    """The column with the half of each sample: 0 or "train", 1 or "test"."""
    features: list[str] | None = None
    """The columns of the features (default: all that are neither target, client nor split)."""
    text: str | None = None
    """The column of texts that are the samples; other columns are no features then."""
    tokenizer: Annotated[str, BeforeValidator(absolute_file), AfterValidator(known_tokenizer)] | None = None
    """What makes ids of tokens: "minilm" (extra `pretrained`), "transformers:NAME", a tokenizer.json, or a function of
    texts and `length`, as `package.module:function` (default: that of the encoder in `features`).
    """
    length: Count = 128
    """Most tokens of a text; a longer text is cut."""
    missing: Literal["refuse", "mean", "drop"] = "refuse"
    """What to do with empty cells of features: refuse the file, put the training mean of the column (a column of text:
    none of its values; not for `text`), or drop the row.
    """
    standardize: Literal["no", "client"] = "no"
    """Whether each client scales its columns of numbers by the mean and deviation of its own training samples; the
    experiment's `scale` is fitted to all clients together.
    """
    test_share: TestShare = 0.2
    """Share of each client's samples (without clients: of each class's) that is test, for a table without a split."""
    columns: dict[str, str | list[str]] | None = None
    """The data dictionary of all sites: the columns in order, target included, with the unit of a column of numbers
    (`age = "years"`, or `""`), or all values that a column of text may have (`ward = ["a", "b"]`).
    """
    rename: dict[str, str] = field(default_factory=dict)
    """Columns of this file that have another name elsewhere, and that name: `Alter = "age"`."""
    categories: dict[str, dict[str, str]] = field(default_factory=dict)
    """Texts of this file that are others elsewhere, by column (its new name): `ward = {Station_A = "a"}`."""

    def load(self) -> Dataset:
        """Load x float32 [n, d] or, of texts, int64 [n, 2, length], and y int64 [n], or float32 [n, L] or [n, q]."""
        if self.text:
            self._require_options_of_text()
        path = existing_path(self.path, "data.path")
        targets = [self.target] if isinstance(self.target, str) else self.target
        codes = [self.client, *(targets if len(targets) == 1 and self.task == "auto" else [])]
        texts = [self.text] if self.text else []
        frame = read_frame(path, "at least two are needed, one to train and one to test on", texts, codes)
        named = {use: column for use, column in (("client", self.client), ("split", self.split)) if column}
        if self.columns is not None or self.rename or self.categories:
            frame = conformed(frame, self.columns, self.rename, self.categories, targets, list(named.values()), path)
        uses = dict.fromkeys(targets, "target") | {column: use for use, column in named.items()}
        others = [name for name in frame.columns if name not in uses]
        features = texts or (others if self.features is None else self.features)
        inputs = "text" if texts else "features"
        faults = Faults()
        _require_columns(frame, {"target": targets, **{k: [c] for k, c in named.items()}, inputs: features}, faults)
        with faults.of(f"data.{inputs}"):
            self._require_features(features, uses, path, inputs)
        faults.require_none()
        return self._read_rows(frame, path, targets, named, features, faults)

    def _read_rows(
        self,
        frame: pd.DataFrame,
        path: Path,
        targets: list[str],
        named: Mapping[str, str],
        features: list[str],
        faults: Faults,
    ) -> Dataset:
        """The data set of a table that has all of its columns; ``named`` are those of client and split."""
        uses = [*targets, *named.values()]
        if self.text:
            frame[self.text] = frame[self.text].where(frame[self.text].astype(str).str.strip() != "")
        if self.missing == "drop":
            frame = frame.dropna(subset=features).reset_index(drop=True)
        arrays: dict[str, np.ndarray] = {use: _labels(frame[column]) for use, column in named.items()}
        with faults.of("empty cells"):
            self._require_no_gaps(frame, [*uses, *(features if self.missing == "refuse" else [])], path)
        with faults.of(f"data.target ({listed(targets)})"):
            arrays["y"] = _targets(frame[targets], self.task)
        train = None
        with faults.of(f"data.split ({self.split})"):
            train = self._training_rows(arrays, len(frame), path)
        by_client = self.standardize == "client" and self.client is not None
        for name in features:
            with faults.of(f"'{name}'"):
                if name == self.text:
                    texts_of(frame.dropna(subset=[name]), name, path)
                elif frame[name].dtype.kind not in "iufb":
                    _require_categories(name, frame[name].dropna())
                else:
                    _require_finite(frame[name], path)
                    if not by_client:
                        _require_different(frame[name])
                if train is not None and not self.text:
                    form_of(frame.loc[train, [name]])
        faults.require_none()
        assert train is not None
        if arrays["y"].dtype == bool:
            arrays["labels"] = np.array(targets, str)
        for name in (name for name in [*uses, *features] if name != self.text and frame[name].dtype.kind not in "iufb"):
            warn_of_blanks(frame[name].dropna().astype(str).unique().tolist(), f"{path}: column '{legible(name)}'")
        if isinstance(classes := (self.columns or {}).get(targets[0], ""), list):
            arrays["classes"] = np.array(classes, str)
        if by_client:
            if lacking := sorted(map(str, {*arrays["client"].tolist()} - {*arrays["client"][train].tolist()})):
                found = f"'{legible(lacking[0])}' has none ({len(lacking)} such clients)"
                raise FedblendError(
                    f"data.standardize: 'client' takes means of a client's training rows, but {found}; valid: 'no', or "
                    "a training row of each client"
                )
            frame = _standardized(frame, features, arrays["client"], train)
            for name in features:
                _require_different(frame[name])
        form, arrays["x"] = self._encoded(frame, features, train, path)
        sha256 = {path.name: sha256_file(path)}
        data = dataset_of(arrays, path.stem, path, self.test_share, sha256, "tokens" if self.text else None)
        if not self.split:
            group = "client" if self.client else "class" if data.classes else "table"
            data.facts["notes"] = f"test: {self.test_share:g} of each {group}, drawn by the file's name"
        data.facts.update(table={**form, "standardize": self.standardize})
        return data

    def _encoded(
        self, frame: pd.DataFrame, features: Sequence[str], train: np.ndarray, path: Path
    ) -> tuple[dict[str, Any], np.ndarray]:
        """What encodes a sample, by the training rows, and the encoded samples of all rows."""
        if self.text:
            pangram = self.tokens([PANGRAM])[0, 0].tolist()
            how = {"text": self.text, "tokenizer": self.tokenizer, "length": self.length, "pangram": pangram}
            return how, self.tokens(frame[self.text].tolist())
        listing = {name: values for name, values in (self.columns or {}).items() if name in features}
        form = form_of(frame.loc[train, features])
        form["categories"] |= {name: values for name, values in listing.items() if isinstance(values, list)}
        x = encode(frame, form, path)
        units = {name: unit for name, unit in listing.items() if isinstance(unit, str) and unit}
        return form | ({"units": units} if units else {}), x

    def tokens(self, texts: Sequence[str]) -> np.ndarray:
        """Return ids of tokens and their mask, int64 [n, 2, length] (:func:`.tokens_of`)."""
        assert self.tokenizer is not None
        return tokens_of(texts, self.tokenizer, self.length)

    def _require_options_of_text(self) -> None:
        """Raise :class:`FedblendError` for options that texts do not have, and without a tokenizer."""
        for option, valid in (("features", [None]), ("missing", ["refuse", "drop"]), ("standardize", ["no"])):
            if (given := getattr(self, option)) not in valid:
                raise FedblendError(
                    f"data.{option}: {given!r} is for columns of numbers and categories, but the samples are the texts "
                    f"of data.text = '{self.text}'; leave it out"
                )
        if self.tokenizer is None:
            raise FedblendError(
                'data.tokenizer: is missing; valid: "minilm", "transformers:NAME", a file tokenizer.json, '
                'module:function, or data.features = { model = "minilm" } for embeddings'
            )

    def _training_rows(self, arrays: dict[str, np.ndarray], n: int, path: Path) -> np.ndarray | None:
        """The training rows, bool [n]; the split is drawn if there is none, and ``None`` if what it needs is wrong."""
        if "split" not in arrays:
            groups = arrays.get("client", arrays.get("y"))
            if groups is None:
                return None
            no_groups = groups.ndim > 1 or groups.dtype.kind == "f"
            numbers = np.zeros(n) if no_groups else np.unique(groups, return_inverse=True)[1]
            arrays["split"] = draw_test_half(numbers, self.test_share, path.name).astype(np.int64)
        return ~test_rows(arrays["split"], path)

    def _require_features(self, features: Sequence[str], uses: Mapping[str, str], path: Path, inputs: str) -> None:
        """Raise :class:`FedblendError` without features, for columns of another use, and for those without a name."""
        valid = "one or more, beside target, client and split"
        if not features:
            raise FedblendError(f"data.features: no column is left in {path}; valid: {valid}")
        if taken := [name for name in features if name in uses]:
            valid = "columns that are neither target, client nor split"
            raise FedblendError(f"data.{inputs}: column '{taken[0]}' is already data.{uses[taken[0]]}; valid: {valid}")
        # pandas gives a column without a name this one.
        if self.features is None and (unnamed := [name for name in features if name.startswith("Unnamed: ")]):
            raise FedblendError(
                f"data.features: column '{unnamed[0]}' of {path} has no name, as row numbers that pandas writes or a "
                "separator at the end of each line; valid: a header with all names (pandas: index=False), or "
                "data.features without this column"
            )

    def _require_no_gaps(self, frame: pd.DataFrame, columns: Sequence[str], path: Path) -> None:
        """Raise :class:`FedblendError` for empty cells in columns where there must be none."""
        gaps = frame[list(columns)].isna().sum()
        if found := {name: int(count) for name, count in gaps.items() if count}:
            column, count = next(iter(found.items()))
            empty = f"column '{legible(column)}' is empty in {_rows(count)} (with gaps: {listed(list(found))})"
            drop = "'drop' for texts" if self.text else "'mean' or 'drop' for features"
            valid = f"data.missing = {drop}; " if self.missing == "refuse" else ""
            raise FedblendError(f"{path}: {empty}; valid: {valid}targets, clients and splits must be there")


def _rows(count: int) -> str:
    return f"{count} {'row' if count == 1 else 'rows'}"


def _unfit(name: object, fault: str, remedy: str = "valid: data.features without it") -> FedblendError:
    return FedblendError(f"data.features: column '{legible(name)}' {fault}; {remedy}")


def read_frame(
    path: Path,
    needed: str = "there is nothing to predict",
    categories: Collection[str] = (),
    codes: Collection[str | None] = (),
) -> pd.DataFrame:
    """Read a table. Raises :class:`FedblendError` for another kind of file, a damaged one, and one without rows.

    ``needed`` is the end of the message for a table without rows. Columns of ``categories`` are read as text, and those
    of ``codes`` if a whole number of theirs has a leading zero: 01 and 1 are two codes.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise FedblendError(f"{path}: is no table; valid: {', '.join(SUFFIXES)}")
    regular_file(path)
    import pandas as pd

    try:
        frame = pd.read_parquet(path) if path.suffix.lower() == ".parquet" else _read_text(path, categories, codes)
    except ImportError:
        raise missing_package("a Parquet file", "pyarrow", "parquet") from None
    except pd.errors.EmptyDataError:
        raise FedblendError(f"{path}: is empty; valid: a line of column names, a line for each sample") from None
    except UnicodeDecodeError:
        raise FedblendError(f"{path}: is no text in UTF-8; valid: UTF-8 (Excel saves it as 'CSV UTF-8')") from None
    except pd.errors.ParserWarning:
        raise FedblendError(f"{path}: rows have more cells than the header; valid: a name for each column") from None
    # pandas and pyarrow raise errors of many kinds for damaged files.
    except (ValueError, OSError, EOFError, LookupError, TypeError, OverflowError, MemoryError) as error:
        raise FedblendError(f"{path}: is no table, or is damaged ({legible(error)})") from None
    # A Parquet file keeps the numbers that rows had where it was written.
    frame = frame.reset_index(drop=True)
    frame.columns = frame.columns.map(str)
    if frame.columns.duplicated().any():
        raise FedblendError(f"{path}: has two columns named '{legible(frame.columns[frame.columns.duplicated()][0])}'")
    if not len(frame):
        raise FedblendError(f"{path}: holds no rows; {needed}")
    types: dict[str, Any] = {"boolean": "boolean", "decimal": "float64"}
    for name in (name for name, kind in frame.dtypes.items() if isinstance(kind, np.dtype) and kind.kind == "O"):
        if kind := types.get(pd.api.types.infer_dtype(frame[name])):
            frame[name] = frame[name].astype(kind)
    return frame


def _read_text(path: Path, categories: Collection[str], codes: Collection[str | None]) -> pd.DataFrame:
    """Read a table of text; columns of text, and of ``categories``, keep their cells as they stand in the file.

    Only an empty cell is missing there: NA and None may be texts. In other columns they are missing numbers.
    """
    import pandas as pd

    # Names as they stand there: pandas would number columns of the same name.
    headers = {
        separator: pd.read_csv(path, sep=separator, header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0]
        for separator in ("\t" if path.suffix.lower() == ".tsv" else ",;\t")
    }
    # A quote is left where a separator divides a quoted name.
    separator, names = max(headers.items(), key=lambda one: (not one[1].str.contains('"').any(), len(one[1])))
    if len(double := names[names.duplicated() & (names != "")]):
        raise FedblendError(f"{path}: has two columns named '{legible(double.iloc[0])}'")
    # With low_memory, 01 may be a number in one part of a long file and text in another. Without index_col, rows with
    # one cell more than the header would stand one column too far to the left.
    options: dict[str, Any] = {"sep": separator, "low_memory": False, "index_col": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        frame = pd.read_csv(path, **options)
    if separator == ";":
        with_commas = pd.read_csv(path, decimal=",", **options)
        points, commas = (one.select_dtypes("number").columns for one in (frame, with_commas))
        if len(commas) > len(points):
            if len(both := points.difference(commas, sort=False)):
                both_signs = "has decimal points, but others have decimal commas; write one of both"
                raise FedblendError(f"{path}: column '{legible(both[0])}' {both_signs}")
            frame = with_commas
    # Truth values with gaps are objects.
    kinds = {name: pd.api.types.infer_dtype(frame[name]) for name in frame if frame[name].dtype.kind not in "iufb"}
    texts = [name for name in frame if name in categories or kinds.get(name, "boolean") != "boolean"]
    numbers = [name for name in frame if name in codes and frame[name].dtype.kind in "iu"]
    if wanted := {*texts, *numbers}:
        options |= {"dtype": str, "keep_default_na": False, "na_values": [""]}
        cells = pd.read_csv(path, usecols=lambda name: name in wanted, **options)
        texts += [name for name in numbers if cells[name].str.fullmatch(r"\s*0\d+\s*").any()]
        frame[texts] = cells[texts]
    return frame


class Faults(dict[str, str]):
    """What is wrong with a table, by what is at fault, so that one message reports all of it."""

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Keep the message of a :class:`FedblendError` instead of raising it."""
        try:
            yield
        except FedblendError as error:
            self[name] = str(error)

    def require_none(self) -> None:
        """Raise :class:`FedblendError` with the kept messages; of those beyond :data:`ROOM`, only what is at fault."""
        if not self:
            return
        texts = list(self.values())
        told = max(1, sum(length <= ROOM for length in itertools.accumulate(map(len, texts))))
        first = [f"({number}) {text}" if len(texts) > 1 else text for number, text in enumerate(texts[:told], 1)]
        if rest := list(self)[told:]:
            first.append(f"also at fault: {listed([legible(name, 40) for name in rest])}")
        raise FedblendError((f"{len(texts)} faults: " if len(texts) > 1 else "") + "; ".join(first))


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
    """Return a table with its columns and texts renamed, and of ``columns`` those, in their order, and ``besides``."""
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


def _require_columns(frame: pd.DataFrame, options: Mapping[str, Sequence[str]], faults: Faults) -> None:
    """Keep a fault for each column that an option names and the table lacks, or that it names twice."""
    hint = "; columns of text are separated by commas, semicolons or tabs" if frame.shape[1] == 1 else ""
    for option, names in options.items():
        for i, name in enumerate(names):
            where = f"data.{option}: '{name}'"
            if name not in frame.columns:
                faults[where] = f"data.{option}: there is no column '{name}'{or_valid(name, frame.columns)}{hint}"
            elif name in names[:i]:
                faults[where] = f"data.{option}: column '{name}' is listed twice; valid: each column once"


def _targets(frame: pd.DataFrame, task: str) -> np.ndarray:
    """One column of classes or numbers [n], several of labels bool [n, L], or several of numbers [n, q]."""
    kinds = {name: frame[name].dtype.kind for name in frame}
    if frame.shape[1] == 1 and task == "auto":
        column = frame.iloc[:, 0]
        where = f"data.target: column '{legible(column.name)}' holds"
        predict = "data.task = 'regression' for numbers to predict"
        used = np.unique(column.to_numpy()) if column.dtype.kind in "iu" else np.empty(0, np.int64)
        # Numbers from elsewhere are no classes, or leave most classes without a sample.
        if len(used) and (used[0] != 0 or used[-1] >= max(2 * len(used), 2)):
            found = f"whole numbers from {used[0]} to {used[-1]}, {len(used)} different ones"
            raise FedblendError(f"{where} {found}; valid: classes numbered from 0, or text for classes, or {predict}")
        if column.dtype.kind == "f" and column.isin([0, 1]).all():
            raise FedblendError(f"{where} only 0.0 and 1.0; valid: 0 and 1 or text for classes, or {predict}")
        return _labels(column)
    if wrong := [name for name, kind in kinds.items() if kind not in "iufb"]:
        wants = "several targets" if task == "auto" else "targets of data.task = 'regression'"
        labels = ", or 0 and 1 for labels" if task == "auto" else ""
        raise FedblendError(f"data.target: column '{wrong[0]}' is no column of numbers; {wants} must be{labels}")
    numbers = frame.to_numpy(np.float32)
    are_labels = task == "auto" and "f" not in kinds.values() and bool(np.isin(numbers, (0, 1)).all())
    return numbers == 1 if are_labels else numbers


def _labels(column: pd.Series[Any]) -> np.ndarray:
    """Numbers as they are, and anything else as text."""
    array = column.to_numpy()
    return array if array.dtype.kind in "iuf" else _texts(column).astype(str)


def _of_form(column: pd.Series[Any], known: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """A column's cells, and the texts of its form: trimmed, unless an older form keeps them apart by blanks."""
    names = [*map(trimmed, known)]
    apart = len(set(names)) < len(names)
    return _texts(column, stored=apart), np.array([*known] if apart else names, object)


def _texts(column: pd.Series[Any], stored: bool = False) -> np.ndarray:
    """A column's cells as trimmed text, or as ``stored``, object [n]; ``None`` for empty cells."""
    import pandas as pd

    # Not as NumPy's text: pandas 3 cuts all texts to one letter where a cell is empty.
    numbers, different = pd.factorize(column.astype(str).to_numpy(object))
    texts = np.array([*(different if stored else map(trimmed, different)), None], object)[numbers]
    texts[column.isna().to_numpy()] = None
    return texts


# Features --------------------------------------------------------------------------------------------------


def form_of(training: pd.DataFrame) -> dict[str, Any]:
    """How the columns of features become numbers, by the training samples: in plain data, kept in a run's facts.

    ``columns`` in order; ``categories`` of each column of text; ``fill`` for empty cells of the others.
    """
    categories: dict[str, list[str]] = {}
    fill: dict[str, float] = {}
    for name in training:
        column = training[name]
        if column.isna().all():
            raise _unfit(name, "is empty in all training rows")
        if column.dtype.kind in "iufb":
            mean = float(column.mean())
            fill[str(name)] = mean if np.isfinite(mean) else 0.0
        else:
            categories[str(name)] = texts = sorted({*_texts(column)} - {None})
            if len(texts) > MAX_CATEGORIES:
                raise _unfit(name, f"has {len(texts)} different texts", f"valid: up to {MAX_CATEGORIES}")
    return {"columns": [str(name) for name in training], "categories": categories, "fill": fill}


def _require_finite(column: pd.Series[Any], path: Path) -> None:
    """Raise :class:`FedblendError` for infinity, and for numbers that are infinity in float32."""
    if count := int((np.abs(column.to_numpy(np.float64, na_value=np.nan)) > np.finfo(np.float32).max).sum()):
        found = f"holds infinity, or a number beyond float32, in {_rows(count)}"
        raise FedblendError(f"{path}: column '{legible(column.name)}' {found}; valid: finite numbers")


def texts_of(frame: pd.DataFrame, name: str, path: Path) -> list[str]:
    """The texts of a column. Raises :class:`FedblendError` for a missing column, and for cells that are no text."""
    if name not in frame.columns:
        raise FedblendError(f"{path}: has no column '{legible(name)}' of texts{or_valid(name, frame.columns)}")
    cells = frame[name].tolist()
    if count := sum(not isinstance(cell, str) or not cell.strip() for cell in cells):
        found = f"column '{legible(name)}' is empty or no text in {_rows(count)}"
        raise FedblendError(f"{path}: {found}; valid: a text in each cell")
    return cells


def _require_different(column: pd.Series[Any]) -> None:
    """Raise :class:`FedblendError` for a column of which float32 leaves few levels, and not half of its numbers."""
    kinds: dict[str, Any] = {"i": np.int64, "u": np.uint64, "f": np.float64}
    kind = kinds.get(column.dtype.kind)
    if kind is None or not len(numbers := np.unique(column.dropna().to_numpy(kind))):
        return
    # Numbers that differ by rounding only, as 0.3 and 0.1 + 0.2 do, are one.
    noise = 1e-12 * float(max(abs(numbers[0]), abs(numbers[-1]))) if column.dtype.kind == "f" else 0
    count = 1 + int((np.diff(numbers) > noise).sum())
    left = len(np.unique(numbers.astype(np.float64).astype(np.float32)))
    if left < min(FEW, count / 2):
        found = f"has {count} different numbers, such as {numbers[0]}, of which float32 keeps {left} apart"
        raise _unfit(column.name, found, "subtract an offset, such as the smallest, or make it text if it is a code")


def _require_categories(name: str, cells: pd.Series[Any]) -> None:
    """Raise :class:`FedblendError` for lists, for numbers among text or with signs, and for cells that name rows."""
    import pandas as pd

    if pd.api.types.infer_dtype(cells) == "mixed":
        raise _unfit(name, f"holds neither numbers nor text, but such as {brief(cells.iloc[0])}")
    counts = cells.astype(str).value_counts(sort=False)
    words = counts.index.to_series()
    texts = counts[(numbers := pd.to_numeric(words, errors="coerce")).isna()]
    such = f"such as {brief(texts.index[0])}" if len(texts) else ""
    is_stray = texts.sum() <= STRAY * len(cells) or len(texts) <= MARKS
    if numbers.nunique() > MAX_CODES and len(texts) and is_stray:
        found = f"holds numbers, but {texts.sum()} of {len(cells)} cells are text, {such}"
        raise _unfit(name, found, "write numbers, or empty cells and data.missing = 'mean'")
    if len(texts) and pd.to_numeric(words.str.replace("[,%]", "", regex=True), errors="coerce").notna().all():
        found = f"holds numbers with commas or percent signs, {such}"
        raise _unfit(name, found, "write digits and decimal points only")
    if len(words) > max(MAX_CODES, OWN_TEXTS * len(cells)):
        found = f"has {len(words)} different texts in {len(cells)} rows, such as {brief(words.iloc[0])}"
        remedy = f"valid: data.features without it, or data.text = '{legible(name)}' for texts to learn from"
        raise _unfit(name, f"{found}: it names rows", remedy)


def encode(frame: pd.DataFrame, form: Mapping[str, Any], path: Path) -> np.ndarray:
    """The features of a table float32 [n, d], in the form of a data set. Raises :class:`FedblendError`."""
    parts, faults = [], Faults()
    for name in form["columns"]:
        with faults.of(f"'{name}'"):
            parts.append(_encode_column(frame, name, form, path))
    faults.require_none()
    return np.concatenate(parts, 1).astype(np.float32)


def _encode_column(frame: pd.DataFrame, name: str, form: Mapping[str, Any], path: Path) -> np.ndarray:
    """The features of one column, [n, 1], or [n, texts] of 0 and 1."""
    if name not in frame.columns:
        raise FedblendError(f"{path}: has no column '{legible(name)}'{or_valid(name, frame.columns)}")
    column = frame[name]
    if name in form["categories"]:
        return np.equal.outer(*_of_form(column, form["categories"][name]))
    if column.dtype.kind not in "iufb":
        raise FedblendError(f"{path}: column '{legible(name)}' holds text; valid: numbers, as in the training data")
    _require_finite(column, path)
    numbers = column.to_numpy(np.float64, na_value=np.nan)[:, None]
    return np.where(np.isnan(numbers), form["fill"][name], numbers)


def guesses(frame: pd.DataFrame, form: Mapping[str, Any]) -> list[str]:
    """What :func:`encode` puts in place of unknown values, in a line for each column that has some."""
    lines = []
    for name in (name for name in form["columns"] if name in frame.columns):
        known = form["categories"].get(name)
        if empty := int(frame[name].isna().sum()):
            instead = "the training mean" if known is None else "none of its texts"
            lines.append(f"column '{legible(name)}' is empty in {_rows(empty)}, taken as {instead}")
        if known is not None and (strange := sorted(set.difference(*map(set, _of_form(frame[name], known))) - {None})):
            texts = listed([f"'{legible(text)}'" for text in strange])
            lines.append(f"column '{legible(name)}' holds {texts}, of which the training data had none")
    return lines


def _standardized(frame: pd.DataFrame, features: Sequence[str], client: np.ndarray, train: np.ndarray) -> pd.DataFrame:
    """Each client's columns of numbers by the mean and deviation of its training samples; constant columns by 1."""
    import pandas as pd

    columns = [name for name in features if frame[name].dtype.kind in "iuf"]
    values = frame[columns].astype(np.float64)
    known = values.where(pd.Series(train))
    groups = known.groupby(client)
    mean, deviation = groups.transform("mean"), groups.transform("std", ddof=0)
    return frame.assign(**((values - mean) / deviation.where(deviation > 0, 1.0)))
