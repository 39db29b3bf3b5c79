"""Mix2FLD's channel: the paper's numbers by hand, closed forms, and draws against them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import torch
from cli_helpers import TINY, here, refused, succeeded, write
from helpers import each, examples, federation, images, setup
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedblend.cli.paper import payloads
from fedblend.core.channel import Channel
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.registry import build
from fedblend.core.trees import bytes_of
from fedblend.methods.channels import Link, Wireless

MODEL = 32 * 12_544
OUTPUTS = 32 * 100
SEED = 8 * 28 * 28

UNLIKELY = 1e-3
"""Probability below which a draw at a fixed seed is not believed to follow its closed form."""


class PaperNet(nn.Module):
    """The paper's network of 12,544 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.last = nn.Linear(1176, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(x).flatten(1))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def sizes(bits: int, count: int) -> np.ndarray:
    """Bytes of ``count`` transmissions of so many bits."""
    assert bits % 8 == 0
    return np.full(count, bits // 8)


def test_the_papers_links_by_hand() -> None:
    # 23 dBm are 199.526 mW; 1 km to the power 4 is 1e12; -174 dBm/Hz are 3.98107e-18 mW/Hz on 2 MHz: 7.96214e-12 mW.
    up, down = Wireless().link("up", 10), Wireless().link("down", 10)
    assert (up.bandwidth, down.bandwidth) == (2e6, 10e6)
    assert up.snr == pytest.approx(199.526231 * 1e-12 / 7.96214341e-12, rel=1e-6)
    assert down.snr == pytest.approx(10_000 * 1e-12 / 3.98107171e-11, rel=1e-6)
    assert up.success == pytest.approx(math.exp(-3 / 25.0594), abs=1e-6) == pytest.approx(0.88717, abs=1e-5)
    assert down.success == pytest.approx(math.exp(-3 / 251.1886), abs=1e-6)
    assert (up.bits_per_slot, down.bits_per_slot) == (4000, 20_000)
    assert (up.limit, down.limit) == (100, 100)


def test_slots_that_the_papers_payloads_need() -> None:
    up, down = Wireless().link("up", 10), Wireless().link("down", 10)
    bits = [MODEL, OUTPUTS, OUTPUTS + 10 * SEED, OUTPUTS + 50 * SEED]
    assert up.needed(np.array(bits)).tolist() == [101, 1, 17, 80]
    assert down.needed(np.array(bits[:2])).tolist() == [21, 1]
    assert up.needed(np.array([0, 1, 4000, 4001, 8000])).tolist() == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("power", [23.0, 40.0])
def test_fl_fails_always_with_the_papers_numbers_and_not_within_110_ms(power: float) -> None:
    literal, longer = Wireless(power_up=power), Wireless(power_up=power, t_max=0.11)
    assert literal.link("up", 10).outage(MODEL) == 1
    assert not literal.transmit("up", sizes(MODEL, 10), rng()).arrives.any()
    assert longer.link("up", 10).limit == 110
    assert 0 < longer.link("up", 10).outage(MODEL) < 1
    # A target of 3 dB would need 127 slots.
    assert Wireless(power_up=power, theta_up=10**0.3).link("up", 10).needed(MODEL) == 127


def test_what_the_paper_sends_in_bits() -> None:
    made = setup(images(40, classes=10, side=28), model={"name": "module", "path": f"{__name__}:PaperNet"})
    assert payloads(made, [10, 50]) == {
        "up": {
            "model": 401_408,
            "outputs": 3_200,
            "1 seed": 6_272,
            "outputs, 10 seeds": 65_920,
            "outputs, 50 seeds": 316_800,
        },
        "down": {"model": 401_408, "outputs": 3_200},
    }
    assert (MODEL, OUTPUTS, SEED) == (401_408, 3_200, 6_272)
    assert 8 * bytes_of(made.weights()) == MODEL


def test_the_uplink_is_shared_by_those_that_transmit() -> None:
    channel = Wireless()
    assert [channel.link("up", n).bandwidth for n in (10, 20, 5)] == [2e6, 1e6, 4e6]
    assert Wireless(devices=10).link("up", 3).bandwidth == 2e6
    assert channel.link("down", 3).bandwidth == 10e6
    # Two of these four have nothing to send, so that the others get 10 MHz each: 20,000 bits a slot, of one slot.
    sent = Wireless(power_up=90, t_max=0.001).transmit("up", np.array([0, 2500, 2501, 0]), rng())
    assert sent.arrives.tolist() == [True, True, False, True]
    assert sent.seconds.tolist() == [0, 0.001, 0.001, 0]


LINKS = st.builds(
    Link,
    snr=st.floats(0.3, 300),
    theta=st.floats(0.1, 10),
    bandwidth=st.just(1e6),
    slot=st.just(0.001),
    limit=st.integers(1, 60),
)


@examples(50)
@given(LINKS, st.integers(1, 70))
def test_closed_forms_are_scipys(link: Link, needed: int) -> None:
    bits = needed * link.bits_per_slot
    assert link.needed(bits) == needed
    slots, probability = link.slots(bits)
    assert slots.tolist() == list(range(needed, link.limit + 1))
    np.testing.assert_allclose(probability, scipy.stats.nbinom.pmf(slots - needed, needed, link.success), rtol=1e-8)
    assert link.outage(bits) == pytest.approx(scipy.stats.binom.cdf(needed - 1, link.limit, link.success), rel=1e-8)
    assert probability.sum() + link.outage(bits) == pytest.approx(1, abs=1e-9)
    assert link.mean_seconds(bits) == pytest.approx(0.001 * needed / link.success, rel=1e-9)


def test_limits_of_the_closed_forms() -> None:
    good = Link(snr=1e300, theta=1.0, bandwidth=1e6, slot=0.001, limit=10)
    bad = Link(snr=1e-300, theta=1.0, bandwidth=1e6, slot=0.001, limit=10)
    assert good.success == 1
    assert good.outage(10_000) < 1e-200
    assert [half.tolist() for half in good.slots(0)] == [[0], [1]]
    assert [half.tolist() for half in good.slots(11 * good.bits_per_slot)] == [[], []]
    assert bad.outage(1) == pytest.approx(1)
    assert bad.outage(0) == 0
    assert 0 < bad.success < 1e-250


def drawn(channel: Wireless, direction: str, bits: int, devices: int, times: int) -> np.ndarray:
    """Slots of ``times`` transmissions of the channel; T_max + 1 is an outage."""
    alike = build("channel", {"name": "wireless", "devices": devices, "t_max": channel.t_max})
    sent = alike.transmit(direction, sizes(bits, times), rng(7))
    slots = np.rint(sent.seconds / channel.slot).astype(int)
    return np.where(sent.arrives, slots, alike.link(direction, devices).limit + 1)


@each("bits", [OUTPUTS, OUTPUTS + 10 * SEED, OUTPUTS + 50 * SEED])
@each("direction", ["up", "down"])
def test_drawn_slots_follow_the_negative_binomial_distribution(direction: str, bits: int) -> None:
    channel, times = Wireless(t_max=0.095), 20_000
    link = channel.link(direction, 10)
    slots, probability = link.slots(bits)
    expected = times * np.append(probability, link.outage(bits))
    counts = np.bincount(drawn(channel, direction, bits, 10, times), minlength=link.limit + 2)
    assert counts[: slots[0]].sum() == 0
    observed = counts[slots[0] :]
    assert len(observed) == len(expected)
    # Outcomes that are expected less than five times are counted as one.
    rare = expected < 5
    binned = [np.append(one[~rare], one[rare].sum()) for one in (observed, expected)]
    keep = binned[1] > 0
    assert scipy.stats.chisquare(binned[0][keep], binned[1][keep] * (times / binned[1][keep].sum())).pvalue > UNLIKELY


def test_slots_beyond_counting_are_outages() -> None:
    sent = Wireless(power_up=-300).transmit("up", np.array([0, 1, 10**15]), rng())
    assert sent.arrives.tolist() == [True, False, False]
    assert sent.seconds.tolist() == [0, 0.1, 0.1]


def test_what_is_lost_took_t_max() -> None:
    sent = Wireless(t_max=0.09).transmit("up", sizes(OUTPUTS + 50 * SEED, 10), rng(1))
    assert sent.arrives.any()
    assert not sent.arrives.all()
    assert set(sent.seconds[~sent.arrives]) == {0.09}
    assert (sent.seconds[sent.arrives] <= 0.09 + 1e-12).all()


def test_devices_are_at_one_kilometre_unless_a_ring_is_given() -> None:
    assert Wireless().distances(np.array([5, 0])).tolist() == [1000, 1000]


def test_places_in_a_ring_are_uniform_and_stay() -> None:
    channel = Wireless(nearest=200, distance=1000)
    metres = channel.distances(np.arange(5000))
    assert metres.min() >= 200
    assert metres.max() <= 1000
    area = (metres**2 - 200**2) / (1000**2 - 200**2)
    assert scipy.stats.kstest(area, "uniform").pvalue > UNLIKELY
    assert channel.distances(np.array([4999, 3, 3])).tolist() == metres[[4999, 3, 3]].tolist()
    assert (Wireless(nearest=200, places=1).distances(np.arange(5)) != metres[:5]).all()
    assert channel.distances(np.empty(0, np.int64)).tolist() == []


def test_a_devices_success_is_that_of_its_distance() -> None:
    channel = Wireless(nearest=400, distance=1600, devices=10, t_max=0.02)
    order = np.argsort(channel.distances(np.arange(40)))
    for device in (order[0], order[20], order[-1]):
        metres = float(channel.distances(np.array([device]))[0])
        link = channel.link("up", 10, metres)
        assert link.snr == pytest.approx(channel.link("up", 10).snr * (1600 / metres) ** 4)
        arrives = channel.transmit("up", sizes(OUTPUTS + 10 * SEED, 3000), rng(2), np.full(3000, device)).arrives
        outage = link.outage(OUTPUTS + 10 * SEED)
        assert scipy.stats.binomtest(int((~arrives).sum()), 3000, outage).pvalue > UNLIKELY


def test_distances_need_to_know_who_transmits() -> None:
    with pytest.raises(FedblendError, match=r"channel\.nearest: 200\.0"):
        Wireless(nearest=200).delivers("up", np.array([1]), rng())


def test_a_channel_defines_one_of_the_two() -> None:
    class Odd(Channel):
        def delivers(self, direction: str, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
            return sizes % 2 == 1

    sent = Odd().transmit("up", np.array([1, 2]), rng(), None)
    assert (sent.arrives.tolist(), sent.seconds.tolist()) == ([True, False], [0, 0])
    with pytest.raises(TypeError, match="Channel defines neither transmit nor delivers"):
        Channel().delivers("up", np.array([1]), rng())


def test_delivers_is_what_transmit_says() -> None:
    channel, bits = Wireless(t_max=0.09), sizes(OUTPUTS + 50 * SEED, 50)
    assert channel.delivers("up", bits, rng(3)).tolist() == channel.transmit("up", bits, rng(3)).arrives.tolist()


LOSSY = {"name": "wireless", "t_max": 0.001, "power_up": 25.0, "power_down": 28.0}
"""One slot each way, for models that fit into one: five of six arrive."""


def test_what_arrives_is_aggregated_and_nothing_else() -> None:
    fed = federation(channel=LOSSY, train={"cohort": 4}, rounds=8, seed=3)
    channel, weights = fed.experiment.channel, bytes_of(fed.setup.weights())
    assert channel.link("up", 4).needed(8 * weights) == channel.link("down", 4).needed(8 * weights) == 1
    state, lost = fed.start()[0], []
    for round in range(8):
        state, record = fed.round(state)
        down = channel.transmit("down", np.full(4, weights), stream(3, "downlink", round))
        up = channel.transmit("up", np.full(4, weights), stream(3, "uplink", round))
        assert record.cohort == [0, 1, 2, 3]
        assert record.uploads == up.arrives.sum()
        assert (record.lost or []) == np.flatnonzero(~up.arrives).tolist()
        assert record.bytes_down["weights"] == record.bytes_up["weights"] == 4 * weights
        assert record.channel == {"down": down.seconds.max(), "up": up.seconds.max()}
        lost.append(((~down.arrives).sum(), (~up.arrives).sum()))
    assert min(np.sum(lost, 0)) > 0


def test_a_model_that_needs_more_slots_than_allowed_never_arrives() -> None:
    # 123 weights are 3,936 bits, at 39 bits a slot 101 slots.
    fed = federation(channel={"name": "wireless", "bandwidth": 39e3}, train={"cohort": 4})
    assert fed.experiment.channel.link("up", 4).needed(8 * bytes_of(fed.setup.weights())) == 101


@each(
    ("options", "told"),
    [
        ({"bandwidth": 0}, "channel.bandwidth: 0 is not valid"),
        ({"distance": -1.0}, "channel.distance: -1.0 is not valid"),
        ({"path_loss": 1.5}, "channel.path_loss: 1.5 is not valid"),
        ({"theta_up": 0}, "channel.theta_up: 0 is not valid"),
        ({"power_up": 1e6}, "channel.power_up: 1000000.0 is not valid"),
        ({"noise": float("nan")}, "channel.noise: nan is not valid"),
        ({"devices": 0}, "channel.devices: 0 is not valid"),
        ({"places": -1}, "channel.places: -1 is not valid"),
        ({"t_max": 0.0005}, "t_max: 0.0005 seconds are 0.5 slots of 0.001 seconds; valid: 1 to 1e6 slots"),
        ({"t_max": 1e9}, "valid: 1 to 1e6 slots"),
        ({"nearest": 2000}, "nearest: 2000.0 is more than distance: 1000.0"),
        ({"tmax": 0.1}, "channel.tmax: unknown key for the channel 'wireless' (did you mean 't_max'?)"),
    ],
)
def test_options_out_of_range_are_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(FedblendError) as caught:
        build("channel", {"name": "wireless", **options})
    assert told in str(caught.value)


@pytest.mark.parametrize("slot", [0.001, 0.1, 0.3, 1e-4])
def test_the_limit_is_whole_slots(slot: float) -> None:
    assert Wireless(slot=slot, t_max=3 * slot).link("up", 1).limit == 3
    assert Wireless(slot=slot, t_max=3.99 * slot).link("up", 1).limit == 3


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def cells(out: str) -> dict[tuple[str, str], list[str]]:
    """The rows of the table by direction and payload."""
    rows = (re.fullmatch(r"(up|down) +(.*?)((?: +[\d.,e+-]+){7})", line.rstrip()) for line in out.splitlines())
    return {(row[1], row[2]): row[3].split() for row in rows if row}


def test_channel_tells_what_becomes_of_each_payload() -> None:
    file = write(
        Path("tiny.toml"), {"channel": "wireless", "train": {"cohort": 10}, "partition": {"name": "iid", "clients": 10}}
    )
    shown = succeeded(here("channel", file, "--samples", "10,1")).out
    assert "10 devices share the uplink, at 1000 m; up to 100 slots of 1 ms each way" in shown
    told = cells(shown)
    # digits on 64-8-10: 610 weights; p = exp(-3 / 25.06), an outage of one slot in 100 is (1 - p)^100.
    model = ["19,520", "25.06", "0.8872", "4,000", "5", "5.636"]
    assert told["up", "model"][:-1] == model
    assert float(told["up", "model"][-1]) == pytest.approx(scipy.stats.binom.cdf(4, 100, 0.88717), rel=0.1)
    assert told["up", "outputs"][0] == "3,200"
    assert told["up", "1 seed"][0] == str(8 * 64)
    assert told["up", "outputs, 10 seeds"][0] == "8,320"
    assert told["up", "outputs, 1 seed"][0] == "3,712"
    assert told["down", "model"][:5] == ["19,520", "251.2", "0.9881", "20,000", "1"]
    assert ("down", "1 seed") not in told


def test_channel_tells_of_the_nearest_and_the_farthest_devices() -> None:
    file = write(Path("tiny.toml"), {"channel": {"name": "wireless", "nearest": 500, "devices": 10}})
    shown = succeeded(here("channel", file)).out
    assert "10 devices share the uplink, at 500 m" in shown
    assert "10 devices share the uplink, at 1000 m" in shown
    assert "400.9" in shown  # 16 times 25.06


def test_channel_cuts_no_number_off_at_80_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file = write(Path("tiny.toml"), {"channel": "wireless", "model": {"name": "mlp", "hidden": [9999]}})
    shown = succeeded(here("channel", file)).out
    assert cells(shown)["up", "model"][0] == f"{32 * (64 * 9999 + 9999 + 9999 * 10 + 10):,}"
    assert "…" not in shown


def test_channel_refuses_what_it_cannot_tell() -> None:
    file = write(Path("tiny.toml"))
    refused(here("channel", file), "channel.name: 'ideal' has no slots", "wireless")
    lossy = ("channel", file, "--set", "channel=wireless")
    succeeded(here(*lossy))
    refused(here(*lossy, "--samples", "ten"), "--samples 'ten' is not valid")
    refused(here(*lossy, "--samples", "0"), "--samples '0' is not valid")
    refused(
        here("channel", file, "--set", "channel.name=wireles"), "unknown channel 'wireles' (did you mean 'wireless'?)"
    )
    refused(here("channel", "none.toml"), "none.toml: no such file")


@pytest.mark.slow
def test_an_experiment_runs_over_the_channel() -> None:
    file = write(Path("tiny.toml"), {"channel": {"name": "wireless", "t_max": 0.02}, "train": {"cohort": 4}})
    succeeded(here("run", file))
    refused(here("run", file, "--set", "channel.bandwidth=1000"), "0 good uploads")
    assert TINY["rounds"] == 2


@pytest.mark.slow
def test_a_channel_that_loses_all_shared_data_is_named() -> None:
    lost = {"channel": {"name": "wireless", "power_up": -25, "power_down": -20}, "method": "fedmix"}
    refused(
        here("run", write(Path("tiny.toml"), lost)),
        "'fedmix' has nothing to mix with; the channel 'wireless' may have lost all of it; take one that loses less",
    )
