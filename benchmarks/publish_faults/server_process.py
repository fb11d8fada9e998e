"""A rollout server's real control plane in a process of its own, over an engine in memory.

Staging, checks, content store, commits, roll backs, read-back and health are the product's;
only vLLM's workers are replaced, by a dictionary of tensors. What goes wrong next is written
into a file, read once.
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

from rollout_server import app, service
from rollout_server.acceptance import AcceptanceGuard, AcceptanceTracker
from rollout_server.engine import Description, UntrustedEngineError
from rollout_server.launch import access_of, add_access_options
from rollout_server.plugins import Settings
from rollout_server.reload import Change, Result
from rollout_server.store import ContentStore, Key, WeightSource
from slipstream.checkpoints import read_layout
from slipstream.errors import RefusedError
from slipstream.security import Access, ClientCredentials
from slipstream.tensors import digest

TRAFFIC = "traffic.json"
"""Steps per second and, by draft version ("": any other), the rate accepted at each position."""
TICK_SECONDS = 0.02

DRAFTS = 4.3
"""That fit into the content store; what was served long ago has to be sent again."""


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


class MemoryEngine:
    """The methods of ``VllmEngine`` over a dictionary."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._live: dict[str, dict[str, bytes]] = {}

    async def describe(self) -> Description:
        return Description(False, (), "bfloat16")

    async def prepare(self, source: WeightSource, keep: WeightSource | None) -> str:
        return ""

    async def apply(self, changes: Sequence[Change]) -> Result:
        word = self._fault.take("die-before", "die-after", "refuse", "worker")
        if word == "die-before":
            _die()
        if word == "refuse":
            raise RefusedError("commit", "a fault", "none", "try again", grpc.StatusCode.ABORTED)
        if word == "worker":
            raise UntrustedEngineError("the worker died in the middle")
        for change in changes:
            # Reads every byte, as a worker does.
            self._live[change.kind] = {n: digest(t) for n, t in change.new.weights()}
        if word == "die-after":
            _die()
        return Result(0.001)

    async def check_transfer(self, transfer: str) -> str:
        return ""

    async def set_draft_lengths(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    async def set_speculation(self, enabled: bool) -> float:
        return 0.0

    async def read_back(self) -> str:
        return "draft read back from memory: differs" if self._fault.take("damage") else ""

    def is_alive(self) -> bool:
        return True


class _Store(ContentStore):
    """That fails to write, or dies writing, when told to."""

    def __init__(self, directory: Path, capacity: int, fault: Fault) -> None:
        super().__init__(directory, capacity)
        self._fault = fault

    def write(self, key: Key, tensor: Any) -> None:
        word = self._fault.take("die-staging", "disk-full")
        if word == "die-staging":
            _die()
        if word == "disk-full":
            raise OSError(28, "No space left on device")
        super().write(key, tensor)


def _no_metrics(kind: str, outcome: str, result: Result | None) -> None: ...


async def control_plane(
    engine: Any,
    store: ContentStore,
    draft_dir: Path,
    access: Access,
    tracker: AcceptanceTracker | None = None,
    peers: ClientCredentials | None = None,
) -> Callable[[], service.ControlServer]:
    """What makes a server of one and the same state, again after each that was stopped.

    Args:
        engine: takes what is committed: it has the methods of ``VllmEngine``.
        store: of what is staged.
        draft_dir: the draft that it starts with; it serves as the policy's layout too.
        access: who may use it.
        tracker: counts what is drafted.
        peers: what other servers are shown.
    """
    tracker = tracker or AcceptanceTracker()
    settings = Settings(draft_dir, draft_dir, access, peers=peers)
    layout = read_layout(draft_dir)
    del layout["t2d"]
    control, servicer = await app.control_plane(
        engine, store, settings, layout, tracker, _no_metrics
    )

    def server() -> service.ControlServer:
        guard = AcceptanceGuard(tracker, settings.guard_drafts)
        return service.ControlServer(servicer, control, guard, lambda: True, lambda: None, access)

    return server


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
    tracker = AcceptanceTracker()
    control_server = await control_plane(MemoryEngine(fault), store, draft_dir, access, tracker)
    server = control_server()
    await server.start("127.0.0.1", port)
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    cut: Callable[[], str] = lambda: fault.take("cut")  # noqa: E731
    try:
        while not over.is_set():
            if cut():
                # The connection goes, the process and what it serves stay.
                await server.stop()
                server = control_server()
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
