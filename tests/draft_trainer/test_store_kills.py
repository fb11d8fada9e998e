"""kill -9 at any instant: nothing acknowledged is lost, nothing is trained on too often."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.contract("exactly once")

_COMMAND = (sys.executable, "-m", "tests.draft_trainer.storing_process")


def _run(folder: Path, kills: int, capacity: int) -> dict[str, Any]:
    done = subprocess.run(
        [*_COMMAND, str(folder), str(kills), str(capacity)],
        timeout=600,
        check=True,
        stdout=subprocess.PIPE,
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def test_store_kills_lose_and_repeat_no_sample(tmp_path: Path) -> None:
    figures = _run(tmp_path, kills=30, capacity=1 << 23)
    wrong = ("forgotten", "lost", "miscounted", "unsaved", "trained_too_often", "left")
    assert {name: figures[name] for name in wrong} == dict.fromkeys(wrong, 0)
    assert figures["trained_too_little"] == 0
    assert figures["kills"] == 30 and figures["acknowledged"] > 300


def test_store_kills_at_capacity_never_mix_samples(tmp_path: Path) -> None:
    """A worker checks the bytes of every sample that it draws, and ends if one is not its own."""
    capacity = 1 << 15
    figures = _run(tmp_path, kills=20, capacity=capacity)
    wrong = ("forgotten", "miscounted", "unsaved", "trained_too_often", "left")
    assert {name: figures[name] for name in wrong} == dict.fromkeys(wrong, 0)
    assert figures["acknowledged"] > 200
    assert figures["nbytes"] <= capacity
