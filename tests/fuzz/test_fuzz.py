"""The fuzzer finds what it looks for, makes the same inputs again, and finds nothing in a slice of its inputs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

import fuzz
import mutations
import numpy as np
import pytest
import worker
from helpers import each
from surfaces import SURFACES
from surfaces.base import TINY, Outcome

from fedblend.cli import FAULT


@each(
    ("outcome", "kind"),
    [
        (Outcome("done\n"), "clean"),
        (Outcome("\nfedblend: error: rounds: -1 is not valid\n", 2), "message"),
        (Outcome(f"\nfedblend: error: {'a' * 1_001}\n", 2), "too long"),
        (Outcome("a table with \x1b[31m in it\n"), "control"),
        (Outcome("\nfedblend: error: one\nfedblend: error: two\n", 2), "traceback"),
        (Outcome("\nfedblend: error: unexpected KeyError\n", FAULT), "traceback"),
        (Outcome("Traceback (most recent call last):\nKeyError: 1\nfedblend: error: x\n", 2), "traceback"),
        (Outcome("", 1), "traceback"),
    ],
)
def test_each_kind_of_fault_is_told_apart(outcome: Outcome, kind: str) -> None:
    assert worker.judge(outcome)[0] == kind


def test_an_input_depends_on_its_number_alone() -> None:
    changes = {
        mutations.of_table: TINY,
        mutations.of_bytes: b"some bytes" * 30,
        mutations.of_lines: "a = 1\nb = 2\n",
        mutations.of_words: ["run", "experiment.toml"],
        mutations.of_array: np.arange(12.0).reshape(3, 4),
    }
    for number in range(50):
        for change, given in changes.items():
            assert repr(change(Random(number), given)) == repr(change(Random(number), given))
        assert worker.surface_of(number) == worker.surface_of(number)
    assert SURFACES.keys() == worker.SHARES.keys()


@pytest.mark.slow
def test_a_slice_of_the_inputs_ends_cleanly_or_in_one_message() -> None:
    path = os.pathsep.join([str(Path(fuzz.__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    # Not in pytest's folder, which is closed to others: the fuzzer gives up root's rights.
    with tempfile.TemporaryDirectory(prefix="fedblend-fuzz-", ignore_cleanup_errors=True) as out:
        command = [sys.executable, fuzz.__file__, "--inputs", "300", "--out", out]
        environment = {**os.environ, "PYTHONPATH": path}
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-2000:]}"
    assert "300 inputs, numbers 0 to 299" in ended.stdout
