"""Both services in processes of their own, whose memory and log can be looked at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.robustness import rollout_process

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "arithmetic_grpo"
PATIENCE = 120.0

_CONFIG = """
[server]
port = 0
metrics_port = 0
max_streams = {streams}
message_timeout_s = {seconds}
calls_per_s = 1e6
keepalive_s = 2.0
stream_idle_s = {idle}
[draft]
initial = "{draft}"
registry = "registry"
[replay]
capacity_bytes = 16777216
held_out_fraction = 0.98
[training]
cpu_kernels = "off"
[gate]
min_anchors = 100000000
[economy]
mode = "always"
"""


class Process:
    """A service that runs until ``stop``.

    Args:
        command: of the process.
        folder: its working directory; the log is in it.
        ready: how the line begins that says its address after ``word``.
        word: see ``ready``.

    Attributes:
        address: host:port.
    """

    def __init__(self, command: list[str], folder: Path, ready: str, word: str) -> None:
        self._log = folder / "log"
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=folder, stdout=log, stderr=log, env=environment
            )
        self.address = self._wait(ready, word)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it did not end."""
        return self._process.poll() is None

    @property
    def log(self) -> str:
        """All that it wrote."""
        return self._log.read_text(errors="replace")

    @property
    def rss(self) -> int:
        """Bytes of memory, shared memory excluded."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")

    @property
    def peak(self) -> int:
        """The most bytes of memory that it ever took."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
        raise RuntimeError("no VmHWM in /proc")

    @property
    def threads(self) -> int:
        """How many it has."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    @property
    def files(self) -> int:
        """Open descriptors."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def stop(self) -> int:
        """SIGTERM; how it ended."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _wait(self, ready: str, word: str) -> str:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for line in self.log.splitlines():
                if line.startswith(ready):
                    return dict(part.split("=", 1) for part in line.split() if "=" in part)[word]
            if not self.alive:
                break
            time.sleep(0.05)
        self.stop()
        raise RuntimeError(f"not ready: {self.log[-2000:]}")


def start_trainer(
    folder: Path, seconds: float = 2.0, idle: float = 900.0, streams: int = 8
) -> Process:
    """A trainer of the example's draft that hardly trains.

    Args:
        folder: empty.
        seconds: ``server.message_timeout_s``.
        idle: ``server.stream_idle_s``.
        streams: ``server.max_streams``.
    """
    config = folder / "trainer.toml"
    settings = {"seconds": seconds, "idle": idle, "streams": streams}
    config.write_text(_CONFIG.format(**settings, draft=EXAMPLE / "draft"))
    run = "import sys; from draft_trainer.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", run, "serve", "--config", str(config)]
    return Process(command, folder, "draft-trainer ready:", "grpc")


def start_rollout_server(folder: Path, seconds: float = 2.0) -> Process:
    """A rollout server's control plane of the example's draft, over an engine in memory."""
    command = [sys.executable, "-m", rollout_process.__name__]
    command += [str(EXAMPLE / "draft"), str(folder), str(seconds)]
    return Process(command, folder, "rollout-server ready:", "control")
