"""docs/results.md is what the committed results say."""

from __future__ import annotations

from docs.make_results import PAGE, page


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m docs.make_results"
