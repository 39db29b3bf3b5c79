"""Damaged, wrong and missing data files give one message, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_input_helpers import refused_at_once, run
from helpers import each

pytestmark = pytest.mark.usefixtures("elsewhere")


@each(
    ("content", "said"),
    [
        (b"", "t.csv: is empty; valid: a line of column names, a line for each sample"),
        (b'y,a\n"1,2', "t.csv: is no table, or is damaged (Error tokenizing data."),
        (b"y\n", "t.csv: holds no rows; at least two are needed, one to train and one to test on"),
        (b"a,a,y\n1,2,u\n1,2,v\n", "t.csv: has two columns named 'a'"),
        (b"a,y\n1,2,u\n3,4,v\n", "t.csv: rows have more cells than the header; valid: a name for each column"),
        (b",a,y\n0,1,u\n1,2,v\n", "t.csv has no name, as row numbers that pandas writes or a separator at the end"),
        ("a,y\n1,ü\n".encode("latin-1"), "t.csv: is no text in UTF-8; valid: UTF-8 (Excel saves it as 'CSV UTF-8')"),
        (b'a,y\n"1,5",u\n"2,5",v\n', "column 'a' holds numbers with commas or percent signs, such as '1,5'; write"),
        (b"a,y\n1e39,u\ninf,v\n", "t.csv: column 'a' holds infinity, or a number beyond float32, in 2 rows; valid: "),
        (b"a,y\n1,0.0\n2,1.0\n", "data.target: column 'y' holds only 0.0 and 1.0; valid: 0 and 1 or text for classes"),
    ],
)
def test_a_damaged_table_or_one_that_would_silently_become_other_data(content: bytes, said: str) -> None:
    Path("t.csv").write_bytes(content)
    refused_at_once(run({"data": {"name": "table", "path": "t.csv", "target": "y"}}), said)


def test_missing_files() -> None:
    refused_at_once(run({"data": {"name": "npz", "path": "nowhere.npz"}}), "data.path: ", "/nowhere.npz'", "existing")
    refused_at_once(run({"data": "npz"}), "path", "missing")
    refused_at_once(run({"data": {"name": "mnist", "folder": "nowhere"}}), "data.folder: ", "/nowhere'")
