"""The GPU benchmark checks itself on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu
from tests.machine import lacking


@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 2, 3])
def test_gpu_benchmark_runs_every_section_on_cpu(part: int, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert gpu.main(["--device=cpu", "--tiny", f"--part={part}", f"--json={out}"]) == 0
    found = json.loads(out.read_text())
    assert found["targets"] == []
    sections = found["sections"]
    assert list(sections) == list(gpu.PARTS[part])
    statuses = {name: section["status"] for name, section in sections.items()}
    without_triton = ("vllm_engine",) if "triton" in lacking() else ()
    on_a_gpu = ("memory", "filled", "vllm_sleep", "vllm_fp8", "specforge", "speculators")
    for name in (*on_a_gpu, *without_triton):
        assert statuses.pop(name, "not measured") == "not measured"
    assert set(statuses.values()) == {"measured"}, found["sections"]
    bounds = [bound for section in gpu.PARTS[part].values() for bound in section.bounds]
    assert found["not_measured"].keys() == {b.figure for b in bounds}
    if part == 1:
        smoke = sections["smoke"]["figures"]
        assert smoke["hashes that differ"] == smoke["swaps that a graph does not see"] == 0
        assert smoke["relative error of attention"] < 1e-5
        profile = sections["profile"]["figures"]
        assert len(profile["operations"]) == 40 and profile["ms_on_the_device"] > 0.0
        parity = sections["parity"]["figures"]
        assert parity["relative error of the loss"] < 1e-5
        assert parity["cosine of the gradients"] > 0.99999
        assert parity["difference of the acceptance length"] == 0.0
    elif part == 2:
        assert sections["run_ahead"]["figures"]["samples shed by a run-ahead"] == 0
        assert sections["capture"]["figures"]["share of the samples accepted"] == 1.0
        assert sections["capture"]["figures"]["samples shed"] == 0
        (shed,) = (b for b in gpu.PARTS[2]["capture"].bounds if b.figure == "samples shed")
        assert shed.target(0).ok and not shed.target(1).ok
    else:
        server = sections["vllm_server"]["figures"]
        assert server["requests that failed"] == server["greedy_different"] == 0
        assert server["swaps"] == 4 and server["not_prepared"] == []
        if not without_triton:
            engine = sections["vllm_engine"]["figures"]
            assert (engine["runner"], engine["asynchronous"]) == ("V2", True)
            assert engine["runs that differ"] == 0


def test_failed_section_fails_the_run_and_spares_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One raises, one is killed, one hangs, one has too little time, and the last finds theirs."""
    out = tmp_path / "figures.json"
    measured = '{"status": "measured", "reason": "", "figures": {"seen": 1.0}}'
    programs = {
        "raises": "raise MemoryError('CUDA out of memory')",
        "killed": "import os; os.kill(os.getpid(), 9)",
        "last": f"import json, sys; assert len(json.load(open({str(out)!r}))['sections']) == 3; "
        f"open(sys.argv[1], 'w').write({measured!r})",
        "hangs": "import time; time.sleep(600)",
    }

    def command(name: str, chosen: object, path: Path, until: float) -> list[str]:
        return [sys.executable, "-c", programs[name], str(path)]

    def nothing(bench: object) -> dict[str, float]:
        raise AssertionError

    bound = gpu.Bound("a figure", "at least", 1.0)
    names = {"raises": 1.0, "killed": 1.0, "late": 1e9, "last": 1.0, "hangs": 1.0}
    sections = {name: gpu.Section(nothing, seconds, (bound,)) for name, seconds in names.items()}
    monkeypatch.setattr(gpu, "PARTS", {1: sections})
    monkeypatch.setattr(gpu, "PART_SECONDS", 12.0)
    monkeypatch.setattr(gpu, "_command", command)
    assert gpu.main(["--device=cpu", "--tiny", "--part=1", f"--json={out}"]) == 1
    found = json.loads(out.read_text())["sections"]
    statuses = [section["status"] for section in found.values()]
    assert statuses == ["failed", "failed", "not measured", "measured", "failed"]
    assert found["raises"]["reason"] == "exit status 1: MemoryError: CUDA out of memory"
    assert found["killed"]["reason"].startswith("exit status -9")
    assert "are left" in found["late"]["reason"] and "not done after" in found["hangs"]["reason"]
    assert found["last"]["figures"] == {"seen": 1.0}
