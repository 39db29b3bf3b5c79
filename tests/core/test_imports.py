"""Imports go one way: from the commands down to the core, and never back."""

from __future__ import annotations

import ast
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
    for path in ROOT.rglob("*.py"):
        module = ".".join(("fedblend", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedblend."):
                found.append((module, str(node.module)))
            elif isinstance(node, ast.ImportFrom) and node.module == "fedblend":
                found += [(module, f"fedblend.{alias.name}") for alias in node.names]
            elif isinstance(node, ast.Import):
                found += [(module, alias.name) for alias in node.names if alias.name.startswith("fedblend.")]
            elif isinstance(node, ast.Constant) and re.fullmatch(r"fedblend(\.\w+)+[.:]?\w*", str(node.value)):
                found.append((module, node.value.partition(":")[0]))
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
