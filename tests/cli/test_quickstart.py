"""The demo: its study, and what it says of the results."""

import pytest
from cli_helpers import here, succeeded
from script_helpers import ROOT, script

from fedblend.report.columns import method_rows
from fedblend.report.verdict import verdict
from fedblend.runs.directory import find_runs
from fedblend.runs.groups import group


@pytest.mark.slow
def test_the_demo_says_what_its_runs_show_and_what_means_reveal(tmp_path):
    short = ("--set", "rounds=1", "--engine", "loop", "--jobs", "1", "--out", tmp_path)
    succeeded(here("run", ROOT / "examples" / "quickstart.toml", *short))

    said = script("examples/quickstart.py").in_words(tmp_path)

    rows = method_rows(group(find_runs([tmp_path])))
    assert [row["method"] for row in rows] == ["fedavg", "scaffold", "fedmix", "server-means", "virtual-means"]
    assert said[0].startswith("Each client knows 2 of 10 digits.")
    assert said[1:-1] == verdict(rows, "fedavg")
    assert said[1].startswith("No method reaches 90 % with every seed: fedavg (0 of 5), ")
    assert "is one of the 20 or fewer that were averaged (guessing: 1 %)" in said[-1]


def test_make_demo_runs_or_resumes_the_study_and_then_says_what_is_seen():
    recipe = (ROOT / "Makefile").read_text().partition("\ndemo: .venv/.base\n")[2].split("\n\n")[0]
    assert recipe.split("\n") == [
        "\tPYTHONDONTWRITEBYTECODE= $(BIN)/fedblend run examples/quickstart.toml --out $(OUT) --resume",
        "\tPYTHONDONTWRITEBYTECODE= $(BIN)/python examples/quickstart.py $(OUT)",
    ]
