"""docs/tutorial.md from its first block to its last, as it is printed, on real vLLM."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from docs.first_hour import ROOT, TUTORIAL, Reader, Typed, page, shortened
from examples.arithmetic_grpo.processes import free_port

PORTS = ("8000", "50061", "50051", "9464")
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.mark.vllm
def test_every_step_works_as_it_is_printed(tmp_path: Path) -> None:
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
        assert len(reader.typed) >= 12
        reader.shell("", "draft-trainer status --json")
    status = json.loads(reader.said)
    assert int(status["policy_version"]) == 19 and int(status["train_steps"]) > 0
    assert int(status["samples_accepted"]) >= 20 * 32 - 32
    assert status["servers"][0]["reachable"]
    events = [
        json.loads(line)
        for line in (reader.folder / "draft" / "training.jsonl").read_text().splitlines()
    ]
    lengths = [e["acceptance_length"] for e in events if e["event"] == "evaluation"]
    assert max(lengths) > 1.5 > lengths[0]


def test_what_is_exported_is_there_for_the_commands_after_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        reader = Reader(tmp_path, Path(sys.executable).parent, stack)
        reader.shell("", "export WORD=one  # why\nprintenv WORD")
        assert reader.said == "one\n"
        reader.shell("", "basename folder/$WORD")
        assert reader.said == "one\n" and [one.command for one in reader.typed][1:] == [
            "basename folder/$WORD"
        ]


def test_a_log_has_every_command_its_seconds_and_the_end_of_its_output() -> None:
    long = "\n".join(f"line {number}" for number in range(40))
    said = shortened(f"\x1b[31mred\x1b[0m\nstep 1 ━━━ 3%\n{long}\nhalf\rwhole\n", 3)
    assert said == "...\nline 38\nline 39\nwhole"
    typed = [Typed("Set up", "make setup", 300.0, ""), Typed("1. A draft", "init", 12.4, said)]
    text = page(typed, "abc")
    assert "took 5 minutes, 5 minutes of them" in text and "commit abc" in text
    assert "## 1. A draft\n\n12 s:\n\n```text\n$ init\n...\nline 38" in text
