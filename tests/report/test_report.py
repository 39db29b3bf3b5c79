"""The page: its text, its sections, and what a browser makes of it."""

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import here, refused, sites_with_own_data, succeeded, tiny_run
from helpers import each
from PIL import Image
from report_helpers import HOSTILE, browse, experiment

from fedblend import report
from fedblend.analysis.plotting import METHOD_STYLES
from fedblend.core.errors import FedblendError
from fedblend.experiment.config import as_table
from fedblend.experiment.privacy_facts import privacy_facts
from fedblend.report import shared_images
from fedblend.report.description import describe_runs, rerun_command
from fedblend.report.figures import class_chart
from fedblend.report.guarantees import shares_raw_samples
from fedblend.report.sections import dataset_sections
from fedblend.report.tables import results_table
from fedblend.runs.api import expand_file
from fedblend.runs.directory import METRICS, RunDirectory, find_runs
from fedblend.runs.groups import Outcome, group
from fedblend.runs.runner import execute
from fedblend.runs.summary import rows_of

pytestmark = pytest.mark.drawn


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


@pytest.mark.parametrize("name", ["rep.pdf", "rep"])
def test_a_page_with_another_ending_than_html_is_refused(name, folder, tmp_path):
    refused(here("report", folder, "--out", tmp_path / name), "valid: a name that ends in .html, such as report.html")
    assert not any(tmp_path.iterdir())


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
    assert image.shape[1] == 1275
    for colour in (METHOD_STYLES[method].colour for method in ("fedavg", "fedmix", "global-mixup")):
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(image.astype(int) - wanted).max(axis=2) < 8).sum() > 100, colour


def opened(path: Path, home: Path) -> Tags:
    """The page's elements after its scripts ran, in a window of 1200 pixels."""
    return Tags(browse(path, home, "--window-size=1200,900"))


@pytest.fixture(scope="module")
def browsed(page, tmp_path_factory):
    """The page after a click on a heading of its first table, and one line of its own on what it then holds."""
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
    return opened(copy, tmp_path_factory.mktemp("chromium"))


def drawn(browsed):
    """The methods' keys of the lines and bands, by figure."""
    found: dict[str, list[str]] = {}
    figure = ""
    for tag, attrs in browsed.tags:
        figure = attrs.get("data-figure", figure)
        if tag == "g" and "data-method" in attrs:
            found.setdefault(figure, []).append(attrs["data-method"])
    return found


@pytest.mark.slow
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
        "measured-taylor_failed": {"1"},
    }


def test_a_method_of_the_legend_hides_its_lines_in_every_figure(browsed):
    body = browsed.having("body")[0]
    assert set(body["data-hidden"].split()) == {"none"}
    # Three in each of three figures, in the training loss, and in what the objective measures.
    assert len(body["data-hidden"].split()) == 15
    assert (body["data-pressed"], body["data-shown"]) == ("false", "")


def test_browser_sorts_by_value_both_ways(browsed, folder):
    body = browsed.having("body")[0]
    finals = sorted(row["final"] for row in rows_of(group(find_runs([folder]))))
    assert [float(v) for v in body["data-up"].split()] == pytest.approx(finals)
    assert [float(v) for v in body["data-down"].split()] == pytest.approx(finals[::-1])
    assert body["data-sort"] == "ascending"


@pytest.mark.slow
def test_browser_draws_every_figure_of_every_data_set(mixed, tmp_path):
    report.write(mixed, tmp_path / "report.html")
    shown = opened(tmp_path / "report.html", tmp_path / "chromium")
    places = {attrs["data-figure"]: attrs for tag, attrs in shown.tags if "data-figure" in attrs}
    classified = {"accuracy", "cost", "loss", "train_loss-1", "train_loss-2", "classes", "split-0", "time"}
    classified |= {"measured-taylor_failed"}
    wanted = classified | {f"{name}-2" for name in classified}
    wanted |= {f"{name}-3" for name in classified - {"accuracy", "classes"}}
    assert set(places) == wanted
    assert len(shown.having("svg", role="img")) == len(wanted) + 6  # and a piece of line a method and data set
    assert [a["id"] for a in shown.having("section", **{"class": "dataset"})] == ["data", "data-2", "data-3"]


def test_page_is_no_wider_than_the_window(browsed):
    assert int(browsed.having("body")[0]["data-wide"]) <= 0


@pytest.mark.slow
def test_page_is_no_wider_than_a_phone(page, tmp_path):
    # A window has a least width of its own, a frame has none.
    probe = """<script>
      const root = document.documentElement;
      document.querySelectorAll("details").forEach((one) => { one.open = true; });
      parent.postMessage([root.clientWidth, root.scrollWidth].join(" "), "*");
    </script></body>"""
    text = page.read_text(encoding="utf-8").replace("</body>", probe)
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    frame = """<body><script>onmessage = (event) => { document.body.setAttribute("data-sizes", event.data); };</script>
      <iframe src="page.html" style="width: 390px; height: 3000px; border: 0"></iframe></body>"""
    (tmp_path / "frame.html").write_text(frame, encoding="utf-8")
    sizes = opened(tmp_path / "frame.html", tmp_path / "chromium").having("body")[0]["data-sizes"]
    shown, needed = map(int, sizes.split())
    assert needed == shown <= 390


def test_runs_of_sites_with_data_of_their_own_are_not_described_as_a_split(folder, tmp_path):
    run = sites_with_own_data(shutil.copytree(folder / "fedavg-seed0", tmp_path / "run"), *[9] * 6)
    described = describe_runs(group([RunDirectory(run)]))
    assert "These are the server's; the clients are 6 sites with data of their own, each with 9" in described.text
    assert "by '" not in described.text
    assert all("federation app" in line for line in described.commands_by_method or described.commands)


def test_each_data_set_has_its_own_table_curves_and_classes(mixed):
    sections = {section.name: section for section in dataset_sections(mixed)}
    assert list(sections) == ["digits", "letters", "numbers"]
    assert [g.name for section in sections.values() for g in section.groups] == ["fedavg", "fedmix"] * 3
    assert class_chart(sections["digits"].groups).data.head == ["method", *"0123456789"]
    assert class_chart(sections["letters"].groups).data.head == ["method", *"abc"]
    assert class_chart(sections["numbers"].groups) is None
    assert len({section.styles["fedmix"] for section in sections.values()}) == 1
    for name, measure in (("digits", "accuracy (%)"), ("letters", "accuracy (%)"), ("numbers", "loss")):
        grid = results_table(sections[name].rows, sections[name].baseline)
        assert grid.headings[1][0] == f"final {measure}"
        several = name == "digits"  # the others have one seed
        assert (grid.headings[2][0] == "difference to fedavg") is several
        assert any(cell.best for _, cells in grid.rows for cell in cells) <= several


@pytest.mark.slow
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


@pytest.mark.slow
def test_images_beyond_the_limit_are_left_out_and_named(folder, tmp_path, monkeypatch):
    runs = find_runs([folder])
    first, second = shared_images.galleries(group(runs))
    monkeypatch.setattr("fedblend.report.page.MAX_IMAGE_BYTES", first.size + second.size - 1)
    report.write(runs, tmp_path / "report.html")
    shown = Tags((tmp_path / "report.html").read_text(encoding="utf-8")).having("img")
    assert [one["src"] for one in shown] == [image.url for image in first.images]
    names = ", ".join(second.methods).replace(HOSTILE, "a&lt;b&gt;&amp;&lt;/script&gt;")
    assert f"so that the page stays small: {names}." in words_of(tmp_path / "report.html")


@each(
    ("method", "min_mean", "raw"),
    [
        ("fedavg", 1, False),
        ("fedmix", 2, False),
        # The last mean of a client may then be of one sample, whatever the size of the others.
        ("fedmix", 1, True),
        ("global-mixup", 2, True),
        ({"name": "fedmix", "sharing": {"samples_per_mean": 1}}, 1, True),
        ({"name": "local-means", "sharing": {"samples_per_mean": 1}}, 1, False),
    ],
)
def test_methods_that_share_raw_samples_are_found(method, min_mean, raw):
    made = experiment(method, 0, policy={"min_mean": min_mean})
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


@pytest.mark.slow
def test_the_commands_of_the_guide_run(folder, tmp_path, monkeypatch):
    guide = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    lines = re.findall(r"^fedblend (.*)$", guide, re.M)
    monkeypatch.setattr("fedblend.report.export.figure_bytes", lambda figure, form: b"")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    shutil.copytree(folder, tmp_path / "runs" / "quickstart")
    for line in lines:
        succeeded(here(*line.replace("naivemix", "fedmix").split()))
    assert len(lines) == 4
    assert {"comparison.html", "report.html", "figures"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
def test_a_page_of_many_methods_and_rounds_is_at_most_one_and_a_half_megabytes(tmp_path):
    for i, method in enumerate([*METHOD_STYLES][:16]):
        for seed in (0, 1):
            made = experiment(method, seed, rounds=600, unsafe=True)
            run = RunDirectory(tmp_path / "runs" / f"{method}-{seed}")
            run.path.mkdir(parents=True)
            split = {"classes": list("0123456789"), "counts": [[5] * 10] * 200, "sizes": [50] * 200, "measures": {}}
            run.create(made, {}, split)
            sent = {"bytes_up": {"weights": 1000 + i}, "bytes_down": {"weights": 1000}, "machine": {}}
            records = [
                {"round": r, "loss": 2 - r / 1000 + i / 99, "accuracy": (r + 7 * i * seed) / 900, **sent}
                | {"train_loss": 1 / (r + 1)}
                for r in range(601)
            ]
            (run.path / METRICS).write_text("".join(json.dumps(one) + "\n" for one in records))
            run.set_status("done", 600)
    report.write(find_runs([tmp_path / "runs"]), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<title>") > 16 * 4  # lines of each method in four charts
    assert len(page.encode()) <= 1_500_000


def test_no_runs_and_a_folder_for_a_page_are_refused(folder, tmp_path):
    with pytest.raises(FedblendError, match="no runs given"):
        report.write([], tmp_path / "report.html")
    with pytest.raises(FedblendError, match="is a folder; give the path of a file"):
        report.write(find_runs([folder]), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"steps": 3}}, "for 3 steps on batches of"),
        ({"train": {"epochs": 2}}, "for 2 local epochs on batches of"),
        ({"method": "fedper", "holdout": 0.2}, "Each client's model is tested after every round"),
        ({}, "The server's model is tested after every round"),
    ],
)
def test_the_text_says_how_long_clients_train_and_whose_model_is_tested(changes, words, tmp_path):
    assert words in describe_runs(group([tiny_run(tmp_path, rounds=1, **changes)])).text


@pytest.mark.slow
def test_metrics_have_a_table_of_their_own_on_the_page(tmp_path):
    for method in ("fedavg", "fedmix"):
        execute(experiment(method, 0, rounds=1, metrics=["ece"]), tmp_path / "runs" / method)
    report.write(find_runs([tmp_path / "runs"]), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    metrics = page.split("Metrics by method</caption>")[1].split("</table>")[0]
    assert re.findall(r'<button type="button">([^<]+)', metrics) == ["method", "ece"]


@pytest.mark.slow
def test_the_chart_of_epsilon_says_how_many_points_it_has(tmp_path):
    """Of 15 evaluations not all have a point."""
    noisy = {"name": "noise", "clip": 1.0, "multiplier": 8.0}
    execute(experiment("fedavg", 0, rounds=14, eval_every=1, protection=noisy, delta=0.01), tmp_path / "run")

    report.write([RunDirectory(tmp_path / "run")], tmp_path / "page.html")

    assert "points for up to 12 evaluated rounds, and the last round" in (tmp_path / "page.html").read_text("utf-8")
