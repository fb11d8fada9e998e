"""Tensors on the wire: in chunks, and blocks with a checksum.

Every decode checks shape, size and checksum and raises ``RefusedError`` naming the field, so that
no damaged message becomes a tensor.

``frame`` puts a request's payload behind what protobuf serialized: its Python runtime copies a
bytes field on the way into a message and out of it, and holds the interpreter's lock meanwhile.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import grpc
import numpy as np
import torch
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from slipstream.errors import RefusedError, StatusCode
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import tensor_pb2

Bytes = NDArray[np.uint8]

CHUNK_BYTES = 4 << 20

_DTYPES: dict[torch.dtype, tensor_pb2.DType] = {
    torch.float32: tensor_pb2.DTYPE_FLOAT32,
    torch.bfloat16: tensor_pb2.DTYPE_BFLOAT16,
    torch.float16: tensor_pb2.DTYPE_FLOAT16,
    torch.int64: tensor_pb2.DTYPE_INT64,
    torch.int32: tensor_pb2.DTYPE_INT32,
    torch.bool: tensor_pb2.DTYPE_BOOL,
}
_TORCH_DTYPES: dict[int, torch.dtype] = {value: key for key, value in _DTYPES.items()}

# Read as signed integers, +inf and the positive NaNs are the largest values of a float's format;
# read as unsigned ones, -inf and the negative NaNs are. Two maxima tell exactly.
_INFINITY: dict[torch.dtype, tuple[type, int, type, int]] = {
    torch.bfloat16: (np.int16, 0x7F80, np.uint16, 0xFF80),
    torch.float16: (np.int16, 0x7C00, np.uint16, 0xFC00),
    torch.float32: (np.int32, 0x7F80_0000, np.uint32, 0xFF80_0000),
}


def dtype_to_wire(dtype: torch.dtype) -> tensor_pb2.DType:
    """The wire's number for ``dtype``. Raises RefusedError for one that may not cross."""
    if dtype not in _DTYPES:
        names = ", ".join(str(known) for known in _DTYPES)
        raise RefusedError("dtype", dtype, f"one of {names}", "cast the tensor before sending it")
    return _DTYPES[dtype]


def dtype_from_wire(value: int, field: str) -> torch.dtype:
    """The torch dtype for a wire number. Raises RefusedError for an unknown one."""
    if value not in _TORCH_DTYPES:
        raise RefusedError(
            f"{field}.dtype",
            value,
            f"one of {sorted(_TORCH_DTYPES)} (slipstream.v1.DType)",
            "cast it",
        )
    return _TORCH_DTYPES[value]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, little-endian and row-major, without a copy if contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]


def from_bytes(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Make a tensor over ``data``, without a copy; ``len(data)`` must be right."""
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def digest(tensor: torch.Tensor) -> bytes:
    """SHA-256 over a tensor's bytes (32 bytes)."""
    return hashlib.sha256(bytes_of(tensor)).digest()


def checksum_of(block: Bytes) -> int:
    """XXH3 of uint8 [n], 64 bits, seed 0; runs without the interpreter's lock."""
    return xxh3_64_intdigest(block)  # type: ignore[arg-type]


def all_finite(data: Bytes, dtype: torch.dtype) -> bool:
    """Return whether bytes, read as ``dtype``, hold neither NaN nor infinity. Exact.

    Args:
        data: uint8 [n * itemsize], contiguous.
        dtype: bfloat16, float16 or float32.
    """
    if not len(data):
        return True
    signed, positive, unsigned, negative = _INFINITY[dtype]
    return bool(data.view(signed).max() < positive and data.view(unsigned).max() < negative)


def spec_of(name: str, tensor: torch.Tensor) -> tensor_pb2.TensorSpec:
    """Name, dtype, shape and content hash of a tensor."""
    return tensor_pb2.TensorSpec(
        name=name,
        dtype=dtype_to_wire(tensor.dtype),
        shape=list(tensor.shape),
        sha256=digest(tensor),
    )


def chunks_of(tensors: Mapping[str, torch.Tensor]) -> Iterator[tensor_pb2.TensorChunk]:
    """Yield all tensors as chunks of at most ``CHUNK_BYTES``, one tensor after the other."""
    for name, tensor in tensors.items():
        data = bytes_of(tensor)
        for offset in range(0, len(data), CHUNK_BYTES):
            yield tensor_pb2.TensorChunk(
                name=name, offset=offset, data=bytes(data[offset : offset + CHUNK_BYTES])
            )


class ChunkAssembler:
    """Puts chunked tensors together again and verifies them.

    Memory is bounded by the specs: a chunk outside its tensor is refused before
    it is stored.

    Args:
        specs: the tensors that will come. Others are refused.
        max_bytes: bound on their total size; exceeding it is refused at once.
    """

    def __init__(self, specs: Iterable[tensor_pb2.TensorSpec], max_bytes: int) -> None:
        self._specs = {spec.name: spec for spec in specs}
        total = 0
        for spec in self._specs.values():
            total += _spec_bytes(spec)
            if len(spec.sha256) != hashlib.sha256().digest_size:
                raise RefusedError(
                    f"{spec.name}.sha256", f"{len(spec.sha256)} bytes", "32 bytes", "send it"
                )
        if total > max_bytes:
            raise RefusedError(
                "tensors",
                f"{total} bytes",
                f"at most {max_bytes} bytes",
                "send a smaller model, or raise the receiver's limit",
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
        self._buffers = {name: bytearray() for name in self._specs}
        self.bytes_received = 0

    def feed(self, chunk: tensor_pb2.TensorChunk) -> None:
        """Take one chunk. Raises RefusedError: unknown name, a gap, or too many bytes."""
        if chunk.name not in self._specs:
            raise RefusedError(
                "chunk.name",
                chunk.name,
                f"one of {sorted(self._specs)}",
                "send only what is needed",
            )
        buffer = self._buffers[chunk.name]
        if chunk.offset != len(buffer):
            raise RefusedError(
                f"{chunk.name}.offset", chunk.offset, len(buffer), "send chunks in order, no gaps"
            )
        size = _spec_bytes(self._specs[chunk.name])
        if len(buffer) + len(chunk.data) > size:
            raise RefusedError(
                f"{chunk.name}.data", f"more than {size} bytes", f"{size} bytes", "check the shape"
            )
        buffer += chunk.data
        self.bytes_received += len(chunk.data)

    def finish(self) -> dict[str, torch.Tensor]:
        """The tensors by name. Raises RefusedError if one is short or its hash differs."""
        return {name: verified(spec, self._buffers[name]) for name, spec in self._specs.items()}


def verified(spec: tensor_pb2.TensorSpec, data: bytearray) -> torch.Tensor:
    """A tensor over its bytes. Raises RefusedError if it is short or its hash differs."""
    name, size = spec.name, _spec_bytes(spec)
    if len(data) != size:
        raise RefusedError(name, f"{len(data)} bytes", f"{size} bytes", "send all of it")
    found = hashlib.sha256(data)
    if found.digest() != spec.sha256:
        expected = spec.sha256.hex()
        raise RefusedError(f"{name}.sha256", found.hexdigest(), expected, "send it again")
    return from_bytes(data, dtype_from_wire(spec.dtype, name), tuple(spec.shape))


def _spec_bytes(spec: tensor_pb2.TensorSpec) -> int:
    if any(size < 0 for size in spec.shape):
        field, expected = f"{spec.name}.shape", "sizes >= 0"
        raise RefusedError(field, list(spec.shape), expected, "send the real shape")
    return math.prod(spec.shape) * dtype_from_wire(spec.dtype, spec.name).itemsize


def difference(block: memoryview, before: memoryview) -> bytes:
    """Return what makes ``block`` of ``before``, of the same even length: the words that differ.

    Little-endian: uint32, how many words of 16 bits the block has, how many edges follow, and the
    edges, where words begin to differ, then where they cease to, and so on; uint16, the words. In
    a block of which too much differs, all of it counts as different.
    """
    new, old = (np.frombuffer(data, "<u2") for data in (block, before))
    differs = new != old
    edges = np.flatnonzero(np.diff(differs, prepend=False, append=False))
    if 4 * len(edges) + 2 * np.count_nonzero(differs) >= len(block):
        edges, differs = np.array([0, len(new)]), np.ones_like(differs)
    head = np.concatenate(([len(new), len(edges)], edges)).astype("<u4")
    return head.tobytes() + new[differs].tobytes()


def patched(data: bytes, before: memoryview) -> bytes:
    """The block that ``difference`` was made of; ``before`` begins where it does, and may go on.

    Raises:
        RefusedError: ``data`` is not a difference, or of a longer block.
    """
    size = count = 0
    if len(data) >= 8:
        size, count = np.frombuffer(data, "<u4", 2).tolist()
    begin = 8 + 4 * count
    if begin <= len(data) and len(data) % 2 == count % 2 == 0 and 2 * size <= len(before):
        edges = np.frombuffer(data, "<u4", count, 8).astype(np.int64)
        words = np.frombuffer(data, "<u2", -1, begin) if begin < len(data) else edges[:0]
        inside = not count or (edges[-1] <= size and bool((np.diff(edges) > 0).all()))
        if inside and (edges[1::2] - edges[::2]).sum() == len(words):
            flips = np.zeros(size + 1, dtype=np.bool_)
            flips[edges] = True
            block = np.frombuffer(before, "<u2", size).copy()
            block[np.logical_xor.accumulate(flips)[:size]] = words
            return block.tobytes()
    found, expected = f"{len(data)} bytes", f"a difference of at most {len(before)} bytes"
    raise RefusedError("chunk.data", found, expected, "send the whole tensor, without a base")


SCHEMA_VERSION = 10
"""10: reasons of refusals, and of servers that are not ready, by which both sides decide."""


def check_schema(found: int, whose: str, upgrade: str) -> None:
    """Raise RefusedError (FAILED_PRECONDITION) unless a peer speaks this revision."""
    version = found or 1
    if version != SCHEMA_VERSION:
        raise RefusedError(
            "schema_version",
            f"{version} ({whose})",
            SCHEMA_VERSION,
            upgrade,
            StatusCode.FAILED_PRECONDITION,
        )


def release_digest(tensors: Iterable[tuple[str, str]]) -> bytes:
    """SHA-256 over (name, SHA-256 of the bytes in hex) of every tensor, ordered by name."""
    lines = (f"{name}\0{sha256}\n" for name, sha256 in sorted(tensors))
    return hashlib.sha256("".join(lines).encode()).digest()


def digest_of_specs(specs: Iterable[tensor_pb2.TensorSpec]) -> bytes:
    """The ``release_digest`` of a manifest's tensors."""
    return release_digest((spec.name, spec.sha256.hex()) for spec in specs)


_PAYLOAD = pb.StreamStatesRequest.PAYLOAD_FIELD_NUMBER
_CHUNK = pb.AnnouncePolicyRequest.CHUNK_FIELD_NUMBER
_CHUNK_DATA = tensor_pb2.TensorChunk.DATA_FIELD_NUMBER
# Wire types of protobuf's encoding, the last with the bytes of those of a fixed length.
_VARINT, _LENGTH_DELIMITED, _FIXED_BYTES = 0, 2, {1: 8, 5: 4}

# Bounds on the work that a client's message of 64 MiB causes: reading millions of fields of two
# bytes took a minute, and a batch of empty samples took gigabytes.
_MAX_FIELDS = 16
_MAX_BATCH_BYTES = 1 << 20
PIECE_BYTES = 1 << 20
"""The approximate payload of a message where a sample is longer than that."""


@dataclass(frozen=True)
class Framed:
    """A request as it arrived.

    Attributes:
        request: everything but the payload.
        payload: uint8 [n], read-only.
        nbytes: bytes of the serialized message, as credits count them.
        ahead: payloads that came ahead of it, in messages of their own.
    """

    request: pb.StreamStatesRequest
    payload: Bytes
    nbytes: int
    ahead: tuple[Bytes, ...] = ()

    def behind(self, ahead: Sequence[Framed]) -> Framed:
        """Add the messages that came ahead of this one."""
        if not ahead:
            return self
        nbytes = self.nbytes + sum(framed.nbytes for framed in ahead)
        return replace(self, nbytes=nbytes, ahead=tuple(framed.payload for framed in ahead))


Parts = list["bytes | Bytes"]
"""The parts of a serialized message, to be joined: the payload among them is not copied yet."""


def frame(request: pb.StreamStatesRequest, payload: Sequence[Bytes] = ()) -> bytes:
    """Serialize ``request`` with a payload that is copied once."""
    return b"".join(_parts(request, payload))  # type: ignore[arg-type]


def frames(request: pb.StreamStatesRequest, payload: Sequence[Bytes]) -> Iterator[Parts]:
    """Yield the messages of ``request``: one, after pieces of the payload if that is long.

    gRPC copies a message several times and takes fresh memory for each copy; in pieces that fit
    into a processor's cache, a byte costs a third of what it does in a message of 32 MiB.
    """
    length = sum(map(len, payload))
    count = round(length / PIECE_BYTES)
    if count > 1:
        # Even pieces: a message of a few left-over bytes would cost as much.
        step = -(-length // count)
        *ahead, last = [
            piece[start : start + step] for piece in payload for start in range(0, len(piece), step)
        ]
        for piece in ahead:
            yield _parts(pb.StreamStatesRequest(), [piece])
        payload = [last]
    yield _parts(request, payload)


def frame_chunk(name: str, offset: int, data: memoryview) -> bytes:
    """Serialize an AnnouncePolicyRequest with a chunk of a tensor, whose data is copied once."""
    chunk = tensor_pb2.TensorChunk(name=name, offset=offset).SerializeToString()
    chunk += _field(_CHUNK_DATA, len(data))
    return b"".join((_field(_CHUNK, len(chunk) + len(data)), chunk, data))


def unframe(data: bytes) -> Framed:
    """Read what ``frame`` wrote, in any order of fields.

    Raises:
        google.protobuf.message.DecodeError: not a StreamStatesRequest.
        RefusedError: more fields than one has, or a batch that describes too much.
    """
    at = fields = described = 0
    payload = np.empty(0, dtype=np.uint8)
    rest = []
    while at < len(data):
        begin = at
        fields += 1
        if fields > _MAX_FIELDS:
            raise RefusedError(
                "request",
                f"over {_MAX_FIELDS} fields",
                "a StreamStatesRequest",
                "send one at a time",
            )
        tag, at = _read_varint(data, at)
        length = 0
        if tag & 7 == _LENGTH_DELIMITED:
            length, at = _read_varint(data, at)
        elif tag & 7 == _VARINT:
            # Varints and fixed lengths are fields of a later revision, which protobuf skips.
            _, at = _read_varint(data, at)
        elif tag & 7 in _FIXED_BYTES:
            length = _FIXED_BYTES[tag & 7]
        else:
            raise DecodeError(f"wire type {tag & 7}")
        if tag == _PAYLOAD << 3 | _LENGTH_DELIMITED and at + length <= len(data):
            payload = np.frombuffer(data, np.uint8, length, at)
        else:
            rest.append(data[begin : at + length])
            described += len(rest[-1])
        at += length
        if described > _MAX_BATCH_BYTES:
            raise RefusedError(
                "batch",
                f"{described} bytes",
                f"at most {_MAX_BATCH_BYTES} bytes",
                "put the states into the payload or the file, or send smaller batches",
                StatusCode.RESOURCE_EXHAUSTED,
            )
    request = pb.StreamStatesRequest.FromString(b"".join(rest))
    return Framed(request, payload, len(data))


def _parts(request: pb.StreamStatesRequest, payload: Sequence[Bytes]) -> Parts:
    parts: Parts = [request.SerializeToString()]
    length = sum(map(len, payload))
    if length:
        parts += [_field(_PAYLOAD, length), *payload]
    return parts


def _field(number: int, length: int) -> bytes:
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(length)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number, and where it ends; one that is cut off ends the data, for protobuf to refuse."""
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, at
