"""The GPU benchmark checks itself on a CPU; wheels go through parts whole or not at all."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import pack
from benchmarks.gpu.bench import NotMeasuredError
from benchmarks.gpu.sections import training_flops


@pytest.mark.parametrize("part", [1, 2])
def test_every_section_runs_and_no_target_is_measured(part: int, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert gpu.main(["--device=cpu", "--tiny", f"--part={part}", f"--json={out}"]) == 0
    found = json.loads(out.read_text())
    assert found["targets"] == []
    sections = found["sections"]
    assert list(sections) == list(gpu.PARTS[part])
    statuses = {name: section["status"] for name, section in sections.items()}
    assert statuses.pop("memory", "not measured") == "not measured"
    assert set(statuses.values()) == {"measured"}, found["sections"]
    bounds = [bound for section in gpu.PARTS[part].values() for bound in section.bounds]
    assert found["not_measured"].keys() == {b.figure for b in bounds} | set(gpu.NOT_BUILT)
    if part == 1:
        parity = sections["parity"]["figures"]
        assert parity["relative error of the loss"] < 1e-5
        assert parity["cosine of the gradients"] > 0.99999
        assert parity["difference of the acceptance length"] == 0.0
    else:
        assert sections["capture"]["figures"]["capture_off_reason"] == ""
        assert sections["capture"]["figures"]["samples accepted"] >= 1


def test_a_section_that_fails_does_not_end_the_others_and_is_no_pass(
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
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="found cuda and no GPU"):
        gpu.main([])


def test_flops_of_a_step() -> None:
    """Of the 8B draft, 16,384 tokens at K = 5: what the emulation counts, within 5 %."""
    case = gpu.sections.replace(gpu.sections.SHAPES["8B"], rows=8, ttt_steps=5)
    assert training_flops(case) == pytest.approx(176e12, rel=0.05)


def _wheels(folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    contents = {}
    for name, size in (("one-1.0-py3-none-any.whl", 250), ("two-2.0-py3-none-any.whl", 100)):
        data = bytes(torch.randint(256, (size,), generator=generator).tolist())
        (folder / name).write_bytes(data)
        contents[name] = data
    return contents


def test_wheels_come_back_as_they_were(tmp_path: Path) -> None:
    contents = _wheels(tmp_path / "wheels")
    assert pack.split(tmp_path / "wheels", tmp_path / "parts", 100) == 4
    sizes = [p.stat().st_size for p in (tmp_path / "parts").glob("*.whl.*")]
    assert max(sizes) == 100
    assert pack.main(["join", str(tmp_path / "parts"), str(tmp_path / "back")]) == 0
    with pytest.raises(SystemExit, match="2"):
        pack.main(["split", str(tmp_path / "wheel"), str(tmp_path / "more")])
    back = {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()}
    assert back == contents


@pytest.mark.parametrize("damage", ["missing", "altered", "swapped", "path", "no manifest"])
def test_a_damaged_wheel_is_skipped_by_name(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = _wheels(tmp_path / "wheels")
    parts, back = tmp_path / "parts", tmp_path / "back"
    pack.split(tmp_path / "wheels", parts, 100)
    one, two = sorted(contents)
    manifest = json.loads((parts / pack.MANIFEST).read_text())
    match damage:
        case "missing":
            (parts / f"{one}.001").unlink()
        case "altered":
            data = bytearray((parts / f"{one}.001").read_bytes())
            data[3] ^= 1
            assert zlib.crc32(data) != zlib.crc32((parts / f"{one}.001").read_bytes())
            (parts / f"{one}.001").write_bytes(data)
        case "swapped":
            manifest[one]["parts"].reverse()
        case "path":
            manifest[one]["parts"][0]["name"] = f"../wheels/{one}"
        case _:
            (parts / pack.MANIFEST).unlink()
    if damage in ("swapped", "path"):
        (parts / pack.MANIFEST).write_text(json.dumps(manifest))
    assert pack.main(["join", str(parts), str(back)]) == 1
    skipped = one if damage != "no manifest" else pack.MANIFEST
    assert f"skipped {skipped}: " in capsys.readouterr().out
    expected = [] if damage == "no manifest" else [two]
    assert [path.name for path in back.iterdir()] == expected
