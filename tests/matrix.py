"""Run the quick tests with several versions of Python and PyTorch: ``make test-matrix``.

Each pair has an environment under ``.matrix/``, which is made once and used again. Interpreters are those on the path
and pyenv's. The table goes to the terminal and to ``.matrix/matrix.md``: what passed, failed and was skipped, or why an
environment could not be made. The exit code is 1 if a test failed or pytest ended early.

PyPI's builds of PyTorch for Linux bring gigabytes of CUDA libraries. Without a GPU there are two ways around them:
``PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu``, or ``--without-cuda``, which needs only PyPI.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".matrix"
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.6.0", "2.13.0")
"""The oldest PyTorch of pyproject.toml, and that of constraints.txt."""

QUICK = ("tests/core", "tests/methods", "tests/engines", "tests/runs")
"""What ``--quick`` runs: the round loop, the parts, the engines and run directories."""

CUDA = re.compile(r"lib(cu|nccl|nv)")
"""Names of NVIDIA's libraries."""


class CannotMake(Exception):
    """Why an environment could not be made."""


@dataclass
class Row:
    """A line of the table."""

    python: str
    torch: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    note: str = ""


def call(*words: object) -> str:
    """Run a command and return what it prints. Raises :class:`CannotMake` with its last line if it fails."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines or [f"exit code {done.returncode}"]
        raise CannotMake(errors[-1].strip()[:300])
    return done.stdout


def interpreter(version: str) -> Path:
    """The Python of a version, such as "3.11": this one, one on the path, or pyenv's newest."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = sorted(pyenv.glob(f"{version}.*/bin/python"), key=lambda path: int(path.parts[-3].split(".")[2]))
    for candidate in (sys.executable, shutil.which(f"python{version}"), *reversed(found)):
        asked = "import sys; print('%d.%d' % sys.version_info[:2], sys.base_prefix)"
        done = subprocess.run([candidate or "false", "-c", asked], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.split()[0] == version:
            return Path(done.stdout.split()[1]) / "bin" / f"python{version}"
    raise CannotMake(f"no Python {version} on the path or in {pyenv}")


def environment(python: str, torch: str, without_cuda: bool) -> Path:
    """The environment of a pair, made unless it is there and fits pyproject.toml. Raises :class:`CannotMake`."""
    folder = FOLDER / f"python{python}-torch{torch}"
    ready = folder / "ready"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if ready.is_file() and ready.read_text() == wanted:
        return folder
    program = folder / "bin" / "python"
    pip = (program, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    if not program.is_file():
        call(interpreter(python), "-m", "venv", folder)
    version = "import importlib.metadata as m; print(m.version('torch').partition('+')[0])"
    try:
        present = call(program, "-c", version).strip()
    except CannotMake:
        present = ""
    if present != torch:
        call(*pip, *(["--no-deps"] if without_cuda else []), f"torch=={torch}")
        if without_cuda:
            packages = Path(call(program, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
            replace_cuda(packages)
    call(*pip, "--editable", ".[dev]", f"torch=={torch}")
    call(program, "-c", "import torch, fedblend")
    ready.write_text(wanted)
    return folder


def replace_cuda(packages: Path) -> None:
    """Put libraries without content in the place of NVIDIA's, of which PyTorch needs only the names on a CPU.

    The loader wants each library, with each symbol and symbol version that PyTorch's own libraries import from it. Each
    function here returns 100, CUDA's error "no device". The requirements on NVIDIA's packages are taken out of
    PyTorch's metadata. Needs gcc and binutils.
    """
    libraries = packages / "torch" / "lib"
    own = sorted(libraries.glob("*.so*"))
    home: dict[str, str] = {}  # symbol version -> library
    imported: set[str] = set()
    needed: dict[str, dict[str, list[str]]] = {}  # library -> version -> symbols
    for library in own:
        for name in re.findall(r"\(NEEDED\).*\[(.*?)\]", call("readelf", "--dynamic", "--wide", library)):
            if CUDA.match(name) and not (libraries / name).exists():
                needed[name] = defaultdict(list)
        for part in call("readelf", "--version-info", "--wide", library).split("File: ")[1:]:
            home |= dict.fromkeys(re.findall(r"Name: (\S+) +Flags", part), part.split()[0])
        undefined = call("nm", "--dynamic", "--undefined-only", library)
        imported |= {line.split()[-1] for line in undefined.splitlines()}
    for symbol, _, version in (entry.partition("@") for entry in sorted(imported)):
        unversioned = next(iter(needed), "") if re.match(r"_*(cu|nccl|nv)", symbol) else ""
        if (library_name := home.get(version, unversioned)) in needed:
            needed[library_name][version].append(symbol)
    for name, versions in needed.items():
        script = libraries / "versions.txt"
        groups = {version: " ".join(f"{symbol};" for symbol in found) for version, found in versions.items() if version}
        script.write_text("".join(f"{version} {{ {symbols} }};\n" for version, symbols in groups.items()))
        source = script.with_suffix(".c")
        source.write_text("".join(f"int {s}(void) {{ return 100; }}\n" for found in versions.values() for s in found))
        options = [f"-Wl,-soname,{name}", *([f"-Wl,--version-script={script}"] if groups else [])]
        call("gcc", "-shared", "-fPIC", "-w", "-fno-builtin", *options, source, "-o", libraries / name)
    for metadata in packages.glob("torch-*.dist-info/METADATA"):
        lines = metadata.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if not re.match(r"Requires-Dist: (nvidia|triton|cuda)", line)]
        metadata.write_text("".join(kept), encoding="utf-8")


def run_tests(folder: Path, row: Row, paths: list[str]) -> None:
    """Run the quick tests in an environment, and count."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    words = [folder / "bin" / "python", "-m", "pytest", "-m", "not slow", f"--junit-xml={report}", *paths]
    with open(folder / "output.txt", "w") as output:
        code = subprocess.run(words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT).returncode
    if not report.is_file():
        row.failed, row.note = 1, f"pytest ended with exit code {code}; see {output.name}"
        return
    suites = ElementTree.parse(report).getroot().findall("testsuite")
    total, failed, errors, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    row.passed, row.failed, row.skipped = total - failed - errors - skipped, failed + errors, skipped
    row.seconds = sum(float(suite.get("time", "0")) for suite in suites)
    if code not in (0, 1):
        row.note = f"pytest ended early, with exit code {code}; see {output.name}"
    elif row.failed:
        row.note = f"see {output.name}"


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| Python | PyTorch | passed | failed | skipped | seconds | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        made = bool(row.passed or row.failed)
        numbers = (row.passed, row.failed, row.skipped, f"{row.seconds:.0f}") if made else ("",) * 4
        lines.append(f"| {' | '.join(map(str, (row.python, row.torch, *numbers, row.note)))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Make the environments, run the tests, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="VERSION", help=f"default: {' '.join(PYTHONS)}")
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="VERSION", help=f"default: {' '.join(TORCHES)}")
    parser.add_argument("--quick", action="store_true", help=f"run only {' '.join(QUICK)}")
    parser.add_argument("--without-cuda", action="store_true", help="empty libraries in the place of NVIDIA's")
    given = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    results = FOLDER / "results.json"
    before = json.loads(results.read_text()) if results.is_file() else []
    known = {(row["python"], row["torch"]): Row(**row) for row in before}
    asked = [Row(python, torch) for torch in given.torch for python in given.python]
    for row in asked:
        print(f"Python {row.python}, PyTorch {row.torch} ...", flush=True)
        try:
            folder = environment(row.python, row.torch, given.without_cuda)
            run_tests(folder, row, list(QUICK) if given.quick else [])
        except CannotMake as reason:
            row.note = f"not made: {reason}"
        known[row.python, row.torch] = row
        results.write_text(json.dumps([asdict(one) for one in known.values()], indent=1))
    text = table(sorted(known.values(), key=lambda row: [int(n) for n in f"{row.torch}.{row.python}".split(".")]))
    (FOLDER / "matrix.md").write_text(text)
    print(text, end="")
    return int(any(row.failed or row.note.startswith("pytest ended") for row in asked))


if __name__ == "__main__":
    sys.exit(main())
