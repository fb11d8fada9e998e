"""The store after the caller of a stage left."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import torch

from rollout_server.control.control import DRAFT, Weights
from rollout_server.control.stages import Key, StageStore
from rollout_server.control.upload import Upload
from slipstream.serving.server import Workers
from slipstream.tensors import chunks_of, spec_of
from tests.waiting import until


class SlowStore(StageStore):
    """Writes when it is let."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 1000)
        self.writing, self.go_on = threading.Event(), threading.Event()

    def write(self, folder: Path, key: Key, tensor: torch.Tensor) -> None:
        self.writing.set()
        assert self.go_on.wait(30)
        super().write(folder, key, tensor)


def test_cancelled_stage_leaves_no_file_being_written(tmp_path: Path) -> None:
    """Else it stays beyond the store's bound, and nothing finds it."""
    store, workers = SlowStore(tmp_path), Workers(1, "test")
    tensor = torch.arange(40, dtype=torch.float32)
    spec = spec_of("w", tensor)

    async def cancelled() -> None:
        weights = Weights.of(DRAFT, 1, [spec], store.new_folder())
        upload = Upload([spec], weights, store, workers)

        async def stage() -> None:
            with upload.opened():
                for chunk in chunks_of({"w": tensor}):
                    await upload.feed(chunk)

        caller = asyncio.ensure_future(stage())
        await asyncio.to_thread(store.writing.wait, 30)
        assert store.bytes == 160
        caller.cancel()
        await asyncio.sleep(0)
        store.go_on.set()
        await asyncio.wait({caller})
        assert caller.cancelled()

    asyncio.run(cancelled())
    workers.close()
    assert store.bytes == 0
    until(lambda: list(tmp_path.iterdir()) == [])
