"""Files of runs and audit logs are written whole, or the writer hears of it; also by several writers at once."""

import io
import os
import subprocess
import sys

import pytest
import torch
from helpers import largest_file, same

from fedblend.core import files
from fedblend.core.errors import FedblendError
from fedblend.core.files import append_line, read_lines, remove_temporaries, write_atomically
from fedblend.runs import checkpoint
from fedblend.runs.directory import STUDY, STUDY_LOCK, WRITTEN_IN_RUN, RunDirectory, locked_study


def log_line(path, round):
    pytest.importorskip("flwr.serverapp", reason="Flower (extra 'flower') is not installed")
    from fedblend.flower.audit import AuditLog, ReplayGuard

    ReplayGuard(None, AuditLog(str(path)), "run/1", round, 0, "weights").record_sent({"w": torch.zeros(2)}, True)


def test_an_audit_line_that_does_not_fit_on_the_disk_is_an_error_and_leaves_no_part(tmp_path):
    path = tmp_path / "audit.jsonl"
    log_line(path, 0)
    whole = path.read_bytes()
    for room in (0, 1, 40, len(whole) - 1):  # the last: all but the end of the line
        with largest_file(len(whole) + room), pytest.raises(FedblendError, match=r"audit\.jsonl: could not be written"):
            log_line(path, 1)
        assert path.read_bytes() == whole, room
    log_line(path, 1)
    assert [line["round"] for line in read_lines(path)] == [0, 1]


def test_a_line_is_written_by_as_many_writes_as_it_takes(tmp_path, monkeypatch):
    class Slow(io.FileIO):
        def write(self, data):
            return super().write(bytes(data)[:7])

    def slow(path, mode, **more):
        return Slow(path, mode.replace("b", ""))

    monkeypatch.setattr("fedblend.core.files.open", slow, raising=False)
    for number in range(3):
        append_line(tmp_path / "log.jsonl", {"number": number, "text": "x" * 50})
    write_atomically(tmp_path / "whole.txt", "y" * 50)
    monkeypatch.undo()
    assert [line["number"] for line in read_lines(tmp_path / "log.jsonl")] == [0, 1, 2]
    assert (tmp_path / "whole.txt").read_text() == "y" * 50


def test_a_system_that_takes_no_bytes_is_an_error(tmp_path, monkeypatch):
    class Deaf(io.FileIO):
        def write(self, data):
            return 0

    monkeypatch.setattr("fedblend.core.files.open", lambda path, mode, **_: Deaf(path, mode[0]), raising=False)
    with pytest.raises(FedblendError, match="could not be written"):
        append_line(tmp_path / "log.jsonl", {})


def test_a_failed_write_keeps_the_file_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "status.json"
    write_atomically(path, "before")
    with largest_file(100), pytest.raises(FedblendError, match=r"could not be written.*the previous file is unchanged"):
        write_atomically(path, "x" * 101)
    assert (path.read_text(), [p.name for p in tmp_path.iterdir()]) == ("before", ["status.json"])


def test_files_that_a_killed_writer_left_are_removed(tmp_path):
    for name in (".a[1].json.7-aa.tmp", ".b.json.7-bb.tmp", ".a[1].json", "a[1].json"):
        (tmp_path / name).touch()
    remove_temporaries(tmp_path, ["a[1].json", "c.json"])
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a[1].json", ".b.json.7-bb.tmp", "a[1].json"]


def test_a_run_removes_what_a_killed_writer_of_any_of_its_files_has_left(tmp_path):
    for name in (*WRITTEN_IN_RUN, checkpoint.BEST):
        (tmp_path / f".{name}.7-aa.tmp").touch()
    with RunDirectory(tmp_path).locked():
        assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


def test_a_study_removes_what_a_killed_writer_of_its_table_has_left(tmp_path):
    (tmp_path / f".{STUDY}.7-aa.tmp").touch()
    with locked_study(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [STUDY_LOCK]


def test_tensors_that_share_memory_in_any_way_are_written_whole(tmp_path):
    row = torch.arange(6.0)
    tensors = {
        "whole": row,
        "same": row,
        "middle": row[1:4],
        "end": row[4:],
        "none": row[2:2],
        "bits": row.view(torch.int32),
    }

    checkpoint.write_table(tmp_path / "state", {"round": 1}, tensors)

    assert same(checkpoint.read_table(tmp_path / "state")[1], tensors)


def test_a_copy_of_the_process_leaves_all_locks_also_beside_files_that_were_closed(tmp_path, monkeypatch):
    closed, held = (open(tmp_path / name, "w") for name in "ab")  # noqa: SIM115 (closed below)
    closed.close()
    monkeypatch.setattr(files, "_locked", [closed, held])

    files._leave_locks()

    with pytest.raises(OSError, match="Bad file descriptor"):
        held.close()


WRITER = """
import sys
from pathlib import Path
from fedblend.core.files import write_atomically

path, letter, times = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(times):
    write_atomically(path, letter * 50_000)
"""


@pytest.mark.slow
def test_a_reader_sees_the_whole_content_of_one_of_two_writers(tmp_path):
    path = tmp_path / "shared.txt"
    write_atomically(path, "a" * 50_000)
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [
        subprocess.Popen([*command, letter, "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for letter in "ab"
    ]
    try:
        for writer in writers:
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            writer.stdin.write("go\n")
            writer.stdin.close()
        seen, faults = 0, []
        while any(writer.poll() is None for writer in writers):
            content = path.read_text()
            seen += 1
            if content not in ("a" * 50_000, "b" * 50_000):
                faults.append((len(content), content[:1], content[-1:]))
        assert [writer.returncode for writer in writers] == [0, 0]
        assert (seen > 0, faults) == (True, [])
        assert [p.name for p in tmp_path.iterdir()] == ["shared.txt"]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            for pipe in (writer.stdin, writer.stdout):
                if pipe is not None:
                    pipe.close()


def test_a_log_that_is_a_named_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "log")
    with pytest.raises(FedblendError, match="could not be written"):
        append_line(tmp_path / "log", {})
