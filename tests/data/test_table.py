"""Data of one's own in tables, signals in folders, and PyTorch's data sets."""

from __future__ import annotations

import re
import wave
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from cli_helpers import TINY, here, refused, succeeded, write
from helpers import each
from torch.utils.data import IterableDataset, TensorDataset

import fedblend
from fedblend.core.errors import FedblendError
from fedblend.data.loaders.signal_folder import SignalFolder
from fedblend.data.loaders.table import TableFile, encode, guesses, read_frame
from fedblend.data.scale import Standard
from fedblend.runs import api

PATIENTS = pd.DataFrame(
    {
        "age": [40, 50, 60, 70, 44, 54],
        "sex": ["f", "m", "f", "m", "f", "x"],
        "dose": [1.0, np.nan, 3.0, 5.0, 2.0, 2.0],
        "site": ["a", "a", "b", "b", "a", "b"],
        "half": ["train"] * 4 + ["test"] * 2,
        "ill": ["no", "yes", "no", "yes", "no", "yes"],
    }
)


def table(path: Path, frame: pd.DataFrame = PATIENTS, **options: Any) -> TableFile:
    """The data set of a frame, written to a file."""
    frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False)
    return TableFile(str(path), **{"target": "ill", "client": "site", "split": "half", "missing": "mean", **options})


def fault(message: str, load: Callable[..., Any], *given: Any, **options: Any) -> None:
    """The call raises an error with this message in it."""
    with pytest.raises(FedblendError) as error:
        load(*given, **options)
    assert message in str(error.value)


def parquet() -> None:
    pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")


@pytest.mark.parametrize("name", ["p.csv", "p.parquet"])
def test_numbers_categories_and_gaps_by_hand(name: str, tmp_path: Path) -> None:
    if name.endswith(".parquet"):
        parquet()
    data = table(tmp_path / name).load()
    # age; sex f, m (the test's x is neither); dose, whose mean over the training rows is 3.
    assert data.train.x.tolist() == [[40, 1, 0, 1], [50, 0, 1, 3], [60, 1, 0, 3], [70, 0, 1, 5]]
    assert data.test.x.tolist() == [[44, 1, 0, 2], [54, 0, 0, 2]]
    assert (data.classes, data.client_names) == (("no", "yes"), ("a", "b"))
    assert data.train.y.tolist() == [0, 1, 0, 1]
    assert data.train.client.tolist() == [0, 0, 1, 1]
    assert data.facts["table"]["columns"] == ["age", "sex", "dose"]


FLAGS = PATIENTS.fillna(0).assign(
    tired=[0, 1, 0, 1, 1, 0], cough=[True, True, False, True, False, False], half=[False] * 4 + [True] * 2
)


@each(
    ("frame", "options", "task", "y"),
    [
        (PATIENTS, {"target": "age", "task": "regression"}, "regression", [[40], [50], [60], [70]]),
        (FLAGS, {"target": "dose"}, "regression", [[1], [0], [3], [5]]),
        (FLAGS, {"target": ["dose", "age"], "features": ["sex"]}, "regression", [[1, 40], [0, 50], [3, 60], [5, 70]]),
        (FLAGS.assign(ill=[0, 1, 0, 1, 1, 0]), {}, "classification", [0, 1, 0, 1]),
        (FLAGS, {"target": ["tired", "cough"]}, "multi-label", [[0, 1], [1, 1], [0, 0], [1, 1]]),
        (FLAGS, {"target": ["tired"], "task": "regression"}, "regression", [[0], [1], [0], [1]]),
        # One column with another number, or with decimals: numbers to predict.
        (FLAGS.assign(tired=[0, 1, 2, 1, 1, 0]), {"target": ["tired", "cough"]}, "regression", None),
        (FLAGS.assign(tired=FLAGS.tired * 1.0), {"target": ["tired", "cough"]}, "regression", None),
    ],
)
def test_targets_are_classes_labels_or_numbers(
    frame: pd.DataFrame, options: dict[str, Any], task: str, y: list[Any] | None, tmp_path: Path
) -> None:
    data = table(tmp_path / "p.csv", frame, **options).load()
    assert data.task == task
    assert y is None or data.train.y.tolist() == y
    assert data.labels == (("tired", "cough") if task == "multi-label" else ())


def test_a_client_scales_by_its_own_training_samples(tmp_path: Path) -> None:
    data = table(tmp_path / "p.csv", standardize="client").load()
    ages = [*data.train.x[:, 0].tolist(), *data.test.x[:, 0].tolist()]
    assert ages == pytest.approx([-1, 1, -1, 1, (44 - 45) / 5, (54 - 65) / 5])
    # Client a knows one dose, so that its deviation is taken as 1.
    assert data.train.x[:, 3].tolist() == pytest.approx([0, 0, -1, 1])
    assert Standard().fit(data)(data.train.x).mean(0).abs().max() < 1e-6


def test_a_table_in_another_order_scales_by_the_same_samples(tmp_path: Path) -> None:
    parquet()
    shuffled = PATIENTS.iloc[[5, 2, 0, 4, 3, 1]]  # the file keeps the old numbers of its rows
    data = table(tmp_path / "p.parquet", shuffled, standardize="client").load()
    assert sorted(data.train.x[:, 0].tolist()) == pytest.approx([-1, -1, 1, 1])


THIRTY = pd.concat([PATIENTS] * 5, ignore_index=True)
DOSES = [f"{number / 4}" for number in range(29)]
DRAWN = {"target": "y", "split": None}
ALONE = {**DRAWN, "client": None}
MARKS = (["?"] * 72, ["?"] * 100 + ["low", "high"] * 10)
OFFSETS = (10**9, 2**60, 1e9 + 0.5)


def pulse(marks: list[str]) -> pd.DataFrame:
    """Marks among 228 numbers, and two classes."""
    n = len(marks) + 228
    return pd.DataFrame({"pulse": [*marks, *(str(40 + i % 80) for i in range(228))], "y": [0, 1] * (n // 2)})


def later(by: float) -> pd.DataFrame:
    """Sixty points in time of two clients."""
    return pd.DataFrame({"time": [by + i for i in range(60)], "y": [0, 1] * 30, "site": ["a", "b"] * 30})


@each(
    ("frame", "options", "said"),
    [
        (PATIENTS, {"target": "age"}, "column 'age' holds whole numbers from 40 to 70, 6 different ones; valid: "),
        (PATIENTS, {"task": "regression"}, "column 'ill' is no column of numbers; targets of data.task = 'regression'"),
        (PATIENTS, {"target": "Ill"}, "data.target: there is no column 'Ill' (did you mean 'ill'?)"),
        (PATIENTS, {"missing": "refuse"}, "column 'dose' is empty in 1 row (with gaps: dose); valid: data.missing ="),
        (PATIENTS, {"target": "dose"}, "column 'dose' is empty in 1 row"),
        (PATIENTS, {"target": ["sex", "age"]}, "data.target: column 'sex' is no column of numbers"),
        (PATIENTS, {"features": ["age", "nothing"]}, "data.features: there is no column 'nothing'"),
        (PATIENTS, {"features": ["age", "ill"]}, "data.features: column 'ill' is already data.target; valid: columns"),
        (PATIENTS, {"features": ["age", "site"]}, "data.features: column 'site' is already data.client; valid: "),
        (PATIENTS, {"features": ["half"]}, "data.features: column 'half' is already data.split; valid: columns that"),
        (PATIENTS, {"features": ["age", "age"]}, "data.features: column 'age' is listed twice; valid: each"),
        (PATIENTS, {"target": ["ill", "ill"]}, "data.target: column 'ill' is listed twice; valid: each column once"),
        (PATIENTS, {"features": []}, "p.csv; valid: one or more, beside target, client and split"),
        (THIRTY.assign(dose=[*DOSES, "n/k"], half="train"), {}, "1 of 30 cells are text, such as 'n/k'"),
        (THIRTY.assign(age=["?", *DOSES]), {}, "column 'age' holds numbers, but 1 of 30 cells are text"),
        *(
            (pulse(marks), ALONE, f"but {len(marks)} of {len(marks) + 228} cells are text, such as '?'; ")
            for marks in MARKS
        ),
        *(
            (later(by), DRAWN, f"'time' has 60 different numbers, such as {by}, of which float32 keeps ")
            for by in OFFSETS
        ),
        (PATIENTS.assign(dose=[None] * 4 + [1.0, 2.0]), {}, "column 'dose' is empty in all training rows"),
        (THIRTY.assign(patient=[f"P{i}" for i in range(30)]), {}, "'patient' has 30 different texts in 30 rows"),
        (PATIENTS.assign(site=["a"] * 5 + ["c"]), {"standardize": "client"}, "but 'c' has none (1 such clients)"),
    ],
)
def test_what_is_no_feature_target_or_client_is_refused(
    frame: pd.DataFrame, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    fault(said, table(tmp_path / "p.csv", frame, **options).load)


def test_codes_with_signs_are_categories(tmp_path: Path) -> None:
    frame = THIRTY.assign(dose=["1", "2", "3+"] * 10, half=["train"] * 24 + ["test"] * 6)
    assert table(tmp_path / "p.csv", frame).load().train.x.shape == (24, 1 + 3 + 3)


def test_numbers_with_an_offset_may_be_scaled_by_clients_and_rounding_is_no_difference(tmp_path: Path) -> None:
    frame = later(10**9)
    frame["sum"] = [0.3, 0.1 + 0.2, 0.3 + 1e-16] * 20
    data = table(tmp_path / "p.csv", frame, target="y", split=None, standardize="client", features=["time"]).load()
    assert len(np.unique(data.train.x)) == len(data.train)
    data = table(tmp_path / "p.csv", frame, target="y", split=None, features=["sum"]).load()
    assert len(data.train.x.unique()) == 1


def test_an_empty_cell_of_text_is_none_of_its_texts_and_leaves_the_others(tmp_path: Path) -> None:
    habits = ["never", "former", None, "never", "new", "former"]
    frame = PATIENTS.assign(smokes=habits)
    data = table(tmp_path / "p.csv", frame, features=["smokes"]).load()
    assert data.facts["table"]["categories"] == {"smokes": ["former", "never"]}
    assert data.train.x.tolist() == [[0, 1], [1, 0], [0, 0], [0, 1]]
    assert data.test.x.tolist() == [[0, 0], [1, 0]]


def test_na_and_none_are_texts_among_texts_and_gaps_among_numbers(tmp_path: Path) -> None:
    rows = zip(["NA", "EU", "", "NA"] * 3, ["1.5", "NA", "null", ""] * 3, ["None", "Mild", "Severe"] * 4, strict=True)
    flags = ["TRUE", "FALSE", "n/a", "TRUE"] * 3
    lines = [f"{','.join(row)},{flag},{site}" for row, flag, site in zip(rows, flags, ["n/a", "x"] * 6, strict=True)]
    (tmp_path / "p.csv").write_text("\n".join(["region,dose,y,flag,site", *lines]))
    data = TableFile(str(tmp_path / "p.csv"), target="y", client="site", missing="mean").load()
    assert (data.classes, data.client_names) == (("Mild", "None", "Severe"), ("n/a", "x"))
    form = data.facts["table"]
    assert form["categories"] == {"region": ["EU", "NA"]}
    assert (form["fill"]["dose"], list(form["fill"])) == (1.5, ["dose", "flag"])
    (tmp_path / "new.csv").write_text("region,dose,flag\nNA,1,TRUE\nNA,NA,FALSE\n")
    new = read_frame(tmp_path / "new.csv", categories=form["categories"])
    assert encode(new, form, tmp_path)[:, :3].tolist() == [[0, 1, 1], [0, 1, 1.5]]


def test_classes_and_clients_with_leading_zeros_are_texts(tmp_path: Path) -> None:
    lines = [f"{i},{['00', '01', '1'][i % 3]},{['001', '01', '1', '10', '2'][i % 5]}" for i in range(30)]
    (tmp_path / "p.csv").write_text("\n".join(["x,y,site", *lines]))
    data = TableFile(str(tmp_path / "p.csv"), target="y", client="site").load()
    assert (data.classes, data.client_names) == (("00", "01", "1"), ("001", "01", "1", "10", "2"))
    assert TableFile(str(tmp_path / "p.csv"), target="y", task="regression").load().task == "regression"
    # Without leading zeros they are numbers, in their order.
    (tmp_path / "q.csv").write_text(re.sub(r",0+(?=\d)", ",", (tmp_path / "p.csv").read_text()))
    data = TableFile(str(tmp_path / "q.csv"), target="y", client="site").load()
    assert (data.classes, data.client_names) == (("0", "1"), ("1", "2", "10"))


def test_a_table_that_does_not_conform_to_its_dictionary_is_refused_with_all_faults(tmp_path: Path) -> None:
    frame = pd.DataFrame({"Age": range(40), "ward": [1, 2] * 20, "dose": ["5 mg"] * 40, "ill": ["no", "yes"] * 20})
    columns = {"age": "years", "ward": ["a", "b"], "dose": "mg", "ill": ["no", "yes"]}
    options: dict[str, Any] = {"client": None, "split": None, "columns": columns}
    load = table(tmp_path / "p.csv", frame, **options).load
    fault("has no column 'age' (did you mean 'Age'?); data.rename gives a column", load)
    options["rename"] = {"Age": "age"}
    fault(
        "data.columns: 'ward' holds '1', '2' in 40 rows; valid: a, b", table(tmp_path / "p.csv", frame, **options).load
    )
    fault("'dose' holds text; valid: numbers (mg)", table(tmp_path / "p.csv", frame, **options).load)
    options["categories"] = {"wards": {}}
    fault("data.columns: 'wards' is missing (did you mean 'ward'?)", table(tmp_path / "p.csv", frame, **options).load)
    for rename, said in (({"ag": "age"}, "has no column 'ag'"), ({"Age": "ward"}, "two columns become 'ward'")):
        fault(f"data.rename: {said}" if "two" in said else said, table(tmp_path / "p.csv", frame, rename=rename).load)


def test_rows_with_gaps_are_dropped_where_asked(tmp_path: Path) -> None:
    data = table(tmp_path / "p.csv", missing="drop").load()
    assert data.train.x[:, 0].tolist() == [40, 60, 70]


def test_without_a_split_a_share_of_each_client_is_test(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": range(30), "site": ["a"] * 10 + ["b"] * 20, "y": [0, 1] * 15})
    data = table(tmp_path / "p.csv", frame, target="y", split=None).load()
    assert np.bincount(data.test.client).tolist() == [2, 4]


SEMICOLONS = "age;dose;ill\n40;1,5;no\n50;2,5;yes\n60;3,5;no\n70;4,5;yes\n"


@each("text", [SEMICOLONS, SEMICOLONS.replace(",", "."), SEMICOLONS.replace(",", ".").replace(";", "\t")])
def test_a_csv_file_may_have_semicolons_or_tabs(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.CSV").write_text(text, encoding="utf-8-sig")
    data = TableFile(str(tmp_path / "p.CSV"), target="ill", test_share=0.5).load()
    rows = [*data.train.x.tolist(), *data.test.x.tolist()]
    assert data.facts["table"]["columns"] == ["age", "dose"]
    assert sorted(rows) == [[40, 1.5], [50, 2.5], [60, 3.5], [70, 4.5]]


@each("columns", ['"a, b, c, d";dose;ill', 'age;dose;"ill, or not, or so"', '"a\nge";dose;i'])
def test_separators_in_quoted_names_do_not_count(columns: str, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(SEMICOLONS.replace("age;dose;ill", columns))
    assert read_frame(tmp_path / "p.csv").dose.tolist() == [1.5, 2.5, 3.5, 4.5]
    text = SEMICOLONS.replace(",", ".").replace(";", ",").replace("dose", '"dose; of; the; day"')
    (tmp_path / "p.csv").write_text(text)
    assert list(read_frame(tmp_path / "p.csv")) == ["age", "dose; of; the; day", "ill"]


def test_decimal_points_beside_decimal_commas_and_other_separators_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("age;dose;size;ill\n40.5;1,5;2,5;no\n50.5;2,5;3,5;yes\n")
    said = "p.csv: column 'age' has decimal points, but others have decimal commas; write one of both"
    fault(said, read_frame, tmp_path / "p.csv")
    (tmp_path / "p.csv").write_text(SEMICOLONS.replace(",", ".").replace(";", "|"))
    said = "no column 'ill'; valid: age|dose|ill; columns of text are separated by commas, semicolons or tabs"
    fault(said, TableFile(str(tmp_path / "p.csv"), target="ill").load)


@pytest.mark.slow
def test_a_long_file_is_read_as_one(tmp_path: Path) -> None:
    rows = 600_000  # pandas would read the first half as numbers, in which the site 01 is 1
    (tmp_path / "p.csv").write_text("ill,site\n" + "0,01\n" * rows + "1,3+\n")
    data = TableFile(str(tmp_path / "p.csv"), target="ill", features=["site"]).load()
    assert data.facts["table"]["categories"] == {"site": ["01", "3+"]}


def test_truth_values_with_gaps_and_decimals_are_numbers_and_lists_are_refused(tmp_path: Path) -> None:
    flags = table(tmp_path / "p.csv", PATIENTS.assign(dose=[True, None, False, True, True, None]), features=["dose"])
    data = flags.load()
    assert data.train.x.flatten().tolist() == pytest.approx([1, 2 / 3, 0, 1])
    assert data.test.x.flatten().tolist() == pytest.approx([1, 2 / 3])
    parquet()
    prices = [Decimal("1.50"), Decimal("2.25"), None, Decimal("3.00"), Decimal("1.00"), Decimal("4.00")]
    data = table(tmp_path / "p.parquet", PATIENTS.assign(dose=prices), features=["dose"]).load()
    assert data.train.x.flatten().tolist() == [1.5, 2.25, 2.25, 3]
    lists = table(tmp_path / "p.parquet", PATIENTS.assign(dose=[[1, 2]] * 6), features=["dose"])
    fault("column 'dose' holds neither numbers nor text, but such as array([1, 2]); valid: data.features ", lists.load)


@pytest.mark.slow
def test_a_file_trains_on_a_table_and_predicts_for_another(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n = 200
    frame = pd.DataFrame(
        {"a": rng.normal(size=n), "colour": rng.choice(["red", "blue"], n), "site": rng.integers(0, 4, n)}
    )
    frame["y"] = np.where((frame.a > 0) ^ (frame.colour == "red"), "up", "down")
    frame.to_csv(tmp_path / "t.csv", index=False)
    data = {"name": "table", "path": "t.csv", "target": "y", "client": "site"}
    train = {"cohort": 4, "epochs": 15, "lr": 0.3, "batch_size": 8, "lr_decay": 1.0}
    changes = {"data": data, "partition": {"name": "natural"}, "rounds": 4, "train": train}
    file = write(tmp_path / "x.toml", changes)
    assert here("run", file, "--out", tmp_path / "runs", "--jobs", 1).code == 0
    new = frame.drop(columns=["y", "site"])[["colour", "a"]]
    new.to_csv(tmp_path / "new.csv", index=False)
    told = here("predict", tmp_path / "runs", tmp_path / "new.csv", "--out", tmp_path / "p.csv")
    assert told.code == 0, told.err
    assert (pd.read_csv(tmp_path / "p.csv")["class"] == frame.y).mean() > 0.9
    assert "column" not in told.err
    pd.DataFrame({"colour": ["green", "red", None], "a": [0.5, None, 1]}).to_csv(tmp_path / "odd.csv", index=False)
    odd = here("predict", tmp_path / "runs", tmp_path / "odd.csv")
    assert odd.code == 0
    assert "column 'a' is empty in 1 row, taken as the training mean" in odd.err
    assert "column 'colour' is empty in 1 row, taken as none of its texts" in odd.err
    assert "column 'colour' holds 'green', of which the training data had none" in odd.err
    new.assign(a=np.inf).to_csv(tmp_path / "odd.csv", index=False)
    refused(
        here("predict", tmp_path / "runs", tmp_path / "odd.csv"),
        "column 'a' holds infinity, or a number beyond float32, in 200 rows; valid: finite numbers",
    )
    new.drop(columns="a").to_csv(tmp_path / "less.csv", index=False)
    refused(here("predict", tmp_path / "runs", tmp_path / "less.csv"), "has no column 'a'; valid: colour")


def test_a_sites_own_names_and_texts_are_predicted_for(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    frame = pd.DataFrame({"a": [0.5, -1.0, 2.0, 1.0] * 5, "colour": ["red", "blue"] * 10, "y": [*"uuddu"] * 4})
    frame.to_csv(tmp_path / "t.csv", index=False)
    data = {"name": "table", "path": "t.csv", "target": "y"}
    file = write(tmp_path / "x.toml", {"data": data, "partition": {"name": "iid", "clients": 2}, "rounds": 1})
    succeeded(here("run", file, "--out", tmp_path / "runs", "--jobs", 1))
    own = frame.rename(columns={"a": "Wert", "colour": "Farbe"}).replace({"red": "rot", "blue": "blau"})
    own.to_csv(tmp_path / "own.csv", index=False)
    site = '[data]\nname = "table"\npath = "own.csv"\ntarget = "y"\n[data.rename]\nWert = "a"\nFarbe = "colour"\n'
    (tmp_path / "site.toml").write_text(f'{site}[data.categories]\ncolour = {{ rot = "red", blau = "blue" }}\n')
    told = []
    for name, words in (("t.csv", []), ("own.csv", ["--site", tmp_path / "site.toml"])):
        succeeded(here("predict", tmp_path / "runs", tmp_path / name, *words, "--out", tmp_path / "p.csv"))
        told.append(pd.read_csv(tmp_path / "p.csv")["probability"].tolist())
    assert told[0] == told[1]
    (tmp_path / "site.toml").write_text('[data]\nname = "npz"\npath = "x.npz"\n')
    refused(
        here("predict", tmp_path / "runs", tmp_path / "own.csv", "--site", tmp_path / "site.toml"), "data: is no table"
    )


def test_codes_are_texts_in_a_prediction_too(tmp_path: Path) -> None:
    frame = PATIENTS.assign(code=["01", "02", "3+", "01", "02", "3+"])
    form = table(tmp_path / "p.csv", frame, features=["code"]).load().facts["table"]
    (tmp_path / "new.csv").write_text("code,b\n01,\n02,\n,\n")
    new = read_frame(tmp_path / "new.csv", categories=form["categories"])
    assert encode(new, form, tmp_path).tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert guesses(new, form) == ["column 'code' is empty in 1 row, taken as none of its texts"]
    (tmp_path / "new.csv").write_text("smoker\nTRUE\nFALSE\n")  # all truth values, as pandas reads them
    assert read_frame(tmp_path / "new.csv", categories=["smoker"]).smoker.tolist() == ["TRUE", "FALSE"]


def sound(path: Path, numbers: Sequence[int] = (0,) * 10, channels: int = 1, rate: int = 8000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, 2, rate, 0, "NONE", ""))
        file.writeframes(np.array(numbers, "<i2").tobytes() * channels)


def test_signals_of_each_form_are_read(tmp_path: Path) -> None:
    sound(tmp_path / "hum" / "a.wav", (0, 16384, -32768))
    (tmp_path / "tick").mkdir()
    np.save(tmp_path / "hum" / "b.npy", np.array([1.0, 2.0, 3.0, 4.0]))
    (tmp_path / "tick" / "c.csv").write_text("5\n6\n")
    (tmp_path / "tick" / "d.txt").write_text("7\n8\n9\n")
    data = SignalFolder(str(tmp_path), length=3, test_share=0.5).load()
    halves = (data.train, data.test)
    rows = {tuple(x.flatten().tolist()): int(y) for half in halves for x, y in zip(half.x, half.y, strict=True)}
    assert rows == {(0, 0.5, -1): 0, (1, 2, 3): 0, (5, 6, 0): 1, (7, 8, 9): 1}
    assert data.classes == ("hum", "tick")
    fault("give data.length to cut or fill", SignalFolder(str(tmp_path)).load)
    (tmp_path / "tick" / "e.wav").write_bytes(b"RIFF")
    fault("e.wav: is damaged or no signal", SignalFolder(str(tmp_path), length=3).load)


@each("length", [None, 5])
def test_mono_beside_stereo_is_refused(length: int | None, tmp_path: Path) -> None:
    sound(tmp_path / "hum" / "a.wav")
    sound(tmp_path / "tick" / "b.wav", channels=2)
    said = "b.wav: has 2 channels, a.wav has 1; valid: one number of channels"
    fault(said, SignalFolder(str(tmp_path), length=length).load)


def test_sound_of_two_frame_rates_is_refused_also_in_two_halves(tmp_path: Path) -> None:
    for half in ("train", "test"):
        for name in ("hum", "tick"):
            sound(tmp_path / half / name / "a.wav")
    assert SignalFolder(str(tmp_path)).load().train.x.shape == (2, 1, 10)
    sound(tmp_path / "test" / "tick" / "b.wav", rate=16000)
    fault("b.wav: has 16000 frames a second, a.wav has 8000; valid: one frame", SignalFolder(str(tmp_path)).load)


def client(seed: int, n: int = 20) -> TensorDataset:
    pixels = torch.randint(0, 256, (n, 1, 4, 4), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(pixels.float() / 255, torch.arange(n) % 2)


def test_a_data_set_for_each_client_is_a_natural_split(tmp_path: Path) -> None:
    data = fedblend.from_torch({"north": client(0), "south": client(1)}, tmp_path / "two.npz").load()
    assert (data.kind, data.client_names, data.classes) == ("image", ("north", "south"), ("0", "1"))
    assert len(data.train) + len(data.test) == 40
    pixels = {tuple((x * 255).round().flatten().int().tolist()) for one in (client(0), client(1)) for x, _ in one}
    assert {tuple(x.flatten().tolist()) for x in (*data.train.x, *data.test.x)} == pixels


def test_one_data_set_with_clients_runs_and_resumes(tmp_path: Path) -> None:
    part = fedblend.from_torch(client(0, 60), tmp_path / "one.npz", clients=[i % 5 for i in range(60)])
    table = {**TINY, "data": part, "partition": "natural", "train": {**TINY["train"], "cohort": 3}}
    done = api.run(fedblend.Experiment(**table), tmp_path / "run")
    assert len(done.metrics) == 3
    more = api.run(fedblend.Experiment(**{**table, "rounds": 3}), tmp_path / "run", resume=True)
    assert len(more.metrics) == 4


def test_clients_may_be_a_column_of_text(tmp_path: Path) -> None:
    names = ["north", "south"] * 5
    for clients in (pd.Series(names), np.array(names, object), np.array(names)):
        data = fedblend.from_torch(PIXELS, tmp_path / "x.npz", clients=clients).load()
        assert (data.client_names, sorted(data.train.client)) == (("north", "south"), [0] * 4 + [1] * 4)
    numbers = fedblend.from_torch(PIXELS, tmp_path / "x.npz", clients=pd.Series([10, 9] * 5, dtype=object)).load()
    assert numbers.client_names == ("9", "10")


def test_from_torch_replaces_its_own_files_only(tmp_path: Path) -> None:
    made = TensorDataset(torch.rand(10, 3), torch.arange(10) % 2)
    assert len(fedblend.from_torch(made, tmp_path / "own.npz").load().train) == 8
    fedblend.from_torch(made, tmp_path / "own.npz")
    np.savez(tmp_path / "mine.npz", x=np.zeros(3))
    (tmp_path / "text.npz").write_text("notes")
    for name in ("mine.npz", "text.npz"):
        before = (tmp_path / name).read_bytes()
        fault("is a file that from_torch has not written; name another", fedblend.from_torch, made, tmp_path / name)
        assert (tmp_path / name).read_bytes() == before


PIXELS = [(np.full((1, 3, 3), i, np.uint8), i % 2) for i in range(10)]


class Stream(IterableDataset):
    """Samples without numbers."""

    def __iter__(self) -> Iterator[Any]:
        return iter(client(0))


@each("clients", [None, [0] * 20])
def test_from_torch_takes_an_iterable_data_set_as_a_list(clients: list[int] | None, tmp_path: Path) -> None:
    said = "object of type 'Stream' has no len(); valid: samples by number, such as list(DATA_SET) of an iterable"
    fault(said, fedblend.from_torch, Stream(), tmp_path / "it.npz", clients=clients)
    assert len(fedblend.from_torch(list(Stream()), tmp_path / "it.npz", clients=clients).load().train) == 16


class Named(NamedTuple):
    """A sample whose fields are in another order than those of a pair."""

    label: int
    image: np.ndarray


@dataclass
class Record:
    """A sample with fields."""

    target: int
    pixel_values: np.ndarray
    name: str = ""


@each(
    "form",
    [
        lambda x, y: {"label": y, "img": x, "id": "a"},
        lambda x, y: UserDict(pixel_values=torch.tensor(x), labels=torch.tensor(y)),
        lambda x, y: Named(y, x),
        lambda x, y: Record(y, x),
        lambda x, y: [x, y],
    ],
)
def test_named_fields_are_input_and_target(form: Callable[[np.ndarray, int], Any], tmp_path: Path) -> None:
    samples = [form(x, y) for x, y in PIXELS]
    data = fedblend.from_torch(samples, tmp_path / "x.npz", test=samples).load()
    assert np.array_equal(data.train.x.numpy(), np.stack([x for x, _ in PIXELS]))
    assert data.train.y.tolist() == [0, 1] * 5


@each(
    ("sample", "said"),
    [
        ({"image": PIXELS[0][0], "label": 0, "labels": 0}, "a sample has the fields image, label, labels, of which"),
        ({"image": PIXELS[0][0], "x": PIXELS[0][0], "y": 0}, "choose them: [(one[INPUT], one[TARGET]) for one in"),
        ({"input_ids": [1, 2], "label": 0}, "the fields input_ids, label, of which not exactly one is an input (x, im"),
        ((PIXELS[0][0], 0, 1), "a sample is a tuple of 3 entries; valid: pairs (x, y)"),
        ((PIXELS[0][0],), "a sample is a tuple of 1 entries"),
        ("ab", "a sample is a str"),
        (torch.zeros(2), "a sample is a Tensor"),
        (({"input_ids": [1, 2]}, 0), "an input or a target is a dict, not numbers"),
        ((None, 0), "an input or a target is a NoneType, not numbers"),
    ],
)
def test_samples_of_an_unknown_form_are_refused(sample: Any, said: str, tmp_path: Path) -> None:
    fault(said, fedblend.from_torch, [sample, sample], tmp_path / "x.npz")
    assert not (tmp_path / "x.npz").exists()


def test_floats_and_labels_are_kept_also_of_tensors_with_a_gradient(tmp_path: Path) -> None:
    x = torch.randn(10, 3)
    samples = [(one.clone().requires_grad_(), 0.5) for one in x]
    data = fedblend.from_torch(samples, tmp_path / "r.npz", test=TensorDataset(x[:2], x[:2].sum(1))).load()
    assert (data.task, len(data.train), len(data.test)) == ("regression", 10, 2)
    assert torch.equal(data.train.x, x)
    y = torch.tensor([[True, False], [True, True], [False, False], [False, True], [True, False]])
    labelled = TensorDataset(x[:5], y)
    data = fedblend.from_torch(labelled, tmp_path / "l.npz", test=labelled, labels=["red", "big"]).load()
    assert (data.task, data.labels) == ("multi-label", ("red", "big"))
    assert torch.equal(data.train.y, y.float())


def changed(x: Callable[..., Any] = lambda x: x, y: Callable[..., Any] = lambda y: y) -> list[Any]:
    return [(x(a), y(b)) for a, b in PIXELS]


@each(
    ("given", "said"),
    [
        ({"train": {}}, "there are no clients"),
        ({"train": {"train": PIXELS, "test": PIXELS}}, "the keys train, test are halves, not clients; valid: "),
        ({"train": {"a": [(1, 2)], "b": [((1, 2), 0)]}}, "samples of shapes"),
        ({"test": changed(x=lambda x: x / 255)}, "x of train and test: both floats and pixels (uint8); valid: "),
        ({"test": changed(y=lambda y: y / 2)}, "y of train and test: both floats and whole numbers; valid: one kind"),
        ({"test": changed(x=lambda x: x[:, :2])}, "x of train and test: samples of shapes [[1, 2, 3], [1, 3, 3]]"),
        ({"test": changed(y=lambda y: (y, y))}, "y of train and test: samples of shapes [[], "),
        ({"train": {"a": PIXELS, "b": changed(x=lambda x: x / 255)}}, "x of clients: both floats and pixels"),
        ({"train": [(np.zeros(2), 0), (np.zeros(3), 0)]}, "valid: pairs (x, y) of one shape"),
        ({"train": []}, "it holds no samples"),
        ({"train": [(np.zeros(2), 0)], "clients": [0, 1]}, "clients: 2 for 1 samples"),
        ({"train": PIXELS, "clients": ["a", None] * 5}, "clients: holds NoneType, str; valid: a whole number for each"),
        ({"train": PIXELS, "clients": ["a", 1] * 5}, "clients: holds int, str; valid: a whole number for each sample"),
        ({"train": PIXELS, "clients": pd.Series(["a", float("nan")] * 5)}, "clients: holds float, str; valid: "),
        ({"train": {"a": [(np.zeros(2), 0)]}, "test": [(np.zeros(2), 0)]}, "test: not of the form of train"),
    ],
)
def test_data_sets_that_do_not_fit_are_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    fault(said, fedblend.from_torch, **{"train": PIXELS, "path": tmp_path / "x.npz", **given})
