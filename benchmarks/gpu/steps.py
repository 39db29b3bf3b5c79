"""What is measured on one GPU, in steps of eight minutes that go on where the last one stopped.

    make gpu STEP=1        or    python benchmarks/gpu/steps.py 1 [--kept FOLDER] [--data FOLDER] [--seconds 480]
    python benchmarks/gpu/steps.py keep                     copy the results to the repository and rewrite its pages
    python benchmarks/gpu/steps.py 3 --device cpu --tiny    the same in small, to test the script

README.md beside this file says in which order, and what to carry to a machine without a network. A step ends by itself
within its seconds, with its results in the folder of --kept: gpu.json, one archive of at most 16 MiB for each run that is
not finished, and the reproduced item's result. The same step with these files goes on, on another machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "peers"), str(ROOT / "evidence")]

import machine
import torch

from fedblend.core.errors import Stopped
from fedblend.core.record import RoundRecord
from fedblend.experiment.config import Experiment
from fedblend.papers.paths import RUNS, OutputPaths, runs_of
from fedblend.papers.plan import plan_item
from fedblend.papers.run_item import run_item
from fedblend.runs.groups import read

ITEM = "fedmix/choice-vgg-long"
LARGEST = 16 * 2**20
"""Bytes of one kept file, at most."""

Result = dict[str, Any]
PAPER_ROWS = ("fedavg", "naivemix", "fedmix", "fedmix-twice")
TRAINING: dict[str, tuple[str, int, tuple[str, ...]]] = {
    **{str(3 + seed): ("plain", seed, PAPER_ROWS) for seed in range(3)},
    **{str(6 + seed): ("momentum", seed, PAPER_ROWS) for seed in range(3)},
    "9": ("plain", 0, ("fedmix-checked",)),
}
