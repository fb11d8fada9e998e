"""The set-up of the Makefile at paths that the dynamic linker or a compiler would split."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT


def set_up(folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Print what ``make setup`` would run in a checkout at ``folder``."""
    (folder / "deploy").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copytree(ROOT / "deploy" / "requirements", folder / "deploy" / "requirements")
    for name in ("pyproject.toml", "proto/hatch_build.py", "rollout_server/install_cpu.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return subprocess.run(
        ["make", "--no-print-directory", "-n", "setup"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        check=False,
    )


@pytest.mark.parametrize("name", ["a b", "a:b", "a'b", "a$b"])
def test_venv_of_odd_path_is_in_cache_and_linked(tmp_path: Path, name: str) -> None:
    done = set_up(tmp_path / name, tmp_path / "cache")
    (line,) = [x for x in done.stdout.splitlines() if " -m venv " in x]
    environment = line.rpartition(" ")[2]
    assert environment.startswith(f"{tmp_path}/cache/slipstream/venv-"), done.stderr
    assert f"ln -sfnT {environment} .venv\n" in done.stdout
    # Another checkout has another one.
    other = set_up(tmp_path / f"{name} 2", tmp_path / "cache").stdout
    assert environment not in other


def test_cache_folder_with_space_refused_before_setup(tmp_path: Path) -> None:
    done = set_up(tmp_path / "a b", tmp_path / "c d")
    assert done.returncode != 0 and not done.stdout
    assert "found a space in" in done.stderr and "Next step: make XDG_CACHE_HOME=" in done.stderr
