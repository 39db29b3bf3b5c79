"""Cryptography of secure aggregation: keys, masks, and the secret shares that restore a lost key.

From Flower: key pairs on the curve P-384, key agreement (ECDH, HKDF with SHA-256), encryption between sites (Fernet)
and Shamir's secret sharing.

Not from Flower: masks and quantisation. Flower 1.41 (``pseudo_rand_gen``) draws masks from the Mersenne Twister, with
the 256 bits of a key folded into 32. Of these, 28 bits remain where the key is shared by two sites: few enough for an
exhaustive search. Here a mask is the key stream of AES-256 in counter mode. Flower's quantisation draws from a global
generator.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP384R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
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

from fedblend.core.errors import FedblendError
from fedblend.core.paths import read_bytes
from fedblend.core.trees import add_prefix, digest_of
from fedblend.flower.messages import Tensors

MODELS, MEANS = "models", "means"
"""What a masked sum is of: models after training, or the means that a group of clients shares."""

KEY_BYTES = 32  # Length of a mask's key
DIGEST_BYTES = 32  # Length of a SHA-256
NOTHING: Tensors = MappingProxyType({})  # An empty table

SECRETS = ("own", "pair")
"""A site's two secrets: that of its own mask, and the private key of the masks that it shares with others."""

CRYPTO_ERRORS = (
    *(ValueError, TypeError, KeyError, IndexError, OverflowError),
    *(InvalidToken, InvalidTag, UnsupportedAlgorithm),
)
"""Errors that the primitives raise on invalid keys, shares and ciphertexts."""


def new_key_pair() -> tuple[bytes, bytes]:
    """Return a new private key and its public key, as PEM."""
    private, public = generate_key_pairs()
    return private_key_to_bytes(private), public_key_to_bytes(public)


def public_key_of(private: bytes) -> bytes:
    """Return the public key of a private key."""
    return public_key_to_bytes(bytes_to_private_key(private).public_key())


def is_public_key(key: bytes) -> bool:
    """Whether ``key`` is a public key on P-384."""
    try:
        return isinstance(bytes_to_public_key(key).curve, SECP384R1)
    except (*CRYPTO_ERRORS, AttributeError):
        return False


def _key_for(private: bytes, public: bytes, use: bytes) -> bytes:
    shared = base64.urlsafe_b64decode(generate_shared_key(bytes_to_private_key(private), bytes_to_public_key(public)))
    return hmac.digest(shared, use, "sha256")


def shared_mask(private: bytes, public: bytes, context: bytes, length: int) -> np.ndarray:
    """Return the mask that two sites share, uint32 [length]; equal only where both have the same ``context``."""
    return mask_from_key(_key_for(private, public, context), length)


def sum_digest(
    setup_fields: Mapping[str, Any], round: int, start: Tensors = NOTHING, total: int = 0, beside: Tensors = NOTHING
) -> bytes:
    """Return the digest of a sum's context: experiment, setup, round, the clients' start model, their total weight.

    ``beside`` is what the server sends with the model (:func:`sent_beside`). The digest is part of each mask that two
    sites share. So masks do not cancel for a server that sends sites different contexts: another learning rate, weights
    that leave one site's model alone in the sum, or data to mix with that fix the models of all sites but one.
    """
    # In the form that a site receives: JSON keys are strings.
    fields = json.loads(json.dumps([setup_fields["experiment"], setup_fields["setup"], round, total]))
    text = json.dumps(fields, sort_keys=True)
    tables = (digest_of(table) if table else "" for table in (start, beside))
    return hashlib.sha256("\0".join([text, *tables]).encode()).digest()


def table_digest(public: Mapping[int, Mapping[str, bytes]], threshold: int) -> bytes:
    """Return the digest of a sum's threshold and of all its sites' public keys "mask" and "box".

    It is part of each mask that two sites share, and of the key under which a share is sealed. So a server gains
    nothing from keys that sites made for another sum: a site opens no share of one that saw other keys than itself.
    """
    rows = [[site, keys["mask"].hex(), keys["box"].hex()] for site, keys in sorted(public.items())]
    return hashlib.sha256(json.dumps([threshold, rows]).encode()).digest()


def sent_beside(pool: Tensors | None, owner: np.ndarray, server_state: Tensors) -> dict[str, torch.Tensor]:
    """Return what the server sends all sites of a sum beside the model: data to mix with, their owners, its state."""
    mixed = {} if pool is None else {**add_prefix("pool/", pool), "owner": torch.from_numpy(owner)}
    return mixed | add_prefix("server/", server_state)


def sign(path: str, text: bytes) -> bytes:
    """Sign a text with a site's private key at ``path`` (P-384, OpenSSH): ECDSA with SHA-384.

    Raises :class:`FedblendError` if there is no such key at ``path``.
    """
    content = read_bytes(path, "key: give this site's private key in OpenSSH's format")
    try:
        private = load_ssh_private_key(content, None)
        if not isinstance(private, EllipticCurvePrivateKey):
            raise ValueError("it is no elliptic-curve key")
        return private.sign(text, ECDSA(SHA384()))
    except CRYPTO_ERRORS as error:
        raise FedblendError(f"key: {path}: cannot sign with it: {error}; valid: ssh-keygen -t ecdsa -b 384") from None


def is_signed(line: str, text: bytes, signed: bytes) -> bool:
    """Whether ``signed`` is the signature of a text by the site with the public key ``line`` (OpenSSH)."""
    public = public_key(line)
    try:
        if public is not None:
            public.verify(signed, text, ECDSA(SHA384()))
    except (InvalidSignature, *CRYPTO_ERRORS):
        return False
    return public is not None


def public_key(line: str) -> EllipticCurvePublicKey | None:
    """The public key that a line in OpenSSH's format holds; ``None`` if it holds none on an elliptic curve."""
    try:
        public = load_ssh_public_key(line.encode())
    except CRYPTO_ERRORS:
        return None
    return public if isinstance(public, EllipticCurvePublicKey) else None


def hello_text(run: str, node: int, client: int) -> bytes:
    """Return what a site signs of the client that it is, for one run and Flower's node."""
    return _text("client of a node", run, node, client)


def keys_text(client: int, quantity: str, context: bytes, keys: Mapping[str, bytes]) -> bytes:
    """Return what a site signs of its public keys; no other protocol signs a text with this beginning."""
    return _text("keys of a masked sum", client, quantity, context, keys["mask"], keys["box"])


def sites_text(client: int, quantity: str, table: bytes, present: Collection[int], dropped: Collection[int]) -> bytes:
    """Return what a site signs of the sites in a sum (present) and of those whose masks are removed (dropped)."""
    lists = json.dumps([sorted(present), sorted(dropped)])
    return _text("sites of a masked sum", client, quantity, table, lists)


def _text(about: str, *parts: bytes | str | int) -> bytes:
    contents = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return f"fedblend {about}\0".encode() + b"".join(len(one).to_bytes(4, "little") + one for one in contents)


def mask_from_key(key: bytes, length: int) -> np.ndarray:
    """Return the mask of a key that is used once: AES-256 in counter mode, uint32 [length]."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(4 * length)), "<u4")


def seal(private: bytes, public: bytes, table: bytes, sender: int, receiver: int, own: bytes, pair: bytes) -> bytes:
    """Encrypt and authenticate a sender's two shares for a receiver with the same ``table`` (:func:`table_digest`)."""
    return encrypt(_box_key(private, public, table), share_keys_plaintext_concat(sender, receiver, own, pair))


def unseal(
    private: bytes, public: bytes, table: bytes, sender: int, receiver: int, sealed: bytes
) -> tuple[bytes, bytes]:
    """Decrypt the two shares.

    Raises one of :data:`CRYPTO_ERRORS` if sender, receiver or table differ, or on a forgery.
    """
    opened = decrypt(_box_key(private, public, table), sealed)
    sealed_by, sealed_for, own, pair = share_keys_plaintext_separate(opened)
    if (sealed_by, sealed_for) != (sender, receiver):
        raise ValueError(f"shares of {sealed_by} for {sealed_for}, not of {sender} for {receiver}")
    return own, pair


def _box_key(private: bytes, public: bytes, table: bytes) -> bytes:
    return base64.urlsafe_b64encode(_key_for(private, public, b"fedblend shares\0" + table))


split_secret, join_shares = create_shares, combine_shares
"""Split a secret into shares, a threshold of which restores it and fewer reveal nothing; restore it, or raise one of
:data:`CRYPTO_ERRORS`.
"""


def commitment(secret: bytes) -> bytes:
    """Return the SHA-256 by which the server detects a wrong secret; a site sends it before the secret is needed."""
    return hashlib.sha256(b"fedblend mask" + secret).digest()


def share_digest(dealer: int, receiver: int, secret: str, share: bytes) -> bytes:
    """Return the SHA-256 of a share, to which the site that deals it commits; ``secret`` is "own" or "pair".

    A share is as long as its secret and, for fewer sites than restore the secret, uniformly random: the digest reveals
    nothing that could be found by search.
    """
    return hashlib.sha256(f"fedblend share {dealer} {receiver} {secret}\0".encode() + share).digest()


def bytes_to_tensor(content: bytes) -> torch.Tensor:
    """Return bytes as a tensor, uint8."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def as_tensors(table: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    """Return a table of bytes as tensors, uint8; :func:`as_bytes` returns the bytes."""
    return {name: bytes_to_tensor(content) for name, content in table.items()}


def as_bytes(tensors: Tensors) -> dict[str, bytes]:
    """Return the bytes of each tensor."""
    return {name: tensor_to_bytes(tensor) for name, tensor in tensors.items()}


def tensor_to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return tensor.contiguous().numpy().tobytes()
