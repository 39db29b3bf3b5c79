"""docs/results.md says what the committed results say."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_table_of_the_results_page_is_made_from_the_committed_results() -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "evidence" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for place in tables.PAGES:
        page = place.read_text()
        assert tables.fill(page, tables.TABLES) == page
        assert "<!-- end -->" in page
