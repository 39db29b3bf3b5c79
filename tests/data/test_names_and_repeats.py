"""Names that differ in blanks only, and samples that stand in both halves, in each loader of one's own data."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets_helpers import load, refused
from helpers import each
from PIL import Image

import fedblend
from fedblend.core.dataset import Dataset, Samples
from fedblend.core.errors import FedblendError
from fedblend.data.loaders.files import check, repeats
from fedblend.data.loaders.table import TableFile, encode, form_of, guesses, read_frame

CLIENTS = ["H1", "H1 ", " H1", "H2"]
LABELS = ["a", "b", "b ", "a"]


def of_table(folder: Path) -> Dataset:
    half = ["train"] * 4 + ["test"] * 4
    rows = {"x": range(8), "y": LABELS * 2, "site": CLIENTS * 2, "half": half}
    pd.DataFrame(rows).to_csv(folder / "t.csv", index=False)
    return TableFile(str(folder / "t.csv"), "y", client="site", split="half").load()


def of_npz(folder: Path) -> Dataset:
    x, y = np.arange(8.0)[:, None], np.array(LABELS * 2)
    np.savez(folder / "t.npz", x=x, y=y, client=np.array(CLIENTS * 2), split=np.repeat(["train", "test"], 4))
    return load("npz", path=folder / "t.npz")


def of_torch(folder: Path) -> Dataset:
    def given(first: int) -> dict[str, Any]:
        return {name: [(np.full(1, first + i), LABELS[i])] for i, name in enumerate(CLIENTS)}

    return fedblend.from_torch(given(0), folder / "t.npz", test=given(4)).load()


def of_folders(folder: Path) -> Dataset:
    for i, (client, label) in enumerate(zip(CLIENTS, LABELS, strict=True)):
        for half in ("train", "test"):
            path = folder / "set" / half / client / label / "0.png"
            path.parent.mkdir(parents=True)
            Image.fromarray(np.full((1, 1), i + 4 * (half == "test"), np.uint8)).save(path)
    return load("image-folder", path=folder / "set", clients=True)


@pytest.mark.parametrize("read", [of_table, of_npz, of_torch, of_folders])
def test_names_that_differ_in_blanks_only_are_one(read: Callable[[Path], Dataset], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="2 of 4 names differ from others in blanks only, such as '(H1 | H1)'"):
        data = read(tmp_path)
    assert (data.client_names, data.classes) == (("H1", "H2"), ("a", "b"))
    for half in (data.train, data.test):
        assert half.client is not None
        order = half.x.flatten(1)[:, 0].argsort().numpy()
        assert half.client[order].tolist() == [0, 0, 0, 1]
        assert half.y[order].tolist() == [0, 1, 1, 0]


def test_classes_that_are_blanks_stay_as_they_are(recwarn: pytest.WarningsRecorder) -> None:
    half = Samples(torch.zeros(3, 1), torch.tensor([0, 1, 2]))
    data = check(Dataset("text", "features", half, half, (" ", "\n", "a b ")))
    assert (data.classes, len(recwarn)) == ((" ", "\n", "a b"), 0)


@each("array", ["classes", "client_names", "labels"])
def test_listed_names_may_not_differ_in_blanks_only(array: str, tmp_path: Path) -> None:
    y = np.array([[0, 1], [1, 1]] * 3) if array == "labels" else np.arange(6) % 2
    names = {array: np.array(["a b", "a  b"])}
    np.savez(tmp_path / "t.npz", x=np.zeros((6, 2)), y=y, client=np.arange(6) % 2, **names)
    refused(f"'{array}' has a name twice", "npz", path=tmp_path / "t.npz")


def test_categories_of_a_table_and_of_a_prediction_are_trimmed(tmp_path: Path) -> None:
    rows = {"ward": ["north", "south ", "north ", "south"], "y": ["a", "b"] * 2, "half": ["train"] * 3 + ["test"]}
    pd.DataFrame(rows).to_csv(tmp_path / "t.csv", index=False)
    with pytest.warns(UserWarning, match="column 'ward': 2 of 4 names differ from others in blanks only"):
        data = TableFile(str(tmp_path / "t.csv"), "y", split="half").load()
    assert data.train.x.tolist() == [[1, 0], [0, 1], [1, 0]]
    assert data.test.x.tolist() == [[0, 1]]
    new = pd.DataFrame({"ward": [" south", "east"]})
    # Runs of before version 0.3 have texts with their blanks.
    for known in (["north", "south"], [" north", "south "]):
        form = {"columns": ["ward"], "categories": {"ward": known}, "fill": {}}
        assert encode(new, form, tmp_path).tolist() == [[0, 1], [0, 0]]
        assert guesses(new, form) == ["column 'ward' holds 'east', of which the training data had none"]


def test_a_client_with_two_spellings_is_scaled_as_one(tmp_path: Path) -> None:
    rows = {"x": [1.0, 3.0, 1.0, 3.0], "y": ["a", "b"] * 2, "site": ["A", "A ", "B", "B"], "half": [0, 0, 0, 1]}
    pd.DataFrame(rows).to_csv(tmp_path / "t.csv", index=False)
    with pytest.warns(UserWarning, match="column 'site'"):
        data = TableFile(str(tmp_path / "t.csv"), "y", client="site", split="half", standardize="client").load()
    assert data.train.x.flatten().tolist() == [-1, 1, 0]


def samples(x: Any, y: Any, kind: torch.dtype = torch.float32) -> Samples:
    return Samples(torch.tensor(x, dtype=kind), torch.tensor(y))


@each("kind", [torch.uint8, torch.int64, torch.float32])
def test_only_equal_inputs_with_equal_targets_are_repeats(kind: torch.dtype) -> None:
    train = samples([[i, 0] for i in (1, 2, 3, 3)], [0, 1, 0, 1], kind)
    test = samples([[i, 0] for i in (1, 2, 3, 3, 4)], [0, 0, 1, 1, 0], kind)
    assert repeats(train, test) == 3


@each("repeated", [0, 1])
def test_repeats_are_counted_in_a_warning(repeated: int, tmp_path: Path) -> None:
    x = np.arange(20.0).reshape(10, 2)
    x[8] = x[0] if repeated else x[8]
    np.savez(tmp_path / "t.npz", x=x, y=np.arange(10) % 2, split=[0] * 8 + [1] * 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load("npz", path=tmp_path / "t.npz")
    told = [str(one.message).split(" (")[0] for one in caught]
    assert told == ["data set 't': 1 of 2 test samples are training samples too"] * repeated


def faulty(path: Path) -> Path:
    """A table with a fault in six of its columns."""
    n = 60
    rows = {
        "age": ["?", *map(str, range(1, n))],
        "price": [f"{i},000" for i in range(n)],
        "name": [f"p{i}" for i in range(n)],
        "none": [None] * n,
        "large": [1e300] * n,
        "code": [2**60 + i for i in range(n)],
        "good": range(n),
        "ill": ["no", "yes"] * (n // 2),
        "half": ["train", "tset"] * (n // 2),
    }
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def test_all_faults_of_a_table_are_in_one_message(tmp_path: Path) -> None:
    path = faulty(tmp_path / "t.csv")
    first = r"^6 faults: \(1\) data.features: column 'age' holds numbers, but 1 of 60 cells are text"
    said = refused(first, "table", path=path, target="ill", missing="mean")
    assert len(said) <= 900
    assert {name for name in (*pd.read_csv(path), "good") if f"'{name}'" in said} == {
        "age", "price", "name", "none", "large", "code"
    }  # fmt: skip
    all_four = r"^4 faults: \(1\) .*'none' is empty.*\(2\) .*'tset'.*\(3\) .*'age'.*'code'"
    refused(all_four, "table", path=path, target="ill", split="half", features=["none", "age", "code"])
    options = (
        r"^3 faults: \(1\) data.target: there is no column 'il' \(did you mean 'ill'\?\); \(2\) data.client: there "
    )
    options += r"is no column 'site'.*\(3\) data.features: there is no column 'agee' \(did you mean 'age'\?\)"
    refused(options, "table", path=path, target="il", client="site", features=["agee", "good"])


def test_a_form_of_0_2_keeps_texts_apart_that_differ_in_blanks(tmp_path: Path) -> None:
    form = {"columns": ["h"], "categories": {"h": ["H1", "H1 ", "H2"]}, "fill": {}}
    (tmp_path / "new.csv").write_text('h\nH1\n"H1 "\nH3\n')
    frame = read_frame(tmp_path / "new.csv")
    assert encode(frame, form, tmp_path).tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert guesses(frame, form) == ["column 'h' holds 'H3', of which the training data had none"]


def test_a_prediction_tells_all_columns_at_fault(tmp_path: Path) -> None:
    form = form_of(pd.DataFrame({"a": [1.0], "b": [2.0], "c": ["x"]}))
    (tmp_path / "new.csv").write_text("a\nx\n")
    with pytest.raises(FedblendError, match=r"^3 faults: \(1\) .*'a' holds text.*\(2\) .*'b'.*\(3\) .*no column 'c'"):
        encode(read_frame(tmp_path / "new.csv"), form, tmp_path / "new.csv")
