"""The site file and its audit log, which need no Flower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import here, refused, succeeded
from flower_sites import sent
from torch import nn

from fedblend.cli.federation import init_site, show_audit
from fedblend.core.errors import FedblendError
from fedblend.core.files import append_line
from fedblend.core.objective import Task
from fedblend.core.sharing import ClientData, Payload
from fedblend.flower.audit import AuditLog, audit_rows
from fedblend.flower.ledger import SharingLedger
from fedblend.flower.site import SAFE, read_site, site_text
from fedblend.methods.sharing.moments import Moments


def write_samples(path: Path) -> Path:
    """Ten samples of two classes."""
    with path.open("wb") as file:
        np.savez(file, x=np.zeros((10, 3, 2), np.float32), y=np.arange(10) % 2, classes=np.array(["no", "yes"]))
    return path


def test_a_new_site_file_is_read_back(tmp_path: Path) -> None:
    data = write_samples(tmp_path / "a b.npz")
    init_site(tmp_path / "s" / "site.toml", data, 20)
    site = read_site(tmp_path / "s" / "site.toml")
    assert (site.allow, site.min_mean, site.rounds, site.protection, site.device) == (SAFE, 20, 1000, None, "cpu")
    assert site.trusted == ()
    assert (site.data.name, site.data.path) == ("npz", str(data))
    assert site.audit == str(tmp_path / "s" / "site.audit.jsonl")
    with pytest.raises(FedblendError, match="exists already"):
        init_site(tmp_path / "s" / "site.toml", None, 2)


def test_new_site_files_in_one_folder_have_an_audit_log_each(tmp_path: Path, capsys: Any) -> None:
    logs = []
    for name in ("site-0.toml", "site-1.toml", "a.b.toml"):
        init_site(tmp_path / name, None, 2)
        logs.append(AuditLog(read_site(tmp_path / name).audit))
    assert [log.path.name for log in logs] == ["site-0.audit.jsonl", "site-1.audit.jsonl", "a.b.audit.jsonl"]
    # What is shared is kept beside the log.
    assert len({SharingLedger(log, 1).folder for log in logs}) == 3
    assert "audit.jsonl" not in capsys.readouterr().out
    # The log of a file from before, without the field, is found again, and is not forgotten.
    (tmp_path / "old.toml").write_text("min_mean = 2\n")
    assert read_site(tmp_path / "old.toml").audit == str(tmp_path / "audit.jsonl")
    (tmp_path / "audit.jsonl").write_bytes(b"")
    init_site(tmp_path / "new.toml", None, 2)
    assert 'audit = "audit.jsonl"' in capsys.readouterr().out


@pytest.mark.parametrize("name", ["data-\U0001f600.npz", 'a "b" \\.npz', "a\x7f\n[b].npz"])
def test_a_new_site_file_names_samples_of_any_name(tmp_path: Path, name: str) -> None:
    data = write_samples(tmp_path / name)
    path = tmp_path / name.replace("npz", "toml")
    init_site(path, data, 2)
    assert read_site(path).data.path == str(data)
    path.write_text(site_text(path, data, trusted=["nets:Net", str(data)]))
    assert read_site(path).trusted == ("nets:Net", str(data))


def test_a_new_site_file_is_written_only_for_samples_that_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    for name, content, words in (
        ("empty.npz", b"", "is no valid .npz archive"),
        ("x.csv", b"a,b\n1,2\n", "x.csv is a table; valid: the column to predict: a, b"),
        ("missing.npz", None, "no such file"),
    ):
        data = tmp_path / name
        if content is not None:
            data.write_bytes(content)
        refused(here("site", "init", path, "--data", data), words)
        assert not path.exists()
    outcome = here("site", "init", path, "--data", write_samples(tmp_path / "good.npz"))
    assert outcome.code == 0
    assert "Samples: 8 to train on, 2 for tests (not used); shape 3x2; 2 classes: no, yes" in outcome.out


def test_a_new_site_file_takes_a_table_with_its_options(tmp_path: Path) -> None:
    path, data = tmp_path / "site.toml", tmp_path / "north.csv"
    data.write_text(
        "age,dose,note,ill\n" + "".join(f"{i},{i or ''},n{i},{'no' if i % 2 else 'yes'}\n" for i in range(30))
    )
    options = ("--target", "ill", "--missing", "mean", "--features", "age", "--features", "dose")

    shown = succeeded(here("site", "init", path, "--data", data, *options)).out

    assert "Samples: 24 to train on, 6 for tests (not used); shape 2; 2 classes: no, yes" in shown
    held = read_site(path).data
    assert (held.name, held.path, held.target, held.missing) == ("table", str(data), "ill", "mean")
    assert held.features == ["age", "dose"]
    assert "no fault found" in succeeded(here("site", "check", path)).out

    new = tmp_path / "new.toml"
    refused(here("site", "init", new, "--data", data, "--target", "ill"), "2 faults: (1) ", "'dose' is empty", "'note'")
    refused(here("site", "init", new, *options), "--data: is missing beside --target")
    samples = write_samples(tmp_path / "a.npz")
    refused(here("site", "init", new, "--data", samples, *options), "--target: ", "a.npz is no table; valid: with .csv")
    assert not new.exists()
    # A check tells the faults of a table that has changed since.
    data.write_text(data.read_text().replace("2,2,", "2,?,").replace("3,3,", "inf,3,"))
    refused(here("site", "check", path), "2 faults: (1) ", "'age' holds infinity", "'dose' holds numbers, but 1 of")


def test_a_check_shows_samples_keys_and_what_the_audit_log_has_counted(tmp_path: Path) -> None:
    trial = pytest.importorskip("fedblend.flower.credentials")
    path = tmp_path / "site.toml"
    for name in ("site-0", "site-1", "other"):
        trial.make_site_key(tmp_path / name)
    public = [f'{client} = "{(tmp_path / f"site-{client}.pub").read_text().strip()}"' for client in (0, 1)]
    (tmp_path / "peers.toml").write_text("\n".join(public))
    init_site(path, write_samples(tmp_path / "samples.npz"), 9)
    text = path.read_text().replace("min_sum = 3", "min_sum = 2")
    path.write_text(f'key = "site-1.key"\npeers = "peers.toml"\n{text}')
    sent(AuditLog(read_site(path).audit), "trial/1", 0, 1, "masked", {"w": torch.zeros(2)}, True)

    shown = succeeded(here("site", "check", path)).out

    assert "Samples: 8 to train on, 2 for tests (not used); shape 3x2; 2 classes: no, yes" in shown
    assert "warning: min_mean 9: this site has 8 samples to train on: no mean of them leaves" in shown
    assert f"May leave: {', '.join(SAFE)}\n" in shown
    assert f"Key: client 1 of the 2 in {tmp_path / 'peers.toml'}\n" in shown
    assert "payloads: 1; trained in 1 of at most 1,000 rounds\n" in shown
    assert shown.endswith(f"{path}: no fault found\n")

    for field, replaced, words in (
        ("site-1.key", "other.key", "none of its 2 clients has the public key"),
        ("site-1.key", "site-1.pub", "key: "),
        ("site-1.key", "none.key", "none.key: no such file"),
        ('key = "site-1.key"', "", "key: is missing"),
        ("peers.toml", "samples.npz", "samples.npz"),
        ("samples.npz", "none.npz", "none.npz"),
        ('device = "cpu"', 'device = "gpu"', "device: 'gpu' is not usable here"),
        ("site.audit.jsonl", "no/folder.jsonl", "no: no such folder"),
    ):
        path.write_text(f'key = "site-1.key"\npeers = "peers.toml"\n{text}'.replace(field, replaced))
        refused(here("site", "check", path), words)


def test_a_check_reads_the_keys_of_all_peers(tmp_path: Path) -> None:
    trial = pytest.importorskip("fedblend.flower.credentials")
    path, peers = tmp_path / "site.toml", tmp_path / "peers.toml"
    trial.make_site_key(tmp_path / "own")
    own = (tmp_path / "own.pub").read_text().strip()
    path.write_text('key = "own.key"\npeers = "peers.toml"\n')
    for content, words in (
        (f'0 = "{own}"\n1 = "{own}"\n', "the clients 0 and 1 have the public key"),
        (f'site-0 = "{own}"\n', "site-0 = 'ecdsa-sha2-nistp384"),
        (f'0 = "{own}"\n1 = "ecdsa-sha2-nistp384 AAAA"\n', "1 = 'ecdsa-sha2-nistp384 AAAA' is no client and key"),
        (f'0 = "{own}"\n1 = 3\n', "1 = 3 is no client and key"),
    ):
        peers.write_text(content)
        refused(here("site", "check", path), "peers: ", words)


@pytest.mark.parametrize("unwritable", ["site.audit.jsonl", "site.audit.jsonl.lock"])
def test_a_check_tells_an_audit_log_that_its_user_cannot_write(
    unwritable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init_site(tmp_path / "site.toml", None, 2)
    (tmp_path / unwritable).touch()
    # For root each file is writable.
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path / unwritable)

    refused(here("site", "check", tmp_path / "site.toml"), f"{unwritable}: this user cannot write it")


def test_a_check_of_a_trials_site_file(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    init_site(path, None, 2)
    path.write_text("allow = []\n" + path.read_text().replace("allow = [", "# "))

    shown = succeeded(here("site", "check", path)).out

    assert "Samples: none; the site trains on its client's part of the experiment's data" in shown
    assert "May leave: nothing\n" in shown


def test_errors_of_a_site_file_name_the_field_and_valid_values(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    for text, message in (
        ('allow = ["wieghts"]', r"allow: .*'wieghts' is no kind of payload \(did you mean 'weights'\?\)"),
        ("min_means = 3", r"min_means: unknown key \(did you mean 'min_mean'\?\)"),
        (
            'protection = {name = "nois"}',
            r"site.toml: protection.name: unknown protection 'nois' \(did you mean 'noise'",
        ),
        ("min_mean = 0", "min_mean: 0 is not valid: input should be greater than or equal to 1"),
        ('trusted = ["a:B", "net.Net"]', r"trusted: .*'net\.Net' names nothing; valid: package\.module:Name"),
        ('[data]\nname = "npx"', "unknown dataset 'npx'"),
    ):
        path.write_text(text)
        with pytest.raises(FedblendError, match=message):
            read_site(path)


def test_an_audit_log_in_rows(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "site.toml"
    path.write_text("")
    record = AuditLog(read_site(path).audit)
    sent(record, "trial/1", 0, 3, "weights", {"w": torch.zeros(2, 3), "n": torch.tensor(7)}, True)
    record.record_refused("trial/1", 1, 3, "raw", "no")
    assert record.rounds_trained() == {("trial/1", 0)}
    first, second = audit_rows(record.lines())
    assert first[1:6] == ("trial/1", "1", "weights", "w 2x3, n 1", "32")
    assert second[1:] == ("trial/1", "2", "raw", "refused: no", "", "")
    show_audit(path, None)
    assert "1 payloads, 32 bytes, 1 refusals" in " ".join(capsys.readouterr().out.split())
    record.record_refused("other/2", 0, 3, "raw", "no\x1b[31m\n" + 9999 * "x")
    reason = record.lines()[-1]["refused"]
    assert (reason.isprintable(), len(reason) < 1000) == (True, True)

    def printed(*options: object) -> list[tuple[str, int]]:
        lines = map(json.loads, succeeded(here("site", "audit", path, "--json", *options)).out.splitlines())
        return [(line["run"], line["round"]) for line in lines]

    assert printed() == [("trial/1", 1), ("trial/1", 2), ("other/2", 1)]
    assert printed("--run", "trial") == printed("--run", "trial/1", "--since", "2026-01-31") == printed()[:2]
    assert printed("--since", "9999-01-01") == []
    refused(here("site", "audit", path, "--since", "yesterday"), "--since yesterday: is no date; valid: 2026-01-31")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"tensors": 3}, "2: sent.tensors: 3 is not valid"),
        ({"tensors": {"w": 3}}, "2: sent.tensors.w: 3 is not valid"),
        ({"bytes": "many"}, "2: sent.bytes: 'many' is not valid"),
        ({"round": None}, "2: sent.round: None is not valid"),
        ({"refused": {}}, "2: refused.refused: {} is not valid"),
    ],
)
def test_a_damaged_line_of_an_audit_log_is_named(tmp_path: Path, line: dict[str, Any], words: str) -> None:
    path = tmp_path / "site.toml"
    path.write_text("")
    record = AuditLog(read_site(path).audit)
    sent(record, "trial/1", 0, 3, "weights", {"w": torch.zeros(2)}, True)
    (written,) = record.lines()
    append_line(tmp_path / "audit.jsonl", {**written, **line})
    with pytest.raises(FedblendError, match=f"audit.jsonl: line {words}"):
        show_audit(path, None)


def test_a_damaged_audit_log_is_to_be_restored_and_not_removed(tmp_path: Path) -> None:
    """Limits over all runs count in it: without its lines the site would share and train again."""
    (tmp_path / "site.toml").write_text("")
    log = tmp_path / "audit.jsonl"
    log.write_text('{"time": \n{}\n')
    remedy = "this site's limits count its lines: restore it from a copy"
    with pytest.raises(FedblendError) as raised:
        show_audit(tmp_path / "site.toml", None)
    assert str(raised.value) == f"{log}: line 1 is damaged; {remedy}"
    log.unlink()
    log.mkdir()
    with pytest.raises(FedblendError) as raised:
        show_audit(tmp_path / "site.toml", None)
    assert str(raised.value) == f"{log}: is a folder; {remedy}"


# What a site keeps of its sharings ------------------------------------------------------------------------


def test_sums_are_of_the_samples_that_a_site_has_now(tmp_path: Path) -> None:
    """Means stay where samples are added; sums of all samples are made anew."""
    x, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2

    def local(rows: int) -> ClientData:
        model: Any = nn.Linear(3, 2)
        rng, task = np.random.default_rng(0), Task("classification", 2)
        return ClientData(x[:rows], y[:rows], task, lambda x: x, lambda x, layer: x, rng, 1, model=model)  # type: ignore

    def shared(rows: int) -> Payload | None:
        ledger = SharingLedger(AuditLog(tmp_path / "audit.jsonl"), 10)
        return ledger.payload(sharing, local(rows), {}, lambda tags, labels: None, lambda digest: None)

    sharing = Moments(min_samples=1)
    for rows in (6, 6, 8):
        found, wanted = shared(rows), sharing.share(local(rows))
        assert found
        assert wanted
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), rows
