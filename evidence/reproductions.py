"""The papers' items behind docs/results.md: run at a scale, and their results kept as data.

    python evidence/reproductions.py [PAPER/ITEM ...] [--scale SCALE] [--only ROW_OR_COLUMN ...] [--seeds S,...]

Runs are kept in runs/reproductions and are gone on with; numbers that a kept result has already, made in the same way,
stay in it where their runs do not lie here. Results are written to evidence/reproductions, of which
`python evidence/tables.py` makes the page's tables, and their pictures to docs/figures. Without names, the items that
have a result there are run again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RUNS = Path("runs/reproductions")
KEPT = HERE / "reproductions"
DOCS = ROOT / "docs"
STOPPED = 130  # after Ctrl-C, and the result of what was made is written


def main() -> None:
    """Run what is named, or what is kept as it was run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", nargs="*", metavar="PAPER/ITEM")
    parser.add_argument("--scale", default="laptop", choices=("laptop", "paper"))
    parser.add_argument("--only", nargs="*", default=[], help="rows or columns")
    parser.add_argument("--seeds", help="such as 0,1")
    asked = parser.parse_args()
    chosen = ["--seeds", asked.seeds] if asked.seeds else []
    chosen += [option for name in asked.only for option in ("--only", name)]
    commands = [["reproduce", item, "--scale", asked.scale, *chosen] for item in asked.items]
    if not commands:
        results = [json.loads(path.read_text()) for path in sorted(KEPT.glob("*.json"))]
        commands = [shlex.split(result["command"])[1:] for result in results]
    for command in commands:
        scale = command[command.index("--scale") + 1] if "--scale" in command else "paper"
        take_up(command[1], scale)
        fedblend = Path(sys.executable).with_name("fedblend")
        code = ended([str(fedblend), *command, "--out", str(RUNS)])
        if code not in (0, STOPPED):
            raise SystemExit(code)
        keep(command[1], scale)
        if code == STOPPED:
            raise SystemExit(code)


def ended(command: list[str]) -> int:
    """A command's exit status. Ctrl-C reaches it too, and is left to it: it has a result to write."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return subprocess.run(command, cwd=ROOT, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def take_up(item: str, scale: str) -> None:
    """Put the kept result where the item's runs would lie, if there is none yet: of its numbers those stay that are
    made as they would be now. Pictures are not among them; they are made of runs."""
    kept, place = KEPT / f"{item.replace('/', '-')}-{scale}.json", ROOT / RUNS / item / scale / "result.json"
    if place.exists() or not kept.exists():
        return
    result = json.loads(kept.read_text())
    for quantity in result["quantities"].values():
        for cell in quantity["cells"]:
            cell["ours"] = {seed: value for seed, value in cell["ours"].items() if not str(value).endswith(".png")}
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(result))


def keep(item: str, scale: str) -> None:
    """Copy a result, and the pictures that it tells of, to those of the page."""
    KEPT.mkdir(exist_ok=True)
    name = f"{item.replace('/', '-')}-{scale}"
    folder = ROOT / RUNS / item / scale
    result = json.loads((folder / "result.json").read_text())
    cells = (cell for quantity in result["quantities"].values() for cell in quantity["cells"])
    for cell in cells:
        for seed, value in cell["ours"].items():
            if isinstance(value, str) and value.endswith(".png"):
                place = "-".join(part for part in (name, cell["row"], cell["column"], seed) if part)
                cell["ours"][seed] = f"figures/{place}.png"
                shutil.copyfile(folder / value, DOCS / cell["ours"][seed])
    (KEPT / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{item}: result kept in {KEPT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
