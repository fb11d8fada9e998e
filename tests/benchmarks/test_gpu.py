"""The GPU benchmark checks itself on a CPU; wheels go through parts whole or not at all."""

from __future__ import annotations

import json
import os
import select
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import pack
from benchmarks.gpu.bench import Bench, NotMeasuredError
from benchmarks.gpu.sections import training_flops


def bench(folder: Path, tiny: bool = True) -> Bench:
    return Bench(torch.device("cpu"), tiny, folder, time.monotonic() + 600.0)


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


def test_shed_windows_count_as_not_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = partial(gpu.sections.BridgeConfig, outbox_bytes=1)
    monkeypatch.setattr(gpu.sections, "BridgeConfig", config)
    figures = gpu.sections.capture(bench(tmp_path))
    # All four rows of each of four windows.
    assert (figures["share of the samples accepted"], figures["samples shed"]) == (0.0, 16)


def test_empty_windows_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = gpu.sections.BridgeConfig
    monkeypatch.setattr(
        gpu.sections, "BridgeConfig", lambda **given: config(**given | {"bytes_per_step": 0})
    )
    with pytest.raises(NotMeasuredError, match=r"4 of 4 windows took nothing: .*bytes_per_step"):
        gpu.sections.capture(bench(tmp_path))


def test_timed_out_peer_leaves_no_process(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    # As draft_training with a worker: a child that goes on when its parent is killed.
    code = '(exec 3>"$1"; echo >&3; exec sleep 600) & wait'
    with pytest.raises(NotMeasuredError, match="not done in 10 s"):
        gpu.sections.run_group(["sh", "-c", code, "", str(fifo)], 10.0)
    assert os.read(reader, 2) == b"\n"
    # The pipe ends with its last writer.
    assert select.select([reader], [], [], 30.0)[0] == [reader]
    assert os.read(reader, 1) == b""
    os.close(reader)


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_benchmark_without_gpu_is_refused() -> None:
    with pytest.raises(SystemExit, match="found cuda and no GPU"):
        gpu.main([])


def test_training_flops_match_emulator_counts() -> None:
    """The 8B draft, 16,384 tokens at K = 5: within 5 % of what the emulation counts."""
    case = gpu.sections.replace(gpu.sections.SHAPES["8B"], rows=8, ttt_steps=5)
    assert training_flops(case) == pytest.approx(176e12, rel=0.05)


def test_wheels_join_whole_or_are_skipped_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels, parts = tmp_path / "wheels", tmp_path / "parts"
    wheels.mkdir()
    one, two = ("one-1.0-py3-none-any.whl", bytes(range(250))), ("two-2.0-py3-none-any.whl", b"x")
    for name, data in (one, two):
        (wheels / name).write_bytes(data)
    assert pack.split(wheels, parts, 100) == 4
    assert pack.main(["join", str(parts), str(tmp_path / "whole")]) == 0
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert whole == dict((one, two))
    (parts / f"{one[0]}.001").write_bytes(bytes(100))
    assert pack.main(["join", str(parts), str(tmp_path / "damaged")]) == 1
    assert f"skipped {one[0]}: " in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == [two[0]]
