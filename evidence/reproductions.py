"""The papers' items behind docs/results.md: run at a scale, and their results kept as data.

    python evidence/reproductions.py [PAPER/ITEM ...]

Runs are kept in runs/reproductions and are gone on with; results are written to evidence/reproductions, of which
`python evidence/tables.py` makes the page's tables. Without names, the items that have a result there are run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RUNS = Path("runs/reproductions")
KEPT = HERE / "reproductions"


def main(names: list[str]) -> None:
    """Run the items at the laptop's scale, or at that of the result that is kept."""
    kept = {result["item"]: result["scale"] for result in (json.loads(p.read_text()) for p in KEPT.glob("*.json"))}
    for name in names or sorted(kept):
        scale = kept.get(name, "laptop")
        command = [str(Path(sys.executable).with_name("fedblend")), "reproduce", name, "--scale", scale]
        subprocess.run([*command, "--out", str(RUNS)], cwd=ROOT, check=True)
        keep(name, scale)


def keep(name: str, scale: str) -> None:
    """Copy a result to those of the page."""
    KEPT.mkdir(exist_ok=True)
    result = (ROOT / RUNS / name / scale / "result.json").read_text()
    (KEPT / f"{name.replace('/', '-')}-{scale}.json").write_text(result)
    print(f"{name}: result kept in {KEPT.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
