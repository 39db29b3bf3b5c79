"""Experiments and pictures of tests of reports, and the browser that opens pages."""

import base64
import io
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import PATIENCE_S
from PIL import Image

from fedblend.experiment.config import resolve

HOSTILE = "a<b>&</script>"
"""A method's label that would be markup without escaping."""


def experiment(method, seed, **more):
    """A small experiment on digits; one method has a hostile label."""
    spec = {"name": method, "label": HOSTILE} if method == "naivemix" else method
    fields = {
        "name": "tiny",
        "data": "digits",
        "model": "mlp",
        "partition": {"name": "classes", "clients": 6, "classes_per_client": 3},
        "rounds": 3,
        "target": 0.2,
        "holdout": 0.2,
        "unsafe": True,
        "train": {"cohort": 3, "epochs": 1, "lr": 0.05},
    }
    return resolve({**fields, "method": spec, "seed": seed, **more})


def pixels(url):
    """The pixels of a picture in a page."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))))


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--disable-quic", "--virtual-time-budget=8000"]


def browse(page: Path, home: Path, *flags: str) -> str:
    """A page's elements after its scripts ran, as a browser has them; without a browser the test is skipped."""
    if CHROMIUM is None:
        pytest.skip("no Chromium or Chrome on this machine to open the page in")
    line = [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={home}", "--dump-dom", page.as_uri()]
    return subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
