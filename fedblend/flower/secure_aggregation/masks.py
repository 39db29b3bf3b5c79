"""The arithmetic of secure aggregation: keys, masks, and the shares that give a lost one back.

From Flower: key pairs on P-384, key agreement (ECDH, HKDF with SHA-256), encryption between sites (Fernet) and Shamir's
secret sharing. Not from Flower: its masks, which it draws from the Mersenne Twister with the 256 bits of a key folded
into 32, of which 28 are left where the key is one of two sites (``pseudo_rand_gen`` in 1.41), few enough to be tried
out; here a mask is the key stream of AES-256 in counter mode. Nor its quantisation, which draws from a global
generator.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_concat, share_keys_plaintext_separate
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)

from fedblend.flower.audit import Tensors, digest_of

MODELS, MEANS = "models", "means"
"""What is summed under masks: models after training, or the means that a group of clients shares."""

KEY = 32
"""Bytes of a mask's key."""

BROKEN = (ValueError, TypeError, KeyError, IndexError, InvalidToken, InvalidTag, UnsupportedAlgorithm, OverflowError)
"""What the primitives raise on keys, shares and ciphertexts that are none."""


def new_pair() -> tuple[bytes, bytes]:
    """A private and a public key, as PEM."""
    private, public = generate_key_pairs()
    return private_key_to_bytes(private), public_key_to_bytes(public)


def public_of(private: bytes) -> bytes:
    """The public key of a private one."""
    return public_key_to_bytes(bytes_to_private_key(private).public_key())


def is_public(key: bytes) -> bool:
    """Whether a key is one of P-384, as sites make them."""
    try:
        return isinstance(bytes_to_public_key(key).curve, SECP384R1)
    except (*BROKEN, AttributeError):
        return False


def agreed(private: bytes, public: bytes) -> bytes:
    """The key that two sites have in common, as Fernet wants it (base64)."""
    return generate_shared_key(bytes_to_private_key(private), bytes_to_public_key(public))


def masking(private: bytes, public: bytes, about: bytes, length: int) -> np.ndarray:
    """The mask that two sites have in common, uint32 [length], where they were told the same ``about`` their sum."""
    return stretched(hmac.digest(base64.urlsafe_b64decode(agreed(private, public)), about, "sha256"), length)


def about_sum(told: Mapping[str, Any], round: int, start: Tensors | None = None, total: int = 0) -> bytes:
    """What a sum is of, as a digest: the experiment, the round, the model that clients begin with, their weight.

    It goes into each mask that two sites have in common, so that the masks do not come off for a server that tells them
    different things, such as another learning rate, or weights that leave one site's model alone in the sum.
    """
    # As a site reads it: JSON has no keys but texts.
    plain = json.loads(json.dumps([told["experiment"], told["told"], round, total]))
    words = json.dumps(plain, sort_keys=True)
    return hashlib.sha256(f"{words}\0{digest_of(start) if start else ''}".encode()).digest()


def stretched(key: bytes, length: int) -> np.ndarray:
    """A mask from a key that is used once: AES-256 in counter mode, uint32 [length]."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(4 * length)), "<u4")


def seal(private: bytes, public: bytes, sender: int, receiver: int, own: bytes, pair: bytes) -> bytes:
    """A sender's two shares for a receiver, readable and changeable by nobody between them."""
    return encrypt(agreed(private, public), share_keys_plaintext_concat(sender, receiver, own, pair))


def unseal(private: bytes, public: bytes, sender: int, receiver: int, sealed: bytes) -> tuple[bytes, bytes]:
    """The two shares. Raises one of :data:`BROKEN` if they are not from this sender for this receiver."""
    told, meant, own, pair = share_keys_plaintext_separate(decrypt(agreed(private, public), sealed))
    if (told, meant) != (sender, receiver):
        raise ValueError(f"shares of {told} for {meant}, not of {sender} for {receiver}")
    return own, pair


def split(secret: bytes, threshold: int, number: int) -> list[bytes]:
    """So many shares of a secret, of which ``threshold`` give it back and fewer tell nothing."""
    return create_shares(secret, threshold, number)


def joined(shares: list[bytes]) -> bytes:
    """The secret that shares are of. Raises one of :data:`BROKEN` if they are not of one secret."""
    return combine_shares(shares)


def digest(secret: bytes) -> bytes:
    """What is told of a mask's key before it is needed, so that a wrong one is noticed: SHA-256."""
    return hashlib.sha256(b"fedblend mask" + secret).digest()


def tensor_of(content: bytes) -> torch.Tensor:
    """Bytes as a tensor, uint8."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def bytes_in(tensor: torch.Tensor) -> bytes:
    """The bytes of :func:`tensor_of`."""
    return tensor.contiguous().numpy().tobytes()
