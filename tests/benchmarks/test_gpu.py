"""The GPU benchmark checks itself on a CPU; wheels go through parts whole or not at all."""

from __future__ import annotations

import json
import os
import runpy
import select
import subprocess
import sys
import time
import venv
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.draft_training import contestants
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import pack
from benchmarks.gpu.bench import Bench, NotMeasuredError
from benchmarks.gpu.sections import training_flops
from benchmarks.workers import TIED, WorkerProcess
from tests.deploy.manifests import ROOT

SELF_CHECK = ["--device=cpu", "--tiny"]


def bench(folder: Path, tiny: bool = True) -> Bench:
    return Bench(torch.device("cpu"), tiny, folder, time.monotonic() + 600.0)


@pytest.mark.parametrize("part", [1, 2])
def test_every_section_runs_and_no_target_is_measured(part: int, tmp_path: Path) -> None:
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


def test_windows_that_are_not_copied_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = partial(gpu.sections.BridgeConfig, outbox_bytes=1)
    monkeypatch.setattr(gpu.sections, "BridgeConfig", config)
    figures = gpu.sections.capture(bench(tmp_path))
    # All four rows of each of four windows.
    assert (figures["share of the samples accepted"], figures["samples shed"]) == (0.0, 16)


def test_windows_that_take_nothing_are_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = gpu.sections.BridgeConfig
    monkeypatch.setattr(
        gpu.sections, "BridgeConfig", lambda **given: config(**given | {"bytes_per_step": 0})
    )
    with pytest.raises(NotMeasuredError, match=r"4 of 4 windows took nothing: .*bytes_per_step"):
        gpu.sections.capture(bench(tmp_path))


def test_only_capture_needs_transformers() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from benchmarks.gpu.__main__ import main\n"
        f"sys.exit(main([*{SELF_CHECK!r}, '--only=parity']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "not measured  cosine of the gradients" in done.stdout


def test_it_runs_with_packages_of_another_folder_and_without_scripts(tmp_path: Path) -> None:
    venv.create(tmp_path / "python", with_pip=False, symlinks=True)
    python = tmp_path / "python" / "bin" / "python"
    packages = Path(torch.__file__).parents[1]
    out = tmp_path / "figures.json"
    command = [python, "-m", "benchmarks.gpu", *SELF_CHECK, f"--json={out}"]
    path = os.pathsep.join(map(str, (packages, ROOT / "proto")))
    done = subprocess.run(
        [*command, "--only=training,capture"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["sections"]
    assert {name: found[name]["status"] for name in ("training", "capture")} == {
        "training": "measured",
        "capture": "measured",
    }


def test_a_peer_that_is_not_done_costs_only_its_own_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, float] = {}
    written: dict[str, list[str]] = {}
    out = tmp_path / "figures.json"

    def run(command: Sequence[str], seconds: float) -> None:
        options = dict(word.split("=", 1) for word in command if word.startswith("--"))
        peer = options["--against"]
        given[peer] = seconds
        written[peer] = list(json.loads(out.read_text())["sections"]) if out.exists() else []
        if peer == "specforge":
            raise NotMeasuredError("not done in time")
        case = {
            "contestants": {"ours": {"seconds": {"median": 2.0}}},
            "speed_against": {"speculators": {"median": 3.0}},
        }
        Path(options["--json"]).write_text(json.dumps({"cases": [case]}))

    def with_a_ceiling(bench: Bench) -> dict[str, object]:
        bench.ceilings["product_flops"] = 1e15
        return gpu.sections.training(bench)

    sections = {name: gpu.PARTS[1][name] for name in ("training", "specforge", "speculators")}
    sections["training"] = sections["training"]._replace(run=with_a_ceiling)
    monkeypatch.setattr(gpu, "PARTS", {1: sections})
    monkeypatch.setattr(Bench, "cuda", True)
    monkeypatch.setattr(gpu.sections, "run_group", run)
    gpu.main(["--device=cpu", "--part=1", f"--json={out}"])
    assert list(given) == ["", "specforge", "speculators"]
    assert given["specforge"] == pytest.approx(given[""] / 2, rel=0.1)
    assert given["speculators"] == pytest.approx(given[""], rel=0.1)
    # What was measured lies on disk before a peer begins.
    assert written == {"": [], "specforge": ["training"], "speculators": ["training", "specforge"]}
    found = json.loads(out.read_text())
    figures = {name: section["figures"] for name, section in found["sections"].items()}
    flops = training_flops(bench(tmp_path, tiny=False).case)
    assert figures["training"]["share of the products' ceiling"] == flops / 2e15
    assert figures["specforge"] == {}
    assert figures["speculators"]["speed against speculators"] == 3.0
    absent = found["not_measured"]
    assert absent.keys() == {"speed against specforge", *gpu.NOT_BUILT}
    assert absent["speed against specforge"] == "not done in time"


def test_no_process_of_a_group_that_is_not_done_is_left(tmp_path: Path) -> None:
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


@pytest.mark.skipif(not TIED, reason="there is no setpriv")
def test_no_process_outlives_the_benchmark_that_is_killed(tmp_path: Path) -> None:
    """The benchmark, a command of its own group, and that one's worker in the midst of a step."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "busy.py").write_text(
        f"import time\nfile = open({str(fifo)!r}, 'wb', 0)\nfile.write(b'!')\ntime.sleep(600)\n"
    )
    work = (
        "from pathlib import Path; from benchmarks.workers import WorkerProcess\n"
        f"WorkerProcess('busy', 'busy', [], Path({str(tmp_path / 'log')!r}))"
    )
    code = (
        "import sys; from benchmarks.gpu.sections import run_group\n"
        f"run_group([sys.executable, '-c', {work!r}], 600.0)"
    )
    path = os.pathsep.join(map(str, (ROOT, tmp_path)))
    killed = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path})
    select.select([reader], [], [], 240.0)
    assert os.read(reader, 2) == b"!"
    killed.kill()
    killed.wait()
    assert select.select([reader], [], [], 30.0)[0] == [reader]
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_worker_of_this_interpreter_has_the_callers_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("print('{}')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with WorkerProcess("ours", "only_here", [], tmp_path / "log") as worker:
        assert worker.greeting == {}


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_a_peer_runs_on_the_triton_of_torch(
    cuda: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = runpy.run_path(contestants.__file__)["REQUIREMENTS"]["specforge"]
    assert any(name.startswith("triton") for name in found) == (cuda is None)


def test_a_section_that_fails_does_not_end_the_others_and_is_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(bench: object) -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def absent(bench: object) -> dict[str, float]:
        raise NotMeasuredError("no peers")

    def no_ceiling(bench: Bench) -> dict[str, float]:
        return {"share": 1.0 / bench.ceilings["product_flops"]}

    def no_package(bench: object) -> dict[str, float]:
        raise ModuleNotFoundError("No module named 'transformers'")

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
            "third": gpu.Section(no_ceiling, 1.0),
            "fourth": gpu.Section(no_package, 1.0),
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
    assert found["sections"]["third"]["reason"] == "KeyError: 'product_flops'"
    assert found["sections"]["fourth"]["status"] == "failed"
    assert "are left" in found["sections"]["late"]["reason"]
    # What was measured lies on disk before the next section begins.
    assert written == [["first", "second", "third", "fourth", "late"]]


@pytest.mark.parametrize("only", ["parety", "parity,capture", "parity,"])
def test_a_section_that_is_not_there_is_refused(
    only: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main([*SELF_CHECK, "--part=1", f"--only={only}"])
    assert "expected some of ceilings, parity, waits" in capsys.readouterr().err


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


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this tree is not a git checkout")
def test_a_part_travels_beside_the_repository() -> None:
    listed = ["git", "-C", str(ROOT), "ls-files", "-z"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    tracked = sum((ROOT / name).lstat().st_size for name in names if (ROOT / name).exists())
    assert tracked + pack.PART_BYTES < 64 << 20


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
