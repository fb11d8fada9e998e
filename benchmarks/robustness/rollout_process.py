"""A rollout server's real control plane over an engine in memory: ``python -m ... DRAFT FOLDER S``.

As ``benchmarks.publish_faults.server_process``, without its faults.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from benchmarks.publish_faults.server_process import Fault, MemoryEngine
from rollout_server import admission
from rollout_server.acceptance_tracker import AcceptanceTracker
from rollout_server.content_store import ContentStore
from rollout_server.control import Committed, RolloutControl
from rollout_server.control_server import ControlServer
from rollout_server.endpoint import _expected_draft, _ingest_draft
from rollout_server.layout_check import Expected
from rollout_server.process import Settings
from rollout_server.readiness import AcceptanceGuard
from rollout_server.service import RolloutService
from rollout_server.state_message import StateMessage
from rollout_server.weight_source import WeightSource
from rollout_server.weights import DRAFT, POLICY, Weights
from slipstream.access import open_to_all


class _Nobody:
    """Takes no metrics."""

    def committed(self, kind: str, outcome: str, took: Committed | None) -> None: ...


async def serve(draft_dir: Path, folder: Path) -> None:
    """Run until SIGTERM. Stages have room for eight drafts in ``folder / "store"``."""
    engine = MemoryEngine(Fault(folder / "fault"))
    description = await engine.start()
    capacity = 8 * (draft_dir / "model.safetensors").stat().st_size
    directory = folder / "store"
    directory.mkdir(exist_ok=True)
    store = ContentStore(directory, capacity)
    access = open_to_all()
    settings = Settings(
        draft_dir, draft_dir, "127.0.0.1", 0, 3, "probabilistic", capacity, 512, access
    )
    draft, specs = _ingest_draft(settings, store)
    tracker = AcceptanceTracker()
    tracker.start(draft.version or 0)
    policy = Weights(POLICY, None, WeightSource(directory=str(draft_dir)))
    control = RolloutControl(engine, store, tracker, _Nobody(), draft, policy)
    expected = _expected_draft(specs, description)
    service = RolloutService(
        control,
        engine,
        store,
        tracker,
        {DRAFT: expected, POLICY: Expected(POLICY, expected.layout, "bfloat16")},
        StateMessage(control, 3, "probabilistic", "policy", 1),
    )
    guard = AcceptanceGuard(tracker, 512)
    server = ControlServer(service, control, engine, guard, lambda: True, lambda: None, access)
    await server.start("127.0.0.1", 0)
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    print(f"rollout-server ready: control=127.0.0.1:{server.port}", flush=True)
    try:
        await over.wait()
    finally:
        await server.stop()
        store.close()


def main() -> None:
    """The process's whole life."""
    draft, folder, seconds = sys.argv[1:]
    admission.MESSAGE_SECONDS = float(seconds)
    asyncio.run(serve(Path(draft), Path(folder)))


if __name__ == "__main__":
    main()
