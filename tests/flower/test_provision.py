"""From a coordinator's file to what each party needs: certificates, site files, keys, and what is told of them."""

from __future__ import annotations

import datetime
import os
import signal
import ssl
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import here, refused, succeeded
from flower_helpers import experiment, federate, nodes, refuses
from flower_sites import sent
from test_sites_at_start import DICTIONARY, write_table

from fedblend.core.errors import FedblendError
from fedblend.experiment.config import as_table
from fedblend.experiment.toml_tables import read_toml, write_toml
from fedblend.flower import credentials, supervise
from fedblend.flower.audit import AuditLog
from fedblend.flower.credentials import make_credentials
from fedblend.flower.server import warn_of_expiry
from fedblend.flower.site import read_site
from fedblend.flower.trial import LoopbackTrial, free_port

SITES = 'server = "fl.example.org:8000"\n[sites]\n0 = "north"\n1 = "south"\n[policy]\nmin_mean = 20\n'


@pytest.fixture
def coordinator(tmp_path: Path) -> Path:
    """A coordinator's file, in a folder of its own."""
    file = tmp_path / "sites.toml"
    file.write_text(SITES)
    return file


def site_of(coordinator: Path, name: str = "north") -> Path:
    """A site's file."""
    return coordinator.parent / "out" / "sites" / name / "site.toml"


def provision(file: Path, *options: str) -> str:
    """What the command prints."""
    return succeeded(here("federation", "provision", file, "--out", file.parent / "out", *options)).out


def enroll(file: Path, name: str) -> str:
    """Let a site make its key in a folder of its own, and send the public half; the line."""
    state, path = file.parent / "state", site_of(file, name)
    state.mkdir(exist_ok=True)
    path.write_text(path.read_text().replace("/var/lib/fedblend", str(state)))
    shown = succeeded(here("site", "enroll", path)).out
    line = (state / f"{name}.pub").read_text().strip()
    assert line in shown
    assert credentials.fingerprint(line) in shown
    (file.parent / "out" / "keys" / f"{name}.pub").write_text(line)
    return line


def test_a_federation_is_provisioned_from_one_file_and_keys_are_made_at_sites(coordinator: Path) -> None:
    out = coordinator.parent / "out"
    shown = provision(coordinator)
    assert "new: site 1: " in shown
    assert handshake(out / "server", "fl.example.org") == handshake(out / "server", "localhost") == "TLSv1.3"
    private = {path.name: path.stat().st_mode & 0o777 for path in out.rglob("*.key")}
    assert private == {"ca.key": 0o600, "server.key": 0o600}
    unit = (out / "server" / "fedblend-superlink.service").read_text()
    assert "--port 8000 " in unit
    assert "$" not in unit
    assert "NO_PROXY=127.0.0.1" in unit

    lines = {name: enroll(coordinator, name) for name in ("north", "south")}
    again = provision(coordinator)

    assert "new: " not in again
    peers = read_toml(out / "server" / "peers.toml")
    assert peers == read_toml(out / "sites" / "north" / "peers.toml")
    assert peers == {"0": lines["north"], "1": lines["south"]}
    assert peers["1"].endswith(" south")
    site = read_site(site_of(coordinator, "south"))
    assert (site.min_mean, site.federation.client, site.federation.server) == (20, 1, "fl.example.org:8000")
    assert "Site 1: south" in succeeded(here("site", "check", site_of(coordinator, "south"))).out


def test_site_files_have_the_data_dictionary_of_the_experiment(coordinator: Path) -> None:
    data = {"name": "table", "path": "server.csv", "target": "ill", "columns": DICTIONARY}
    asked = experiment(data=data, partition={"name": "iid", "clients": 2})
    file = coordinator.parent / "experiment.toml"
    file.write_text(write_toml(as_table(asked)))
    coordinator.write_text(f'experiment = "{file.name}"\n{SITES}')
    provision(coordinator)
    path = site_of(coordinator)
    write_table(coordinator.parent / "own.csv", "ab", header="Alter,ward,ill")
    text = path.read_text().replace("/srv/data/table.csv", str(coordinator.parent / "own.csv"))
    path.write_text(text.replace("[data.rename]\n", '[data.rename]\nAlter = "age"\n'))
    held = read_site(path).data
    assert (held.columns, held.target, held.rename) == (DICTIONARY, "ill", {"Alter": "age"})
    assert held.load().classes == ("n", "y")


def test_certificates_are_renewed_in_time_and_for_other_names(coordinator: Path, caplog: Any) -> None:
    provision(coordinator)
    out, folder = coordinator.parent / "out", coordinator.parent / "out" / "server"
    first = (folder / "server.crt").read_bytes()
    coordinator.write_text(f'names = ["10.0.0.5"]\n{SITES}')
    provision(coordinator)
    assert "10.0.0.5" in credentials.names_of_server(credentials.load_certificate(folder / "server.crt"))
    assert (folder / "server.crt").read_bytes() != first
    credentials.make_server(folder, credentials.load_key(out / "authority" / "ca.key"), ["fl.example.org"], 29)
    warn_of_expiry(str(folder), datetime.date.today())
    assert f"fedblend: {folder / 'server.crt'}: expires in 28 days, on " in caplog.text
    provision(coordinator)
    assert not credentials.expiry_warnings([folder / "server.crt"])
    # The authority's certificate, too, with its key: certificates of the old one are valid under the new one.
    credentials.make_authority(out / "authority", credentials.load_key(out / "authority" / "ca.key"), 20)
    assert "authority: renewed with the same key" in provision(coordinator)
    assert handshake(folder, "10.0.0.5") == "TLSv1.3"
    path = out / "sites" / "north" / "site.toml"
    enroll(coordinator, "north")
    credentials.make_authority(path.parent, credentials.load_key(out / "authority" / "ca.key"), 0)
    assert "ca.crt: expired on " in succeeded(here("site", "check", path)).out
    # Without the authority's key, which is offline, the rest is written all the same.
    (out / "authority" / "ca.key").unlink()
    provision(coordinator)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SITES.replace('1 = "south"', '2 = "south"'), "valid: 0 to 1, each once"),
        (SITES.replace("south", "north"), "two sites have one name"),
        (SITES.replace(":8000", ""), "server: "),
        (SITES + "min_mea = 2\n", "min_mea"),
        ("sits = 1\n" + SITES, "sits: unknown key (did you mean 'sites'?)"),
    ],
)
def test_faults_of_a_coordinators_file_are_named(coordinator: Path, text: str, words: str) -> None:
    coordinator.write_text(text)
    refused(here("federation", "provision", coordinator, "--out", coordinator.parent / "out"), words)
    assert not (coordinator.parent / "out").exists()


def test_a_key_of_another_site_or_of_two_is_refused(coordinator: Path) -> None:
    provision(coordinator)
    keys, command = coordinator.parent / "out" / "keys", ("federation", "provision", coordinator, "--out")
    line = enroll(coordinator, "north")
    (keys / "south.pub").write_text(line)
    refused(here(*command, keys.parent), "south.pub: is the key of north, not of south")
    (keys / "south.pub").write_text(line.replace("north", "south"))
    refused(here(*command, keys.parent), "north, south have the same key")
    (keys / "south.pub").write_text("ssh-rsa AAAA south")
    refused(here(*command, keys.parent), "south.pub: is no public key")


def test_a_rotated_key_is_beside_the_old_one(coordinator: Path) -> None:
    provision(coordinator)
    line, state = enroll(coordinator, "north"), coordinator.parent / "state"
    path = site_of(coordinator)
    shown = succeeded(here("site", "enroll", path, "--rotate")).out
    assert (state / "north.pub").read_text().strip() == line
    assert (state / "north.new.pub").read_text().strip() in shown
    assert (state / "north.new.key").stat().st_mode & 0o777 == 0o600


def test_a_site_is_not_started_without_its_files(coordinator: Path) -> None:
    provision(coordinator)
    path = site_of(coordinator)
    refused(here("site", "start", coordinator.parent / "no.toml"), "no.toml")
    refused(here("site", "start", path), "north.key: no such file; fedblend site enroll makes it")
    (coordinator.parent / "plain.toml").write_text("min_mean = 2\n")
    refused(here("site", "start", coordinator.parent / "plain.toml"), "federation: is missing")


def start_with(coordinator: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> int:
    """The exit code of a site whose SuperNode is a script that says something and goes on."""
    provision(coordinator)
    enroll(coordinator, "north")
    node = coordinator.parent / "node"
    node.write_text(f"#!/bin/sh\necho {says}\nexec sleep 600\n")
    node.chmod(0o755)
    monkeypatch.setattr(supervise, "tool", lambda name: str(node))
    monkeypatch.setattr(supervise, "server_certificate", lambda member: "the certificate is of another authority")
    monkeypatch.setattr(signal, "signal", lambda *about: None)
    return supervise.start_site(site_of(coordinator))


def test_a_supernode_that_has_given_up_is_ended_and_is_to_be_started_again(
    coordinator: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("no_proxy", "intranet")
    says = '"$@ $NO_PROXY"\necho "WARN: Giving up reconnection after 24 seconds"'
    code = start_with(coordinator, monkeypatch, says)
    shown = capfd.readouterr()
    assert code == supervise.RESTART
    assert "--superlink fl.example.org:8000" in shown.out
    assert 'partition-id=0 site="' in shown.out
    assert "intranet,127.0.0.1,localhost,::1" in shown.out
    assert "has given up its connection, and ends; the certificate is of another authority" in shown.err


def test_a_port_in_use_is_told_without_a_traceback(
    coordinator: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    with pytest.raises(FedblendError, match=r"--port 9094: another process has this port"):
        start_with(coordinator, monkeypatch, "'OSError: [Errno 98] Address already in use'")
    assert "Errno" not in capfd.readouterr().out


def test_numbers_for_prometheus_are_of_limits_rounds_and_certificates(coordinator: Path) -> None:
    pytest.importorskip("prometheus_client", reason="the extra 'watch' is not installed")
    from fedblend.flower import metrics

    provision(coordinator)
    site = read_site(site_of(coordinator)).model_copy(update={"audit": str(coordinator.parent / "audit.jsonl")})
    sent(AuditLog(site.audit), "trial/1", 0, 0, "weights", {}, True)
    port = free_port()
    metrics.serve(port, lambda: metrics.site_numbers(site, [Path(site.federation.ca)]))
    shown = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    assert 'fedblend_site_used{of="rounds"} 1.0' in shown
    assert 'fedblend_site_limit{of="rounds"} 1000.0' in shown
    assert 'fedblend_certificate_days{of="ca.crt"} 3649.0' in shown
    with pytest.raises(FedblendError, match=f"--metrics-port {port}: "):
        metrics.serve(port, list)


def test_a_servers_numbers_are_of_its_newest_run(coordinator: Path) -> None:
    from fedblend.flower import metrics

    provision(coordinator)
    server = coordinator.parent / "out" / "server"
    asked = experiment(partition={"name": "iid", "clients": 4}, rounds=1, train={"cohort": 4, "lr": 0.1})
    federate(nodes().lying("train", {2}, refuses), asked, coordinator.parent / "runs" / "first")
    numbers = {name: of for name, _, of in metrics.server_numbers(coordinator.parent / "runs", server)}
    assert numbers["run_round"] == numbers["run_rounds"] == {"first": 1}
    assert numbers["run_missing_upload"] == {"2": 1}
    assert numbers["certificate_days"] == {"server.crt": 364, "ca.crt": 3649}


# Certificates and keys ------------------------------------------------------------------------------------


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
