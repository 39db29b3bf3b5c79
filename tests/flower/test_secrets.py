"""A cryptographic generator: its bits, its source, its distributions."""

from __future__ import annotations

import hashlib
import os

import numpy as np
import pytest

from fedblend.flower.secrets import BLOCK_BYTES, secret_generator


def test_a_keyed_secret_generator_is_shake_256_of_key_and_counter() -> None:
    blocks = [hashlib.shake_256(b"secret" + i.to_bytes(8, "little")).digest(BLOCK_BYTES) for i in range(2)]
    words = np.frombuffer(b"".join(blocks), "<u8")
    drawn = secret_generator(b"secret").integers(0, 2**64 - 1, len(words), np.uint64, endpoint=True)
    assert np.array_equal(drawn, words)
    # A number in [0, 1) is made of the upper 53 bits, one of 32 bits of the upper half.
    assert np.array_equal(secret_generator(b"secret").random(3), (words[:3] >> np.uint64(11)) * 2.0**-53)
    halves = secret_generator(b"secret").integers(0, 2**32 - 1, 3, np.uint32, endpoint=True)
    assert np.array_equal(halves, words[:3] >> np.uint64(32))


def test_a_secret_generator_without_a_key_is_the_operating_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not np.array_equal(secret_generator().random(4), secret_generator().random(4))
    monkeypatch.setattr(os, "urandom", lambda number: bytes(range(8)) * (number // 8))
    word = int.from_bytes(bytes(range(8)), "little")
    assert secret_generator().integers(0, 2**64 - 1, 2, np.uint64, endpoint=True).tolist() == [word, word]


def test_a_secret_generators_noise_has_its_distribution() -> None:
    rng = secret_generator(b"fixed")
    for drawn, deviation in ((rng.standard_normal(40_000, np.float32), 1.0), (rng.laplace(size=40_000), 2**0.5)):
        assert abs(drawn.mean()) < 5 * deviation / 200
        assert drawn.std() == pytest.approx(deviation, rel=0.03)
    assert sorted(rng.permutation(100).tolist()) == list(range(100))
