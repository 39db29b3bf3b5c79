"""Seeds in a report: what left each client, with its labels in words, and what became of single samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import experiment
from report_helpers import pixels

from fedblend import report
from fedblend.analysis.plotting import ClientImage
from fedblend.analysis.privacy.seed_trace import seed_traces
from fedblend.experiment.make_setup import make_setup
from fedblend.methods.sharing.xor import blend
from fedblend.report import shared_images
from fedblend.report.shared_images import GAP, ZOOM
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory, find_runs
from fedblend.runs.groups import group
from fedblend.runs.runner import execute

SHOT = {"server_step": {"epochs": 1, "batch_size": 50}}
METHODS: dict[str, Any] = {
    "xormixfl": {"name": "xormixfl", **SHOT},
    "blended": {"name": "xormixfl", "sharing": {"p": 2, "offset": 9}, **SHOT},
    "mixfl": {"name": "mixfl", "sharing": {"lambda": 0.75}, **SHOT},
    "mix2fld": {
        "name": "mix2fld",
        "sharing": {"samples": 4, "lambda": 0.25, "coordinated": True},
        "server_step": {"steps": 1},
    },
    "fld": {"name": "fld", "sharing": {"samples": 2}, "server_step": {"steps": 1}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each method, on 8x8 digits of which label 9 is rare."""
    folder = tmp_path_factory.mktemp("seeds")
    for label, method in METHODS.items():
        made = experiment(
            data="digits",
            model={"name": "mlp", "hidden": []},
            partition={"name": "xormixfl", "clients": 4, "targets": [9], "samples": 8, "target_samples": 2},
            train={"cohort": 4, "epochs": 1},
            rounds=1,
            unsafe=True,
            method={**method, "label": label},
        )
        execute(made, folder / label)
    return folder


def gallery(folder: Path, label: str) -> shared_images.Gallery:
    return next(g for g in shared_images.galleries(group(find_runs([folder]))) if label in g.methods)


def shown(picture: ClientImage, times: int = 1) -> np.ndarray:
    """The pixels of a picture at the size they were stored in."""
    return pixels(picture.url)[times // 2 :: times, times // 2 :: times]


def kept(folder: Path, label: str) -> Any:
    return checkpoint.read(folder / label)


def test_encoded_seeds_are_shown_as_they_left(folder: Path) -> None:
    made, state = gallery(folder, "xormixfl"), kept(folder, "xormixfl")
    seeds, dummies = state.entries.tensors["seeds"], state.entries.tensors["dummies"][:, 0].tolist()

    assert (made.shown, made.entries, made.raw) == (6, 6, False)
    for picture, seed, dummy in zip(made.images, seeds, dummies, strict=True):
        np.testing.assert_array_equal(shown(picture), seed[0].numpy())
        assert picture.caption == f"9 XOR {dummy}"
    assert made.caption == (
        "Each image is a sample of one label, encoded by XOR with a sample of another label. "
        "Where the other sample is black, the first one is visible unchanged."
    )
    blended = gallery(folder, "blended")
    assert "a blend of up to 2," in blended.caption
    assert blended.caption.endswith("random grey levels from 0 to 9.")


def test_mixtures_say_of_what_and_are_not_called_raw(folder: Path) -> None:
    made, state = gallery(folder, "mixfl"), kept(folder, "mixfl")
    dummies = state.entries.tensors["dummies"][:, 0].tolist()
    assert [p.caption for p in made.images] == [f"9: 75 %, {dummy}: 25 %" for dummy in dummies]
    assert not made.raw

    made, state = gallery(folder, "mix2fld"), kept(folder, "mix2fld")
    labels = state.entries.tensors["y"].tolist()
    assert [p.caption for p in made.images] == [f"{b}: 75 %, {a}: 25 %" for a, b in labels]
    assert not made.raw
    assert made.strips == []
    assert "mixture of two samples" in made.caption
    assert gallery(folder, "fld").raw
    assert gallery(folder, "fld").caption == "Each image is one raw sample."


@pytest.mark.parametrize("label", ["xormixfl", "mixfl"])
def test_a_seed_s_story_is_what_the_run_did(folder: Path, label: str) -> None:
    state, made = kept(folder, label), make_setup(RunDirectory(folder / label).experiment())
    told = seed_traces(made, state, np.arange(len(state.entries)))
    x, y = made.samples(0, int(made.sizes(0)[0]))
    seeds, dummies = state.entries.tensors["seeds"], state.entries.tensors["dummies"][:, 0].tolist()

    assert [one.client for one in told] == state.entries.owner.tolist()
    for one, sent, dummy in zip(told, seeds, dummies, strict=True):
        assert one.labels == (9, dummy)
        assert torch.equal(one.sent, sent)
        if label == "mixfl":
            assert one.server_dummy is one.decoded is None
            exact = 0.75 * one.target.double() + 0.25 * one.dummy.double()
            assert float((exact - sent.double()).abs().max()) <= 0.5
        else:
            assert torch.equal(sent, one.target ^ one.dummy)
            assert torch.equal(one.decoded, sent ^ one.server_dummy)
            # It is one of the server's own of the dummy's label.
            assert any(torch.equal(one.server_dummy, image) for image in x[y == dummy])


def test_of_blends_the_first_sample_is_shown(folder: Path) -> None:
    state, made = kept(folder, "blended"), make_setup(RunDirectory(folder / "blended").experiment())
    (one,) = seed_traces(made, state, np.array([3]))
    mine = made.data.train.x[torch.from_numpy(made.population.indices(one.client))]
    assert any(torch.equal(one.target, image) for image in mine)
    assert not torch.equal(blend(mine, np.array([[0]]), 0.5)[0], one.sent)


def test_strips_show_raw_samples_first(folder: Path) -> None:
    state, made = kept(folder, "xormixfl"), make_setup(RunDirectory(folder / "xormixfl").experiment())
    strip = gallery(folder, "xormixfl").strips[2]
    (one,) = seed_traces(made, state, np.array([2]))

    image = shown(strip, ZOOM)
    assert image.shape == (8, 5 * 8 + 4 * GAP)
    for place, part in enumerate((one.target, one.dummy, one.sent, one.server_dummy, one.decoded)):
        np.testing.assert_array_equal(image[:, place * (8 + GAP) :][:, :8], part[0].numpy())
    dummy = one.labels[1]
    assert strip.caption == f"9, {dummy}, the sent seed, the server's {dummy}, the decoded sample"


def test_entries_that_do_not_follow_from_the_world_have_no_story(folder: Path) -> None:
    state, made = kept(folder, "xormixfl"), make_setup(RunDirectory(folder / "xormixfl").experiment())
    state.entries.tensors["seeds"][0, 0, 0, 0] ^= 1
    assert seed_traces(made, state, np.arange(2)) == []


def test_the_page_holds_them(folder: Path) -> None:
    report.write(find_runs([folder / "xormixfl", folder / "mixfl"]), folder / "report.html")
    text = (folder / "report.html").read_text()
    assert text.count("Some of these seeds step by step") == 2
    assert "9 XOR " in text
