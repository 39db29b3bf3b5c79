"""docs/benchmarks.md has the numbers of the committed measurements."""

from script_helpers import ROOT, script


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
