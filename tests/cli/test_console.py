"""What commands print: texts as they are, without markup and without control characters of foreign texts."""

import ast
import io
import json
import shutil
from pathlib import Path

import pytest
from cli_helpers import Outcome, command, finish, here, start_process, succeeded, write
from helpers import each
from rich.table import Table
from rich.text import Text

import fedblend
from fedblend.cli.console import Console, write_line
from fedblend.report.terminal import WrappedTable

pytestmark = pytest.mark.usefixtures("elsewhere")

ODD = "s[/x] [bold]b[/bold] :smile: \x1b[31mred\x9b\x07"


@pytest.mark.parametrize("what", ["str", "Text", "table", "rule"])
def test_a_text_is_printed_without_markup_and_control_characters(what):
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=False)
    if what == "rule":
        console.rule(Text(ODD))
    elif what == "table":
        table = Table("heading [x]")
        table.add_row(ODD)
        console.print(table)
    else:
        console.print(ODD if what == "str" else Text(ODD))
    printed = out.getvalue()
    assert "s[/x] [bold]b[/bold] :smile:" in printed
    assert "[31mred" in printed
    assert all(sign.isprintable() or sign == "\n" for sign in printed)


@each("encoding", ["ascii", "latin-1", "utf-8"])
@each("wrapped", [False, True])
def test_columns_stay_below_each_other_whatever_the_encoding_lacks(encoding, wrapped):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    names, columns = ["fedavg-é-ж", "fedmix"], {"% ± std": ["33.8 ± 1.0", "[-∞, 1]"], "reached": ["—", "12"]}
    table = Table("method", *columns)
    for name, *cells in zip(names, *columns.values(), strict=True):
        table.add_row(name, *cells)
    texts = [(heading, [Text(cell) for cell in cells]) for heading, cells in columns.items()]

    Console(file=file, width=100).print(WrappedTable("method", names, texts) if wrapped else table)

    file.seek(0)
    lines = file.read().splitlines()
    assert len({len(line) for line in lines}) == 1
    (row,) = (line for line in lines if "fedavg" in line)
    assert ("33.8 +- 1.0" if encoding == "ascii" else "33.8 ± 1.0") in row
    assert ("é" in row, "ж" in row) == (encoding != "ascii", encoding == "utf-8")


def test_folders_whose_names_look_like_markup():
    odd = {"name": "s[x]", "rounds": 1}
    succeeded(here("run", write(Path("a.toml"), odd), "--out", "o[/x]"))
    assert "Report: o[/x]/report.html" in succeeded(here("report", "o[/x]", "--out", "o[/x]/report.html")).out
    (run,) = Path("o[/x]").glob("*-seed0")
    hidden = Path("o[red]\x1b[31m")
    shutil.copytree(run, hidden / "r[/y]-seed0")
    status = hidden / "r[/y]-seed0" / "status.json"
    status.write_text(json.dumps({"state": "failed", "round": 1, "reason": "[/z]\x1b[2J"}))
    for name in ("inspect", "compare"):
        outcome = succeeded(here(name, hidden))
        assert "\x1b" not in outcome.out + outcome.err
    assert "r[/y]-seed0" in succeeded(here("inspect", hidden)).out


def test_a_site_file_and_an_audit_log_in_an_odd_folder():
    pytest.importorskip("flwr.serverapp", reason="Flower (extra 'flower') is not installed")
    assert "Site file: s[/x]/site.toml" in succeeded(here("site", "init", "s[/x]/site.toml")).out
    line = {"time": "now", "run": "r[/x]\x1b[2J", "round": 0, "client": 0, "kind": "weights", "refused": "[/no]"}
    Path("s[/x]/site.audit.jsonl").write_text(json.dumps(line) + "\n")
    outcome = succeeded(here("site", "audit", "s[/x]/site.toml"))
    assert "r[/x]" in outcome.out
    assert "refused: [/no]" in outcome.out
    assert "\x1b" not in outcome.out


def test_a_line_of_progress_has_no_control_characters(capsys):
    write_line(ODD)
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "[31mred" in printed
    assert printed.rstrip("\n").isprintable()


WRITERS = {
    "cli/__init__.py": "messages, all of which are printable",
    "cli/console.py": "the console itself",
    "cli/app.py": "the version",
    "cli/federation.py": "lines of JSON, whose signs are escaped",
    "cli/new.py": "an experiment file with checked names",
    "_kernels/build.py": "a line of fedblend's own",
    "engines/distributed/processes.py": "printable lines of other processes",
    "flower/supervise.py": "a SuperNode's log, and lines of fedblend's own",
}
"""The modules that write to standard output or error by themselves, and what they write."""


def test_all_other_output_goes_through_the_console():
    root = Path(fedblend.__file__).parent
    writers = set()
    for path in root.rglob("*.py"):
        module = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            plain = isinstance(node, ast.ImportFrom) and node.module == "rich.console" and module.startswith("cli/")
            taken = plain and any(name.name == "Console" for name in node.names)
            if taken or called in ("print", "typer.echo", "click.echo", "sys.stdout.write", "sys.stderr.write"):
                writers.add(module)
    assert writers == set(WRITERS)


def _shell(redirections, *words):
    """Run a command with its streams as a shell redirects them."""
    return finish(start_process(["sh", "-c", f'exec "$@" {redirections}', "sh", *command(*words)]))


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
"""Of tests that write to the device that is always full."""


@FULL
@pytest.mark.slow
def test_a_log_on_a_full_disk_stops_no_run(tmp_path):
    outcome = _shell("2>/dev/full", "run", write(tmp_path / "tiny.toml", {"rounds": 2}), "--out", tmp_path / "out")
    assert outcome.code == 0
    assert "Report: " in outcome.out
    assert json.loads((tmp_path / "out/fedavg-seed0/status.json").read_text()) == {"state": "done", "round": 2}


@FULL
@pytest.mark.slow
def test_output_that_does_not_fit_on_the_disk_is_told(tmp_path):
    told = "No space left on device: output or a file could not be written; free disk space and repeat the command"
    outcome = _shell(">/dev/full", "list", "methods")
    assert (outcome.code, outcome.err) == (2, f"fedblend: error: {told}\n")


@pytest.mark.slow
@pytest.mark.parametrize("redirections", [pytest.param("2>/dev/full", marks=FULL), "2>&-", "<&- >&- 2>&-"])
def test_an_error_that_cannot_be_printed_has_its_exit_code(redirections, tmp_path):
    assert _shell(redirections, "compare", tmp_path / "nowhere") == Outcome(2, "", "")
