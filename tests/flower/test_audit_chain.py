"""Who changes, removes or restores a site's audit log gets no count back, and a server gets nothing uncounted."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import here, refused, succeeded
from flower_sites import OwnSite, sent, write_peers
from flwr.app import Context, RecordDict

from fedblend.core import files
from fedblend.core.errors import FedblendError
from fedblend.core.files import csv_text, waiting_lock
from fedblend.flower.audit import AuditLog, Counts, End, tagged
from fedblend.flower.client_task import MOST_RUNS, Memory
from fedblend.flower.site import Site

STOPPED = "this site's audit log is not as the site wrote it, and nothing leaves; the site's log states what to do"


def record(folder: Path, *rounds: int) -> AuditLog:
    """A log in which these rounds were trained."""
    (folder / "site.toml").write_text("rounds = 5\n")
    log = AuditLog(str(folder / "audit.jsonl"))
    for round in rounds:
        sent(log, "trial/1", round, 0, "weights", {"w": torch.zeros(2)}, True)
    return log


def chained(lines: list[dict[str, Any]], secret: bytes) -> str:
    """Lines in a chain of another secret, as who wants to change a log would write them."""
    text, before = "", End().chain
    for line in lines:
        made = tagged({name: value for name, value in line.items() if name != "chain"}, secret, before)
        before, text = bytes.fromhex(made["chain"]), text + f"{json.dumps(made)}\n"
    return text


def lines_changed(change: Callable[[list[str]], list[str]]) -> Callable[[Path], object]:
    return lambda path: path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def of_another_secret(path: Path) -> None:
    path.write_text(chained([json.loads(line) for line in path.read_text().splitlines()], b"guessed"))


def rotated(path: Path) -> None:
    path.rename(path.with_name("audit.jsonl.1"))


def untagged(line: str) -> str:
    return f"{json.dumps({k: v for k, v in json.loads(line).items() if k != 'chain'})}\n"


without_tags = lines_changed(lambda lines: [untagged(line) for line in lines])
SPOILED: dict[str, Callable[[Path], object]] = {
    "rotated": rotated,
    "emptied": lines_changed(lambda lines: []),
    "older": lines_changed(lambda lines: lines[:2]),
    "without its head": lines_changed(lambda lines: lines[1:]),
    "of another secret": of_another_secret,
    "without tags": without_tags,
    "without counter": lambda path: (path.with_suffix(".shared") / "counts.sqlite").unlink(),
    "without secret": lambda path: shutil.rmtree(path.with_suffix(".shared")),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_log_that_is_not_the_sites_stops_everything_and_gives_no_count_back(how: str, tmp_path: Path) -> None:
    log = record(tmp_path, 0, 1, 2)
    SPOILED[how](tmp_path / "audit.jsonl")

    for request in (
        lambda: log.has_sent("trial/2", 0, 0, "weights", True),
        lambda: log.record_refused("trial/2", 0, 0, "weights", "no"),
        lambda: sent(log, "trial/2", 0, 0, "weights", {}, True),
    ):
        with pytest.raises(FedblendError) as raised:
            request()
        assert str(raised.value) == STOPPED
    for command in (("audit", tmp_path / "site.toml", "--verify"), ("check", tmp_path / "site.toml")):
        refused(here("site", *command), "audit.jsonl: is not as this site wrote it: ", "fedblend site audit --accept")

    shown = succeeded(here("site", "audit", tmp_path / "site.toml", "--accept")).out
    assert "all fit; the site's user accepted 1 gaps before" in shown
    # All that was known counts: of a lost counter the lines of the log.
    assert log.rounds_trained() == {("trial/1", round) for round in range(3)}
    assert log.times_sent("weights") >= 3
    sent(log, "trial/2", 0, 0, "weights", {}, True)
    assert len(log.rounds_trained()) == 4
    succeeded(here("site", "audit", tmp_path / "site.toml", "--verify"))
    refused(here("site", "audit", tmp_path / "site.toml", "--accept"), "nothing to accept")


def test_a_site_whose_log_was_rotated_neither_trains_nor_shares_nor_takes_part(tmp_path: Path, caplog: Any) -> None:
    site = OwnSite(tmp_path, rounds=1)
    asked = site.experiment(method="fedavg")
    assert site.trained(asked)[1]
    assert "has trained in 1 rounds" in site.trained(asked, 2)[0]["fault"]
    rotated(tmp_path / "audit.jsonl")

    replies = [site.trained(asked, 3), site.reply("query.share", site.experiment(), 0, 4)]
    replies.append(site.reply("query.hello", asked))

    assert [(fields["fault"], tensors) for fields, tensors in replies] == [(STOPPED, {})] * 3
    assert f"{tmp_path / 'audit.jsonl'}: is not as this site wrote it: line " in caplog.text
    assert not (tmp_path / "audit.jsonl").exists()
    # Restored, the log goes on.
    (tmp_path / "audit.jsonl.1").rename(tmp_path / "audit.jsonl")
    assert "has trained in 1 rounds" in site.trained(asked, 5)[0]["fault"]


def test_the_first_line_that_does_not_fit_is_named(tmp_path: Path) -> None:
    log, path = record(tmp_path, 0, 1, 2, 3), tmp_path / "audit.jsonl"
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    for changed, number in (
        (whole.replace('"round": 1', '"round": 0'), 2),
        (lines[0] + lines[2] + lines[1] + lines[3], 2),
        (lines[0] + lines[2] + lines[3] * 2, 2),
        (whole.replace('"client": 0', '"client": 1'), 1),
    ):
        path.write_text(changed)
        outcome = here("site", "audit", tmp_path / "site.toml", "--verify")
        refused(outcome, f"audit.jsonl: is not as this site wrote it: line {number} does not fit the lines before it")
    path.write_text(whole)
    assert "4 lines, and all fit\n" in succeeded(here("site", "audit", tmp_path / "site.toml", "--verify")).out
    assert len(log.rounds_trained()) == 4


def test_a_message_reads_only_what_is_new(tmp_path: Path) -> None:
    """What is before the last line is counted already: its bytes are not read, and verified on request."""
    log, path = record(tmp_path, 0, 1, 2), tmp_path / "audit.jsonl"
    first, rest = path.read_text().split("\n", 1)
    path.write_text("x" * len(first) + "\n" + rest)

    sent(log, "trial/1", 3, 0, "weights", {}, True)

    assert len(log.rounds_trained()) == 4
    assert log.has_sent("renamed/1", 0, 0, "outputs", True)
    assert not log.has_sent("renamed/2", 0, 0, "outputs", True)
    refused(here("site", "audit", tmp_path / "site.toml", "--verify"), "line 1 is damaged")


def test_a_site_killed_before_a_line_is_counted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = record(tmp_path, 0)

    def killed(self: Counts, *lines: Any) -> Any:
        raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Counts, "add", killed)
            with pytest.raises(KeyboardInterrupt):
                sent(log, "trial/1", 1, 0, "weights", {}, True)
        assert log.has_sent("trial/1", 1, 0, "weights", True)
    assert len(log.lines()) == 3
    # One that was cut off while its line was written, too.
    with (tmp_path / "audit.jsonl").open("a") as file:
        file.write('{"time": ')
    sent(log, "trial/1", 2, 0, "weights", {}, True)
    assert len(log.rounds_trained()) == 3
    succeeded(here("site", "audit", tmp_path / "site.toml", "--verify"))


def test_a_log_of_version_0_2_goes_on(tmp_path: Path) -> None:
    log, path = record(tmp_path, 0, 1), tmp_path / "audit.jsonl"
    without_tags(path)
    SPOILED["without secret"](path)
    assert "trained in 2 of at most 5 rounds" in succeeded(here("site", "check", tmp_path / "site.toml")).out
    assert not path.with_suffix(".shared").exists()

    assert len(log.rounds_trained()) == 2
    sent(log, "trial/1", 2, 0, "weights", {}, True)
    assert ["chain" in line for line in log.lines()] == [False, False, True]
    succeeded(here("site", "audit", tmp_path / "site.toml", "--verify"))
    # From its first start on its lines are in the chain, too, and none without a tag follows.
    whole = path.read_text()
    path.write_text(whole.replace('"round": 0', '"round": 1'))
    refused(here("site", "audit", tmp_path / "site.toml", "--verify"), "line 3 does not fit the lines before it")
    path.write_text(whole + whole.splitlines(keepends=True)[0])
    with pytest.raises(FedblendError, match="not as the site wrote it"):
        log.rounds_trained()


def test_a_counter_that_is_damaged_is_to_be_restored(tmp_path: Path) -> None:
    log = record(tmp_path, 0)
    (tmp_path / "audit.shared" / "counts.sqlite").write_bytes(b"x" * 5000)
    with pytest.raises(FedblendError, match=r"counts\.sqlite: is damaged: .*remove it and run: fedblend site audit"):
        log.rounds_trained()


class Classes(OwnSite):
    """A site with classes of 23, 31 and 26 samples."""

    def hold(self, samples: int) -> None:
        y = np.concatenate([np.repeat([0, 1, 2], [23, 31, 26]), np.arange(40) % 3])
        split = np.repeat([0, 1], [80, 40])
        np.savez(self.folder / "own.npz", x=self.x[:120], y=y, split=split, classes=np.arange(3))

    def entries(self, name: str, samples: int, run_id: int) -> Any:
        """The number of entries of a sharing of means by class, or why it is not told."""
        table = {"name": name, "split": "class", "samples_per_mean": samples}
        asked = self.experiment(method={"name": "naivemix", "sharing": table})
        fields, tensors = self.reply("query.share", asked, 0, run_id)
        return fields.get("fault") or (0 if fields.get("nothing") else len(tensors["x"]))


@pytest.mark.parametrize(("name", "min_mean", "first"), [("local-means", 20, 3), ("means", 35, 0)])
def test_numbers_of_entries_count_as_sharings(name: str, min_mean: int, first: int, tmp_path: Path) -> None:
    """Of many sizes of means, or of many that are too large, these numbers would tell the sizes of classes."""
    site = Classes(tmp_path, min_mean=min_mean)
    told = [site.entries(name, samples, run) for run, samples in enumerate(range(40, 60))]

    assert told[0] == first
    assert all("has shared 1 payload of its samples" in reply for reply in told[1:])
    (line,) = [line for line in site.log() if "refused" not in line]
    assert (line["kind"], line["bytes"], len(line["sharing"])) == ("means", 0, 64)
    # The same request of the same samples reveals nothing new.
    assert site.entries(name, 40, 100) == first
    assert "has shared 1 payload" in site.entries(name, 41, 101)
    site.write(sharings=2)
    assert site.entries(name, 41, 102) == first


def test_equal_means_of_another_request_count(tmp_path: Path) -> None:
    """Sizes from the largest class up make the same means, so that a free repeat would tell which those are."""
    site = Classes(tmp_path)
    assert site.entries("means", 60, 1) == 3
    assert all("has shared 1 payload" in site.entries("means", size, size) for size in (61, 31, 30))


def test_a_lock_is_its_owners_alone_and_its_holder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = tmp_path / "audit.jsonl.lock"
    beside.touch(0o666)
    with waiting_lock(tmp_path / "audit.jsonl"):
        assert stat.S_IMODE(beside.stat().st_mode) == 0o600
    monkeypatch.setattr(files, "LOCK_S", -1.0)
    with beside.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        holder = f"process {os.getpid()}" if Path("/proc/locks").exists() else "another process"
        with pytest.raises(FedblendError, match=f"{holder} has held this lock|another process has held this lock"):
            waiting_lock(tmp_path / "audit.jsonl").__enter__()


def test_a_check_refuses_loose_keys_and_sums_that_no_federation_has(tmp_path: Path) -> None:
    write_peers(tmp_path, ("site-0", "site-1", "site-2"))
    path = tmp_path / "site.toml"
    path.write_text('key = "site-0.key"\npeers = "peers.toml"\nmin_sum = 3\n')
    succeeded(here("site", "check", path))
    for file, mode, valid, words in (("site-0.key", 0o644, 0o640, "key: "), ("peers.toml", 0o664, 0o644, "peers: ")):
        (tmp_path / file).chmod(mode)
        refused(here("site", "check", path), words, f"{file}: other users can", f"run: chmod {valid:o} ")
        (tmp_path / file).chmod(valid)
    path.write_text(path.read_text().replace("min_sum = 3", "min_sum = 4"))
    refused(here("site", "check", path), "min_sum: 4: ", "has 3 sites", "valid: 2 to 3")


def test_a_check_warns_of_limits_that_are_used_up(tmp_path: Path) -> None:
    log = record(tmp_path, 0, 1, 2, 3)
    assert "warning" not in succeeded(here("site", "check", tmp_path / "site.toml")).out
    for round in (4, 5):
        sent(log, "trial/1", round, 0, "weights", {"w": torch.zeros(2)}, True)
    sent(log, "trial/1", 0, 0, "means", {"x": torch.zeros(2)}, False)
    shown = succeeded(here("site", "check", tmp_path / "site.toml")).out
    assert "warning: rounds: used up, 6 of at most 5 over all runs\n" in shown
    assert "warning: sharings: used up, 1 of at most 1 over all runs\n" in shown
    assert "max_scores" not in shown


def test_a_site_keeps_the_state_of_a_bounded_number_of_runs(tmp_path: Path) -> None:
    site = Site(audit=str(tmp_path / "audit.jsonl"))
    memories = [Memory(Context(1, 1, {}, RecordDict(), {}), site, 0, f"run {n}") for n in range(MOST_RUNS + 3)]
    for number, memory in enumerate(memories):
        memory.keep("parts", "0", {"c": torch.full((1,), float(number))})
        memory.save()
        os.utime(memory.path, (number, number))
    assert [memory.path.exists() for memory in memories] == [False] * 3 + [True] * MOST_RUNS


def test_no_text_in_a_csv_file_is_a_formula() -> None:
    texts = ["=1+1", "+cmd", "-2+cmd|x", "@sum", "\tx", "-0.31", "+5 %", "-1e-05", "a=b", "-0.5 ± 0.1", "-inf"]
    assert csv_text([texts]).rstrip("\n").split(",") == [
        *("'=1+1", "'+cmd", "'-2+cmd|x", "'@sum", "'\tx"),
        *("-0.31", "+5 %", "-1e-05", "a=b", "-0.5 ± 0.1", "-inf"),
    ]
    assert csv_text([[-0.5, float("nan"), None, True]]) == "-0.5,,,True\n"
