"""The generated part of a page, between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``."""

from __future__ import annotations

from pathlib import Path


def with_generated(page: Path, name: str, text: str) -> str:
    """Return a page's text with its generated part replaced.

    Raises ValueError: the page lacks one of the two marks.
    """
    return replaced(page.read_text(encoding="utf-8"), name, text)


def replaced(page: str, name: str, text: str) -> str:
    """Return the text of a page with one generated part replaced. Raises as ``with_generated``."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"no place between {begin.strip()} and {end.strip()}")
    return before + begin + text + end + after
