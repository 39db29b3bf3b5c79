"""docs/results.md says what the committed results say."""

from script_helpers import script


def test_every_table_of_the_results_page_is_made_from_the_committed_results() -> None:
    tables = script("evidence/tables.py")
    for place in tables.PAGES:
        page = place.read_text()
        assert tables.fill(page, tables.TABLES) == page
        assert "<!-- end -->" in page
