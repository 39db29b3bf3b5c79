"""Certificates and keys of a federation: an authority, a server's certificate, a site's key, and when they expire.

Keys are on the curve P-384. Files of private keys are made anew, and only their owner can read them.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from fedblend.core.errors import FedblendError
from fedblend.core.paths import read_bytes

TRIAL_DAYS = 30  # A trial's certificates expire soon, so that they are not used outside the trial
WARNING_DAYS = 30  # Days before a certificate expires from which server and sites warn
OWNER_ONLY = 0o600  # The mode of a file that only its owner can read
LOCAL = ("localhost", "127.0.0.1")


def make_credentials(folder: Path, sites: int) -> None:
    """Write a trial's ``ca.crt``, ``server.crt``, ``server.key``, and ``site-K.key`` and ``site-K.pub`` for each site.

    Certificates are valid for 127.0.0.1 and localhost only. The authority's own key is not kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    authority = new_key()
    make_authority(folder, authority, TRIAL_DAYS)
    make_server(folder, authority, LOCAL, TRIAL_DAYS)
    for site in range(sites):
        make_site_key(folder / f"site-{site}")


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a new private key."""
    return ec.generate_private_key(ec.SECP384R1())


def keep_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Write a private key as PEM."""
    write_new(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), OWNER_ONLY)


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a private key in PEM. Raises :class:`FedblendError` if it is none on an elliptic curve."""
    try:
        key = load_pem_private_key(read_bytes(path, "give the authority's private key"), None)
    except (ValueError, TypeError) as error:
        raise FedblendError(f"{path}: is no private key in PEM without a password ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedblendError(f"{path}: is no key on an elliptic curve; valid: openssl ecparam -genkey -name secp384r1")
    return key


def make_authority(folder: Path, key: ec.EllipticCurvePrivateKey, days: int) -> None:
    """Write ``ca.crt``, an authority's certificate of its own key."""
    issuer = _name("fedblend authority")
    made = _certificate(issuer, issuer, key, key, days)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    # Python 3.13 and later refuse an authority whose certificate has no keyUsage with keyCertSign.
    made = made.add_extension(_key_usage(signs_certificates=True), critical=True)
    write_new(folder / "ca.crt", made.sign(key, hashes.SHA384()).public_bytes(Encoding.PEM))


def make_server(folder: Path, authority: ec.EllipticCurvePrivateKey, names: Sequence[str], days: int) -> None:
    """Write ``server.key`` and ``server.crt`` for these host names and addresses, by the authority of ``ca.crt``."""
    key, issuer = new_key(), load_certificate(folder / "ca.crt")
    if issuer.public_key() != authority.public_key():
        raise FedblendError(f"{folder / 'ca.crt'}: is not the certificate of the authority's key; valid: both of one")
    made = _certificate(_name(names[0]), issuer.subject, key, authority, days)
    made = made.add_extension(x509.SubjectAlternativeName([*map(_general_name, names)]), critical=False)
    made = made.add_extension(_key_usage(signs_certificates=False), critical=True)
    keep_key(folder / "server.key", key)
    write_new(folder / "server.crt", made.sign(authority, hashes.SHA384()).public_bytes(Encoding.PEM))


def make_site_key(path: Path, name: str = "") -> None:
    """Write a site's private key ``path.key`` and its public key ``path.pub`` with its name, in OpenSSH's format."""
    key = new_key()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    write_new(Path(f"{path}.key"), private, OWNER_ONLY)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    write_new(Path(f"{path}.pub"), f"{public} {name}".rstrip().encode() + b"\n")


def fingerprint(line: str) -> str:
    """Return the fingerprint of a public key in OpenSSH's format, as ``ssh-keygen -l`` prints it."""
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def load_certificate(path: Path) -> x509.Certificate:
    """Read a certificate in PEM. Raises :class:`FedblendError` if it is none."""
    try:
        return x509.load_pem_x509_certificate(read_bytes(path, "give a certificate in PEM"))
    except ValueError as error:
        raise FedblendError(f"{path}: is no certificate in PEM ({error})") from None


def days_left(certificate: x509.Certificate) -> int:
    """Return the whole days until a certificate expires; below 0 once it has."""
    return (certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days


def expiry_warnings(paths: Iterable[Path]) -> list[str]:
    """Return a sentence for each certificate that expires within :data:`WARNING_DAYS` days."""
    certificates = {path: load_certificate(path) for path in paths if path.exists()}
    return [text for path, one in certificates.items() if (text := expiry_warning(str(path), one))]


def expiry_warning(name: str, certificate: x509.Certificate) -> str:
    """Return a sentence if a certificate expires within :data:`WARNING_DAYS` days, else an empty text."""
    left, date = days_left(certificate), f"{certificate.not_valid_after_utc:%Y-%m-%d}"
    if left > WARNING_DAYS:
        return ""
    when = f"expired on {date}" if left < 0 else f"expires in {left} days, on {date}"
    return f"{name}: {when}; renew it at the server: fedblend federation provision"


def names_of_server(certificate: x509.Certificate) -> list[str]:
    """Return the host names and addresses that a server's certificate is for."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(one.value) for one in names]


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    usage = dict.fromkeys((*unused, "decipher_only", "crl_sign"), False)
    return x509.KeyUsage(digital_signature=not signs_certificates, key_cert_sign=signs_certificates, **usage)


def write_new(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a new file, also where a file with another mode, a link, or a named pipe is in its place."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
