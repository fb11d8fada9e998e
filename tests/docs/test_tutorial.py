"""docs/tutorial.md from its first block to its last, as it is printed, on real vLLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.arithmetic_grpo.processes import Service, Services, free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600.0
"""The longest that a command takes, or a service until it is ready."""
PORTS = ("8000", "50061", "50051", "9464")
HEALTH = {"rollout-server": "50061", "draft-trainer": "50051"}
"""The gRPC ports, where the health of a service is asked for."""
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

_BLOCK = re.compile(r"^```(sh|python|toml)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class _Reader:
    """A reader who types the tutorial.

    Args:
        stack: ends the services.
        folder: in place of ``runs/tutorial``.

    Attributes:
        typed: the number of commands so far.
        said: the output of the last one that ended.
    """

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self.folder = stack, folder
        self._scripts = Path(sys.executable).parent
        self._ports = {port: str(free_port()) for port in PORTS}
        self._env = {**os.environ, "PATH": f"{self._scripts}:{os.environ['PATH']}", **ENVIRONMENT}
        self._server: ExitStack | None = None
        self._exported: dict[str, str] = {}
        self.typed = 0
        self.said = ""

    def page(self, text: str) -> None:
        """Every block of a page in order. Raises RuntimeError: a command failed."""
        for language, block in _BLOCK.findall(text):
            if language == "sh":
                self.shell(block)
            elif language == "toml":
                (self.folder / "trainer.toml").write_text(self._here(block))
            elif "sys.argv" in block:
                (self.folder / "train.py").write_text(self._here(block))
            else:
                self._run("python", ["python", "-c", self._here(block)])

    def shell(self, block: str) -> None:
        """Every line of a block of shell."""
        for line in block.replace("\\\n", " ").splitlines():
            typed = " ".join(line.split())
            text = self._here(typed)
            for name, value in self._exported.items():
                text = text.replace(f"${name}", value)
            words = text.split()
            if words[:1] in ([], ["."]):
                continue  # the environment is active
            if words[0] == "export":
                name, _, value = words[1].partition("=")
                self._exported[name] = self._env[name] = value
                continue
            if words[1:2] == ["serve"] and "--check" not in words:
                self._start(words)
                continue
            asks = words[1:2] and words[1] in ("status", "doctor", "releases")
            if words[0] == "draft-trainer" and asks:
                # The page's trainer listens where these ask by default.
                words += ["--address", f"127.0.0.1:{self._ports['50051']}"]
            self._run(typed, words)

    def _here(self, text: str) -> str:
        for port, other in self._ports.items():
            text = re.sub(rf"\b{port}\b", other, text)
        return text.replace("runs/tutorial", str(self.folder))

    def _run(self, typed: str, words: list[str]) -> None:
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        self.said = done.stdout
        if done.returncode:
            raise RuntimeError(f"{typed}: exit status {done.returncode}\n{done.stdout[-4000:]}")
        self.typed += 1

    def _start(self, words: list[str]) -> None:
        stack, port = self._stack, HEALTH[words[0]]
        if words[0] == "rollout-server":
            if self._server is not None:
                self._server.close()
            self._server = stack = self._stack.enter_context(ExitStack())
        else:
            # The ports of the page are the defaults of [server].
            words += ["--set", f"server.port={self._ports['50051']}"]
            words += ["--set", f"server.metrics_port={self._ports['9464']}"]
        log = self.folder / f"{words[0]}-{self.typed}.log"
        health = f"127.0.0.1:{self._ports[port]}"
        words[0] = str(self._scripts / words[0])
        service = Service(words[0], words, log, health, self._env)
        stack.enter_context(Services(service))
        service.wait_ready(SECONDS)
        self.typed += 1


@pytest.mark.vllm
def test_tutorial_runs_as_printed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        reader = _Reader(stack, tmp_path)
        reader.page((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"))
        assert reader.typed >= 10
        reader.shell("draft-trainer status --json")
    status = json.loads(reader.said)
    assert int(status["policy_version"]) == 19 and int(status["train_steps"]) > 0
    # A trainer that does not keep up asks for fewer than all.
    assert int(status["samples_accepted"]) > 20 * 32 // 4
    assert status["servers"][0]["reachable"]
    warmup = json.loads((reader.folder / "draft" / "acceptance.json").read_text())
    assert warmup["acceptance_length"] > 1.5 > warmup["acceptance_length_at_start"]
