"""The GPU benchmark checks itself on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.bench import NotMeasuredError


@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 2])
def test_gpu_benchmark_runs_every_section_on_cpu(part: int, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert gpu.main(["--device=cpu", "--tiny", f"--part={part}", f"--json={out}"]) == 0
    found = json.loads(out.read_text())
    assert found["targets"] == []
    sections = found["sections"]
    assert list(sections) == list(gpu.PARTS[part])
    statuses = {name: section["status"] for name, section in sections.items()}
    for name in ("memory", "specforge", "speculators"):
        assert statuses.pop(name, "not measured") == "not measured"
    assert set(statuses.values()) == {"measured"}, found["sections"]
    bounds = [bound for section in gpu.PARTS[part].values() for bound in section.bounds]
    assert found["not_measured"].keys() == {b.figure for b in bounds} | set(gpu.NOT_BUILT)
    if part == 1:
        parity = sections["parity"]["figures"]
        assert parity["relative error of the loss"] < 1e-5
        assert parity["cosine of the gradients"] > 0.99999
        assert parity["difference of the acceptance length"] == 0.0
    else:
        assert sections["capture"]["figures"]["share of the samples accepted"] == 1.0
        assert sections["capture"]["figures"]["samples shed"] == 0
        (shed,) = (b for b in gpu.PARTS[2]["capture"].bounds if b.figure == "samples shed")
        assert shed.target(0).ok and not shed.target(1).ok


def test_failed_section_fails_the_run_and_spares_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(bench: object) -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def absent(bench: object) -> dict[str, float]:
        raise NotMeasuredError("no peers")

    written: list[list[str]] = []
    out = tmp_path / "figures.json"

    def last(bench: object) -> dict[str, float]:
        written.append(list(json.loads(out.read_text())["sections"]))
        return {"seen": 1.0}

    bound = gpu.Bound("a figure", "at least", 1.0)
    parts = {
        1: {
            "first": gpu.Section(out_of_memory, 1.0, (bound,)),
            "second": gpu.Section(absent, 1.0),
            "late": gpu.Section(last, 1e9),
            "last": gpu.Section(last, 1.0),
        }
    }
    monkeypatch.setattr(gpu, "PARTS", parts)
    assert gpu.main(["--device=cpu", "--tiny", "--part=1", f"--json={out}"]) == 1
    found = json.loads(out.read_text())
    assert found["sections"]["first"]["reason"] == "OutOfMemoryError: CUDA out of memory"
    assert found["not_measured"]["a figure"] == found["sections"]["first"]["reason"]
    assert found["sections"]["second"]["status"] == "not measured"
    assert "are left" in found["sections"]["late"]["reason"]
    # What was measured lies on disk before the next section begins.
    assert written == [["first", "second", "late"]]
