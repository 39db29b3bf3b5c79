"""docs/benchmarks.md has the numbers of the committed measurements."""

from dataclasses import replace
from pathlib import Path

import pytest
from script_helpers import ROOT, script

from fedblend.engines.loop import LoopEngine
from fedblend.experiment.setup import make_setup


def test_the_benchmarks_page_is_generated_from_the_committed_measurements() -> None:
    page = script("benchmarks/page.py")
    text = (ROOT / "docs" / "benchmarks.md").read_text()

    assert page.fill(text, page.SECTIONS) == text
    assert text.count("<!-- end -->") == len(page.SECTIONS)


def test_committed_measurements_have_no_faults_and_equal_weights() -> None:
    results = script("benchmarks/page.py").read("rounds")

    assert results
    for job in results.get("jobs", {}).values():
        assert job["faults"] == {}
        assert job["failed"] == {}
    for check in results.get("same_work", {}).values():
        same = [apart for name, apart in check["apart"].items() if name != "other-order"]
        assert max(same) <= 0.05 < check["apart"]["other-order"]


def test_the_peers_benchmark_trains_the_jobs_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
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
