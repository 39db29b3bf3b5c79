"""Write the lock files beside this script anew, by uv: `make lock`. Each serves Python 3.11 and newer.

base.txt is what fedblend needs, tests.txt what `make test` needs too, all.txt all extras and tools. PyTorch and what
its CUDA builds bring are left out: `make` takes the version of constraints.txt, in the build that pip finds.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
EXTRAS = {"all": ["dev"], "tests": ["tests"], "base": []}
"""The extras of each file. Later files have the versions of the first."""

OF_PYTORCH = re.compile(r"^(torch|cuda-\w+|nvidia-[\w-]+)==.*\n(?: .*\n)*", re.MULTILINE)
TRITON = re.compile(r"^triton==.*\n(?: .*\n)*", re.MULTILINE)


def main() -> None:
    """Write all files."""
    for name, extras in EXTRAS.items():
        words = ["uv", "pip", "compile", "pyproject.toml", "--universal", "--python-version", "3.11"]
        words += ["--generate-hashes", "--no-header", "--no-annotate", "--quiet", "--constraint", "constraints.txt"]
        words += ["--constraint", "locks/all.txt"] if name != "all" else []
        words += [word for extra in extras for word in ("--extra", extra)]
        made = subprocess.run(words, cwd=FOLDER.parent, check=True, capture_output=True, text=True).stdout
        made = OF_PYTORCH.sub("", made)
        (FOLDER / f"{name}.txt").write_text(made if name == "all" else TRITON.sub("", made))


if __name__ == "__main__":
    main()
