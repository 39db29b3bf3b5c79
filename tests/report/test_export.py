"""Files of a report for a paper."""

import csv
import re

import pytest
from report_helpers import HOSTILE

from fedblend import report
from fedblend.core.errors import FedblendError
from fedblend.report.export import LATEX, latex
from fedblend.report.tables import Cell, PageTable
from fedblend.runs.directory import find_runs
from fedblend.runs.groups import group
from fedblend.runs.summary import curves_of


@pytest.fixture(scope="module")
def exported(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("exported")
    report.write(find_runs([folder]), place / "report.html", export=place / "new" / "files")
    return place / "new" / "files"


@pytest.fixture(scope="module")
def tables(folder, tmp_path_factory):
    """The same export without its drawings."""
    place = tmp_path_factory.mktemp("tables")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda *given, **named: None)
        report.write(find_runs([folder]), place / "report.html", export=place)
    return place


@pytest.mark.slow
def test_an_export_has_each_figure_as_svg_pdf_and_csv_and_each_table_as_csv_and_latex(exported):
    figures = ["accuracy", "classes", "cost", "loss", "measured-taylor_failed", "split-0", "time"]
    figures += [f"train_loss-{i}" for i in range(1, 5)]
    wanted = {f"{name}.{form}" for name in figures for form in ("svg", "pdf", "csv")}
    wanted |= {f"table-{name}.{form}" for name in ("results", "bytes", "clients", "time") for form in ("csv", "tex")}
    assert {path.name for path in exported.iterdir()} == wanted
    for name in figures:
        pdf, svg = (exported / f"{name}.pdf").read_bytes(), (exported / f"{name}.svg").read_text(encoding="utf-8")
        assert re.search(rb"/MediaBox \[ 0 0 252 ", pdf), name  # 3.5 inches of 72 points
        assert b"/FontFile2" in pdf
        assert 'width="252pt"' in svg
        assert "<text" not in svg  # letters are outlines


def test_exported_numbers_are_those_of_the_runs(tables, folder):
    frame = curves_of(group(find_runs([folder])))
    with open(tables / "accuracy.csv", encoding="utf-8", newline="") as file:
        table = csv.DictReader(file)
        rows = list(table)
    assert list(table.fieldnames or ())[:4] == ["method", "seeds", "round", "test accuracy (%): mean"]
    [last] = [row for row in rows if row["method"] == "fedmix" and row["round"] == "3"]
    finals = 100 * frame[(frame["method"] == "fedmix") & (frame["round"] == 3) & frame["finished"]]["accuracy"]
    assert last["seeds"] == "0 1"
    measured = [float(last[name]) for name in ("test accuracy (%): mean", "lowest seed", "highest seed")]
    assert measured == pytest.approx([finals.mean(), finals.min(), finals.max()], rel=1e-5)
    assert {row["method"] for row in rows} >= {HOSTILE, "fedmix, unfinished (seed 2)"}
    with open(tables / "table-results.csv", encoding="utf-8", newline="") as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["fedavg", "fedmix", "global-mixup", HOSTILE]


def test_exported_latex_is_escaped_and_has_as_many_columns_as_it_says(tables):
    text = (tables / "table-results.tex").read_text(encoding="utf-8")
    assert r"a\textless{}b\textgreater{}\&\textless{}/script\textgreater{} &" in text
    assert "global-mixup (breaks privacy) &" in text
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1
    [columns] = re.findall(r"\\begin\{tabular\}\{([lr]+)\}", text)
    lines = [line for line in text.splitlines() if line.endswith(r" \\")]
    assert len(lines) == 5
    assert {len(re.findall(r"(?<!\\)&", line)) + 1 for line in lines} == {len(columns)}
    special = "".join(LATEX)
    table = PageTable([("x", "")], [(special, [Cell("-1.5 [-2.0, +0.5]", 1.0, True)])])
    assert r" & \textbf{$-$1.5 {[}$-$2.0, +0.5{]}} \\" in latex(table)
    assert "".join(LATEX.values()) in latex(table)


@pytest.mark.slow
def test_files_of_several_data_sets_have_their_names(mixed, tmp_path, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *given, **named: None)
    report.write(mixed, tmp_path / "report.html", export=tmp_path / "files")
    names = {path.name for path in (tmp_path / "files").iterdir()}
    assert {"digits-accuracy.svg", "letters-accuracy.svg", "numbers-loss.pdf", "numbers-table-results.tex"} <= names
    (tmp_path / "file").write_text("")
    with pytest.raises(FedblendError, match=r"file: cannot be created as a folder: .*; give another path"):
        report.write(mixed[:1], tmp_path / "report.html", export=tmp_path / "file")
