"""Takes one stage: what is missing, its chunks, its verification.

Memory is bounded: room in the store is set aside before the first byte, and a
tensor leaves the heap as soon as it is complete and verified.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

import grpc
import torch

from rollout_server.checkpoint import TensorLayout
from rollout_server.content_store import ContentStore, Key, Room
from rollout_server.layout_check import Expected, check, check_finite
from rollout_server.weight_source import StagedTensor, WeightSource
from rollout_server.weights import DRAFT, POLICY, Weights
from slipstream.refusal import RefusedError
from slipstream.tensors import ChunkAssembler, dtype_from_wire
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import tensor_pb2

MAX_ID_CHARACTERS = 256

_KINDS = {pb.STAGE_KIND_DRAFT: DRAFT, pb.STAGE_KIND_POLICY: POLICY}


def kind_of(header: pb.StageHeader) -> str:
    """``DRAFT`` or ``POLICY``. Raises RefusedError for anything else, or without an id."""
    if header.kind not in _KINDS:
        raise RefusedError(
            "kind", header.kind, "STAGE_KIND_DRAFT or STAGE_KIND_POLICY", "say what it replaces"
        )
    if not header.stage_id:
        raise RefusedError("stage_id", "empty", "a name such as draft-7", "choose one")
    if len(header.stage_id) > MAX_ID_CHARACTERS:
        # It is in every ServerState: sixteen long ones made that too large for anybody to read.
        raise RefusedError(
            "stage_id",
            f"{len(header.stage_id)} characters",
            f"at most {MAX_ID_CHARACTERS}",
            "choose a name such as draft-7",
        )
    return _KINDS[header.kind]


def key_of(spec: tensor_pb2.TensorSpec) -> Key:
    """A tensor's place in the content store. Raises RefusedError: not a SHA-256."""
    dtype = dtype_from_wire(spec.dtype, spec.name)
    # Refuses a digest of another length and negative sizes.
    ChunkAssembler([spec], max_bytes=1 << 62)
    size = dtype.itemsize
    for length in spec.shape:
        size *= length
    return Key(spec.sha256.hex(), str(dtype).removeprefix("torch."), size)


def layout_of(spec: tensor_pb2.TensorSpec) -> TensorLayout:
    """A spec's dtype and shape."""
    return TensorLayout(key_of(spec).dtype, tuple(spec.shape))


def weights_of(
    kind: str,
    version: int,
    specs: Sequence[tensor_pb2.TensorSpec],
    store: ContentStore,
    *,
    stage_id: str = "",
    trained_against: int | None = None,
) -> Weights:
    """The weights that ``specs`` name, as they will be in the store."""
    keys = [key_of(spec) for spec in specs]
    return Weights(
        kind=kind,
        version=version,
        source=WeightSource(
            tensors=tuple(
                StagedTensor(spec.name, key.dtype, tuple(spec.shape), str(store.path(key)))
                for spec, key in zip(specs, keys, strict=True)
            )
        ),
        keys=tuple(keys),
        stage_id=stage_id,
        trained_against=trained_against,
        digests=tuple(sorted((spec.name, spec.sha256.hex()) for spec in specs)),
    )


class Upload:
    """The missing tensors of one stage, while they arrive.

    Use as a context: on leaving it without ``keep``, what arrived is forgotten.

    Args:
        specs: every tensor of the stage.
        expected: what they must look like.
        store: where they go.

    Raises:
        RefusedError: they do not fit the model or the store.
    """

    def __init__(
        self, specs: Sequence[tensor_pb2.TensorSpec], expected: Expected, store: ContentStore
    ) -> None:
        check(specs, expected)
        self._store = store
        self._keys = {spec.name: key_of(spec) for spec in specs}
        self._missing: dict[str, tensor_pb2.TensorSpec] = {}
        contents: set[Key] = set()
        for spec in specs:
            key = self._keys[spec.name]
            if key not in store and key not in contents:
                self._missing[spec.name] = spec
                contents.add(key)
        self.needed = list(self._missing)
        self._arriving: dict[str, ChunkAssembler] = {}
        self._arrived: list[Key] = []
        self._keep = False
        self._room = Room(0)
        self.bytes_received = 0

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Holds the room and the content while the upload lasts."""
        keys = list(self._keys.values())
        self._store.hold(keys)
        try:
            with self._store.room(self.needed_bytes) as room:
                self._room = room
                yield
        finally:
            self._store.release(keys)
            if not self._keep:
                self._store.drop(self._arrived)

    @property
    def needed_bytes(self) -> int:
        """Of all that was missing at first."""
        return sum(self._keys[name].size for name in self.needed)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing any more."""
        return not self._missing

    async def feed(self, chunk: tensor_pb2.TensorChunk) -> None:
        """Take one chunk. Raises RefusedError: unasked for, damaged, or not finite."""
        if chunk.name not in self._missing:
            raise RefusedError(
                "chunk.name",
                chunk.name,
                f"one of the names in StageNeeded that is not complete ({len(self._missing)})",
                "send only what is needed, once",
            )
        spec = self._missing[chunk.name]
        if chunk.name not in self._arriving:
            self._arriving[chunk.name] = ChunkAssembler([spec], self._keys[chunk.name].size)
        assembler = self._arriving[chunk.name]
        assembler.feed(chunk)
        self.bytes_received += len(chunk.data)
        if assembler.bytes_received == self._keys[chunk.name].size:
            await self._store_one(spec, assembler)

    async def finish(self) -> None:
        """The sender has no more. Raises RefusedError if a tensor is short."""
        for name, spec in list(self._missing.items()):
            assembler = self._arriving.get(name) or ChunkAssembler([spec], self._keys[name].size)
            await self._store_one(spec, assembler)

    def keep(self) -> None:
        """The stage was accepted."""
        self._keep = True

    async def _store_one(self, spec: tensor_pb2.TensorSpec, assembler: ChunkAssembler) -> None:
        key = self._keys[spec.name]
        # Hashing and writing would hold up the API server's event loop.
        await asyncio.to_thread(_verify_and_write, spec, assembler, self._store, key)
        self._store.add(key, self._room)
        self._arrived.append(key)
        del self._missing[spec.name]
        self._arriving.pop(spec.name, None)


def _verify_and_write(
    spec: tensor_pb2.TensorSpec, assembler: ChunkAssembler, store: ContentStore, key: Key
) -> None:
    tensor = assembler.finish()[spec.name]
    check_finite(spec.name, tensor)
    store.write(key, tensor)


def ingest(
    tensors: dict[str, torch.Tensor], specs: Sequence[tensor_pb2.TensorSpec], store: ContentStore
) -> None:
    """Put a checkpoint's tensors into the store, as if they had been staged.

    Raises:
        RefusedError: no room, or a value that is not finite.
    """
    for spec in specs:
        key = key_of(spec)
        if key in store:
            continue
        check_finite(spec.name, tensors[spec.name])
        with store.room(key.size) as room:
            store.write(key, tensors[spec.name])
            store.add(key, room)
        store.hold([key])


def refuse_shared(shared: Sequence[str]) -> None:
    """Refuse to stage while draft and verifier share memory (see ``aliasing``)."""
    if shared:
        raise RefusedError(
            "draft parameters in the verifier's memory",
            ", ".join(shared),
            "none but embed_tokens",
            "restart the server with a draft whose checkpoint has its own lm_head",
            grpc.StatusCode.FAILED_PRECONDITION,
        )
