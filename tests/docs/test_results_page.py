"""docs/results.md is what the committed results say, and so is what other pages quote."""

from __future__ import annotations

import json
import statistics

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


def test_economics_has_the_committed_ratios_of_draft_length() -> None:
    results = PAGE.parents[1] / "benchmarks" / "results" / "draft_length.json"
    cells = json.loads(results.read_text())["cells"]
    none, best = ([c[of] for c in cells] for of in ("over_none", "over_best"))
    quoted = [
        f"{min(medians):.2f} to {max(medians):.2f}"
        for medians in ([statistics.median(rounds) for rounds in of] for of in (none, best))
    ]
    text = " ".join((PAGE.parent / "economics.md").read_text(encoding="utf-8").split())
    assert f"`auto` is {quoted[0]} times as fast as no speculation" in text
    assert f"and {quoted[1]} times as fast as the best fixed choice" in text
    spread = max(max(rounds) / min(rounds) for rounds in none + best)
    assert f"the median of seven rounds, which differ by a factor of up to {spread:.1f}" in text
