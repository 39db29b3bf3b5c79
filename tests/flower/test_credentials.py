"""Certificates of a trial pass the strict check of Python 3.13."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="Flower (extra 'flower') is not installed")

from fedblend.core.errors import FedblendError
from fedblend.flower.credentials import make_credentials
from fedblend.flower.trial import LoopbackTrial


def handshake(folder: Path, host: str) -> str | None:
    """The TLS version that a client and a server agree on, in memory; strict, as Python 3.13's default is."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    client = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)]
    for _ in range(6):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends[0].version()


def test_certificates_of_a_trial_pass_a_strict_check_for_loopback_only(tmp_path: Path) -> None:
    make_credentials(tmp_path, 1)
    for host in ("127.0.0.1", "localhost"):
        assert handshake(tmp_path, host) == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(tmp_path, "fl.example.org")
    assert {path.name: path.stat().st_mode & 0o77 for path in tmp_path.glob("*.key")} == {
        "server.key": 0,
        "site-0.key": 0,
    }


def test_keys_replace_files_that_others_can_read_and_links(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "keys", tmp_path / "elsewhere"
    folder.mkdir(mode=0o755)
    (folder / "site-0.key").touch(mode=0o644)
    reader = (folder / "site-0.key").open()
    (folder / "server.key").symlink_to(elsewhere)
    make_credentials(folder, 1)
    assert reader.read() == "", "who had opened the old file reads the new key"
    reader.close()
    assert not elsewhere.exists()
    modes = {path.name: path.lstat().st_mode & 0o777 for path in (folder, *folder.glob("*.key"))}
    assert modes == {"keys": 0o700, "site-0.key": 0o600, "server.key": 0o600}


def test_a_system_without_process_groups_is_told_of_before_a_trial_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "killpg")
    with pytest.raises(FedblendError, match="needs Linux or macOS"), LoopbackTrial(tmp_path, 1):
        pass


@pytest.mark.parametrize("name", ["ca.crt", "server.crt", "site-0.pub"])
def test_a_named_pipe_in_the_place_of_a_certificate_is_replaced(tmp_path: Path, name: str) -> None:
    """Writing into a pipe that nobody reads would wait for ever."""
    os.mkfifo(tmp_path / name)
    pipe = os.open(tmp_path / name, os.O_RDONLY | os.O_NONBLOCK)  # a writer would not wait, and its bytes come here
    make_credentials(tmp_path, 1)
    assert os.read(pipe, 1) == b""
    os.close(pipe)
    assert (tmp_path / name).is_file()
