"""The benchmark on a tiny case, without peers: workers, rounds, tables, JSON."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from benchmarks.draft_training import case as cases
from benchmarks.draft_training import contestants
from benchmarks.draft_training.__main__ import CaseResult, Measured, main
from benchmarks.draft_training.case import Case
from benchmarks.workers import WorkerProcess

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


def test_targets_compare_with_fastest_and_leanest_peer() -> None:
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


def test_peer_imports_its_own_package_versions_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "own-1.0-py3-none-any.whl"
    facts = "own-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("own.py", "WHOSE = 'the peer'")
        archive.writestr(f"{facts}/METADATA", "Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
        archive.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr(f"{facts}/RECORD", "")
    callers = tmp_path / "callers"
    callers.mkdir()
    (callers / "own.py").write_text("WHOSE = 'the caller'")
    (callers / "only_here.py").write_text("import json, own; print(json.dumps({'own': own.WHOSE}))")
    # As PYTHONPATH does at the start.
    monkeypatch.syspath_prepend(callers)
    monkeypatch.setenv("PYTHONPATH", str(callers))
    monkeypatch.setitem(contestants.REQUIREMENTS, "speculators", (str(wheel),))
    python = contestants.python_of("speculators", tmp_path / "peers")
    with WorkerProcess("speculators", "only_here", [], tmp_path / "log", python) as worker:
        assert worker.greeting == {"own": "the peer"}
