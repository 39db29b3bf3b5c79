"""docs/benchmarks.md says what the committed measurements say."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_figure_of_the_benchmarks_page_is_made_from_the_committed_measurements() -> None:
    page = script("page")
    text = (ROOT / "docs" / "benchmarks.md").read_text()

    made = page.fill(text, page.SECTIONS)

    assert made == text
    assert text.count("<!-- end -->") == len(page.SECTIONS)


def test_no_committed_measurement_has_weights_that_cannot_be_right() -> None:
    results = script("page").read("rounds")

    assert results
    for job in results.get("jobs", {}).values():
        assert job["faults"] == {}
        assert job["failed"] == {}
    for check in results.get("same_work", {}).values():
        same = [apart for name, apart in check["apart"].items() if name != "other-order"]
        assert max(same) <= 0.05 < check["apart"]["other-order"]
