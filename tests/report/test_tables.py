"""Tables of the page: columns, what is bold, and an epsilon in words."""

import math
import re

import pytest
from helpers import each

from fedblend.report.columns import Column, best_row, method_rows
from fedblend.report.guarantees import Guarantee
from fedblend.report.sections import dataset_sections
from fedblend.report.tables import results_table
from fedblend.runs.directory import find_runs
from fedblend.runs.groups import group


def test_the_mean_of_the_last_evaluations_shows_their_number(mixed):
    letters = results_table(dataset_sections(mixed[4:6])[0].rows)
    assert letters.headings[2][0] == "mean of last n"
    assert [re.findall(r"\(.*", cells[2].text) for _, cells in letters.rows] == [["(n = 2)"], ["(n = 4)"]]
    alike = results_table(dataset_sections(mixed[:4])[0].rows)
    assert alike.headings[2][0] == "mean of last 3"
    assert "n =" not in alike.rows[0][1][2].text


def test_the_status_column_shows_how_runs_ended(folder):
    grid = results_table(method_rows(group(find_runs([folder]))))
    by_method = {method: cells[-1].text for method, cells in grid.rows}
    assert (by_method["fedavg"], by_method["fedmix"]) == ("done", "1 stopped")


def test_times_are_in_seconds_unless_every_run_took_a_minute(folder):
    rows = method_rows(group(find_runs([folder])))
    shown = []
    for seconds in ([30.0, 90.0, 0.25, 600.0], [60.0, 90.0, 120.0, 600.0]):
        grid = results_table([row | {"seconds": time} for row, time in zip(rows, seconds, strict=True)])
        place = next(i for i, (heading, _) in enumerate(grid.headings) if heading.startswith("time"))
        shown.append([grid.headings[place][0], *(cells[place].text for _, cells in grid.rows)])
    assert shown == [["time (s)", "30.0", "90.0", "0.25", "600"], ["time (min)", "1.0", "1.5", "2.0", "10.0"]]


def test_megabytes_up_and_down_are_in_their_own_columns(folder):
    rows = [row | {"bytes_up": 1e6, "bytes_down": 2e6} for row in method_rows(group(find_runs([folder])))]
    grid = results_table(rows)
    shown = {heading: cell.text for (heading, _), cell in zip(grid.headings, grid.rows[0][1], strict=True)}
    assert (shown["up (MB)"], shown["down (MB)"]) == ("1.0", "2.0")


def method_row(*values, unsafe=False):
    mean = sum(values) / len(values) if values else 0.99
    return {"mb": mean, "by_seed": {seed: {"mb": value} for seed, value in enumerate(values)}, "unsafe": unsafe}


@each(
    ("rows", "sign", "best"),
    [
        ([method_row(0.7, 0.71), method_row(0.2, 0.22)], 1, 0),
        ([method_row(0.7, 0.71), method_row(0.2, 0.22)], -1, 1),
        ([method_row(0.7, 0.71), method_row(0.2, 0.22)], 0, None),
        ([method_row(0.7, 0.71), method_row(0.2, 0.6)], 1, None),  # the differences are 0.5 and 0.11
        ([method_row(0.7), method_row(0.2)], 1, None),  # one seed
        ([method_row(0.7, 0.71), method_row(0.2)], 1, None),
        ([method_row(0.7, 0.71)], 1, None),
        ([method_row(0.5, 0.5), method_row(0.5, 0.5)], 1, None),
        ([method_row(0.503, 0.503), method_row(0.501, 0.501)], 1, None),  # of equal text
        ([method_row(0.7, 0.71, unsafe=True), method_row(0.5, 0.51), method_row(0.2, 0.22)], 1, 1),
        ([method_row(), method_row(0.5, 0.51), method_row(0.2, 0.22)], 1, 1),  # no finished run
        ([method_row(math.nan, math.nan), method_row(0.5, 0.51), method_row(0.2, 0.22)], 1, 1),
    ],
)
def test_only_a_clear_best_of_methods_that_keep_samples_private_is_bold(rows, sign, best):
    assert best_row(rows, Column("MB", lambda row: f"{row['mb']:.2f}", lambda row: row["mb"], sign)) == best


@pytest.mark.parametrize(("seeds", "exact", "best"), [(2, False, None), (3, False, None), (4, False, 1), (2, True, 1)])
def test_two_or_three_equal_differences_are_bold_only_of_what_is_counted(seeds, exact, best):
    rows = [method_row(*(base + seed for seed in range(seeds))) for base in (20.0, 10.0)]
    column = Column("rounds", lambda row: f"{row['mb']:.0f}", lambda row: row["mb"], -1, "", exact)
    assert best_row(rows, column) == best


def test_an_epsilon_has_words_for_how_little_it_protects():
    def words(epsilon, delta=1e-5):
        return Guarantee("fedavg", "weights", "a client", epsilon, delta, "", {1: epsilon}).words

    assert words(0.0, 0.0) == "strong: a guess is right up to 50.0 % of the time"
    assert words(1.0) == "strong: a guess is right up to 73.2 % of the time"  # e / (1 + e) = 0.7311
    assert words(2.0, 0.1) == "moderate: a guess is right up to 89.3 % of the time"  # (e^2 + 0.1) / (1 + e^2) = 0.8927
    assert words(11_015.0) == "protects nothing: a guess is right practically all of the time"
    assert Guarantee("a", "b", "c", None, 0.1, "why", {}).words == "no guarantee"
