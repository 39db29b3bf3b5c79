"""The notebooks of the documentation run, and their outputs are those of their code."""

import pytest
from cli_helpers import PNG
from script_helpers import ROOT, script

pytestmark = pytest.mark.slow

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
