"""Both services in processes of their own, whose memory and log can be looked at."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from examples.arithmetic_grpo.processes import Service, free_port
from examples.local_services import ARITHMETIC, ONE_THREAD, script

PATIENCE = 120.0
DRAFTS = 8
"""Stages that the rollout server can hold."""

_CONFIG = """
[server]
port = {port}
metrics_port = 0
max_streams = {streams}
message_timeout_s = {seconds}
calls_per_s = 1e6
keepalive_s = 6.0
stream_idle_s = {idle}
[draft]
initial = "{draft}"
registry = "{registry}"
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


class Process(Service):
    """A service at ``health`` whose resources can be counted."""

    @property
    def text(self) -> str:
        """All that it wrote."""
        return self.log.read_text(errors="replace")

    @property
    def rss(self) -> int:
        """Bytes of memory, shared memory excluded."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")

    @property
    def threads(self) -> int:
        """The number of its threads."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    @property
    def files(self) -> int:
        """Open descriptors."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


def start_trainer(folder: Path, seconds: float, idle: float = 900.0, streams: int = 8) -> Process:
    """A trainer of the example's draft that hardly trains.

    Args:
        folder: empty.
        seconds: ``server.message_timeout_s``.
        idle: ``server.stream_idle_s``.
        streams: ``server.max_streams``.
    """
    config, port = folder / "trainer.toml", free_port()
    settings = {"port": port, "seconds": seconds, "idle": idle, "streams": streams}
    folders = {"draft": ARITHMETIC / "draft", "registry": folder / "registry"}
    config.write_text(_CONFIG.format(**settings, **folders))
    command = [script("draft-trainer"), "serve", "--config", str(config)]
    return _started("draft-trainer", command, folder, port)


def start_rollout_server(folder: Path, seconds: float) -> Process:
    """A rollout server's control plane of the example's draft, over an engine in memory."""
    port = free_port()
    arguments = (str(ARITHMETIC / "draft"), port, str(folder / "fault"))
    code = (
        "from benchmarks.publish_faults.server_process import serve;"
        f"serve(*{arguments}, drafts={DRAFTS}, message_seconds={seconds})"
    )
    return _started("rollout-server", [sys.executable, "-c", code], folder, port)


def _started(name: str, command: list[str], folder: Path, port: int) -> Process:
    process = Process(name, command, folder / "log", f"127.0.0.1:{port}", ONE_THREAD)
    process.start()
    try:
        process.wait_ready(PATIENCE)
    except BaseException:
        process.stop()
        raise
    return process
