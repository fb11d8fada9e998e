"""kill -9 of a real warm-up: it ends as one that was not killed."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from draft_trainer.cli.main import main
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.ingest.database import FILE
from draft_trainer.warmup import run as warming
from examples.arithmetic_grpo.states import States
from tests.draft_trainer.warmup_rig import (
    COUNT,
    EPOCHS,
    Rollout,
    command,
    expected_tokens,
    report,
    write_rollouts,
)

pytestmark = [pytest.mark.contract("exactly once"), pytest.mark.slow]

PROGRAM = """
import os, signal, sys
from draft_trainer.cli.main import main
left = int(sys.argv[1])
def on_event(name, arguments):
    global left
    # Every training state, release, position and report comes into being by a rename.
    if name == "os.rename":
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(on_event)
sys.exit(main(sys.argv[2:]))
"""


def test_warmup_killed_three_times_trains_every_rollout_as_often(
    tmp_path: Path,
    policy_dir: Path,
    drawn: list[Rollout],
    fresh: States,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """kill -9 in the middle of writing a state, a release, a position or the report."""
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
        write_rollouts(folder / "rollouts.jsonl", drawn)

    def arguments(folder: Path) -> list[str]:
        return command(folder, policy_dir, "--rollouts", folder / "rollouts.jsonl")

    whole, killed = folders
    for renames in (8, 7, 9):
        program = [sys.executable, "-c", PROGRAM, str(renames), *arguments(killed)]
        done = subprocess.run(program, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr[-4000:]
        # What vLLM would load is whole at any time.
        Eagle3().read(killed / "draft").draft()
    # What was held is looked at before it is removed.
    kept = SimpleNamespace(
        copyfile=shutil.copyfile, rmtree=lambda path: path.rename(path.parents[1] / "kept")
    )
    monkeypatch.setattr(warming, "shutil", kept)
    lengths = []
    for folder in folders:
        assert main(arguments(folder)) == 0
        with closing(sqlite3.connect(folder / "kept" / "registry" / "samples" / FILE)) as db:
            rows = db.execute("SELECT held_out, times_drawn, tokens FROM samples").fetchall()
        assert len(rows) == COUNT
        assert {(held, times) for held, times, _ in rows} == {(0, EPOCHS), (1, 0)}
        assert sum(tokens for *_, tokens in rows) == sum(len(p) + len(a) for p, a in drawn)
        draft = Eagle3().read(folder / "draft").draft()
        lengths.append(fresh.acceptance_length(draft, 3))
    assert lengths[1] == pytest.approx(lengths[0], rel=0.1) and min(lengths) > 1.25
    assert report(whole)["tokens"] == report(killed)["tokens"] == expected_tokens(drawn)
