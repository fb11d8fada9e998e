"""docs/tutorial.md from its first block to its last, as it is printed, on real vLLM."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from docs.first_hour import ROOT, TUTORIAL, Reader
from examples.arithmetic_grpo.processes import free_port

pytestmark = pytest.mark.slow

PORTS = ("8000", "50061", "50051", "9464")
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.mark.vllm
def test_tutorial_runs_as_printed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        reader = Reader(
            ROOT,
            Path(sys.executable).parent,
            stack,
            ports={port: str(free_port()) for port in PORTS},
            folder=tmp_path,
            env=ENVIRONMENT,
        )
        reader.page(TUTORIAL.read_text(encoding="utf-8"))
        assert len(reader.typed) >= 10
        reader.shell("", "draft-trainer status --json")
    status = json.loads(reader.said)
    assert int(status["policy_version"]) == 19 and int(status["train_steps"]) > 0
    # A trainer that does not keep up asks for fewer than all.
    assert int(status["samples_accepted"]) > 20 * 32 // 4
    assert status["servers"][0]["reachable"]
    warmup = json.loads((reader.folder / "draft" / "acceptance.json").read_text())
    assert warmup["acceptance_length"] > 1.5 > warmup["acceptance_length_at_start"]
