"""The benchmark on a tiny case, without peers: workers, rounds, tables, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.draft_training import case as cases
from benchmarks.draft_training.__main__ import main
from benchmarks.draft_training.case import Case

TINY = Case("tiny", 32, 64, 4, 2, 8, 96, 48, rows=2, tokens=12, ttt_steps=2)


@pytest.mark.slow
def test_benchmark_trains_tiny_case_in_both_dtypes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both types learn the same case."""
    monkeypatch.setitem(cases.SHAPES, "tiny", TINY)
    out = tmp_path / "figures.json"
    options = ["--against=", "--cases=tiny", "--ttt-steps=2", "--rounds=2", "--warmup=1"]
    assert main([*options, f"--peers-dir={tmp_path}", f"--json={out}"]) == 0
    found = json.loads(out.read_text())
    assert [c["case"]["dtype"] for c in found["cases"]] == ["float32", "bfloat16"]
    losses = [c["contestants"]["ours"]["first_loss"] for c in found["cases"]]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert "tiny float32 K=2" in capfd.readouterr().out
