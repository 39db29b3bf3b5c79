"""Mixtures whose labels the server coordinates: every one has a partner, where labels drawn at random have few."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import federation_of, images, run, setup

from fedblend.analysis.privacy.mixup_privacy import make_mixtures
from fedblend.core.errors import FedblendError
from fedblend.core.registry import build
from fedblend.core.setup import Setup
from fedblend.data.partitions.prepare import prepare
from fedblend.engines.loop_engine import LoopEngine
from fedblend.methods.sharing.seeds import MixedSeeds

LINEAR = {"name": "mlp", "hidden": []}
CLASSES = 10


def made(coordinated: bool, **changes: object) -> Setup:
    """Four devices with samples of all of ten labels, which mix three pairs each."""
    method = {"name": "mix2fld", "sharing": {"samples": 3, "coordinated": coordinated}, "server_step": {"steps": 1}}
    groups = [range(50 * k, 50 * k + 50) for k in range(4)]
    return setup(images(n=200, classes=CLASSES), groups, method=method, model=LINEAR, **changes)


def partners(on: Setup) -> list[int]:
    """For each mixture that was sent, how many of other devices have its labels the other way round."""
    state, _ = run(on, 1)
    labels, owner = state.entries.tensors["y"].numpy().astype(int), state.entries.owner
    symmetric = (labels[:, None, :] == labels[None, :, ::-1]).all(2)
    return list((symmetric & (owner[:, None] != owner)).sum(1))


def test_every_coordinated_mixture_has_a_partner_on_another_device() -> None:
    found = partners(made(coordinated=True))
    assert len(found) == 12
    assert min(found) >= 1
    # Of 90 ordered pairs of labels, twelve drawn at random hardly ever match all.
    assert min(partners(made(coordinated=False))) == 0


def test_a_device_mixes_samples_of_the_labels_that_it_is_asked_for() -> None:
    on = made(coordinated=True)
    sizes = on.sizes(0)
    asked = on.requests(sizes)
    for client, payload in LoopEngine(on).share(0, on.weights(), range(4), sizes):
        assert payload["y"].tolist() == asked[client].pairs.tolist()
        assert set(payload["y"].flatten().tolist()) <= set(on.data.train.y[on.population.indices(client)].tolist())


def test_labels_are_those_of_the_samples_that_have_arrived() -> None:
    on = made(coordinated=True)
    labels = on.data.train.y.numpy()
    sizes = np.array([0, 1, 7, 50])

    held = on.labels_held(sizes)

    for client, size in enumerate(sizes):
        own = labels[on.population.indices(client)[:size]]
        assert np.flatnonzero(held[client]).tolist() == np.unique(own).tolist()


def test_what_was_lost_is_asked_for_again_with_the_same_labels() -> None:
    on = made(coordinated=True)
    first, again = on.requests(on.sizes(0)), on.requests(on.sizes(1))
    assert all((first[client].pairs == again[client].pairs).all() for client in range(4))


def test_devices_that_share_no_two_labels_are_refused_before_the_first_round() -> None:
    data = images(n=40, classes=4)
    of = data.train.y.numpy()
    apart = [np.flatnonzero(of < 2), np.flatnonzero(of >= 2)]
    method = {"name": "mix2fld", "sharing": {"coordinated": True}}
    on = setup(data, apart, method=method, model=LINEAR)

    with pytest.raises(FedblendError, match="no two of 2 devices hold the same two labels"):
        federation_of(on)


def test_a_device_that_nobody_asks_says_so() -> None:
    on = made(coordinated=True)
    local = LoopEngine(on).local(0, 10, np.random.default_rng(0), 1)
    with pytest.raises(FedblendError, match="coordinated: true, but the server requested no labels of this device"):
        MixedSeeds(coordinated=True).share(local)


def test_real_sites_cannot_be_coordinated() -> None:
    on = made(coordinated=True)
    far = replace(on, population=replace(on.population, order=on.population.order[:0]))
    with pytest.raises(FedblendError, match="coordinated: true, but clients are real sites; valid: false"):
        far.requests(far.sizes(0))


def test_sample_privacy_of_many_classes_repeats_no_pair_where_labels_match() -> None:
    data = images(n=200, classes=CLASSES)
    population = prepare(build("partition", {"name": "iid", "clients": 2}), data, 0)

    alone = make_mixtures(data, population, 0, samples=20)
    together = make_mixtures(data, population, 0, samples=20, coordinated=True)

    assert alone.pairs.repeated > 0
    assert together.pairs.repeated == 0
    s, t = together.labels[together.pairs.chosen[:, 0]], together.labels[together.pairs.chosen[:, 1]]
    assert (s == t[:, ::-1]).all()
