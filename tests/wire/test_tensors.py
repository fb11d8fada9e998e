"""Tensors on the wire: exact round trips, and no damaged message becomes a tensor."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slipstream.errors import RefusedError
from slipstream.tensors import (
    CHUNK_BYTES,
    ChunkAssembler,
    bytes_of,
    chunks_of,
    difference,
    digest,
    dtype_from_wire,
    dtype_to_wire,
    patched,
    spec_of,
)
from slipstream.v1 import tensor_pb2

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool]
SHAPES = [(), (0,), (1,), (3, 4), (2, 0, 5)]
SPECIAL = [float("nan"), float("inf"), float("-inf"), -0.0, 1e-45]
BASE = torch.arange(24).reshape(4, 6)


def make(dtype: torch.dtype, shape: tuple[int, ...] = (2, 3, 4)) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100
    return (values > 0) if dtype == torch.bool else values.to(dtype)


def received(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that went over the wire."""
    receiver = ChunkAssembler([spec_of("t", tensor)], 1 << 30)
    for chunk in chunks_of({"t": tensor}):
        receiver.feed(tensor_pb2.TensorChunk.FromString(chunk.SerializeToString()))
    return receiver.finish()["t"]


@pytest.mark.parametrize(
    "tensor",
    [
        *(make(dtype) for dtype in DTYPES),
        *(make(torch.bfloat16, shape) for shape in SHAPES),
        torch.tensor(SPECIAL),
        *(BASE.T, BASE[::2], BASE[:, 1:3], BASE[1].expand(3, 6)),
        torch.ones(2, requires_grad=True),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}",
)
def test_tensor_wire_round_trip_keeps_bits(tensor: torch.Tensor) -> None:
    back = received(tensor)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert bytes_of(back) == bytes_of(tensor.detach().clone()) == bytes_of(tensor)
    assert len(bytes_of(tensor)) == math.prod(tensor.shape) * tensor.dtype.itemsize
    assert digest(tensor) == digest(tensor.clone())
    assert dtype_from_wire(dtype_to_wire(tensor.dtype), "t") == tensor.dtype


def test_tensor_received_owns_writable_memory() -> None:
    sent = torch.zeros(3)
    received(sent).add_(1.0)
    assert torch.equal(sent, torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.complex64])
def test_tensor_dtype_outside_wire_refused(dtype: torch.dtype) -> None:
    with pytest.raises(RefusedError, match="dtype"):
        spec_of("t", torch.zeros(1, dtype=dtype))


@pytest.mark.parametrize(
    ("share", "most"),
    [(0.0, 8), (0.004, 2000), (0.025, 12_000), (0.5, 80_016), (1.0, 80_016)],
)
def test_a_difference_gives_back_every_bit(share: float, most: int) -> None:
    """A share of 40,000 words differs; steps of RL leave 97 to 99.6 % of bfloat16 values."""
    generator = torch.Generator().manual_seed(0)
    before = make(torch.bfloat16, (200, 200))
    now = before.clone()
    now[torch.rand(200, 200, generator=generator) < share] = float("nan")
    data = difference(bytes_of(now), bytes_of(before))
    assert len(data) <= most
    # The base goes on behind the block.
    longer = memoryview(bytes(bytes_of(before)) + b"more")
    assert patched(data, longer) == bytes(bytes_of(now))


def words(*head: int, data: bytes = b"") -> bytes:
    return np.array(head, "<u4").tobytes() + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        words(2),
        words(5, 0),  # longer than its base
        words(4, 2, 1),  # an edge is missing
        words(4, 1, 1),
        words(4, 2, 1, 3, data=b"abc"),  # a word is cut short
        words(4, 2, 1, 3, data=b"ab"),
        words(4, 2, 3, 1, data=b"abcd"),  # not ascending
        words(4, 4, 0, 2, 2, 3, data=b"abcdef"),
        words(4, 2, 3, 5, data=b"abcd"),  # beyond its end
        words(4, 0, data=b"ab"),
        words(4, 1 << 31, 0, 1, data=b"ab"),
    ],
)
def test_what_is_no_difference_is_refused(data: bytes) -> None:
    with pytest.raises(RefusedError, match="without a base"):
        patched(data, memoryview(bytes(8)))
    assert patched(words(4, 2, 1, 3, data=b"abcd"), memoryview(bytes(8))) == b"\0\0abcd\0\0"


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(CHUNK_BYTES // 4 + 100, 2, generator=generator),
        "small": torch.arange(5),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
    }


def assembler(sent: dict[str, torch.Tensor]) -> ChunkAssembler:
    return ChunkAssembler([spec_of(name, tensor) for name, tensor in sent.items()], 1 << 30)


def test_chunks_assemble_every_tensor() -> None:
    sent = tensors()
    receiver, chunks = assembler(sent), list(chunks_of(sent))
    assert all(0 < len(chunk.data) <= CHUNK_BYTES for chunk in chunks)
    assert [c.name for c in chunks] == ["large"] * 3 + ["small", "scalar"]
    for chunk in chunks:
        receiver.feed(chunk)
    got = receiver.finish()
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)
    assert receiver.bytes_received == sum(tensor.nbytes for tensor in sent.values())


def test_chunks_out_of_order_repeated_or_beyond_refused() -> None:
    sent = tensors()
    chunks = [chunk for chunk in chunks_of(sent) if chunk.name == "large"]
    receiver = assembler(sent)
    with pytest.raises(RefusedError, match=r"large\.offset"):
        receiver.feed(chunks[1])
    receiver.feed(chunks[0])
    with pytest.raises(RefusedError, match=r"large\.offset"):
        receiver.feed(chunks[0])
    receiver.feed(chunks[1])
    chunks[2].data += b"\0"
    with pytest.raises(RefusedError, match=r"large\.data"):
        receiver.feed(chunks[2])
    with pytest.raises(RefusedError, match=r"chunk\.name"):
        receiver.feed(tensor_pb2.TensorChunk(name="stranger", data=b"1"))


def test_chunks_missing_or_altered_refused() -> None:
    sent = {"w": torch.arange(8)}
    (chunk,) = chunks_of(sent)
    short = assembler(sent)
    with pytest.raises(RefusedError, match="0 bytes, expected 64 bytes"):
        short.finish()
    altered = assembler(sent)
    chunk.data = b"\1" + chunk.data[1:]
    altered.feed(chunk)
    with pytest.raises(RefusedError, match=r"w\.sha256"):
        altered.finish()


def test_tensor_spec_invalid_refused_before_first_byte() -> None:
    good = spec_of("w", torch.zeros(4))
    with pytest.raises(RefusedError, match="at most 15 bytes"):
        ChunkAssembler([good], 15)
    for name, value in (("sha256", b"short"), ("dtype", 0)):
        bad = tensor_pb2.TensorSpec()
        bad.CopyFrom(good)
        setattr(bad, name, value)
        with pytest.raises(RefusedError, match=name):
            ChunkAssembler([bad], 1 << 20)
    bad = tensor_pb2.TensorSpec()
    bad.CopyFrom(good)
    bad.shape[0] = -4
    with pytest.raises(RefusedError, match="shape"):
        ChunkAssembler([bad], 1 << 20)


def test_tensors_that_exceed_bound_together_refused() -> None:
    specs = [spec_of(name, torch.zeros(4)) for name in ("a", "b")]
    with pytest.raises(RefusedError, match="32 bytes, expected at most 31 bytes"):
        ChunkAssembler(specs, 31)
