"""The report: figures against numbers computed by hand, and the page in a browser."""

import base64
import io
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_helpers import PATIENCE_S
from matplotlib.colors import to_rgba
from PIL import Image

from fedblend import report
from fedblend.analysis.plotting import (
    COLOURS,
    METHOD_COLOURS,
    METHOD_STYLES,
    PHASES,
    line_styles,
    log_axis,
    png_data_url,
)
from fedblend.core.errors import FedblendError
from fedblend.experiment.config import as_table, resolve
from fedblend.experiment.presets import presets
from fedblend.experiment.privacy import privacy_facts
from fedblend.report import shared_images
from fedblend.report.charts import section_charts
from fedblend.report.columns import best_rows, method_rows
from fedblend.report.curve_figures import BY_BYTES, BY_ROUND, MAX_MARKS, MAX_POINTS, Line, curve_chart, lines
from fedblend.report.description import describe_runs, rerun_command
from fedblend.report.figures import class_chart, split_chart, time_chart
from fedblend.report.privacy import shares_raw_samples
from fedblend.report.sections import dataset_sections
from fedblend.report.svg import inline_svg
from fedblend.report.tables import results_table
from fedblend.runs.api import expand_file
from fedblend.runs.directory import RunDirectory, find_runs
from fedblend.runs.groups import Outcome, group
from fedblend.runs.runner import execute
from fedblend.runs.summary import curves, table

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=8000",
    "--window-size=1200,900",
]

HOSTILE = "a<b>&</script>"
"""A method's label that would be markup without escaping."""

RUNS = [("fedavg", 0), ("fedavg", 1), ("fedmix", 0), ("fedmix", 1), ("naivemix", 0), ("global-mixup", 0)]


def experiment(method, seed, **more):
    spec = {"name": method, "label": HOSTILE} if method == "naivemix" else method
    fields = {
        "name": "tiny",
        "data": "digits",
        "model": "mlp",
        "partition": {"name": "classes", "clients": 6, "classes_per_client": 3},
        "rounds": 3,
        "target": 0.2,
        "holdout": 0.2,
        "unsafe": True,
        "train": {"cohort": 3, "epochs": 1, "lr": 0.05},
    }
    return resolve({**fields, "method": spec, "seed": seed, **more})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of four methods; one run is unfinished after a round."""
    folder = tmp_path_factory.mktemp("tiny")
    for method, seed in RUNS:
        execute(experiment(method, seed), folder / f"{method}-seed{seed}")
    execute(experiment("fedmix", 2, rounds=1), folder / "fedmix-seed2")
    cut = RunDirectory(folder / "fedmix-seed2")
    cut.set_experiment(experiment("fedmix", 2))
    cut.set_status("stopped", 1, "interrupted")
    return folder


@pytest.fixture(scope="module")
def page(folder, tmp_path_factory):
    """The page, written as by the command line."""
    path = tmp_path_factory.mktemp("page") / "new" / "report.html"
    report.write(find_runs([folder]), path, path.with_suffix(".png"))
    return path


def words_of(page):
    """The visible text of a page, without tags and scripts."""
    words = re.sub(r"<(script|style)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", words))


@pytest.fixture(scope="module")
def mixed(folder, tmp_path_factory):
    """Runs on three data sets: digits, letters of three classes, and numbers to predict."""
    place = tmp_path_factory.mktemp("mixed")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((120, 4))
    np.savez(place / "letters.npz", x=x, y=np.array(list("abc"))[x[:, :3].argmax(1)])
    np.savez(place / "numbers.npz", x=x, y=x @ rng.standard_normal((4, 1)))
    for name in ("letters", "numbers"):
        data = {"name": "npz", "path": str(place / f"{name}.npz")}
        for method, rounds in (("fedavg", 2), ("fedmix", 4)):
            more = {"data": data, "partition": {"name": "iid", "clients": 4}, "name": name, "holdout": 0.0}
            execute(experiment(method, 0, rounds=rounds, **more), place / name / method)
    digits = [RunDirectory(folder / f"{method}-seed{seed}") for method in ("fedavg", "fedmix") for seed in (0, 1)]
    return [*digits, *find_runs([place / "letters"]), *find_runs([place / "numbers"])]


class Tags(HTMLParser):
    """All tags of a page with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def having(self, tag, **attrs):
        return [a for t, a in self.tags if t == tag and all(a.get(k) == v for k, v in attrs.items())]


def test_page_loads_nothing_from_elsewhere(page):
    text = page.read_text(encoding="utf-8")
    tags = Tags(text).tags
    links = [
        a[k] for _, a in tags for k in ("src", "href", "xlink:href", "srcset", "data", "action", "poster") if a.get(k)
    ]
    assert links
    assert all(link.startswith(("data:", "#")) for link in links)
    assert not [t for t, _ in tags if t in ("link", "iframe", "object", "embed", "base")]
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert "@import" not in own
    assert "url(" not in own
    policy = next(a["content"] for t, a in tags if t == "meta" and "http-equiv" in a)
    assert "default-src 'none'" in policy


def test_page_escapes_labels(page):
    text = page.read_text(encoding="utf-8")
    assert HOSTILE not in text
    assert "a&lt;b&gt;&amp;&lt;/script&gt;" in text


def test_page_describes_the_runs_unfinished_runs_and_methods_that_break_privacy(page):
    words = words_of(page)
    assert "7 runs of 4 methods (seeds 0, 1, 2) on the data set digits" in words
    assert "1,438 training samples and 359 test samples (images of 1 by 8 by 8; 10 classes)" in words
    assert "fedmix, seed 2: stopped at round 1 of 3 (interrupted)" in words
    assert "Breaks privacy: global-mixup shares raw samples of clients" in words
    assert re.search(r"SHA-256 of load_digits\(\) images [0-9a-f]{64}", words)
    assert f"fedblend run {page.parents[1]}" not in words
    assert "fedmix-seed0/config.toml --seeds 0,1,2" in words


def test_summary_figure_has_the_colours_of_all_methods(page):
    image = np.asarray(Image.open(page.with_suffix(".png")).convert("RGB"))
    assert image.shape[1] == 1650
    for colour in (METHOD_COLOURS[method] for method in ("fedavg", "fedmix", "global-mixup")):
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(image.astype(int) - wanted).max(axis=2) < 8).sum() > 100, colour


def browse(path: Path, home: Path) -> Tags:
    """The page's elements after its scripts ran, as the browser has them."""
    line = [CHROMIUM, *FLAGS, f"--user-data-dir={home}", "--dump-dom", path.as_uri()]
    return Tags(subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout)


@pytest.fixture(scope="module")
def browsed(page, tmp_path_factory):
    """The page after a click on a heading of its first table, and one line of its own on what it then holds."""
    if CHROMIUM is None:
        pytest.skip("no Chromium or Chrome on this machine to open the page in")
    probe = """<script>
      const body = document.querySelector("#results tbody");
      const rows = () => [...body.rows].map((row) => row.cells[2].dataset.value).join(" ");
      const button = document.querySelectorAll("#results thead button")[2];
      const note = (name, value) => document.body.setAttribute(`data-${name}`, value);
      button.click(); note("up", rows()); note("sort", button.closest("th").getAttribute("aria-sort"));
      button.click(); note("down", rows());
      const hidden = () => [...document.querySelectorAll("[data-method='1']")].map((line) => line.style.display);
      const key = document.querySelector("[data-toggle='1']");
      key.click(); note("hidden", hidden().join(" ")); note("pressed", key.getAttribute("aria-pressed"));
      key.click(); note("shown", hidden().join(" ").trim());
      note("wide", document.documentElement.scrollWidth - document.documentElement.clientWidth);
    </script></body>"""
    copy = page.with_name("clicked.html")
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", probe), encoding="utf-8")
    return browse(copy, tmp_path_factory.mktemp("chromium"))


def drawn(browsed):
    """The methods' keys of the lines and bands, by figure."""
    found: dict[str, list[str]] = {}
    figure = ""
    for tag, attrs in browsed.tags:
        figure = attrs.get("data-figure", figure)
        if tag == "g" and "data-method" in attrs:
            found.setdefault(figure, []).append(attrs["data-method"])
    return found


def test_browser_has_a_line_a_method_a_band_over_seeds_and_a_line_for_the_unfinished_run(browsed):
    found = drawn(browsed)
    # Methods: 0 fedavg and 1 fedmix with two finished seeds, fedmix with an unfinished one, 2 and 3 with one seed.
    for figure in ("accuracy", "cost", "loss"):
        assert sorted(found.pop(figure)) == ["0", "0", "1", "1", "1", "2", "3"], figure
    assert {figure: set(keys) for figure, keys in found.items()} == {
        "train_loss-1": {"0"},
        "train_loss-2": {"1"},
        "train_loss-3": {"2"},
        "train_loss-4": {"3"},
    }


def test_a_method_of_the_legend_hides_its_lines_in_every_figure(browsed):
    body = browsed.having("body")[0]
    assert set(body["data-hidden"].split()) == {"none"}
    assert len(body["data-hidden"].split()) == 12  # three in each of three figures, and in the training loss
    assert (body["data-pressed"], body["data-shown"]) == ("false", "")


def test_browser_sorts_by_value_both_ways(browsed, folder):
    body = browsed.having("body")[0]
    finals = sorted(table(find_runs([folder]))["final"])
    assert [float(v) for v in body["data-up"].split()] == pytest.approx(finals)
    assert [float(v) for v in body["data-down"].split()] == pytest.approx(finals[::-1])
    assert body["data-sort"] == "ascending"


@pytest.mark.slow
def test_browser_draws_every_figure_of_every_data_set(mixed, tmp_path):
    if CHROMIUM is None:
        pytest.skip("no Chromium or Chrome on this machine to open the page in")
    report.write(mixed, tmp_path / "report.html")
    opened = browse(tmp_path / "report.html", tmp_path / "chromium")
    places = {attrs["data-figure"]: attrs for tag, attrs in opened.tags if "data-figure" in attrs}
    classified = {"accuracy", "cost", "loss", "train_loss-1", "train_loss-2", "classes", "split-0", "time"}
    wanted = classified | {f"{name}-2" for name in classified}
    wanted |= {f"{name}-3" for name in classified - {"accuracy", "classes"}}
    assert set(places) == wanted
    assert len(opened.having("svg", role="img")) == len(wanted) + 6  # and a piece of line a method and data set
    assert [a["id"] for a in opened.having("section", **{"class": "dataset"})] == ["data", "data-2", "data-3"]


def test_page_is_no_wider_than_the_window(browsed):
    assert int(browsed.having("body")[0]["data-wide"]) <= 0


def test_lines_span_the_seeds_and_unfinished_runs_have_their_own(folder):
    frame = curves(find_runs([folder]))
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


def drawn_lines(chart):
    return {line.get_gid(): line for line in chart.figure.axes[0].get_lines() if line.get_gid()}


def test_every_preset_has_one_style_that_no_other_has():
    assert set(METHOD_STYLES) == {name for name in presets() if "+" not in name}
    assert len(set(METHOD_STYLES.values())) == len(METHOD_STYLES)
    assert len({(style.dash, style.marker) for style in METHOD_STYLES.values()}) == len(METHOD_STYLES)
    assert {name: style.colour for name, style in METHOD_STYLES.items()} == METHOD_COLOURS


def test_a_method_has_its_colour_whatever_stands_beside_it(folder):
    for names in (["fedmix"], ["mine", "yours", "fedmix"], ["fedavg", "fedmix", "mine"]):
        assert line_styles(names)["fedmix"].colour == METHOD_COLOURS["fedmix"]
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
        "Training loss, objective: plain": {"fedavg"},
        "Training loss, objective: fedmix": {"fedmix"},
        "Training loss, objective: global-mixup": {"global-mixup"},
        "Training loss, objective: naivemix": {HOSTILE},
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


def test_a_long_run_is_drawn_by_a_bounded_number_of_points():
    rounds = list(range(5000))
    line = Line("fedavg", (0, 1), False, rounds, rounds, rounds, rounds, [float(r) for r in rounds], rounds)
    chart = curve_chart("a", "A", [line], BY_ROUND, "loss", line_styles(["fedavg"]))
    [drawn] = drawn_lines(chart).values()
    assert len(drawn.get_xdata()) == MAX_POINTS
    assert (drawn.get_xdata()[0], drawn.get_xdata()[-1]) == (0, 4999)
    assert len(chart.data.rows) == 5000  # an export has all
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


def test_each_data_set_has_its_own_table_curves_and_classes(mixed):
    sections = {section.name: section for section in dataset_sections(mixed)}
    assert list(sections) == ["digits", "letters", "numbers"]
    assert [g.name for section in sections.values() for g in section.groups] == ["fedavg", "fedmix"] * 3
    assert class_chart(sections["digits"].groups).data.head == ["method", *"0123456789"]
    assert class_chart(sections["letters"].groups).data.head == ["method", *"abc"]
    assert class_chart(sections["numbers"].groups) is None
    assert len({section.styles["fedmix"] for section in sections.values()}) == 1
    for name, better in (("digits", max), ("letters", max), ("numbers", min)):
        finals = [row["final"] for row in sections[name].rows]
        grid = results_table(sections[name].rows)
        marked = [value for value, (_, cells) in zip(finals, grid.rows, strict=True) if cells[1].best]
        assert marked == [better(finals)], name
        assert grid.headings[1][0] == ("final loss" if name == "numbers" else "final accuracy (%)")


def test_a_page_on_several_data_sets_has_a_section_for_each(mixed, tmp_path):
    path = tmp_path / "report.html"
    report.write(mixed, path, tmp_path / "report.png")
    text, words = path.read_text(encoding="utf-8"), words_of(path)
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["digits", "letters", "numbers"]
    assert "8 runs on 3 data sets" in words
    assert "(images of 1 by 8 by 8; 10 classes)" in words
    assert "(4 features; regression)" in words
    ids = re.findall(r'<[^>]+\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    one, three = tmp_path / "one.png", tmp_path / "report.png"
    report.write(mixed[:4], tmp_path / "one.html", one)
    heights = [Image.open(picture).size[1] for picture in (one, three)]
    assert heights[1] == 3 * heights[0]


def test_the_mean_of_the_last_evaluations_shows_their_number(mixed):
    letters = dataset_sections(mixed[4:6])[0]
    (heading, _), cells = (
        results_table(letters.rows).headings[2],
        [row[1][2].text for row in results_table(letters.rows).rows],
    )
    assert heading == "mean of last n"
    assert [re.findall(r"\(.*", cell) for cell in cells] == [["(n = 2)"], ["(n = 4)"]]
    alike = results_table(dataset_sections(mixed[:4])[0].rows)
    assert alike.headings[2][0] == "mean of last 3"
    assert "n =" not in alike.rows[0][1][2].text


def test_methods_are_counted_apart_from_their_configurations(tmp_path):
    def tiles(*runs):
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        for i, one in enumerate(runs):
            (place / str(i)).mkdir(parents=True)
            RunDirectory(place / str(i)).create(one, {}, {})
        return describe_runs(group(find_runs([place]))).tiles[:2]

    rates = [{"train": {"cohort": 3, "lr": lr}} for lr in (0.1, 0.2)]
    grid = [experiment(method, 0, **rate) for method in ("fedavg", "fedmix") for rate in rates]
    assert tiles(*grid) == [("2", "methods"), ("4", "configurations")]
    assert tiles(grid[0], grid[2]) == [("2", "methods"), ("1", "seed")]
    prox = [experiment({"name": "fedavg", "terms": terms}, 0) for terms in ([], ["proximal"])]
    assert tiles(*prox) == [("2", "methods"), ("1", "seed")]


def test_the_status_column_shows_how_runs_ended(folder):
    by_method = {
        method: cells[-1].text for method, cells in results_table(method_rows(group(find_runs([folder])))).rows
    }
    assert (by_method["fedavg"], by_method["fedmix"]) == ("done", "1 stopped")


def test_times_are_in_seconds_unless_every_run_took_a_minute(folder):
    rows = method_rows(group(find_runs([folder])))
    shown = []
    for seconds in ([30.0, 90.0, 0.25, 600.0], [60.0, 90.0, 120.0, 600.0]):
        grid = results_table([row | {"seconds": time} for row, time in zip(rows, seconds, strict=True)])
        place = next(i for i, (heading, _) in enumerate(grid.headings) if heading.startswith("time"))
        shown.append([grid.headings[place][0], *(cells[place].text for _, cells in grid.rows)])
    assert shown == [["time (s)", "30.0", "90.0", "0.25", "600"], ["time (min)", "1.0", "1.5", "2.0", "10.0"]]


def test_cells_with_the_text_of_the_best_are_best_too():
    rows = [{"finished": 1, "mb": mb} for mb in (0.821, 0.822, 0.9)]
    assert best_rows(rows, lambda row: f"{row['mb']:.2f}", lambda row: row["mb"], -1) == {0, 1}
    assert best_rows(rows[:2], lambda row: f"{row['mb']:.2f}", lambda row: row["mb"], -1) == set()
    rows[0]["finished"] = 0
    assert best_rows(rows, lambda row: f"{row['mb']:.3f}", lambda row: row["mb"], -1) == {1}
    rows[2]["finished"] = 3  # a method with three seeds is not compared with methods with one seed
    assert best_rows(rows, lambda row: f"{row['mb']:.3f}", lambda row: row["mb"], -1) == set()


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


def pixels(picture):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture.url.split(",")[1]))))


def test_images_are_the_means_of_each_clients_samples(folder):
    gallery = next(g for g in shared_images.galleries(group(find_runs([folder]))) if "fedmix" in g.methods)
    assert gallery.methods == ("fedmix", HOSTILE)  # both share the same means
    assert (gallery.shown, gallery.entries, gallery.raw, gallery.seed) == (6, 6, False, 0)
    made = execute(experiment("fedmix", 0), folder.parent / "again").setup
    for picture in (gallery.images[0], gallery.images[5]):
        held = torch.from_numpy(made.population.indices(picture.client))
        mean = made.data.train.x[held].double().mean(0)[0].numpy()
        image = pixels(picture)
        assert image.shape == (96, 96)
        assert np.abs(image[6::12, 6::12] - mean).max() <= 1
        labels = made.data.train.y[held].numpy()
        common = np.bincount(labels).argmax()
        assert picture.caption.startswith(f"{common}: {100 * (labels == common).mean():.0f} %")
    sizes = made.population.sizes
    assert gallery.caption.endswith(f"held when it shared: {sizes.min()} to {sizes.max()}.")


def test_raw_samples_are_marked_as_raw(folder):
    gallery = next(g for g in shared_images.galleries(group(find_runs([folder]))) if "global-mixup" in g.methods)
    assert gallery.raw
    assert gallery.caption == "Each image is one raw sample."
    assert (gallery.shown, len(gallery.images)) == (24, 24)
    assert {picture.client for picture in gallery.images} == set(range(6))


def test_images_come_from_all_clients_before_a_second_one_of_any():
    assert shared_images.rows_across_clients(np.array([0, 0, 0, 1, 1, 2]), 4).tolist() == [0, 1, 3, 5]
    assert shared_images.rows_across_clients(np.array([4, 4]), 24).tolist() == [0, 1]


def test_colour_images_keep_their_colours():
    image = np.zeros((3, 2, 2), np.float32)
    image[0, 0, 0] = 1
    url = png_data_url(image)
    made = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))))
    assert made.shape == (96, 96, 3)
    assert made[0, 0].tolist() == [255, 0, 0]
    assert made[95, 95].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("method", "raw"),
    [
        ("fedavg", False),
        ("fedmix", False),
        ("global-mixup", True),
        ({"name": "fedmix", "sharing": {"samples_per_mean": 1}}, True),
        ({"name": "local-means", "sharing": {"samples_per_mean": 1}}, False),
    ],
)
def test_methods_that_share_raw_samples_are_found(method, raw):
    made = experiment(method, 0)
    run = Outcome(Path("run"), as_table(made), [], {}, {"privacy": privacy_facts(made)})

    assert shares_raw_samples(run) is raw
    # Runs of version 0.1 lack the fact.
    assert shares_raw_samples(replace(run, facts={})) is raw


def test_the_command_repeats_a_groups_runs(folder):
    for g in group(find_runs([folder])):
        path, seeds = re.fullmatch(r"fedblend run (\S+) --seeds ([\d,]+)", rerun_command(g)).groups()
        study = expand_file(path, [], [int(seed) for seed in seeds.split(",")])
        wanted = {o.seed: RunDirectory(o.path).experiment() for o in g.outcomes}
        assert {e.seed: e for e in study.experiments.values()} == wanted


def test_settings_that_differ_are_listed_apart(folder):
    about = describe_runs(group(find_runs([folder])))
    differs = dict(about.differs)
    assert differs["method.name"] == ["fedavg", "fedmix", "global-mixup", "naivemix"]
    assert differs["method.sharing.name"] == ["none", "means", "raw", "means"]
    shared = dict(about.shared)
    assert (shared["train.lr"], shared["holdout"]) == ("0.05", "0.2")
    assert "seed" not in shared


def test_no_runs_and_a_folder_for_a_page_are_refused(folder, tmp_path):
    with pytest.raises(FedblendError, match="no runs given"):
        report.write([], tmp_path / "report.html")
    with pytest.raises(FedblendError, match="is a folder; give the path of a file"):
        report.write(find_runs([folder]), tmp_path)
    assert list(tmp_path.iterdir()) == []
