"""docs/benchmarks.md says what the committed measurements say."""

from script_helpers import ROOT, script


def test_every_figure_of_the_benchmarks_page_is_made_from_the_committed_measurements() -> None:
    page = script("benchmarks/page.py")
    text = (ROOT / "docs" / "benchmarks.md").read_text()

    made = page.fill(text, page.SECTIONS)

    assert made == text
    assert text.count("<!-- end -->") == len(page.SECTIONS)


def test_no_committed_measurement_has_weights_that_cannot_be_right() -> None:
    results = script("benchmarks/page.py").read("rounds")

    assert results
    for job in results.get("jobs", {}).values():
        assert job["faults"] == {}
        assert job["failed"] == {}
    for check in results.get("same_work", {}).values():
        same = [apart for name, apart in check["apart"].items() if name != "other-order"]
        assert max(same) <= 0.05 < check["apart"]["other-order"]
