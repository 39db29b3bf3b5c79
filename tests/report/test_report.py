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
from PIL import Image

from fedblend import report
from fedblend.analysis.plotting import METHODS, PHASES, line_styles, png_data_url
from fedblend.core.errors import FedblendError
from fedblend.experiment.config import as_table, resolve
from fedblend.experiment.privacy import privacy_facts
from fedblend.report import shared_images
from fedblend.report.description import describe_runs, rerun_command
from fedblend.report.figures import class_figure, figure_by_round, lines, plotly_text, split_figure, time_figure
from fedblend.report.page import _as_json
from fedblend.report.privacy import shares_raw_samples
from fedblend.report.sections import dataset_sections
from fedblend.report.tables import best_rows, results_table
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
    links = [a[k] for _, a in tags for k in ("src", "href", "srcset", "data", "action", "poster") if a.get(k)]
    assert links
    assert all(link.startswith("data:") for link in links)
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
    for colour in METHODS[:4]:
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
      note("tools", [...document.querySelectorAll(".modebar-btn")].map((tool) => tool.dataset.title).join("; "));
      note("wide", document.documentElement.scrollWidth - document.documentElement.clientWidth);
    </script></body>"""
    copy = page.with_name("clicked.html")
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", probe), encoding="utf-8")
    return browse(copy, tmp_path_factory.mktemp("chromium"))


def drawn(browsed):
    """The `d` of every curve and of every band, by figure; the samples in legends are left out."""
    curves: dict[str, list[str]] = {}
    bands: dict[str, list[str]] = {}
    figure = layer = ""
    for tag, attrs in browsed.tags:
        words = (attrs.get("class") or "").split()
        figure = attrs.get("data-figure", figure)
        layer = next((word for word in words if word in ("scatterlayer", "legend")), layer)
        if tag == "path" and layer == "scatterlayer":
            for kind, paths in (("js-line", curves), ("js-fill", bands)):
                if kind in words:
                    paths.setdefault(figure, []).append(attrs.get("d") or "")
    return curves, bands


def test_browser_draws_a_curve_a_method_and_one_for_the_unfinished_run(browsed):
    paths, bands = drawn(browsed)
    assert set(paths) == set(bands) == {"accuracy", "cost", "loss", "train_loss"}
    for figure in ("accuracy", "cost", "loss"):
        assert len(paths[figure]) == 5, figure
        assert all(re.match(r"M[\d.]+,[\d.]+[LHV]", d) for d in paths[figure]), figure
        assert len(bands[figure]) == 2, figure  # two methods have two finished seeds
        assert all(d.startswith("M") for d in bands[figure]), figure
    assert browsed.having("g", **{"class": "heatmaplayer mlayer"})
    assert browsed.having("g", **{"class": "barlayer mlayer"})


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
    classified = {"accuracy", "cost", "loss", "train_loss", "classes", "split-0", "time"}
    wanted = classified | {f"{name}-2" for name in classified}
    wanted |= {f"{name}-3" for name in classified - {"accuracy", "classes"}}
    assert set(places) == wanted
    assert all("js-plotly-plot" in attrs["class"] for attrs in places.values())
    assert [a["id"] for a in opened.having("section", **{"class": "dataset"})] == ["data", "data-2", "data-3"]


def test_browser_shows_no_button_that_uploads_a_figure(browsed):
    tools = browsed.having("body")[0]["data-tools"]
    assert "Download" in tools
    assert not re.search(r"cloud|share|upload|edit", tools, re.IGNORECASE)


def test_page_is_no_wider_than_the_window(browsed):
    assert int(browsed.having("body")[0]["data-wide"]) <= 0


def test_lines_span_the_seeds_and_unfinished_runs_have_their_own(folder):
    frame = curves(find_runs([folder]))
    by_name = {line.name: line for line in lines(frame, "accuracy")}
    assert list(by_name) == ["fedavg", "fedmix", "fedmix, unfinished (seed 2)", "global-mixup", HOSTILE]
    line = by_name["fedmix"]
    assert (line.seeds, line.rounds) == ((0, 1), [0, 1, 2, 3])
    fedmix = frame[(frame["method"] == "fedmix") & (frame["round"] == 3)]
    a, b = fedmix["accuracy"]
    assert line.mean[-1] == pytest.approx((a + b) / 2)
    assert (line.low[-1], line.high[-1]) == (min(a, b), max(a, b))
    assert line.megabytes[-1] == pytest.approx((fedmix["bytes_up"] + fedmix["bytes_down"]).mean() / 1e6)
    assert by_name["fedmix, unfinished (seed 2)"].rounds == [0, 1]


def test_a_method_has_one_colour_in_every_figure(folder):
    runs = find_runs([folder])
    by_method = line_styles([g.name for g in group(runs)])
    for column in ("accuracy", "loss"):
        figure = figure_by_round(curves(runs), column, by_method)
        named = {trace.name: trace.line.color for trace in figure.data if trace.name}
        assert named["fedmix"] == by_method["fedmix"].colour
        assert named[plotly_text(HOSTILE)] == by_method[HOSTILE].colour
    assert len({look.colour for look in line_styles(list("abcdefg")).values()}) == 7
    assert line_styles(list("abcdefgh"))["h"].dash != "solid"


def test_nothing_in_a_figure_can_end_its_script(folder):
    runs = find_runs([folder])
    figure = figure_by_round(curves(runs), "accuracy", line_styles([g.name for g in group(runs)]))
    assert "</script" not in _as_json(figure)
    assert "<" not in _as_json(figure)


def test_by_class_is_the_mean_over_finished_seeds(folder):
    groups = group(find_runs([folder]))
    figure = class_figure(groups)
    fedmix = next(g for g in groups if g.name == "fedmix")
    finals = [o.records[-1].per_class for o in fedmix.outcomes[:2]]
    row = list(figure.data[0].y).index("fedmix")
    assert list(figure.data[0].z[row]) == pytest.approx([50 * (a + b) for a, b in zip(*finals, strict=True)])


def test_each_data_set_has_its_own_table_curves_and_classes(mixed):
    sections = {section.name: section for section in dataset_sections(mixed)}
    assert list(sections) == ["digits", "letters", "numbers"]
    assert [g.name for section in sections.values() for g in section.groups] == ["fedavg", "fedmix"] * 3
    assert list(class_figure(sections["digits"].groups).data[0].x) == list("0123456789")
    assert list(class_figure(sections["letters"].groups).data[0].x) == list("abc")
    assert class_figure(sections["numbers"].groups) is None
    assert len({section.styles["fedmix"] for section in sections.values()}) == 1
    for name, better in (("digits", max), ("letters", max), ("numbers", min)):
        finals = sections[name].table["final"].tolist()
        grid = results_table(sections[name].table)
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
        results_table(letters.table).headings[2],
        [row[1][2].text for row in results_table(letters.table).rows],
    )
    assert heading == "mean of last n"
    assert [re.findall(r"\(.*", cell) for cell in cells] == [["(n = 2)"], ["(n = 4)"]]
    alike = results_table(dataset_sections(mixed[:4])[0].table)
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
    by_method = {method: cells[-1].text for method, cells in results_table(table(find_runs([folder]))).rows}
    assert (by_method["fedavg"], by_method["fedmix"]) == ("done", "1 stopped")


def test_times_are_in_seconds_unless_every_run_took_a_minute(folder):
    frame = table(find_runs([folder]))
    shown = []
    for seconds in ([30.0, 90.0, 0.25, 600.0], [60.0, 90.0, 120.0, 600.0]):
        grid = results_table(frame.assign(seconds=seconds))
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


def test_axes_of_few_rounds_or_clients_have_whole_ticks(folder):
    runs = find_runs([folder])
    frame, by_method = curves(runs), line_styles([g.name for g in group(runs)])
    assert figure_by_round(frame, "accuracy", by_method).layout.xaxis.dtick == 1
    assert figure_by_round(frame.assign(round=20 * frame["round"]), "accuracy", by_method).layout.xaxis.dtick is None
    few = split_figure({"classes": ["x"], "counts": [[1], [2]], "sizes": [1, 2]})
    assert (few.layout.xaxis.dtick, few.data[0].colorbar.dtick) == (1, 1)
    assert split_figure({"classes": [], "counts": [], "sizes": [3, 7]}).layout.yaxis.dtick == 1


def test_a_phase_has_one_colour_in_every_report(folder):
    frame = table(find_runs([folder])).assign(**{"seconds.encode": 50.0})
    colours = {bar.name: bar.marker.color for bar in time_figure(frame).data}
    assert colours["train"] == PHASES["train"]
    assert colours["evaluate"] == PHASES["evaluate"]
    assert colours["encode"] not in PHASES.values()
    less = time_figure(frame.drop(columns=["seconds.train", "seconds.encode"]))
    assert {bar.name: bar.marker.color for bar in less.data}.items() <= colours.items()


def test_split_is_drawn_class_by_client():
    figure = split_figure({"classes": ["x", " "], "counts": [[1, 2], [3, 4], [5, 6]], "sizes": [3, 7, 11]})
    assert (figure.data[0].zmin, figure.data[0].zmax) == (0, 6)  # plotly ignores zmin without zmax
    assert [list(row) for row in figure.data[0].z] == [[1, 3, 5], [2, 4, 6]]
    assert list(figure.data[0].y) == ["x", "' '"]
    assert list(split_figure({"classes": [], "counts": [], "sizes": [3, 7]}).data[0].y) == [3, 7]
    assert split_figure({}) is None


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
