"""The store after the caller of a stage left."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import torch

from rollout_server.control import DRAFT, Weights
from rollout_server.store import ContentStore, Key
from rollout_server.upload import Upload
from slipstream.serving import Workers
from slipstream.tensors import chunks_of, spec_of


class SlowStore(ContentStore):
    """Writes when it is let."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 1000)
        self.writing, self.go_on = threading.Event(), threading.Event()

    def write(self, key: Key, tensor: torch.Tensor) -> None:
        self.writing.set()
        assert self.go_on.wait(30)
        super().write(key, tensor)


def test_cancelled_stage_counts_file_being_written(tmp_path: Path) -> None:
    """Else it stays beyond the store's bound, and no eviction finds it."""
    store, workers = SlowStore(tmp_path), Workers(1, "test")
    tensor = torch.arange(40, dtype=torch.float32)
    spec = spec_of("w", tensor)

    async def cancelled() -> Upload:
        upload = Upload([spec], Weights.of(DRAFT, 1, [spec], store), store, workers)

        async def stage() -> None:
            with upload.opened():
                for chunk in chunks_of({"w": tensor}):
                    await upload.feed(chunk)

        caller = asyncio.ensure_future(stage())
        await asyncio.to_thread(store.writing.wait, 30)
        caller.cancel()
        await asyncio.sleep(0)
        store.go_on.set()
        await asyncio.wait({caller})
        assert caller.cancelled()
        return upload

    upload = asyncio.run(cancelled())
    workers.close()
    assert not upload.missing
    assert store.bytes == sum(path.stat().st_size for path in tmp_path.iterdir()) == 160
    with store.reserve(1000):
        assert store.bytes == 1000 and not list(tmp_path.iterdir())
