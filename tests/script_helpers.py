"""Scripts of this repository that no package holds, as modules, and the texts of its pages."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def text(page: str | Path) -> str:
    """The text of a file of the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str | Path, language: str) -> list[str]:
    """The blocks of code of a language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.M | re.S)


def script(path: str) -> ModuleType:
    """The script at ``path`` below the repository's root, run as a module; it may import modules of its folder."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while they are made.
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module
