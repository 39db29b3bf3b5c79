"""Imports go one way: from the commands down to the core, and never back."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import fedblend

ROOT = Path(fedblend.__file__).parent
LAYERS = (
    *("cli", "report", "papers", "analysis", "flower", "runs", "engines"),
    *("experiment", "methods", "models", "data", "core", "_kernels"),
)
"""Packages from the top down, as docs/architecture.md has them."""


@functools.cache
def imports() -> list[tuple[str, str]]:
    """(importing module, imported module) for every import within fedblend, also those inside functions.

    A string that is the path of a module, such as "fedblend.methods" or "fedblend.flower:server_app", counts as one.
    """
    found = []
    # Not by ``ast``, which takes seconds. A line that only looks like an import is in a docstring.
    pattern = re.compile(r"^ *(?:from (fedblend(?:\.\w+)*) import (\w+)|import (fedblend\.[\w.]+))", re.M)
    path_of_module = re.compile(r"""["'](fedblend(?:\.\w+)+)[.:]?\w*["']""")
    for path in ROOT.rglob("*.py"):
        module = ".".join(("fedblend", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        found += [(module, named) for named in path_of_module.findall(text)]
        for package, name, imported in pattern.findall(text):
            found.append((module, imported or (f"fedblend.{name}" if package == "fedblend" else package)))
    return found


def test_the_package_has_its_layers_and_nothing_else_at_the_top() -> None:
    files = {"__init__.py", "__main__.py", "py.typed"}
    assert {path.name for path in ROOT.iterdir() if path.name != "__pycache__"} == {*LAYERS, *files}


def test_no_module_imports_one_of_a_layer_above_its_own() -> None:
    def layer(module: str) -> str:
        return module.split(".")[1] if "." in module else ""

    upwards = [
        f"{importer} -> {imported}"
        for importer, imported in imports()
        if layer(importer) in LAYERS and layer(imported) in LAYERS
        if LAYERS.index(layer(importer)) > LAYERS.index(layer(imported))
    ]

    assert upwards == []


def test_kernels_are_private_to_engines_and_methods() -> None:
    users = {importer.split(".")[1] for importer, imported in imports() if imported.startswith("fedblend._kernels")}
    assert users <= {"engines", "methods", "_kernels"}
