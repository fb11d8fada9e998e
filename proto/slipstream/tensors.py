"""Tensors on the wire: whole ones inside a message, large ones in chunks.

Every decode checks shape, size and checksum and raises ``RefusedError`` naming
the field, so that a damaged or lying message never becomes a tensor.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping

import grpc
import torch

from slipstream.refusal import RefusedError
from slipstream.v1 import tensor_pb2

CHUNK_BYTES = 4 << 20

_DTYPES: dict[torch.dtype, tensor_pb2.DType] = {
    torch.float32: tensor_pb2.DTYPE_FLOAT32,
    torch.bfloat16: tensor_pb2.DTYPE_BFLOAT16,
    torch.float16: tensor_pb2.DTYPE_FLOAT16,
    torch.int64: tensor_pb2.DTYPE_INT64,
    torch.int32: tensor_pb2.DTYPE_INT32,
    torch.bool: tensor_pb2.DTYPE_BOOL,
    torch.float8_e4m3fn: tensor_pb2.DTYPE_FLOAT8_E4M3,
}
_TORCH_DTYPES: dict[int, torch.dtype] = {value: key for key, value in _DTYPES.items()}


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
            "send a supported element type",
        )
    return _TORCH_DTYPES[value]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, little-endian and row-major, without a copy if contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]


def encode(tensor: torch.Tensor) -> tensor_pb2.Tensor:
    """A whole tensor as a message, with its CRC-32."""
    data = bytes_of(tensor)
    return tensor_pb2.Tensor(
        dtype=dtype_to_wire(tensor.dtype),
        shape=list(tensor.shape),
        data=bytes(data),
        crc32=zlib.crc32(data),
    )


def decode(message: tensor_pb2.Tensor, field: str) -> torch.Tensor:
    """The tensor inside a message, owning its memory.

    Args:
        message: from ``encode``, here or elsewhere.
        field: how a refusal names it.

    Raises:
        RefusedError: unknown dtype, negative size, wrong length or wrong CRC-32.
    """
    data = bytearray(checked_data(message, field))
    return from_bytes(data, dtype_from_wire(message.dtype, field), tuple(message.shape))


def checked_data(message: tensor_pb2.Tensor, field: str) -> bytes:
    """The bytes inside a message, of the right number and checksum. Raises as ``decode``."""
    dtype = dtype_from_wire(message.dtype, field)
    shape = tuple(message.shape)
    _check_shape(shape, field)
    expected = math.prod(shape) * dtype.itemsize
    data = message.data
    if len(data) != expected:
        raise RefusedError(
            f"{field}.data",
            f"{len(data)} bytes",
            f"{expected} bytes for shape {list(shape)} of {dtype}",
            "send product(shape) * itemsize bytes",
        )
    checksum = zlib.crc32(data)
    if checksum != message.crc32:
        raise RefusedError(
            f"{field}.crc32",
            f"{message.crc32:#010x}",
            f"{checksum:#010x} (of the bytes that arrived)",
            "send it again; if it repeats, look for a faulty link or an altered buffer",
        )
    return data


def from_bytes(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over ``data`` (no copy); ``len(data)`` must already be right."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def digest(tensor: torch.Tensor) -> bytes:
    """SHA-256 over a tensor's bytes (32 bytes)."""
    return hashlib.sha256(bytes_of(tensor)).digest()


def spec_of(name: str, tensor: torch.Tensor) -> tensor_pb2.TensorSpec:
    """Name, dtype, shape and content hash of a tensor."""
    return tensor_pb2.TensorSpec(
        name=name,
        dtype=dtype_to_wire(tensor.dtype),
        shape=list(tensor.shape),
        sha256=digest(tensor),
    )


def chunks_of(tensors: Mapping[str, torch.Tensor]) -> Iterator[tensor_pb2.TensorChunk]:
    """All tensors as chunks of at most ``CHUNK_BYTES``, one tensor after the other."""
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
                    f"{spec.name}.sha256",
                    f"{len(spec.sha256)} bytes",
                    "32 bytes",
                    "send the SHA-256 of the tensor's bytes",
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
        tensors = {}
        for name, spec in self._specs.items():
            buffer, size = self._buffers[name], _spec_bytes(spec)
            if len(buffer) != size:
                raise RefusedError(name, f"{len(buffer)} bytes", f"{size} bytes", "send all of it")
            if hashlib.sha256(buffer).digest() != spec.sha256:
                raise RefusedError(
                    f"{name}.sha256",
                    hashlib.sha256(buffer).hexdigest(),
                    spec.sha256.hex(),
                    "send it again; if it repeats, look for a faulty link or an altered buffer",
                )
            tensors[name] = from_bytes(buffer, dtype_from_wire(spec.dtype, name), tuple(spec.shape))
        return tensors


def _spec_bytes(spec: tensor_pb2.TensorSpec) -> int:
    _check_shape(tuple(spec.shape), spec.name)
    return math.prod(spec.shape) * dtype_from_wire(spec.dtype, spec.name).itemsize


def _check_shape(shape: tuple[int, ...], field: str) -> None:
    if any(size < 0 for size in shape):
        raise RefusedError(f"{field}.shape", list(shape), "sizes >= 0", "send the real shape")
