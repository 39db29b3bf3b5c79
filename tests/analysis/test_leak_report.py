"""Leak report cards, and the one figure in which all methods stand."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import here, refused, sites_with_own_data, succeeded, tiny_run
from helpers import images, setup

from fedblend.analysis.attacks.image_similarity import ssim
from fedblend.analysis.attacks.outcome import attack_run
from fedblend.analysis.privacy import membership, xor_privacy
from fedblend.analysis.privacy.leak_report import SEED_MEASURES, Leak, leak_report
from fedblend.analysis.privacy.similarity import similarity_of_entries, similarity_of_target_seeds
from fedblend.core.setup import Setup
from fedblend.core.sharing import Pool
from fedblend.experiment.make_setup import make_setup
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory

SHARING = {"server": 0, "targets": [1, 2, 5], "dummies": [0, 3]}
ONE_SHOT = {"rounds": 1, "train": {"cohort": 3}}
METHODS: dict[str, dict[str, Any]] = {
    "xormixfl": {**ONE_SHOT, "method": {"name": "xormixfl", "sharing": SHARING}},
    "mixfl": {**ONE_SHOT, "method": {"name": "mixfl", "sharing": SHARING}},
    "fed-augmix": {"method": {"name": "fed-augmix", "objective": {"large_lambda": 20.0}}},
    "fedmix": {"method": {"name": "fedmix", "sharing": {"samples_per_mean": 5}}},
    "mix2fld": {"method": {"name": "mix2fld", "server_step": {"steps": 1}}},
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    for name, changes in METHODS.items():
        tiny_run(folder / name, **changes)
    for name in ("fed-augmix", "fedmix"):
        attack_run(folder / name, 2, 0, images=1, steps=1, iterations=30, attacker="plain").write()
    return folder


def world_of(study: Path, name: str) -> Setup:
    return make_setup(RunDirectory(study / name).experiment())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xormixfl", "mixfl"])
def test_seeds_are_compared_with_the_devices_raw_samples_as_by_hand(name: str, study: Path) -> None:
    setup = world_of(study, name)
    sharing = setup.experiment.method.sharing
    one = xor_privacy.make_seeds(setup.data, setup.population, sharing, setup.experiment.seed)
    raw = one.raw[: one.device_samples].double().flatten(1)
    wanted = {"sent": one.seeds}
    if one.guessed is not None:
        wanted |= {"guessed": one.guessed, "decoded": one.server_samples}

    found = similarity_of_target_seeds(setup, sharing)

    assert list(found) == list(wanted)
    factor = float(setup.scale.factor.flatten()[0])
    for kind, seeds in wanted.items():
        flat = seeds.double().flatten(1)
        apart = (flat[:, None] - raw[None]).square().sum(2)
        rows = apart.argmin(1)
        least = apart.min(1).values
        near = found[kind]
        assert near.samples == len(seeds) <= 300
        assert near.distance == pytest.approx(float(least.sqrt().mean()), rel=1e-6)
        assert near.mse == pytest.approx(float(least.mean()) / flat.shape[1] * factor**2, rel=1e-4)
        db = -10 * (least / flat.shape[1] / 255**2).log10()
        assert near.psnr == pytest.approx(float(db.clamp(max=100).mean()), rel=1e-4)
        pairs = [images.double() / 255 for images in (one.raw[rows], seeds)]
        assert near.ssim == pytest.approx(float(ssim(*pairs).mean()), rel=1e-4)
        own = np.concatenate([one.targets, one.dummies], axis=1)
        assert near.recognised == pytest.approx((rows.numpy()[:, None] == own).any(1).mean())


@pytest.mark.slow
def test_the_decoded_are_what_the_server_trains_on(study: Path) -> None:
    """Seeds decoded with the very dummies would be the raw samples; with the server's they are not."""
    setup = world_of(study, "xormixfl")
    one = xor_privacy.make_seeds(setup.data, setup.population, setup.experiment.method.sharing, setup.experiment.seed)
    exact = one.seeds ^ one.raw[torch.from_numpy(one.dummies[:, 0])]

    assert torch.equal(exact, one.raw[torch.from_numpy(one.targets[:, 0])])
    assert similarity_of_target_seeds(setup, setup.experiment.method.sharing)["decoded"].psnr < 100


def test_one_figure_compares_all_four_papers(study: Path, tmp_path: Path) -> None:
    succeeded(here("leaks", study, "--out", tmp_path / "card"))

    rows = json.loads((tmp_path / "card" / "leaks.json").read_text())["leaks"]
    measured = {(row["run"], row["kind"]) for row in rows if row["psnr"] is not None}
    assert measured == {
        ("xormixfl", "seeds"), ("mixfl", "seeds"), ("fed-augmix", "weights"), ("fedmix", "means"),
        ("fedmix", "weights"), ("mix2fld", "seeds"),
    }  # fmt: skip
    assert all(row["accuracy"] is not None for row in rows)
    assert (tmp_path / "card" / "leaks.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    told = {leak.how for leak in leak_report(RunDirectory(study / "xormixfl")).leaks if leak.kind == "seeds"}
    assert told == {SEED_MEASURES[name] for name in ("sent", "guessed", "decoded")}


def test_a_run_of_sites_with_data_of_their_own_is_not_measured_on_the_servers(study: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(study / "fedmix", tmp_path / "fedmix", ignore=shutil.ignore_patterns("attacks"))
    run = sites_with_own_data(copied, 1, 2, 3, 4)
    leaks = leak_report(RunDirectory(run)).leaks
    assert {leak.kind for leak in leaks} == {"weights", "means"}
    assert {leak.how for leak in leaks} == {"not measured: the clients' samples are at their sites"}
    assert all(math.isnan(leak.membership) for leak in leaks)
    refused(here("attack", run, "--round", 1, "--client", 0), "clients were sites with data of their own")


TWO = {"name": "classes", "clients": 5, "classes_per_client": 2}


def leaks(folder: Path, method: Any) -> dict[str, Leak]:
    return {leak.kind: leak for leak in leak_report(tiny_run(folder, partition=TWO, method=method)).leaks}


def test_statistics_have_a_card_without_measures(tmp_path: Path) -> None:
    card = leaks(tmp_path / "run", "ccvr")["statistics"]

    assert (card.senders, card.times, card.how) == (5, 5, "no measure available")
    assert "covariance 36" in card.shape
    assert math.isnan(card.membership)


@pytest.mark.parametrize(("method", "times"), [("feddm", 10), ("server-matched", 5)])
def test_synthetic_samples_are_compared_with_raw_ones(method: str, times: int, tmp_path: Path) -> None:
    found = leaks(tmp_path / "run", {"name": method, "sharing": {"steps": 2}})
    card, state = found["synthetic"], checkpoint.read(tmp_path / "run")
    made = make_setup(RunDirectory(tmp_path / "run").experiment())

    assert (card.senders, card.times) == (5, times)
    assert card.how == "synthetic samples, compared with the nearest raw sample"
    assert 0 <= card.recognised <= 1
    assert card.membership == membership.of_entries(made, state.entries.tensors["x"]), "x is on the model's scale"


def test_a_raw_sample_is_recognised_as_its_clients_alone() -> None:
    """Two of four entries are raw samples under their own client and class."""
    made = setup(images(), groups=[list(range(20)), list(range(20, 40))])
    x, y = made.data.train.x[[0, 1, 21, 22]], made.data.train.y[[0, 1, 21, 22]]
    target = torch.nn.functional.one_hot(y, 3).float()
    target[1] = target[1].roll(1)
    entries = Pool({"x": made.scale(x), "y": target}, torch.tensor([0, 0, 1, 0]).numpy())

    found = similarity_of_entries(made, entries)

    assert (found.samples, found.recognised) == (4, 0.5)
    assert found.mse == pytest.approx(0, abs=1e-10)
