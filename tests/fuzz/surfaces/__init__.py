"""What is fuzzed: for each surface, one input made from a random generator, and what reads the input.

A surface takes a random generator and an empty folder. It writes a changed copy of real files into the folder and
returns what fedblend is to do with them, as a :class:`Case`.
"""

from __future__ import annotations

from pathlib import Path

import tomli_w

from surfaces.base import CLEAN, MESSAGE, TINY, Case, Outcome, Surface, command, tiny
from surfaces.data_sets import DATA, data_files
from surfaces.experiments import experiment_tables, experiment_text
from surfaces.messages import server_messages, site_messages
from surfaces.runs import RUNS, command_words, paths, run_directories
from surfaces.sites import key_files, site_files, write_keys

__all__ = ["CLEAN", "MESSAGE", "SURFACES", "TINY", "Case", "Outcome", "make_real_files"]


def make_real_files(folder: Path) -> None:
    """Write the runs, data sets and messages that are changed."""
    runs = folder / "runs"
    runs.mkdir(parents=True)
    for name, changes in RUNS.items():
        table = tiny(runs, changes)
        (runs / f"{name}.toml").write_text(tomli_w.dumps(table))
        outcome = command(runs, "run", f"{name}.toml", "--out", name, "--jobs", 1).run()
        if outcome.code:
            raise RuntimeError(f"{name}: {outcome.text}")
    for name, write in DATA.items():
        (folder / "data" / name).mkdir(parents=True)
        write(folder / "data" / name)
    (folder / "keys").mkdir()
    write_keys(folder / "keys")


SURFACES: dict[str, Surface] = {
    "experiment tables": experiment_tables,
    "experiment text": experiment_text,
    "data files": data_files,
    "run directories": run_directories,
    "site files and audit logs": site_files,
    "key files": key_files,
    "paths and permissions": paths,
    "command lines": command_words,
    "messages to a site": site_messages,
    "messages to a server": server_messages,
}
"""Every surface by its name in :data:`worker.SHARES`."""
