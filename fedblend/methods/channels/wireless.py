"""Mix2FLD's wireless channel: frequency division uplink, multicast downlink, Rayleigh fading, outage after T_max."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import pydantic
from pydantic import Field

from fedblend.core.channel import Channel, Sent
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.registry import Count, Float, Int, Positive, part
from fedblend.methods.channels.link import LARGEST, Link, slots_in

Decibels = Annotated[Float, Field(ge=-300, le=300)]
"""A level in decibels, limited so that powers do not overflow."""

MAX_MEAN = 1e18  # Largest mean number of lost slots that is drawn from: more than any limit of slots


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
