"""Execute the notebooks of docs/notebooks, and keep their outputs in them: `make notebooks`.

Each notebook runs in an empty folder. Its outputs are kept with a digest of the code that made them; `stale` tells
whether the code has changed since.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")


def executed(notebook: NotebookNode) -> NotebookNode:
    """A copy of the notebook with new outputs. Raises nbclient's CellExecutionError if a cell fails."""
    done = nbformat.from_dict(notebook)
    with tempfile.TemporaryDirectory() as folder:
        # The commands of this environment come first, and nothing is written to a home.
        places = dict.fromkeys(("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR"), folder)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        before = dict(os.environ)
        os.environ.update(places, PATH=path)
        try:
            NotebookClient(
                done,
                timeout=None,
                kernel_name="python3",
                record_timing=False,
                resources={"metadata": {"path": folder}},
                config=Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}}),
            ).execute()
        finally:
            os.environ.clear()
            os.environ.update(before)
    done.metadata = {name: notebook.metadata[name] for name in ("kernelspec", "language_info")}
    done.metadata["outputs_of"] = digest(done)
    return done


def digest(notebook: NotebookNode) -> str:
    """A digest of the code of all cells."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def stale(notebook: NotebookNode) -> bool:
    """Whether the outputs are those of other code."""
    return bool(notebook.metadata.get("outputs_of") != digest(notebook))


def form(notebook: NotebookNode) -> list[list[str]]:
    """The outputs of each code cell without what rounding may change: numbers, blanks and pixels."""
    return [
        [_form_of(output) for output in cell.get("outputs", [])] for cell in notebook.cells if cell.cell_type == "code"
    ]


def _form_of(output: NotebookNode) -> str:
    if "image/png" in output.get("data", {}):
        return "a picture"
    text = output["text"] if output.output_type == "stream" else output["data"]["text/plain"]
    return " ".join(NUMBER.sub("#", text).split())


if __name__ == "__main__":
    for file in sorted(FOLDER.glob("*.ipynb")):
        if not sys.argv[1:] or file.stem in sys.argv[1:]:
            nbformat.write(executed(nbformat.read(file, as_version=4)), file)
            print(file.relative_to(FOLDER.parents[1]))
