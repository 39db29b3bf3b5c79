"""Certificates and keys of a trial: an authority of its own, the SuperLink's certificate, the sites' keys."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

VALID_DAYS = 30
"""A trial's certificates end soon, so that nobody goes on to use them for more."""


def make_credentials(folder: Path, sites: int) -> None:
    """Write ``ca.crt``, ``server.crt``, ``server.key``, and ``site-K.key`` and ``site-K.pub`` for each site.

    Certificates are for 127.0.0.1 and localhost alone; keys are on the curve P-384 and can be read by their owner
    only. The authority's own key is not kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedblend trial authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedblend trial server")])
    ca = _certificate(issuer, issuer, authority, authority)
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    # Python 3.13 and later trust no authority whose certificate does not say that it signs certificates.
    ca = ca.add_extension(_usage(signs_certificates=True), critical=True)
    (folder / "ca.crt").write_bytes(ca.sign(authority, hashes.SHA256()).public_bytes(Encoding.PEM))
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = _certificate(subject, issuer, server, authority).add_extension(x509.SubjectAlternativeName(names), False)
    made = made.add_extension(_usage(signs_certificates=False), critical=True)
    (folder / "server.crt").write_bytes(made.sign(authority, hashes.SHA256()).public_bytes(Encoding.PEM))
    _write_secret(folder / "server.key", server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    for site in range(sites):
        make_site_key(folder / f"site-{site}")


def make_site_key(path: Path) -> None:
    """Write a site's private key ``path.key`` and its public one ``path.pub``, both in the form of OpenSSH."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write_secret(path.with_suffix(".key"), key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b"\n")


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    """What a key is for: to sign certificates, or what TLS needs of a server's."""
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    unused = dict.fromkeys((*others, "decipher_only", "crl_sign"), False)
    return x509.KeyUsage(digital_signature=not signs_certificates, key_cert_sign=signs_certificates, **unused)


def _write_secret(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
