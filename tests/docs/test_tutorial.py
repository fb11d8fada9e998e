"""docs/tutorial.md from its first block to its last, as it is printed, on real vLLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.arithmetic_grpo.processes import Service, Services, free_port

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
PORTS = ("8000", "50061", "50051", "9464")
READY_SECONDS = 200.0


class Reader:
    """Somebody who types the page: other ports, a folder elsewhere, the same words."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self._ports = {port: str(free_port()) for port in PORTS}
        self._server: ExitStack | None = None
        self.said = ""

    def here(self, text: str) -> str:
        for port, other in self._ports.items():
            text = re.sub(rf"\b{port}\b", other, text)
        return text.replace("runs/tutorial", str(self.folder))

    def type(self, block: str) -> None:
        for line in self.here(block.replace("\\\n", " ")).splitlines():
            words = line.replace("$POLICY", "examples/sorting_grpo/policy").split()
            if words[:1] == ["."] or words[:1] == ["export"]:
                continue  # the environment is active
            if words[1:2] == ["serve"] and "--check" not in words:
                self._start(words)
            else:
                if words[:1] == ["draft-trainer"] and words[1] in ("status", "doctor", "releases"):
                    # The page's trainer listens where these ask by default.
                    words += ["--address", f"127.0.0.1:{self._ports['50051']}"]
                self.run(words)

    def run(self, words: list[str]) -> None:
        done = subprocess.run(
            words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        self.said = done.stdout

    def _start(self, words: list[str]) -> None:
        if words[0] == "rollout-server":
            port = self._ports["50061"]
            if self._server is not None:
                self._server.close()
            self._server = stack = self._stack.enter_context(ExitStack())
        else:
            # The port of the page is the default of [server].
            port, stack = self._ports["50051"], self._stack
            words += ["--set", f"server.port={port}"]
            words += ["--set", f"server.metrics_port={self._ports['9464']}"]
        log = self.folder / f"{words[0]}-{time.monotonic_ns()}.log"
        service = Service(words[0], words, log, f"127.0.0.1:{port}", environment())
        stack.enter_context(Services(service))
        service.wait_ready(READY_SECONDS)


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    with ExitStack() as stack:
        yield Reader(tmp_path, stack)


@pytest.mark.timeout(900)
def test_every_step_works_as_it_is_printed(reader: Reader) -> None:
    steps = re.findall(r"```(sh|python|toml)\n(.*?)```", PAGE, re.DOTALL)
    assert len(steps) >= 12
    for language, block in steps:
        if language == "sh":
            reader.type(block)
        elif language == "toml":
            (reader.folder / "trainer.toml").write_text(reader.here(block))
        elif "sys.argv" in block:
            (reader.folder / "train.py").write_text(reader.here(block))
        else:
            reader.run([sys.executable, "-c", reader.here(block)])
    reader.type("draft-trainer status --json")
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
