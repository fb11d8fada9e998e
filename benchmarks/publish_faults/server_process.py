"""A rollout server in memory (``memory_server``) in a process of its own, which may be killed.

What goes wrong next is written into a file, read once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from benchmarks.publish_faults.memory_server import Listener, MemoryEngine, control_plane
from rollout_server.control import service
from rollout_server.control.acceptance_counts import AcceptanceTracker
from rollout_server.control.changes import Change, Result, UntrustedEngineError
from rollout_server.control.stages import Key, StageStore
from rollout_server.vllm.launch import access_of, add_access_options
from rollout_server.vllm.plugins import Settings
from slipstream.errors import RefusedError
from slipstream.serving.identity import Access
from slipstream.v1 import rollout_server_pb2 as pb

TRAFFIC = "traffic.json"
"""Steps per second and, by draft version ("": any other), the rate accepted at each position."""
TICK_SECONDS = 0.02

DRAFTS = 4.3
"""Drafts that fit into the store: the live one, the one before, and what is staged."""


class Fault:
    """The next fault of this process: a word in a file, taken once.

    Args:
        path: written by the harness.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def folder(self) -> Path:
        """The harness's."""
        return self._path.parent

    def take(self, *words: str) -> str:
        """The word in the file if it is one of these; it is gone then."""
        if not self._path.exists():
            return ""
        word = self._path.read_text()
        if word not in words:
            return ""
        self._path.unlink()
        return word


class _Engine(MemoryEngine):
    """That fails, or dies, when told to."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault

    async def apply(self, changes: Sequence[Change]) -> Result:
        word = self._fault.take("die-before", "die-after", "refuse", "worker")
        if word == "die-before":
            _die()
        if word == "refuse":
            raise RefusedError("commit", "a fault", "none", "try again", grpc.StatusCode.ABORTED)
        if word == "worker":
            raise UntrustedEngineError("the worker died in the middle")
        result = await super().apply(changes)
        if word == "die-after":
            _die()
        return result

    async def read_back(self) -> list[pb.NotReady]:
        if self._fault.take("damage"):
            self.memory = "differs"
        return await super().read_back()


class _Store(StageStore):
    """That fails to write, or dies writing, when told to."""

    def __init__(self, directory: Path, capacity: int, fault: Fault) -> None:
        super().__init__(directory, capacity)
        self._fault = fault

    def write(self, folder: Path, key: Key, tensor: Any) -> None:
        word = self._fault.take("die-staging", "disk-full")
        if word == "die-staging":
            _die()
        if word == "disk-full":
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            raise RefusedError("tensors", "No space left on device", "space", "make some", code)
        super().write(folder, key, tensor)


def serve(
    draft: str,
    port: int,
    fault_file: str,
    options: Sequence[str] = (),
    drafts: float = DRAFTS,
    message_seconds: float = service.MESSAGE_SECONDS,
) -> None:
    """Run until SIGTERM or a fault. The process's whole life.

    Args:
        draft: folder of the draft that it is started with.
        port: of the control plane.
        fault_file: see ``Fault``.
        options: of rollout-server's own that say who may use the control plane.
        drafts: see ``DRAFTS``.
        message_seconds: that it waits for a message.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    add_access_options(parser)
    parser.set_defaults(control_host="127.0.0.1")
    access = access_of(parser.parse_args(options))
    service.MESSAGE_SECONDS = message_seconds
    capacity = int(drafts * (Path(draft) / "model.safetensors").stat().st_size)
    asyncio.run(_serve(Path(draft), port, Fault(Path(fault_file)), access, capacity))


async def _serve(draft_dir: Path, port: int, fault: Fault, access: Access, capacity: int) -> None:
    # Beside the fault file, where the harness clears it away after a kill.
    store = _Store(Path(tempfile.mkdtemp(dir=fault.folder)), capacity, fault)
    tracker, settings = AcceptanceTracker(), Settings(draft_dir, draft_dir, access)
    control, servicer = await control_plane(_Engine(fault), store, settings, tracker)
    server = Listener(servicer, control, settings)
    await server.start("127.0.0.1", port)
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    cut: Callable[[], str] = lambda: fault.take("cut")  # noqa: E731
    try:
        while not over.is_set():
            if cut():
                # The connection goes, the process and what it serves stay.
                await server.stop()
                server = Listener(servicer, control, settings)
                await server.start("127.0.0.1", port)
            _draft(tracker, fault.folder / TRAFFIC)
            await asyncio.sleep(TICK_SECONDS)
    finally:
        await server.stop()
        store.close()


def _draft(tracker: AcceptanceTracker, traffic: Path) -> None:
    """Verify as many steps as a tick has, and accept what the live draft is good for."""
    if tracker.live is not None and traffic.exists():
        said = json.loads(traffic.read_text())
        steps = round(said["steps_per_second"] * TICK_SECONDS)
        rates = said["accepted"].get(str(tracker.live), said["accepted"][""])
        accepted = [round(steps * rate) for rate in rates]
        tracker.record(steps, steps * len(rates), sum(accepted), accepted)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
