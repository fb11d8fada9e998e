"""Receives the tensors of a stage that the content store lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from rollout_server.checkpoint import check_finite
from rollout_server.control import Weights
from rollout_server.store import ContentStore, Key, Reservation
from slipstream.errors import RefusedError, clean
from slipstream.serving import Workers
from slipstream.tensors import ChunkAssembler, verified
from slipstream.v1 import tensor_pb2

BYTES_PER_SECOND = 8 << 20
"""Least rate at which a stage's bytes come."""


class Upload:
    """The missing tensors of one stage, while they arrive.

    Inside ``opened`` the store holds what arrives. A stage that is refused leaves nothing; one that
    was cut off leaves the tensors that were whole, until the store needs their capacity: staged
    again, it goes on from there.

    Attributes:
        missing: tensors that have not arrived yet, by name.
        needed_bytes: of those that the store lacked at first.
        bytes_received: that the client sent.
    """

    def __init__(
        self,
        specs: Sequence[tensor_pb2.TensorSpec],
        weights: Weights,
        store: ContentStore,
        workers: Workers,
    ) -> None:
        self._store = store
        self._workers = workers
        self._keys = {tensor.name: tensor.key for tensor in weights.source.tensors}
        self.missing: dict[str, tensor_pb2.TensorSpec] = {}
        contents: set[Key] = set()
        for spec in specs:
            key = self._keys[spec.name]
            if key not in store and key not in contents:
                self.missing[spec.name] = spec
                contents.add(key)
        self.needed_bytes = sum(self._keys[name].size for name in self.missing)
        self._arriving: dict[str, ChunkAssembler] = {}
        self._arrived: list[Key] = []
        self._reservation = Reservation(0)
        self.bytes_received = 0

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Reserve capacity and retain the content while the upload lasts."""
        keys, refused = list(self._keys.values()), False
        self._store.retain(keys)
        try:
            with self._store.reserve(self.needed_bytes) as reservation:
                self._reservation = reservation
                yield
        except RefusedError:
            refused = True
            raise
        finally:
            self._store.release(keys)
            if refused:
                self._store.drop(self._arrived)

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

    def _assembler(self, spec: tensor_pb2.TensorSpec) -> ChunkAssembler:
        if spec.name not in self._arriving:
            self._arriving[spec.name] = ChunkAssembler([spec], self._keys[spec.name].size)
        return self._arriving[spec.name]

    async def _store_one(
        self, spec: tensor_pb2.TensorSpec, tensor_of: Callable[[], torch.Tensor]
    ) -> None:
        key = self._keys[spec.name]
        written: list[Key] = []

        def verify_and_write() -> None:
            tensor = tensor_of()
            check_finite(spec.name, tensor)
            self._store.write(key, tensor)
            written.append(key)

        try:
            # Hashing and writing would hold up the API server's event loop.
            await self._workers.run(verify_and_write)
        finally:
            # Also of a stage that was cancelled meanwhile: the file takes the store's bytes.
            if written:
                self._store.add(key, self._reservation)
                self._arrived.append(key)
                del self.missing[spec.name]
                self._arriving.pop(spec.name, None)
