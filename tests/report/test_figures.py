"""Figures of reports against numbers computed by hand, and the colours of methods."""

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.colors import to_rgba
from report_helpers import HOSTILE

from fedblend import report
from fedblend.analysis.plotting import COLOURS, METHOD_STYLES, PHASES, line_styles, log_axis
from fedblend.experiment.presets import presets
from fedblend.report import summary_figure
from fedblend.report.columns import method_rows
from fedblend.report.curve_figures import BY_BYTES, BY_ROUND, MAX_MARKS, MAX_POINTS, Line, curve_chart, lines
from fedblend.report.figures import class_chart, split_chart, time_chart
from fedblend.report.page import inline_svg
from fedblend.report.sections import dataset_sections, section_charts, splits
from fedblend.runs.directory import RunDirectory, find_runs
from fedblend.runs.groups import group
from fedblend.runs.summary import curves_of


def test_lines_span_the_seeds_and_unfinished_runs_have_their_own(folder):
    frame = curves_of(group(find_runs([folder])))
    by_name = {line.name: line for line in lines(frame, "accuracy")}
    assert list(by_name) == ["fedavg", "fedmix", "fedmix, unfinished (seed 2)", "global-mixup", HOSTILE]
    line = by_name["fedmix"]
    assert (line.seeds, line.rounds) == ((0, 1), [0, 1, 2, 3])
    fedmix = frame[(frame["method"] == "fedmix") & (frame["round"] == 3)]
    a, b = 100 * fedmix["accuracy"]
    assert line.mean[-1] == pytest.approx((a + b) / 2)
    assert (line.low[-1], line.high[-1]) == (min(a, b), max(a, b))
    assert line.megabytes[-1] == pytest.approx((fedmix["bytes_up"] + fedmix["bytes_down"]).mean() / 1e6)
    assert by_name["fedmix, unfinished (seed 2)"].rounds == [0, 1]


def test_the_summary_says_what_is_seen_with_units_and_the_better_side(folder, monkeypatch):
    monkeypatch.setattr("fedblend.analysis.plotting.png_bytes", lambda figure: figure)
    figure = summary_figure.draw_summary(dataset_sections(find_runs([folder])))
    (panels,) = figure.subfigs
    assert panels.get_suptitle() == "Test accuracy by round and by megabytes sent: digits, 1 to 3 seeds"
    by_round, by_bytes = panels.axes
    assert (by_round.get_xlabel(), by_round.get_ylabel()) == ("round", "test accuracy (%)")
    assert by_bytes.get_xlabel() == "MB sent so far, all clients, log scale  (← cheaper)"


def drawn_lines(chart):
    return {line.get_gid(): line for line in chart.figure.axes[0].get_lines() if line.get_gid()}


def test_every_listed_preset_has_one_style_that_no_other_has():
    assert set(METHOD_STYLES) <= set(presets())
    assert len(set(METHOD_STYLES.values())) == len(METHOD_STYLES)
    assert len({(style.dash, style.marker) for style in METHOD_STYLES.values()}) == len(METHOD_STYLES)


def test_a_method_has_its_colour_whatever_stands_beside_it(folder):
    for names in (["fedmix"], ["mine", "yours", "fedmix"], ["fedavg", "fedmix", "mine"]):
        assert line_styles(names)["fedmix"].colour == METHOD_STYLES["fedmix"].colour
    assert line_styles(["mine"]) == {"mine": line_styles(["fedmix", "mine"])["mine"]}
    many = line_styles([f"run {i}" for i in range(48)])
    assert len({style.colour for style in list(many.values())[:12]}) == 12
    assert len(set(many.values())) == 48
    for section in dataset_sections(find_runs([folder])):
        for chart in section_charts(section):
            for gid, line in drawn_lines(chart).items():
                assert line.get_color() == section.styles[chart.marks[gid].method].colour


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_colours_of_methods_have_contrast_with_both_backgrounds():
    style = (Path(report.__file__).parent / "page.css").read_text(encoding="utf-8")
    panels = re.findall(r"--panel: (#[0-9a-f]{6});", style)
    assert len(panels) == 2
    for colour in COLOURS:
        for panel in panels:
            low, high = sorted((luminance(colour), luminance(panel)))
            assert (high + 0.05) / (low + 0.05) >= 3, (colour, panel)


def test_training_losses_of_different_objectives_are_in_different_charts(folder):
    [section] = dataset_sections(find_runs([folder]))
    charts = {chart.title: set(chart.methods) for chart in section_charts(section) if "train_loss" in chart.name}
    assert charts == {
        "Training loss by round, objective: plain": {"fedavg"},
        "Training loss by round, objective: fedmix": {"fedmix"},
        "Training loss by round, objective: global-mixup": {"global-mixup"},
        "Training loss by round, objective: naivemix": {HOSTILE},
    }
    prox = [group([RunDirectory(folder / "fedavg-seed0")])[0], group([RunDirectory(folder / "fedavg-seed1")])[0]]
    prox[1].config["method"]["terms"] = [{"name": "proximal", "mu": 0.1}]
    assert list(replace(section, groups=prox).by_objective) == ["plain", "plain + proximal"]


def test_the_axis_of_bytes_is_logarithmic_and_leaves_out_what_was_before_any(folder):
    [section] = dataset_sections(find_runs([folder]))
    [cost] = [chart for chart in section_charts(section) if chart.name == "cost"]
    assert cost.figure.axes[0].get_xscale() == "log"
    for line in drawn_lines(cost).values():
        assert min(line.get_xdata()) > 0
    assert len(drawn_lines(cost)["line0"].get_xdata()) == 3
    figure = cost.figure.axes[0]
    log_axis(figure, [0.3, 7.0])
    assert {0.5, 1.0, 2.0, 5.0} <= {round(tick, 6) for tick in figure.get_xticks()}


def test_a_loss_that_diverged_is_drawn_on_a_logarithmic_axis():
    line = Line("fedavg", (0,), False, [1, 2], [1.0, 999.0], [1.0, 999.0], [1.0, 999.0], [1.0, 2.0], [0.0, 0.0])
    styles = line_styles(["fedavg"])
    for values, scale in (([1.0, 999.0], "linear"), ([1.0, 1001.0], "log"), ([0.0, 1001.0], "linear")):
        chart = curve_chart("a", "A", [replace(line, low=values, high=values)], BY_ROUND, "loss", styles)
        assert chart.figure.axes[0].get_yscale() == scale


def test_losses_that_are_not_finite_are_left_out():
    values = [1.0, math.inf, math.nan, 0.5]
    line = Line("fedavg", (0,), False, [1, 2, 3, 4], values, values, values, [1.0, 2.0, 3.0, 4.0], [0.0] * 4)
    styles = line_styles(["fedavg"])
    chart = curve_chart("a", "A", [line], BY_ROUND, "loss", styles)
    [drawn] = drawn_lines(chart).values()
    assert drawn.get_xdata().tolist() == [1, 4]
    text = inline_svg(chart.figure, "a", "A", chart.marks)
    assert re.findall(r"<use [^>]*><title>(.*?)</title>", text) == ["fedavg: 1 in round 1", "fedavg: 0.5 in round 4"]
    assert chart.figure.axes[0].get_yscale() == "linear"
    assert curve_chart("a", "A", [replace(line, low=[math.nan] * 4)], BY_ROUND, "loss", styles) is None


def test_a_long_run_is_drawn_by_a_bounded_number_of_points():
    rounds = list(range(5000))
    line = Line("fedavg", (0, 1), False, rounds, rounds, rounds, rounds, [float(r) for r in rounds], rounds)
    chart = curve_chart("a", "A", [line], BY_ROUND, "loss", line_styles(["fedavg"]))
    [drawn] = drawn_lines(chart).values()
    assert len(drawn.get_xdata()) == MAX_POINTS
    assert (drawn.get_xdata()[0], drawn.get_xdata()[-1]) == (0, 4999)
    assert len(chart.data.rows) == 5000  # an export has all
    assert chart.shown.head == ["method", *(f"round {r}" for r in (4999, 3999, 2999, 1999, 999, 0))]
    assert chart.shown.rows == [["fedavg", *(f"{r} ({r} to {r})" for r in (4999, 3999, 2999, 1999, 999, 0))]]
    assert len(chart.marks["line0"].points) == MAX_MARKS
    assert curve_chart("b", "B", [replace(line, megabytes=[0.0] * 5000)], BY_BYTES, "loss", {}) is None


def test_a_picture_shows_numbers_to_a_pointer_and_escapes_names(folder):
    [section] = dataset_sections(find_runs([folder]))
    chart = section_charts(section)[0]
    text = inline_svg(chart.figure, "accuracy", "Accuracy", chart.marks, dict.fromkeys(section.styles, "0"))
    assert HOSTILE not in text
    fedavg = section.rows[0]["final"]
    assert re.search(rf"<title>fedavg: {100 * fedavg:.4g} \([\d.]+ to [\d.]+\) in round 3 \(mean of 2 seeds\)", text)
    assert text.count("<use") == text.count("<use ") > 0
    marks = sum(len(mark.points) for mark in chart.marks.values())
    assert text.count("<title>") == marks + len(chart.marks)
    assert len(re.findall(r"<use [^>]*><title>", text)) == marks
    assert not re.search(r"#1d2730|#5c6873|#e3e7ea|clip-path", text)


def test_by_class_is_the_mean_over_finished_seeds(folder):
    groups = group(find_runs([folder]))
    chart = class_chart(groups)
    fedmix = next(g for g in groups if g.name == "fedmix")
    finals = [o.records[-1].per_class for o in fedmix.outcomes[:2]]
    row = [one[0] for one in chart.data.rows].index("fedmix")
    means = [50 * (a + b) for a, b in zip(*finals, strict=True)]
    assert chart.figure.axes[0].images[0].get_array()[row].tolist() == pytest.approx(means)
    assert chart.data.rows[row][1:] == [f"{mean:.4g}" for mean in means]


def test_axes_of_rounds_and_clients_have_whole_ticks(folder):
    [section] = dataset_sections(find_runs([folder]))
    by_round = section_charts(section)[0]
    few = split_chart({"classes": ["x"], "counts": [[1], [2]], "sizes": [1, 2]}, "split-0", "")
    sizes = split_chart({"classes": [], "counts": [], "sizes": [3, 7]}, "split-0", "")
    for axis in (by_round.figure.axes[0].xaxis, few.figure.axes[0].xaxis, sizes.figure.axes[0].xaxis):
        assert all(tick == int(tick) for tick in axis.get_ticklocs())


def test_a_phase_has_one_colour_in_every_report(folder):
    rows = [row | {"seconds.encode": 50.0} for row in method_rows(group(find_runs([folder])))]

    def colours(rows):
        axes = time_chart(rows).figure.axes[0]
        return {bars.get_label(): bars[0].get_facecolor() for bars in axes.containers}

    found = colours(rows)
    assert found["train"] == to_rgba(PHASES["train"])
    assert found["evaluate"] == to_rgba(PHASES["evaluate"])
    assert found["encode"] not in map(to_rgba, PHASES.values())
    less = [{name: v for name, v in row.items() if name not in ("seconds.train", "seconds.encode")} for row in rows]
    assert colours(less).items() <= found.items()
    assert time_chart([{"method": "a", "seconds.train": 0.0}]) is None


def test_split_is_drawn_class_by_client():
    chart = split_chart({"classes": ["x", " "], "counts": [[1, 2], [3, 4], [5, 6]], "sizes": [3, 7, 11]}, "s", "")
    image = chart.figure.axes[0].images[0]
    assert image.get_clim() == (0, 6)
    assert image.get_array().tolist() == [[1, 3, 5], [2, 4, 6]]
    assert [text.get_text() for text in chart.figure.axes[0].get_yticklabels()] == ["x", "' '"]
    assert chart.shown.rows == [["x", "1", "3", "5"], ["' '", "2", "4", "6"]]
    bars = split_chart({"classes": [], "counts": [], "sizes": [3, 7]}, "s", "").figure.axes[0].containers[0]
    assert [bar.get_height() for bar in bars] == [3, 7]
    assert split_chart({}, "s", "") is None


@pytest.mark.parametrize("counts", [[[1, 2], [3, 4]], []])
def test_a_split_names_clients_that_have_names(counts):
    record = {"classes": ["x", "y"][: 2 if counts else 0], "counts": counts, "sizes": [3, 7], "names": ["Oslo", "Ulm"]}
    chart = split_chart(record, "s", "")
    assert [text.get_text() for text in chart.figure.axes[0].get_xticklabels()] == ["Oslo", "Ulm"]
    named = chart.shown.head[1:] if counts else [row[0] for row in chart.shown.rows]
    assert named == ["Oslo", "Ulm"]


def test_a_split_that_all_seeds_share_is_not_called_each_seeds_own(folder, tmp_path):
    for seed in (0, 1):
        shutil.copytree(folder / f"fedavg-seed{seed}", tmp_path / f"fedavg-seed{seed}")
    (own,) = splits(group(find_runs([tmp_path])))
    shutil.copy(tmp_path / "fedavg-seed0" / "split.json", tmp_path / "fedavg-seed1" / "split.json")
    (same,) = splits(group(find_runs([tmp_path])))
    assert own.chart.title.endswith("seed 0. Each seed has its own split.")
    assert same.chart.title.endswith("seed 0. Each seed has the same numbers.")
