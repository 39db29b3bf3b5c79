"""Runs that the tests of reports share."""

import numpy as np
import pytest
from report_helpers import experiment

from fedblend.runs.directory import RunDirectory, find_runs
from fedblend.runs.runner import execute


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Runs of four methods; one run is unfinished after a round."""
    folder = tmp_path_factory.mktemp("tiny")
    for method, seeds in {"fedavg": (0, 1), "fedmix": (0, 1), "naivemix": (0,), "global-mixup": (0,)}.items():
        for seed in seeds:
            execute(experiment(method, seed), folder / f"{method}-seed{seed}")
    execute(experiment("fedmix", 2, rounds=1), folder / "fedmix-seed2")
    cut = RunDirectory(folder / "fedmix-seed2")
    cut.set_experiment(experiment("fedmix", 2))
    cut.set_status("stopped", 1, "interrupted")
    return folder


@pytest.fixture(scope="session")
def mixed(folder, tmp_path_factory):
    """Runs on three data sets: digits, letters of three classes, and numbers to predict."""
    place = tmp_path_factory.mktemp("mixed")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((120, 4))
    np.savez(place / "letters.npz", x=x, y=np.array(list("abc"))[x[:, :3].argmax(1)])
    np.savez(place / "numbers.npz", x=x, y=x @ rng.standard_normal((4, 1)))
    for name in ("letters", "numbers"):
        data = {"name": "npz", "path": str(place / f"{name}.npz")}
        for method, rounds in (("fedavg", 2), ("fedmix", 4)):
            more = {"data": data, "partition": {"name": "iid", "clients": 4}, "name": name, "holdout": 0.0}
            execute(experiment(method, 0, rounds=rounds, **more), place / name / method)
    digits = [RunDirectory(folder / f"{method}-seed{seed}") for method in ("fedavg", "fedmix") for seed in (0, 1)]
    return [*digits, *find_runs([place / "letters"]), *find_runs([place / "numbers"])]
