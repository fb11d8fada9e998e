"""A rollout server's real control plane over an engine in memory: ``python -m ... DRAFT FOLDER S``.

As ``benchmarks.publish_faults.server_process``, without its faults.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from benchmarks.publish_faults.control_plane import control_plane
from benchmarks.publish_faults.server_process import Fault, MemoryEngine
from rollout_server import service as admission
from rollout_server.store import ContentStore
from slipstream.security import open_to_all


async def serve(draft_dir: Path, folder: Path) -> None:
    """Run until SIGTERM. Eight drafts can be staged in ``folder / "store"``."""
    capacity = 8 * (draft_dir / "model.safetensors").stat().st_size
    directory = folder / "store"
    directory.mkdir(exist_ok=True)
    store = ContentStore(directory, capacity)
    engine = MemoryEngine(Fault(folder / "fault"))
    server = (await control_plane(engine, store, draft_dir, open_to_all()))()
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
