"""Generated pages are what their generators make, and what is written beside that is true."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.harness import ratios
from docs import make_architecture, make_metrics, make_results
from docs.make_metrics import PROCESSES
from examples.figures import Target
from tests import contracts

ROOT = make_architecture.ROOT
ARCHITECTURE = make_architecture.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("path", "made"),
    [
        (make_architecture.PAGE, make_architecture.page),
        (make_metrics.PAGE, make_metrics.page),
        (make_results.PAGE, make_results.page),
        (make_results.README, make_results.readme),
        (make_results.INTEGRATIONS, make_results.integrations),
        (make_results.ECONOMICS, make_results.economics),
        (contracts.PAGE, contracts.page),
    ],
)
def test_generated_page_is_current(path: Path, made: Callable[[], str]) -> None:
    assert path.read_text(encoding="utf-8") == made(), f"run python -m {made.__module__}"


def test_every_contract_has_fast_tests() -> None:
    """Those of what vLLM does, with vLLM."""
    fast = [file for file in contracts.test_files() if file.fast]
    assert {file.contract for file in fast} == contracts.CONTRACTS.keys()
    vllm = {f.contract for f in fast if "pytest.mark.vllm" in (ROOT / "tests" / f.path).read_text()}
    assert vllm >= {"alignment", "lossless", "trial", "draft length"}


def test_readme_quotes_committed_results() -> None:
    text = " ".join(make_results.README.read_text(encoding="utf-8").split())
    first = text.partition("## ")[0]
    cells = json.loads(make_results.SPEED.read_text())["cells"]
    speeds = [cell["tokens_per_second"] for cell in cells if cell["draft"] == "fresh"]
    found = [Target.of_ratios("", ratios(s["auto"], s["none"])).value for s in speeds]
    assert f"one rollout is generated {found[0]:.2f} times as fast as without drafts, " in first
    assert "four {:.2f} times, 16 {:.2f} and 32 {:.2f} times".format(*found[1:]) in first
    targets = json.loads(make_results.REAL.read_text())["targets"]
    [ratio] = [t for t in targets if t["name"].endswith(", moving part, 3 seeds")]
    quoted = f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) times the frozen"
    assert quoted in first


def test_metrics_notes_name_existing_metrics() -> None:
    names = {metric.name for process in PROCESSES for metric in process.metrics}
    # A name with a star stands for several.
    used = re.findall(
        r"slipstream_(?:rollout|trainer|bridge)_\w+(?![*\w])", make_metrics.NOTES.read_text()
    )
    assert {name for name in used if not name.endswith("_")} <= names


def section(title: str) -> str:
    """A section of docs/architecture.md, from its heading to the next one."""
    return ARCHITECTURE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_sample_and_release_paths_list_few_files() -> None:
    for title, most in (("The life of a sample", 30), ("The life of a release", 40)):
        passed = re.findall(r"^\d+\. `(\S+)`$", section(title), re.MULTILINE)
        assert 10 < len(passed) <= most and len(set(passed)) == len(passed), title
        for path in passed:
            assert (ROOT / path).exists(), path
