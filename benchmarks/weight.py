"""How much a reader carries: what a round of FedAvg enters, flags on base classes, lines, and the longest import chain.

    python benchmarks/weight.py

The round is the second of two, in the loop engine, with an MLP on the package's digits.
"""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fedblend.core.loop import RoundLoop
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import resolve
from fedblend.experiment.make_setup import make_setup

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fedblend"
CORE = ("core", "authoring")


def entered() -> set[tuple[str, str]]:
    """The functions of fedblend that a round enters, as (file, qualified name)."""
    table = {"data": "digits", "method": "fedavg", "model": "mlp", "rounds": 2}
    setup = make_setup(resolve(table | {"partition": {"name": "iid", "clients": 4}}))
    loop = RoundLoop(setup, LoopEngine(setup))
    state, _ = loop.round(loop.start()[0])
    found: set[tuple[str, str]] = set()

    def trace(frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            found.add((code.co_filename, code.co_qualname))

    sys.setprofile(trace)
    try:
        loop.round(state)
    finally:
        sys.setprofile(None)
    return found


def lines(paths: Iterable[Path]) -> int:
    """Lines of files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def flags() -> int:
    """Fields of type bool with a default, and nothing else, on the classes of core/."""
    found = 0
    for path in (PACKAGE / "core").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found += sum(
                    isinstance(one, ast.AnnAssign)
                    and ast.unparse(one.annotation) == "bool"
                    and isinstance(one.value, ast.Constant)
                    for one in node.body
                )
    return found


def longest_chain() -> int:
    """Modules of the longest chain of imports within fedblend, those inside functions and for types left out."""
    files = PACKAGE.rglob("*.py")
    paths = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in files}
    imports: dict[str, set[str]] = {}
    for name, path in paths.items():
        imports[name] = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module in paths:
                imports[name] |= {m for one in node.names if (m := f"{node.module}.{one.name}") in paths} or {
                    node.module
                }

    @functools.cache
    def depth(name: str, within: frozenset[str] = frozenset()) -> int:
        return 1 + max((depth(one) for one in imports[name] - {name} - within), default=0)

    try:
        return max(map(depth, imports))
    except RecursionError:
        return -1


def sources() -> list[Path]:
    """The Python and C++ files of the package."""
    return [path for end in ("py", "cpp", "h") for path in PACKAGE.rglob(f"*.{end}")]


def main() -> None:
    """Print all figures."""
    found = entered()
    print(f"a round of FedAvg enters {len(found)} functions in {len({file for file, _ in found})} files")
    print(f"core/loop.py: {lines([PACKAGE / 'core' / 'loop.py'])} lines")
    print(f"core/ and authoring/: {lines(p for name in CORE for p in (PACKAGE / name).rglob('*.py'))} lines")
    print(f"flags on classes of core/: {flags()}")
    print(f"the package: {lines(sources())} lines; tests: {lines((ROOT / 'tests').rglob('*.py'))}")
    print(f"longest import chain: {longest_chain()} modules")


if __name__ == "__main__":
    main()
