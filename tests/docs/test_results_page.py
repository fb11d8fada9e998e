"""docs/results.md is what the committed results say."""

from __future__ import annotations

import pytest

from docs.make_results import DEMO, INTEGRATIONS, PAGE, README, integrations, page, readme


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m docs.make_results"


@pytest.mark.skipif(not DEMO.exists(), reason="no committed run of the demo")
def test_readme_has_the_committed_gains() -> None:
    assert README.read_text(encoding="utf-8") == readme(), "run python -m docs.make_results"


def test_the_integrations_have_the_committed_architectures() -> None:
    found = INTEGRATIONS.read_text(encoding="utf-8")
    assert found == integrations(), "run python -m docs.make_results"
