"""What is fuzzed: for each surface, one input made from a random generator, and what reads the input.

A surface takes a random generator, an empty folder, and the folder of real files. It writes a changed copy of real
files into the empty folder and returns what fedblend is to do with them, as a :class:`Case`. Its name is in
:data:`worker.SHARES`.
"""

from __future__ import annotations

from pathlib import Path

import tomli_w

from surfaces.base import command, tiny
from surfaces.data_sets import DATA, data_files
from surfaces.experiments import experiment_tables, experiment_text
from surfaces.messages import server_messages, site_messages
from surfaces.runs import RUNS, command_lines, paths, run_directories
from surfaces.sites import key_files, site_files, write_keys


def make_real_files(folder: Path) -> None:
    """Write the runs, data sets and messages that are changed."""
    runs = folder / "runs"
    runs.mkdir(parents=True)
    for name, changes in RUNS.items():
        (runs / f"{name}.toml").write_text(tomli_w.dumps(tiny(runs, changes)))
        outcome = command(runs, "run", f"{name}.toml", "--out", name, "--jobs", 1).run()
        if outcome.code:
            raise RuntimeError(f"{name}: {outcome.text}")
    for name, (write, _) in DATA.items():
        (folder / "data" / name).mkdir(parents=True)
        write(folder / "data" / name)
    (folder / "keys").mkdir()
    write_keys(folder / "keys")


SURFACES = {
    made.__name__: made
    for made in (
        *(command_lines, data_files, experiment_tables, experiment_text, key_files, paths, run_directories),
        *(server_messages, site_files, site_messages),
    )
}
