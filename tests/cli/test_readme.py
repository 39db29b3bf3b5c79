"""The files, programs, commands and notebooks of the README and of docs/ run as they stand, and so does the demo."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest
import typer.main
from cli_helpers import PNG, TINY, here, records, succeeded
from helpers import each
from script_helpers import PAGES, ROOT, blocks, script, text

import fedblend
from fedblend.cli.app import app
from fedblend.experiment.config import Experiment, resolve
from fedblend.experiment.study import expand, read_tune
from fedblend.report.columns import method_rows
from fedblend.report.verdict import verdict
from fedblend.runs.directory import find_runs
from fedblend.runs.groups import group

pytestmark = pytest.mark.slow


@each("page", [page for page in PAGES if "```toml" in text(page)])
def test_each_file_on_a_page_is_valid(page):
    """All are TOML; experiments are resolved with what they leave out, unless they name classes of the reader."""
    fields = {*Experiment.model_fields, "methods", "seeds", "grid", "variants", "tune"}
    for block in blocks(str(page), "toml"):
        table = tomllib.loads(block)
        if "tune" in table:
            assert read_tune(table).fields, block
        if set(table) <= fields and not re.search(r'"\w+:[A-Z]', block):
            assert expand({**TINY, **{key: table[key] for key in table if key != "tune"}}).experiments, block


def test_the_commands_of_the_page_of_commands_run_in_its_order(tmp_path, monkeypatch):
    """Those on the files and runs that the page makes, and on the examples that need no data."""
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    rows = re.findall(r"^\| `fedblend ([^`]+)", text("docs/commands.md"), re.M)
    others = r"tune|advise|federation|predict|attack|paper [pbs]|compare runs/heart|privacy samples"
    run = [row.replace("RUN", "runs/fedmix-digits/fedmix-seed0") for row in rows if not re.match(others, row)]
    assert len(run) > 15
    for row in run:
        words, _, out = row.replace("rounds=100", "rounds=3").partition(" > ")
        printed = succeeded(here(*shlex.split(words))).out
        if out:
            Path(out).write_text(printed.replace("rounds = 20", "rounds = 2"))
    assert [len(list(Path("runs", name).glob("fedmix-seed?"))) for name in ("fedmix-digits", "fedmix-digits-2")] == [
        1,
        3,
    ]
    assert len(records(Path("runs/fedmix-digits/fedmix-seed0"))) == 4
    assert {"split.png", "report.html", "model.pt2", "model.json", "leaks"} <= {path.name for path in Path().iterdir()}


def test_the_examples_in_the_help_of_commands_that_read_a_file_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    source = text("fedblend/cli/app.py")
    examples = re.findall(r'"((?:paper \w+|data show|privacy \w+) examples/[^"]+)"', source)
    assert len(examples) == 4
    for words in examples:
        succeeded(here(*shlex.split(words)))


def commands():
    """Each command of fedblend in a block of code, with its page, without what a shell does with its output."""
    rows = re.findall(r"^\| `(fedblend [^`>]+)", text("docs/commands.md"), re.M)
    found = [("commands.md", shlex.split(row)[1:]) for row in rows]
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text(page), re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                words = re.split(r" > | \| | && ", line)[0].strip()
                if language in ("", "sh") and words.startswith("fedblend "):
                    found.append((page.name, shlex.split(words, comments=True)[1:]))
    return found


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda value: value if isinstance(value, str) else None)
def test_commands_on_pages_exist_with_their_options(page, words):
    """Click reads the command, its arguments and its options; nothing is run."""
    command, context = typer.main.get_command(app), None
    while True:
        context = command.make_context("fedblend", list(words), parent=context)
        if not hasattr(command, "commands"):
            break
        _, command, words = command.resolve_command(context, [*context._protected_args, *context.args])


def test_programs_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (train,), (load,) = blocks("README.md", "python"), blocks("docs/runs.md", "python")
    assert "rounds=10" in train
    names = {}
    exec(train.replace("rounds=10", "rounds=1"), names)
    assert re.findall(r"^\d +(\d) ", capsys.readouterr().out, re.M) == ["0", "1"]
    exec(load, names)
    accuracy = names["result"].metrics["accuracy"].iloc[-1]
    assert names["right"].mean() == pytest.approx(accuracy, abs=1e-6)


def test_the_reference_for_python_begins_with_programs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    program, watched = (
        one.replace('"rounds": 5', '"rounds": 1').replace("== 5", "== 1") for one in blocks("docs/python.md", "python")
    )
    names = {"print": lambda *values: None}
    exec(program, names)
    assert capfd.readouterr() == ("", "")
    del names["print"]
    exec(watched, names)
    assert re.findall(r"^(\d) 0\.\d+$", capfd.readouterr().out, re.M) == ["0", "1"]
    result, study, again = (names[name] for name in ("result", "study", "again"))
    assert again.metrics.equals(result.metrics)
    assert again.experiment == result.experiment
    test = again.experiment.data.load().test
    assert (again.predict(test.x) == result.predict(test.x)).all()
    assert fedblend.read_study("runs/several").equals(study)
    assert len(study) == 2 * 2 * 2


def test_the_page_on_reports_ends_with_a_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fedblend.run_study(TINY | {"methods": ["fedavg", "fedmix"]}, "runs/quickstart", jobs=1)
    (program,) = blocks("docs/report.md", "python")
    exec(program, {})
    assert Path("comparison.html").is_file()
    assert Path("figures", "table-results.csv").is_file()


@pytest.mark.parametrize(
    ("y", "task"),
    [
        (np.arange(40) % 3, "classification"),
        (np.array(["cat", "dog"] * 20), "classification"),
        (np.arange(40) % 3 * 1.0, "regression"),
        (np.ones((40, 2), np.float32), "regression"),
        (np.eye(40, 2, dtype=np.int64), "multi-label"),
    ],
)
def test_the_type_of_y_decides_the_task(tmp_path, y, task):
    np.savez(tmp_path / "mine.npz", x=np.random.default_rng(0).standard_normal((40, 5)), y=y)
    model = re.search(r"`(model = \{ name = \"mlp\".*?\})`", text("docs/your-data.md"))
    assert model
    table = tomllib.loads(f'data = {{ name = "npz", path = "mine.npz" }}\npartition = "iid"\n{model[1]}')
    table["data"]["path"] = str(tmp_path / "mine.npz")
    assert resolve(table).data.load().task == task


def test_the_example_of_tokens_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    model, program = (one for one in blocks("docs/your-data.md", "python") if "vocabulary" in one)
    Path("my_encoder.py").write_text(model)
    exec(program, {})
    assert re.search(r"^\[('[01]' ?){3}\]$", capsys.readouterr().out, re.M)


def test_the_channel_command_takes_a_new_file(tmp_path):
    found = re.search(r"^\| `fedblend paper (channel my\.toml[^`]*)`", text("docs/commands.md"), re.MULTILINE)
    command = shlex.split(found[1], comments=True)
    (tmp_path / "my.toml").write_text(here("new", "fedmix", "digits").out)
    output = here("paper", "channel", tmp_path / "my.toml", *command[2:])
    assert output.code == 0
    assert "outage" in output.out


def test_the_flower_page_counts_the_lines_of_its_app():
    app = text("examples/flower_app/blended.py").splitlines()
    ours = [line for line in app if "# fedblend" in line or line.startswith("from fedblend")]
    assert len(ours) == 6
    assert "Six lines of it are fedblend's" in text("docs/flower.md")


def test_the_tutorial_runs_as_it_stands(tmp_path, monkeypatch):
    """But for the federation, whose commands other tests run."""
    pytest.importorskip("efficientnet_lite_pytorch", reason="efficientnet-lite-pytorch (extra 'pretrained') is missing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    printed, compared = "", 0
    for language, block in re.findall(r"^```(sh|toml|python|text)\n(.*?)^```", text("docs/tutorial.md"), re.M | re.S):
        if language == "toml":
            Path(f"{'pretrained' if 'features' in block else 'my'}.toml").write_text(block)
        elif language == "python":
            exec(block, {})
        elif language == "sh":
            for line in block.splitlines():
                _, *words = shlex.split(line)
                printed = "" if words[0] in ("federation", "site") else succeeded(here(*words)).out
        elif printed:
            # Accuracies may differ by rounding, and times do; the methods are those of the command before.
            rows = [re.split(r"\s{2,}", line.strip())[0] for line in block.split("─\n")[1].splitlines()]
            assert all(re.search(rf"^ +{re.escape(row)}\b", printed, re.M) for row in rows), printed
            compared += 1
    assert compared == 3
    assert json.loads((tmp_path / "model.json").read_text())["method"] == "server-means"
    last = {
        method: np.mean([json.loads(records(run)[-1])["accuracy"] for run in Path(folder).glob(f"{method}-seed?")])
        for folder, method in (("runs/mine", "fedavg"), ("runs/mine", "server-means"), ("runs/pretrained", "fedlda"))
    }
    assert last["fedavg"] < last["server-means"]
    assert last["fedlda"] > 0.9


@each("page", [page for page in PAGES if "docs" in page.parts and "results" not in (page.stem, page.parent.name)])
def test_a_page_begins_with_what_its_reader_can_do_after_it(page):
    """Pages of results begin with the verdict instead."""
    _, paragraph, *_ = re.sub(r"<!--.*?-->", "", text(page), flags=re.S).strip().split("\n\n")
    assert re.match(r"After this page you (can|have|know)\b", paragraph)


def test_files_of_fedblend_that_pages_name_exist():
    named = re.findall(r"`fedblend/([^`]+)`", text("docs/comparison.md"))
    named += re.findall(r"`([\w/]+\.(?:py|html|toml))`", text("docs/architecture.md"))
    assert len(named) > 30
    assert [path for path in named if not any((ROOT / "fedblend").rglob(path)) and not (ROOT / path).exists()] == []


# The demo --------------------------------------------------------------------------------------------------------


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
    recipe = text("Makefile").partition("\ndemo: .venv/.base\n")[2].split("\n\n")[0]
    assert recipe.split("\n") == [
        "\tPYTHONDONTWRITEBYTECODE= $(BIN)/fedblend run examples/quickstart.toml --out $(OUT) --resume",
        "\tPYTHONDONTWRITEBYTECODE= $(BIN)/python examples/quickstart.py $(OUT)",
    ]


# Notebooks -------------------------------------------------------------------------------------------------------

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
SHORTER = {'"rounds": 20': '"rounds": 3', "[1, 5, 20]": "[1, 2, 3]", "iterations=200": "iterations=5"}
STALE = "its outputs are those of other code; `make notebooks` executes it again"


@pytest.fixture(scope="module")
def notebooks():
    """docs/site/notebooks.py."""
    for package in ("nbformat", "nbclient", "ipykernel", "flwr", "efficientnet_lite_pytorch"):
        pytest.importorskip(package, reason=f"{package} (extra 'dev') is not installed")
    return script("docs/site/notebooks.py")


def read(path):
    import nbformat

    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_those_of_the_code(notebooks, path):
    notebook = read(path)
    assert not notebooks.stale(notebook), f"{path.name}: {STALE}"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    drawn = [cell for cell in cells if any("image/png" in output.get("data", {}) for output in cell.outputs)]
    assert all(cell.metadata.get("alt") for cell in drawn)
    assert path.stat().st_size < 200_000


def test_outputs_of_changed_code_are_found(notebooks):
    notebook = read(NOTEBOOKS[0])
    next(cell for cell in notebook.cells if cell.cell_type == "code").source += "\n1"
    assert notebooks.stale(notebook)


def test_the_form_of_outputs_does_not_depend_on_rounding(notebooks):
    import nbformat

    def printed(text):
        cell = nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", text=text)])
        return notebooks.form(nbformat.v4.new_notebook(cells=[cell]))

    assert printed("fedavg   9.95\nsum -1,204.0") == printed("fedavg  10.02\nsum 3.5")
    assert printed("fedavg 9.95") != printed("fedmix 9.95")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_shows(notebooks, path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    kept, shorter = read(path), read(path)
    for cell in shorter.cells:
        for words, fewer in SHORTER.items():
            cell.source = cell.source.replace(words, fewer)
    assert shorter != kept
    assert notebooks.form(notebooks.executed(shorter)) == notebooks.form(kept), f"{path.name}: {STALE}"


def test_a_page_shows_text_code_and_outputs_of_a_notebook(notebooks):
    pytest.importorskip("mkdocs", reason="mkdocs-material (extra 'docs') is not installed")
    hooks = script("docs/site/hooks.py")
    page, pictures = hooks.notebook_page(ROOT / "docs" / "notebooks" / "tutorial.ipynb")

    assert page.startswith("# Tutorial in a notebook\n")
    assert '<a href="tutorial.ipynb" download>' in page
    assert "```python\nimport numpy as np\n" in page
    assert "```text\nmethod  fedavg  server-means  difference\n" in page
    assert "![Test accuracy by round of FedAvg and server-means, with bands over three seeds](tutorial-1.png)" in page
    assert [name for name in pictures if f"]({name})" in page] == ["tutorial-1.png"]
    assert all(picture.startswith(PNG) for picture in pictures.values())
    assert hooks.page_of("docs/notebooks/tutorial.ipynb") == "notebooks/tutorial.md"
