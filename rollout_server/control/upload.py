"""Receives the tensors of a stage that no weights on this server have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from rollout_server.control.control import Weights
from rollout_server.control.draft_folder import check_finite
from rollout_server.control.stages import StageStore
from slipstream.errors import RefusedError, clean
from slipstream.serving.server import Workers
from slipstream.tensors import ChunkAssembler, verified
from slipstream.v1 import tensor_pb2

BYTES_PER_SECOND = 8 << 20
"""Least rate at which a stage's bytes come."""


class Upload:
    """The missing tensors of one stage, while they arrive.

    Attributes:
        missing: tensors that have not arrived yet, by name; empty before ``opened``.
        needed_bytes: of those that were missing at first.
        bytes_received: that the client sent.
    """

    def __init__(
        self,
        specs: Sequence[tensor_pb2.TensorSpec],
        weights: Weights,
        store: StageStore,
        workers: Workers,
    ) -> None:
        assert weights.folder is not None
        self._store, self._folder = store, weights.folder
        self._workers = workers
        self._specs = {spec.name: spec for spec in specs}
        self._keys = {tensor.name: tensor.key for tensor in weights.source.tensors}
        self._arriving: dict[str, ChunkAssembler] = {}
        self.missing: dict[str, tensor_pb2.TensorSpec] = {}
        self.needed_bytes = self.bytes_received = 0

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Receive the stage inside. Raises RefusedError: it does not fit into the store."""
        with self._store.receiving(self._folder, self._keys.values()) as lacking:
            # One name for each content.
            names = {key: name for name, key in self._keys.items() if key in lacking}
            self.missing = {name: self._specs[name] for name in names.values()}
            self.needed_bytes = sum(key.size for key in lacking)
            yield

    async def feed(self, chunk: tensor_pb2.TensorChunk) -> None:
        """Take one chunk. Raises RefusedError: unasked for, damaged, or not finite."""
        if chunk.name not in self.missing:
            raise RefusedError(
                "chunk.name",
                clean(chunk.name),
                "a name in StageNeeded",
                "send what is needed, once",
            )
        self.bytes_received += len(chunk.data)
        spec, size = self.missing[chunk.name], self._keys[chunk.name].size
        assembler = self._assembler(spec)
        assembler.feed(chunk)
        if assembler.bytes_received == size:
            await self._store_sent(spec)

    async def take(self, spec: tensor_pb2.TensorSpec, data: bytearray) -> None:
        """Take a whole tensor that was read here. Raises as ``feed``; it is still missing then."""
        await self._store_one(spec, lambda: verified(spec, data))

    async def finish(self) -> None:
        """Nothing more comes. Raises RefusedError if a tensor is short."""
        for spec in list(self.missing.values()):
            await self._store_sent(spec)

    async def _store_sent(self, spec: tensor_pb2.TensorSpec) -> None:
        assembler = self._assembler(spec)
        await self._store_one(spec, lambda: assembler.finish()[spec.name])
        self._arriving.pop(spec.name)

    def _assembler(self, spec: tensor_pb2.TensorSpec) -> ChunkAssembler:
        if spec.name not in self._arriving:
            self._arriving[spec.name] = ChunkAssembler([spec], self._keys[spec.name].size)
        return self._arriving[spec.name]

    async def _store_one(
        self, spec: tensor_pb2.TensorSpec, tensor_of: Callable[[], torch.Tensor]
    ) -> None:
        def verify_and_write() -> None:
            tensor = tensor_of()
            check_finite(spec.name, tensor)
            self._store.write(self._folder, self._keys[spec.name], tensor)

        # Hashing and writing would hold up the API server's event loop.
        await self._workers.run(verify_and_write)
        del self.missing[spec.name]
