"""The benchmark on a tiny case, without peers: workers, rounds, tables, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.draft_training import case as cases
from benchmarks.draft_training.__main__ import CaseResult, Measured, main
from benchmarks.draft_training.case import Case

TINY = Case("tiny", 32, 64, 4, 2, 8, 96, 48, rows=2, tokens=12, ttt_steps=2)


def test_ours_alone(
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


def test_targets_are_against_the_fastest_and_the_leanest_peer() -> None:
    """The two need not be one peer; a ratio is the median over rounds of the same round."""
    result = CaseResult(
        cases.SHAPES["A"],
        {
            "ours": Measured("", cost=[1.0, 2.0, 1.0], memory=[10, 12]),
            "quick": Measured("", cost=[1.5, 3.0, 1.5], memory=[30]),
            "lean": Measured("", cost=[5.0, 9.0, 5.0], memory=[11]),
        },
    )
    speed, memory = result.targets()
    assert "quick" in speed.name and speed.value == 1.5 and speed.ok
    assert "lean" in memory.name and memory.value == 12 / 11 and not memory.ok
