"""One link over a fading channel, in closed form: bits of a time slot, and slots of a payload."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LARGEST = 600.0  # Upper limit of theta / SNR, to avoid overflow; the probability of success is then 1e-261


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
