"""docs/benchmarks.md has the numbers of the committed measurements."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from script_helpers import script

from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.make_setup import make_setup

pytestmark = pytest.mark.slow

PAGE = script("benchmarks/page.py")


def test_the_pages_are_generated_from_the_committed_measurements():
    texts = [path.read_text() for path in PAGE.PAGES]

    assert [PAGE.fill(text, PAGE.SECTIONS) for text in texts] == texts
    assert sum(text.count("<!-- end -->") for text in texts) == len(PAGE.SECTIONS)


def test_committed_measurements_have_no_faults_and_equal_weights():
    measured = PAGE.by_processor("rounds")

    assert measured
    for results in measured:
        for job in results.get("jobs", {}).values():
            assert job["faults"] == {}
            assert job["failed"] == {}
        for check in results.get("same_work", {}).values():
            same = [apart for name, apart in check["apart"].items() if name != "other-order"]
            assert max(same) <= 0.05 < check["apart"]["other-order"]


@pytest.fixture
def machine(monkeypatch):
    found = script("benchmarks/machine.py")
    for name in found.SWITCHES["avx2"]:
        monkeypatch.delenv(name, raising=False)
    return found


def test_a_program_limited_to_an_instruction_set_starts_again_once_with_all_switches(machine, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(machine.os, "execve", lambda *words: started.append(words))
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    machine.CPUINFO.write_text("flags : fpu sse4_1 avx avx2 fma")

    machine.limit(None)
    assert started == []
    machine.limit("avx2")
    [(program, words, environment)] = started
    assert (program, words[1:]) == (sys.executable, sys.orig_argv[1:])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert machine.limited_to() == "avx2"
    machine.limit("avx2")
    assert len(started) == 1
    # Another set is no limit of this one: all of its switches must hold.
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert machine.limited_to() == ""
    with pytest.raises(SystemExit, match="--isa avx512: this processor has no avx512bw"):
        machine.limit("avx512")


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux's list of the processor's features")
@pytest.mark.parametrize("isa", ["default", "avx2", "avx512"])
def test_switches_limit_pytorch_onednn_and_the_kernels(isa, machine, tmp_path):
    if not machine.has(isa, machine.CPUINFO.read_text()):
        pytest.skip(f"this processor has no {machine.NEEDS[isa]}")
    program = """
import torch
from fedblend._kernels import build
print(torch.backends.cpu.get_cpu_capability(), build._flags()[-1])
torch.conv2d(torch.randn(10, 64, 16, 16), torch.randn(128, 64, 3, 3))
"""
    told = {"ONEDNN_VERBOSE": "1", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **machine.SWITCHES[isa], **told},
        capture_output=True,
        text=True,
        check=True,
    )

    march, onednn = {
        "default": ("-march=x86-64", "Intel SSE4.1"),
        "avx2": ("-march=haswell", "Intel AVX2"),
        "avx512": ("-march=skylake-avx512", "Intel AVX-512 with AVX512BW"),
    }[isa]
    assert f"{isa.upper()} {march}\n" in done.stdout
    assert f"cpu,isa:{onednn}" in done.stdout


def test_the_table_of_speeds_has_what_users_type_beside_the_fastest_peer(monkeypatch):

    def one(kind, seconds, disturbed=False):
        repeats = [{"median_s": seconds * slower} for slower in (1, 2, 1)]
        return dict(label=f"{kind} {seconds}", kind=kind, median_s=seconds, disturbed=disturbed, repeats=repeats)

    times = ("base", 9), ("peer", 4), ("peer", 3, True), ("fedblend", 0.9), ("method", 0.5)
    timed = {str(i): one(*given) for i, given in enumerate(times)} | {"auto": one("auto", 1)}
    job = {
        "contestants": timed,
        "date": "today",
        "machine": {"processor": "Some", "instructions": "AVX2", "limited_to": "avx2"},
    }
    monkeypatch.setattr(PAGE, "by_processor", lambda name: [{"jobs": {"B": job, "other": job}}])

    some = "Some with AVX2 (limited to it)"
    assert PAGE.speed_rows() == [[some, "today", "B: pfl's CNN", "peer 3", "3.00 (disturbed)", "1.00", "3.0"]]
    assert PAGE.brief_section() == (
        "In the fastest other framework (peer 3) a round of federated averaging takes 3.0 to 3.0 times as long "
        "([table](docs/benchmarks.md))."
    )


def test_the_peers_benchmark_trains_the_jobs_clients(tmp_path, monkeypatch):
    jobs, contestant = script("benchmarks/peers/jobs.py"), script("benchmarks/peers/run_fedblend.py")
    settings = replace(jobs.JOBS["C"], clients=6, samples=4, cohort=2)
    jobs.write(settings, tmp_path / "job.npz")
    job = contestant.load(tmp_path / "job.npz")
    words = [str(tmp_path / "job.npz"), "--engine", "loop", "--rounds", "2", "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr("sys.argv", ["run_fedblend.py", *words])
    given = contestant.arguments()
    setup = make_setup(contestant.experiment_of(job, given))
    loop = contestant.JobFederation(setup, LoopEngine(setup), job)

    _, _, records = contestant.timed_rounds(loop, loop.begin(), 2)

    assert [record.cohort for record in records] == [job.cohort(0), job.cohort(1)]
    records[1].cohort = [client + 1 for client in records[1].cohort]
    with pytest.raises(SystemExit, match="round 2 trained"):
        contestant.require_cohorts(job, records)


def test_the_scaling_page_computes_from_what_one_more_costs():
    scaling = script("benchmarks/scaling.py")
    rows = [
        {"kind": kind, "value": value, "parameters": value, "round_s": seconds, "mb": mb, "sent_bytes": 80 * value}
        for kind, value, seconds, mb in [
            ("clients", 10, 1.0, 10.0),
            ("clients", 1_000_010, 1.0, 60.0),  # 50 bytes a client
            ("cohort", 1, 5.0, 1.0),
            ("cohort", 1_001, 7.0, 1.0),  # 2 ms a client
            ("model", 1_000, 1.0, 1.0),
            ("model", 1_001_000, 2.0, 5.0),  # 0.1 us for each of 10 clients, 4 bytes
        ]
    ]
    found = {"rows": rows, "base": {"cohort": 10}}

    assert scaling.constants(found) == pytest.approx(
        {
            "mb_per_client": 5e-5,
            "s_per_cohort_client": 2e-3,
            "s_per_parameter": 1e-7,
            "bytes_per_parameter": 8,
            "mb_per_parameter": 4e-6,
        }
    )
    # 10,000 clients: 4 MB each way, one server of 1.25 GB/s; a tree of 100 machines and a root; (2 + 100) ms each.
    assert scaling.computed_rows(found)[0] == ["10,000", "0.08", "32", "101", "2", "0.6", "17.0"]
