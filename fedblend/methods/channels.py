"""Channels: which transmissions between clients and server arrive, and how long they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pydantic
from pydantic import Field

from fedblend.core.channel import Channel, Sent
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.registry import Count, Float, Int, Positive, part

LARGEST = 600.0  # Upper limit of theta / SNR, to avoid overflow; the probability of success is then 1e-261
MAX_MEAN = 1e18  # Largest mean number of lost slots that is drawn from: more than any limit of slots

Decibels = Annotated[Float, Field(ge=-300, le=300)]
"""A level in decibels, limited so that powers do not overflow."""


@part("channel", "ideal")
class Ideal(Channel):
    """Deliver everything without delay."""

    loses = False

    def transmit(
        self, direction: str, sizes: np.ndarray, rng: np.random.Generator, clients: np.ndarray | None = None
    ) -> Sent:
        return Sent(np.ones(len(sizes), bool), np.zeros(len(sizes)))


@dataclass(frozen=True)
class Link:
    """One direction between a device and the server, under Rayleigh block fading (Mix2FLD, section II-C).

    In every slot the received SNR is ``snr * h`` with h exponential of mean 1, independent of other slots and
    devices. A slot whose SNR reaches ``theta`` carries :attr:`bits_per_slot`; any other slot carries nothing.
    """

    snr: float
    """Mean SNR, linear."""
    theta: float
    """Target SNR, linear."""
    bandwidth: float
    """W^y in hertz."""
    slot: float
    """tau in seconds."""
    limit: int
    """T_max in slots."""

    @property
    def success(self) -> float:
        """Probability that a slot is decoded: P(SNR >= theta) = exp(-theta / mean SNR)."""
        return float(np.exp(-self._ratio))

    @property
    def bits_per_slot(self) -> float:
        """Bits that a decoded slot carries: tau W log2(1 + theta) (equation 4)."""
        return self.slot * self.bandwidth * float(np.log2(1 + self.theta))

    @property
    def _ratio(self) -> float:
        return min(self.theta / self.snr, LARGEST) if self.snr > 0 else LARGEST

    def needed(self, bits: np.ndarray | float) -> np.ndarray:
        """Decoded slots that payloads of ``bits`` need: the smallest T with T * bits_per_slot >= bits, int64.

        >>> Link(snr=25.06, theta=3.0, bandwidth=2e6, slot=1e-3, limit=100).needed(32 * 12_544).item()
        101
        """
        return slots_in(np.asarray(bits, float) / self.bits_per_slot, up=True)

    def slots(self, bits: float) -> tuple[np.ndarray, np.ndarray]:
        """The distribution of the slots T that a payload takes, within the limit.

        T = t int64 [k] from the slots needed to T_max, and P(T = t) float64 [k]: a negative binomial distribution,
        C(t - 1, n - 1) p^n (1 - p)^(t - n) for n slots needed. The probabilities sum to 1 - :meth:`outage`. Both arrays
        are empty where n > T_max. A payload of 0 bits takes 0 slots.
        """
        n = int(self.needed(bits))
        if n == 0:
            return np.zeros(1, np.int64), np.ones(1)
        t = np.arange(n, self.limit + 1)
        if not len(t):
            return t, np.empty(0)
        return t, np.exp(_log_choose(t - 1, n - 1) - n * self._ratio + (t - n) * self._log_failure)

    def outage(self, bits: float) -> float:
        """Probability that a payload takes more than T_max slots: P(Binomial(T_max, p) < n); 1 where n > T_max."""
        n = int(self.needed(bits))
        if n > self.limit:
            return 1.0
        k = np.arange(n)
        log_p = _log_choose(np.full(n, self.limit), k) - k * self._ratio + (self.limit - k) * self._log_failure
        return float(min(1.0, np.exp(log_p).sum()))

    def mean_seconds(self, bits: float) -> float:
        """Mean seconds of a payload without a limit: tau n / p."""
        return float(self.slot * self.needed(bits) / self.success)

    @property
    def _log_failure(self) -> float:
        # expm1, because 1 - exp(-x) loses all digits where x is tiny.
        return float(np.log(max(-np.expm1(-self._ratio), np.finfo(float).tiny)))


def slots_in(quotient: np.ndarray | float, up: bool) -> np.ndarray:
    """A quotient rounded up or down to whole slots, int64, after removal of the division's rounding error.

    >>> slots_in(0.3 / 0.1, up=False).item(), slots_in(100.352, up=True).item()
    (3, 101)
    """
    near = np.round(quotient, 6)
    return np.asarray(np.minimum(np.ceil(near) if up else np.floor(near), 2.0**62)).astype(np.int64)


def _log_choose(n: np.ndarray, k: np.ndarray | int) -> np.ndarray:
    """Logarithms of binomial coefficients, from sums of logarithms."""
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, int(n.max(initial=0)) + 1)))])
    return np.asarray(log_factorial[n] - log_factorial[k] - log_factorial[n - k])


@part("channel", "wireless")
class Wireless(Channel):
    """Connect devices and a server by one radio band (Mix2FLD, section II-C); the defaults are those of section IV.

    On the uplink each transmitting device has its own share W N_ch / |D| of the band (FDMA). On the downlink the server
    sends to all devices on the whole band W (multicast), and each device receives until its payload is complete. The
    received SNR in a time slot is P h r^-alpha / (W^y N_0), with h exponential of mean 1, independent for every device
    and slot. A slot whose SNR reaches theta carries tau W^y log2(1 + theta) bits (equation 4). So the slots that a
    payload takes have a negative binomial distribution, from which they are drawn. A transmission longer than T_max is
    lost, after T_max. See :meth:`link` for closed forms.

    theta is a linear ratio, not in decibels: at 3 dB no model would arrive at the paper's settings. T_max holds for
    each direction. With the paper's numbers a model of 12,544 weights needs 101 slots of the uplink, and 100 are
    allowed. So FL always fails, in contrast to the paper's Figure 2. With ``t_max = 0.104`` ten devices' uploads
    arrive over the symmetric channel, and hardly any over the asymmetric one, as in the paper.

    In the paper every device is at 1 km. With ``nearest``, devices are uniformly distributed over a ring instead. A
    device's position is fixed for the run and is a function of ``places`` and the device's number.
    """

    bandwidth: Positive = 10e6
    """The band W in hertz."""
    uplink_channels: Positive = 2.0
    """Channels N_ch of the uplink: each device gets W N_ch / |D| hertz."""
    devices: Count | None = None
    """Devices |D| that share the uplink (default: those that transmit in the round)."""
    power_up: Decibels = 23.0
    """A device's transmission power P^up in dBm; 40 makes the channel symmetric."""
    power_down: Decibels = 40.0
    """The server's transmission power P^dn in dBm."""
    distance: Positive = 1000.0
    """Distance r of devices from the server in metres; with `nearest`, the largest distance."""
    nearest: Positive | None = None
    """Smallest distance of devices from the server in metres (default: all devices are at `distance`)."""
    places: Annotated[Int, Field(ge=0)] = 0
    """Seed of the devices' positions, with `nearest`."""
    path_loss: Annotated[Float, Field(ge=2, le=20)] = 4.0
    """Path loss exponent alpha: power falls with distance in metres to this power."""
    noise: Decibels = -174.0
    """Noise power spectral density N_0 in dBm per hertz."""
    theta_up: Positive = 3.0
    """Target SNR of the uplink, linear."""
    theta_down: Positive = 3.0
    """Target SNR of the downlink, linear."""
    slot: Positive = 0.001
    """Time slot tau, which is the channel's coherence time, in seconds."""
    t_max: Positive = 0.1
    """Time T_max after which a transmission is lost, in seconds; for each direction."""

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> Wireless:
        if self.nearest is not None and self.nearest > self.distance:
            raise ValueError(f"nearest: {self.nearest} is more than distance: {self.distance}; valid: at most that")
        if not 1 <= self.t_max / self.slot + 1e-6 <= 1e6:
            raise ValueError(
                f"t_max: {self.t_max} seconds are {self.t_max / self.slot:g} slots of {self.slot} seconds; "
                "valid: 1 to 1e6 slots"
            )
        return self

    def transmit(
        self, direction: str, sizes: np.ndarray, rng: np.random.Generator, clients: np.ndarray | None = None
    ) -> Sent:
        """Draw the slots that each transmission takes; a transmission of more than T_max is lost.

        ``clients`` are the devices' numbers, which ``nearest`` needs. Seconds are tau times the slots, at most T_max.
        """
        sizes = np.asarray(sizes)
        link = self.link(direction, int(np.count_nonzero(sizes)))
        needed = link.needed(8.0 * sizes)
        ratio = np.minimum(self._ratios(link, len(sizes), clients), LARGEST)
        # Failures before the n-th success, as a gamma-Poisson mixture: Poisson with the mean
        # Gamma(n) * (1 - p) / p, where (1 - p) / p = exp(theta / SNR) - 1.
        failures = rng.poisson(np.minimum(rng.standard_gamma(needed) * np.expm1(ratio), MAX_MEAN))
        slots = needed + failures
        return Sent(slots <= link.limit, link.slot * np.minimum(slots, link.limit))

    def link(self, direction: str, transmitting: int, distance: float | None = None) -> Link:
        """The link of a device at ``distance`` metres (default: the farthest), with its closed forms.

        ``direction`` is "up" or "down". ``transmitting`` devices share the uplink, unless ``devices`` is given.
        """
        up = direction == "up"
        share = self.uplink_channels / max(1, self.devices or transmitting) if up else 1.0
        band = self.bandwidth * share
        lost = 10 * self.path_loss * np.log10(self.distance if distance is None else distance)
        level = (self.power_up if up else self.power_down) - self.noise - 10 * np.log10(band) - lost
        return Link(
            snr=float(10.0 ** (np.clip(level, -3000, 3000) / 10)),
            theta=self.theta_up if up else self.theta_down,
            bandwidth=band,
            slot=self.slot,
            limit=int(slots_in(self.t_max / self.slot, up=False)),
        )

    def distances(self, clients: np.ndarray) -> np.ndarray:
        """The distances of devices, by their numbers, in metres: float64 [clients].

        Uniform over the ring's area, so that a distance is sqrt(u (r_far^2 - r_near^2) + r_near^2), u uniform.
        """
        if self.nearest is None:
            return np.full(len(clients), self.distance)
        # Device k always has the k-th number of the stream.
        u = stream(self.places, "places").random(int(clients.max(initial=-1)) + 1)[clients]
        return np.sqrt(u * (self.distance**2 - self.nearest**2) + self.nearest**2)

    def _ratios(self, link: Link, count: int, clients: np.ndarray | None) -> np.ndarray:
        """theta / mean SNR of each device; ``link`` is the link of the farthest device."""
        farthest = link.theta / link.snr
        if self.nearest is None:
            return np.full(count, farthest)
        if clients is None:
            raise FedblendError(
                f"channel.nearest: {self.nearest}: needs the numbers of the transmitting devices, which this caller "
                "does not give; valid: no nearest, so that all devices are at the same distance"
            )
        return farthest * (self.distances(clients) / self.distance) ** self.path_loss
