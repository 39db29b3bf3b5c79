"""XorMixFL: XOR of samples by hand and in the kernel; what is asked for, and what the server makes of it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from helpers import experiment, federation_of, images, local, numbers, run, same, setup
from sharing_helpers import server_side
from torch.nn import functional as F

from fedblend._kernels import build
from fedblend.core.context import Task
from fedblend.core.engine import TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.server_step import ServerContext
from fedblend.core.sharing import Pool, Request
from fedblend.data.scale import Scaler
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment import presets
from fedblend.methods.server_steps.tuning import TrainOnSeeds
from fedblend.methods.sharing import xor as xor_module
from fedblend.methods.sharing.xor import blend, decode, draw_within, encode, shortages, superpose
from fedblend.methods.sharing.xor_seeds import MixedTargetSeeds, XorSeeds
from fedblend.models.layers import Staged


def rng(seed: int = 0) -> np.random.Generator:
    """A generator by its seed."""
    return np.random.default_rng(seed)


def pixels(n: int, seed: int = 0, side: int = 5) -> torch.Tensor:
    """Random pictures in 8 bits."""
    return torch.from_numpy(rng(seed).integers(0, 256, (n, 1, side, side), np.uint8))


@pytest.fixture(params=["kernel", "without"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernel, and as it is done where there is no compiler."""
    if request.param == "without":
        monkeypatch.setattr(build, "library", lambda source: None)
    elif build.library(xor_module.SOURCE) is None:
        pytest.skip("no C++ compiler")
    return request.param


def test_samples_of_a_label_are_drawn_without_replacement_and_evenly() -> None:
    labels = np.array([1, 0, 1, 1, 0, 1, 1, 2])
    own = np.flatnonzero(labels == 1)
    drawn = draw_within(labels, np.full(12_000, 1), 3, rng())

    assert (labels[drawn] == 1).all()
    assert all(len(np.unique(drawn[:, [a, b]], axis=0)) == 20 for a, b in ((0, 1), (0, 2), (1, 2)))
    assert (np.sort(drawn, axis=1)[:, 1:] != np.sort(drawn, axis=1)[:, :-1]).all()
    # Each of 60 ordered triples about 200 times.
    triples, times = np.unique(drawn, axis=0, return_counts=True)
    assert len(triples) == 60
    assert abs(times - 200).max() < 70
    assert set(drawn[:, 0]) == set(own)


def test_a_label_with_fewer_samples_than_p_is_blended_of_what_there_is() -> None:
    labels = np.array([0, 1, 0, 1, 1, 2])
    drawn = draw_within(labels, np.array([0, 1, 2, 0]), 4, rng())

    assert (drawn >= 0).sum(1).tolist() == [2, 3, 1, 2]
    for row, label in zip(drawn, [0, 1, 2, 0], strict=True):
        taken = row[row >= 0]
        assert sorted(taken) == sorted(np.flatnonzero(labels == label))
        assert (row[len(taken) :] == -1).all()
    assert draw_within(labels, np.empty(0, np.int64), 2, rng()).shape == (0, 2)
    with pytest.raises(FedblendError, match="label 3 is to be blended, but there is no sample of it"):
        draw_within(labels, np.array([0, 3]), 1, rng())


@pytest.mark.parametrize("alpha", ["0.5", "0.25", "0.95", "0.123"])
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_blending_rounds_half_to_even_at_each_step(alpha: str, p: int, way: str) -> None:
    x, places = pixels(7), rng(1).integers(7, size=(9, p))
    places[4, p - 1 :] = -1 if p > 1 else places[4, 0]
    made = blend(x, places, float(alpha)).flatten(1).tolist()

    share, flat = Fraction(alpha), x.flatten(1).tolist()
    for row, result in zip(places.tolist(), made, strict=True):
        wanted = flat[row[0]]
        for other in (one for one in row[1:] if one >= 0):
            # Python's round is half to even, and exact on fractions.
            wanted = [round(share * b + (1 - share) * a) for b, a in zip(wanted, flat[other], strict=True)]
        assert result == wanted


@pytest.mark.parametrize("alpha", ["0.5", "0.01", "0.37", "0.9", "0.95", "0.9921875", "0.123", "0.3333", "0.9999"])
def test_every_pair_of_pixels_is_blended_exactly(alpha: str, way: str) -> None:
    share = Fraction(alpha)
    n, d = share.numerator, share.denominator
    b, a = (part.ravel() for part in np.meshgrid(np.arange(256), np.arange(256)))
    x = torch.from_numpy(np.stack([b, a]).astype(np.uint8))
    down, left = np.divmod(n * b + (d - n) * a, d)
    wanted = down + ((2 * left > d) | ((2 * left == d) & (down % 2 == 1)))
    np.testing.assert_array_equal(blend(x, np.array([[0, 1]]), float(alpha))[0].numpy(), wanted)


def test_a_blend_of_samples_that_there_are_not_is_refused(way: str) -> None:
    x, one = pixels(4), np.zeros((1, 1), np.int64)
    for wrong in ([[4]], [[-2]], [[-1]], [[-1, 0]]):
        with pytest.raises(IndexError, match="samples"):
            encode(x, one, np.array(wrong), 0.5)
        with pytest.raises(IndexError, match="samples"):
            blend(x, np.array(wrong), 0.5)
    assert blend(x, np.empty((0, 2), np.int64), 0.5).shape == (0, 1, 5, 5)


def _all(x: torch.Tensor, a: Any, b: Any, noise: torch.Tensor, alpha: float) -> list[torch.Tensor]:
    return [encode(x, a, b, alpha, noise), encode(x, a, b, alpha), decode(noise, x, b, alpha), blend(x, a, alpha)]


def test_the_kernel_and_plain_pytorch_agree_on_samples_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks of 4,096 pixels, and what is left of them; rows that are no whole vectors.
    for shape in ((3, 40, 35), (1, 1, 1), (9000,)):
        x, noise = (torch.from_numpy(rng(s).integers(0, 256, (6, *shape), np.uint8)) for s in (0, 1))
        a, b = (draw_within(np.arange(6) % 2, rng(s).integers(2, size=6), 4, rng(s)) for s in (2, 3))
        ways = []
        for library in (build.library, lambda source: None):
            monkeypatch.setattr(build, "library", library)
            ways.append([made for alpha in (0.95, 0.123) for made in _all(x, a, b, noise, alpha)])
        assert all(map(torch.equal, *ways))
        turned = x.transpose(0, -1).contiguous().transpose(0, -1)
        assert torch.equal(blend(turned, a, 0.5), blend(x, a, 0.5))
        monkeypatch.undo()


@pytest.mark.parametrize("p", [1, 3])
def test_the_same_dummy_decodes_to_the_exact_target(p: int, way: str) -> None:
    x = pixels(20)
    targets, dummies = (draw_within(np.zeros(20, np.int64), np.zeros(50, np.int64), p, rng(s)) for s in (1, 2))
    encoded = encode(x, targets, dummies, 0.7)

    assert encoded.dtype == torch.uint8
    assert torch.equal(decode(encoded, x, dummies, 0.7), blend(x, targets, 0.7))
    other = draw_within(np.zeros(20, np.int64), np.zeros(50, np.int64), p, rng(3))
    a, b, c = (blend(x, places, 0.7).numpy() for places in (targets, dummies, other))
    np.testing.assert_array_equal(encoded.numpy(), a ^ b)
    np.testing.assert_array_equal(decode(encoded, x, other, 0.7).numpy(), a ^ b ^ c)


def test_pixels_that_are_worked_on_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = pixels(20, side=7)
    a, b = (draw_within(np.arange(20) % 4, rng(s).integers(4, size=33), 6, rng(s)) for s in (1, 2))
    noise = pixels(33, 5, 7)
    whole = encode(x, a, b, 0.95, noise), decode(noise, x, b, 0.95), blend(x, a, 0.95)
    mixed = superpose(x, [a, b], [0.3, 0.7], 0.95)
    monkeypatch.setattr(xor_module, "CHUNK", 100)
    monkeypatch.setattr(build, "library", lambda source: None)
    assert all(map(torch.equal, whole, (encode(x, a, b, 0.95, noise), decode(noise, x, b, 0.95), blend(x, a, 0.95))))
    assert torch.equal(mixed, superpose(x, [a, b], [0.3, 0.7], 0.95))


def test_an_offset_leaves_no_dummy_pixel_constant_and_never_passes_white(way: str) -> None:
    x = torch.tensor([[0, 0, 200, 255], [7, 7, 7, 7]], dtype=torch.uint8)
    noise = torch.tensor([[0, 9, 99, 9]], dtype=torch.uint8)
    encoded = encode(x, np.array([[1]]), np.array([[0]]), 0.5, noise)
    assert encoded.tolist() == [[7, 7 ^ 9, 7 ^ 255, 7 ^ 255]]

    drawn = XorSeeds(offset=15).dummy_noise(x, 5000, rng())
    assert drawn is not None
    assert sorted(drawn.unique().tolist()) == list(range(16))
    assert XorSeeds().dummy_noise(x, 5, rng()) is None


def test_mixup_is_the_rounded_sum_of_shares() -> None:
    x = torch.tensor([[1, 255, 10], [2, 255, 20], [4, 0, 60]], dtype=torch.uint8)
    one, two, three = (np.array([[k]]) for k in range(3))
    assert superpose(x, [one, two], [0.5, 0.5], 0.5).tolist() == [[2, 255, 15]]
    assert superpose(x, [one, two, three], [1 / 3] * 3, 0.5).tolist() == [[2, 170, 30]]
    assert superpose(x, [one, three], [0.75, 0.25], 0.5).tolist() == [[2, 191, 22]]


LINEAR = {"name": "mlp", "hidden": []}


STEP = {"epochs": 3, "batch_size": 5}


ROWS = [[6, 6, 2], [6, 6, 5], [6, 6, 3]]
"""Samples by label of the server and of two devices: label 2 lacks 4 at the server."""


def one_shot(method: Any = "xormixfl", rows: Any = ROWS, **changes: Any) -> Any:
    """A world in which client 0 is the server."""
    spec = {"name": method} if isinstance(method, str) else method
    trains = {"server_step": STEP} if "server_step" in presets.presets()[spec["name"]][1] else {}
    settings = {"model": LINEAR, "partition": {"name": "counts", "counts": rows}, "train": {"cohort": 3}}
    return setup(images(n=60), method={**trains, **spec}, **{**settings, **changes})


def pool_of(made: Any) -> tuple[Pool, Any, Any]:
    """What the server has after its round; the state and the record."""
    fed = federation_of(made)
    state, (record,) = run(fed, 1)
    return fed.exchange.pool_of(state), state, record


def test_the_paper_s_server_asks_for_190_a_target_label() -> None:
    base = np.repeat(np.arange(10), [10, 200, 10, 200, 10, 200, 200, 200, 10, 200])
    asked = XorSeeds().spread(base, 10, [1, 2, 3])
    assert sum(one.wanted for one in asked.values()).tolist() == [190, 0, 190, 0, 190, 0, 0, 0, 190, 0]
    assert [asked[k].wanted[0] for k in (1, 2, 3)] == [64, 63, 63]
    assert all(one.dummies.tolist() == [1, 3, 5, 6, 7, 9] for one in asked.values())
    assert shortages(np.array([10, 200, 30]), np.array([2])).tolist() == [0, 0, 170]


def test_dummy_labels_are_named_or_those_of_which_the_server_holds_most() -> None:
    base = np.repeat(np.arange(5), [2, 9, 8, 9, 5])
    of = lambda **given: XorSeeds(targets=(0,), **given).spread(base, 5, [4])[4].dummies.tolist()  # noqa: E731
    assert of() == [1, 2, 3, 4]
    assert of(dummies=1) == [1]
    assert of(dummies=3) == [1, 2, 3]
    assert of(dummies=(4, 2)) == [2, 4]


def test_a_device_sends_what_is_asked_hidden_by_dummies_it_holds() -> None:
    sharing, labels = XorSeeds(p=2), np.array([0, 0, 1, 1, 2, 2, 4])
    request = Request(np.array([0, 0, 0, 3, 5]), np.array([0, 2, 3]))
    drawn = sharing.draw_recipe(labels, request, rng())

    assert drawn is not None
    # None of label 3, which it does not hold.
    assert drawn.labels.tolist() == [4] * 5
    assert set(drawn.dummy_labels.ravel().tolist()) <= {0, 2}
    assert (labels[drawn.dummies[0]] == drawn.dummy_labels).all()
    assert sharing.draw_recipe(labels, None, rng()) is None
    assert sharing.draw_recipe(labels, Request(np.array([0, 0, 0, 3, 0]), np.array([0])), rng()) is None
    assert sharing.draw_recipe(labels, Request(np.array([0, 0, 0, 0, 5]), np.array([3])), rng()) is None


def test_samples_that_are_not_stored_in_8_bits_are_refused() -> None:
    data = numbers()
    task, scale = Task("classification", 2), experiment().scale.fit(data)
    given = replace(local(data.train.x, torch.zeros(30, dtype=torch.int64), task, scale), request=None)
    with pytest.raises(FedblendError, match=r"needs 8-bit pixels \(uint8\); these data are float32"):
        XorSeeds().share(given)
    with pytest.raises(FedblendError, match="requests samples by label"):
        XorSeeds().spread(data.train.y.numpy(), 2, [1])


@pytest.mark.parametrize("p", [1, 2])
def test_after_decoding_classes_are_level_and_decoded_samples_are_what_they_should(p: int) -> None:
    made = one_shot({"name": "xormixfl", "sharing": {"p": p, "alpha": 0.75}})
    pool, state, record = pool_of(made)
    x, y = made.samples(0, 14)

    assert np.bincount(pool.tensors["y"]).tolist() == [6, 6, 6]
    assert pool.tensors["x"].dtype == torch.uint8
    assert torch.equal(pool.tensors["x"][:14], x)
    assert torch.equal(pool.tensors["y"][:14], y)
    assert pool.owner.tolist() == [0] * 14 + [-1] * 4
    # Each decoded sample is an entry XOR a blend of the server's own samples of the entry's dummy label.
    seeds, hidden = state.entries.tensors["seeds"], state.entries.tensors["dummies"][:, 0]
    rows = {n: np.flatnonzero(y.numpy() == n) for n in (0, 1)}
    allowed = set()
    for seed, label in zip(seeds, hidden.tolist(), strict=True):
        own = [[i] for i in rows[label]] if p == 1 else [[i, j] for i in rows[label] for j in rows[label] if i != j]
        allowed |= {bytes(d.flatten().tolist()) for d in seed ^ blend(x, np.array(own), 0.75)}
    assert {bytes(d.flatten().tolist()) for d in pool.tensors["x"][14:]} <= allowed
    assert record["shared"] == {"asked": 2, "sent": 2, "entries": 4}


def test_several_target_labels_are_levelled() -> None:
    pool, _, record = pool_of(one_shot(rows=[[8, 3, 1], [8, 6, 5], [4, 6, 6]]))
    assert np.bincount(pool.tensors["y"]).tolist() == [8, 8, 8]
    assert record["shared"]["entries"] == 12
    # Only the labels that are named.
    named = {"name": "xormixfl", "sharing": {"targets": [2]}}
    pool, _, _ = pool_of(one_shot(named, rows=[[8, 3, 1], [8, 6, 5], [4, 6, 6]]))
    assert np.bincount(pool.tensors["y"]).tolist() == [8, 3, 8]


def test_what_does_not_come_is_decoded_again_with_other_samples() -> None:
    # The second device holds no sample of the target label.
    pool, state, _ = pool_of(one_shot(rows=[[6, 6, 1], [6, 6, 5], [6, 6, 0]]))
    assert len(state.entries) == 3
    assert np.bincount(pool.tensors["y"]).tolist() == [6, 6, 6]
    assert len(pool.tensors["x"][13:].unique(dim=0)) > 3

    nothing, _, record = pool_of(one_shot(rows=[[6, 6, 1], [6, 6, 0], [6, 6, 0]]))
    assert np.bincount(nothing.tensors["y"]).tolist() == [6, 6, 1]
    assert record["shared"]["sent"] == 0


def test_each_entry_that_came_is_decoded_before_any_is_again() -> None:
    sharing, entries = XorSeeds(), torch.arange(5, dtype=torch.uint8)[:, None]
    tensors = {"seeds": entries, "y": torch.ones(5, dtype=torch.uint8), "dummies": torch.zeros(5, 1)}
    base = torch.zeros(12, 1, dtype=torch.uint8), torch.zeros(12, dtype=torch.int64)
    pool = sharing.make_pool(Pool(tensors, np.ones(5, np.int64)), server_side(rng(), base=base))

    # The dummies are black: what came is what is decoded.
    assert np.bincount(pool.tensors["x"][12:, 0], minlength=5).tolist() in (
        [3 if k in two else 2 for k in range(5)] for two in ({a, b} for a in range(5) for b in range(a))
    )


def test_mixed_seeds_have_soft_labels_by_shares() -> None:
    pool, state, _ = pool_of(one_shot({"name": "mixfl", "sharing": {"lambda": 0.75}}))
    hidden = state.entries.tensors["dummies"][:, 0].long()
    soft = pool.tensors["y"][14:]

    assert torch.equal(soft[:, 2], torch.full((4,), 0.75))
    assert torch.equal(soft.sum(1), torch.ones(4))
    assert torch.equal(soft[:, :2].sum(0), 0.25 * F.one_hot(hidden, 2).sum(0))
    assert torch.equal(pool.tensors["y"][:14], F.one_hot(one_shot().samples(0, 14)[1], 3).float())
    assert set(map(tuple, pool.tensors["x"][14:].flatten(1).tolist())) == set(
        map(tuple, state.entries.tensors["seeds"].flatten(1).tolist())
    )
    assert set(pool.owner[14:]) == {1, 2}

    pool, _, _ = pool_of(one_shot({"name": "mixfl", "sharing": {"equal_parts": True}}))
    torch.testing.assert_close(pool.tensors["y"][14:], torch.full((4, 3), 1 / 3))
    halves, _, _ = pool_of(one_shot("mixfl"))
    assert halves.tensors["y"][14:].unique().tolist() == [0, 0.5]


def test_a_device_that_lacks_a_dummy_label_makes_no_equal_parts() -> None:
    sharing, request = MixedTargetSeeds(equal_parts=True), Request(np.array([0, 0, 2]), np.array([0, 1]))
    assert sharing.draw_recipe(np.array([0, 0, 2]), request, rng()) is None
    drawn = sharing.draw_recipe(np.array([0, 1, 2]), request, rng())
    assert drawn is not None
    assert [part.ravel().tolist() for part in drawn.dummies] == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    "layers",
    [
        [torch.nn.Linear(25, 3)],
        # Layers that fedblend's kernels compute.
        [
            torch.nn.Sequential(torch.nn.Unflatten(1, (1, 5, 5)), torch.nn.Conv2d(1, 4, 3, padding=1)),
            torch.nn.MaxPool2d(2),
            torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)),
        ],
    ],
    ids=["linear", "convolution"],
)
def test_training_on_seeds_is_adam_on_the_scaled_samples(layers: list[torch.nn.Module]) -> None:
    unit = Scaler("unit", False, *(torch.tensor([v]) for v in (1 / 255, 0.0, 1 / 255, 0.0)))
    x, y = pixels(7).flatten(1), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    net = Staged(*layers)
    weights = {name: t.detach().clone() for name, t in net.state_dict().items()}
    server = ServerContext(
        model=net,
        trained=list(weights),
        shape=(25,),
        scale=unit,
        task=Task("classification", 3),
        round=0,
        lr=9.0,
        rng=rng(4),
        pool=Pool({"x": x, "y": y}, np.zeros(7, np.int64)),
    )
    step = TrainOnSeeds(epochs=3, batch_size=3, lr=0.01)
    made, kept = step.refine(weights, server)

    net.load_state_dict(weights)
    adam, order = torch.optim.Adam(net.parameters(), lr=0.01), rng(4)
    for _ in range(3):
        for rows in torch.from_numpy(order.permutation(7)).split(3):
            adam.zero_grad()
            F.cross_entropy(net(x[rows] / 255), y[rows]).backward()
            adam.step()
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(made[name], tensor, rtol=1e-4, atol=1e-4)
    assert kept == {}
    assert not any(t.requires_grad for t in made.values())
    # Hard labels as soft ones; labels above the largest that came are padded.
    soft = replace(server, rng=rng(4), pool=Pool({"x": x, "y": F.one_hot(y, 3).float()}, np.zeros(7, np.int64)))
    for name, tensor in step.refine(weights, soft)[0].items():
        torch.testing.assert_close(tensor, made[name])
    assert same(step.refine(weights, replace(server, round=1))[0], weights)
    assert same(step.refine(weights, replace(server, pool=Pool({}, np.empty(0, np.int64))))[0], weights)


@pytest.mark.parametrize("method", ["xormixfl", "mixfl", "standalone"])
def test_one_shot_is_done_in_one_round(method: str) -> None:
    made = one_shot(method)
    first, records = run(made, 1)
    second, more = run(made, 1, first)

    assert not same(first.weights, made.weights())
    assert same(second.weights, first.weights)
    assert "cohort" not in records[0]
    assert records[0]["loss"] == more[0]["loss"]
    assert more[0]["bytes_up"] == {}


def test_standalone_trains_on_the_server_s_samples_alone() -> None:
    alone, _, record = pool_of(one_shot("standalone"))
    x, y = one_shot().samples(0, 14)
    assert torch.equal(alone.tensors["x"], x)
    assert torch.equal(alone.tensors["y"], y)
    assert record["bytes_up"] == {}
    other, _, _ = pool_of(one_shot({"name": "standalone", "sharing": {"server": 2}}))
    assert np.bincount(other.tensors["y"]).tolist() == ROWS[2]


def test_vanilla_fl_is_one_round_of_fedavg() -> None:
    ours, theirs = (run(made, 1)[0] for made in map(one_shot, ("vanilla-fl", "fedavg")))
    assert same(ours.weights, theirs.weights)


def test_a_warm_start_is_the_one_shot_model_and_then_fedavg() -> None:
    warm = one_shot({"name": "xormixfl", "upload": {"name": "model", "from_round": 2}})
    shot, _ = run(RoundLoop(one_shot(), LoopEngine(one_shot())), 1)
    first, (record,) = run(warm, 1)
    assert same(first.weights, shot.weights)
    assert "cohort" not in record
    assert "weights" not in record["bytes_down"]

    second, (record,) = run(warm, 1, first)
    plain = one_shot("fedavg")
    task = TrainTask(1, shot.weights, None, plain.sizes(1))
    trained = list(LoopEngine(plain).train(task, [0, 1, 2]))
    sizes = torch.tensor([float(t.samples) for t in trained])
    for name, tensor in second.weights.items():
        mean = sum(t.weights[name] * n for t, n in zip(trained, sizes, strict=True)) / sizes.sum()
        torch.testing.assert_close(tensor, mean, atol=1e-6, rtol=1e-5)
    assert record["cohort"] == [0, 1, 2]


def test_a_server_that_does_not_decode_needs_no_sample_of_the_dummys_label() -> None:
    rows = [[6, 0, 2], [6, 6, 5], [6, 6, 3]]
    fine = one_shot({"name": "mixfl", "sharing": {"targets": [2], "dummies": [1]}}, rows=rows)
    assert len(pool_of(fine)[0]) == 8 + 4


def test_methods_in_which_clients_train_have_a_proximal_form_and_others_none() -> None:
    names = presets.presets()
    assert "fedprox+mix2fld" in names
    assert not {"fedprox+xormixfl", "fedprox+mixfl", "fedprox+standalone"} & names.keys()
