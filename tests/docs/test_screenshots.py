"""The script of the pictures: what it does where the demo does not come far, or does not end."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from docs import screenshots
from examples.arithmetic_grpo.processes import free_port


@contextmanager
def demo(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in place of the demo; it has begun when this does."""
    text = f"print(flush=True)\n{code}"
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        yield process
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    text = f"[server]\nport = {free_port()}\nmetrics_port = {free_port()}\n"
    (tmp_path / "draft-trainer.toml").write_text(text)
    return tmp_path


def test_a_demo_that_does_not_come_far_enough_gives_no_picture(run: Path) -> None:
    options = Namespace(seconds=0.5, policy_version=1, release=1)
    said = "policy version 0 and release 0; give --policy"
    with demo("import time; time.sleep(60)") as process, pytest.raises(SystemExit, match=said):
        screenshots._wait(process, run, options)


def test_a_demo_that_ends_is_named_with_its_status(run: Path) -> None:
    with demo("raise SystemExit(3)") as process:
        process.wait(10)
        with pytest.raises(SystemExit, match="the demo ended with status 3"):
            screenshots._wait(process, run, Namespace(seconds=60.0, policy_version=1, release=1))


def test_a_demo_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screenshots, "END_SECONDS", 0.5)
    ignores = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    with demo(f"{ignores}; print(flush=True); time.sleep(60)") as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        with pytest.raises(SystemExit, match="did not end"):
            screenshots._end(process)
        assert process.wait(10) != 0
