"""The parts of a transport: the ring's space and file, the block, checksums, float8, framing."""

from __future__ import annotations

import os
import random
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError

from draft_trainer.ingest.ingest import _cut
from policy_bridge.connection import RingSpace
from slipstream import tensors as framing
from slipstream.checksum import (
    BLOCK_BYTES,
    CRC32,
    KINDS,
    CheckedCopy,
    all_finite,
    checksum_of,
)
from slipstream.errors import RefusedError
from slipstream.sample import PackedTensors, layout_of, tensors_in, write_block
from slipstream.shm import HEADER_BYTES, RingFile, remove_stale
from slipstream.tensors import frame, frames, quantize, through_float8, unframe
from slipstream.v1 import draft_trainer_pb2 as pb


def test_space_is_handed_out_in_order_and_wraps() -> None:
    space = RingSpace(4096, 4096 + 640)
    starts = [space.take(200, 0.0) for _ in range(2)]
    assert starts == [4096, 4096 + 256]
    assert space.take(200, 0.0) is None
    space.give_back(4096)
    # 128 are left at the end: the part goes to the beginning.
    assert space.take(200, 0.0) == 4096
    assert space.take(64, 0.0) is None
    space.give_back(4096 + 256)
    assert space.take(300, 0.0) == 4096 + 256
    assert space.take(641, 0.0) is None
    assert space.capacity == 640


def test_parts_given_back_out_of_order_are_used_after_the_older_ones() -> None:
    space = RingSpace(0, 256)
    for start in (0, 64, 128, 192):
        assert space.take(1, 0.0) == start
    space.give_back(64)
    space.give_back(192)
    assert space.take(1, 0.0) is None
    space.give_back(0)
    assert [space.take(1, 0.0), space.take(1, 0.0), space.take(1, 0.0)] == [0, 64, None]


def test_parts_never_overlap_whatever_the_order() -> None:
    generator = random.Random(0)
    space = RingSpace(4096, 4096 + 64 * 50)
    held: dict[int, int] = {}
    taken = 0
    for _ in range(20_000):
        if held and generator.random() < 0.5:
            start = generator.choice(list(held))
            del held[start]
            space.give_back(start)
        else:
            size = generator.randrange(1, 64 * 12)
            start = space.take(size, 0.0)
            if start is None:
                continue
            taken += 1
            assert start % 64 == 0 and start >= 4096 and start + size <= 4096 + 64 * 50
            for other, length in held.items():
                assert start + size <= other or other + length <= start
            held[start] = size
    assert taken > 3000
    for start in list(held):
        space.give_back(start)
    assert space.take(space.capacity, 0.0) == 4096


def test_a_full_ring_blocks_until_its_deadline_and_wakes_when_there_is_room() -> None:
    space = RingSpace(0, 64)
    assert space.take(64, 0.0) == 0
    assert space.take(64, 0.01) is None
    found: list[int | None] = []
    waiter = threading.Thread(target=lambda: found.append(space.take(64, 30.0)))
    waiter.start()
    space.give_back(0)
    waiter.join(30.0)
    assert found == [0]


def test_both_ends_of_a_ring_see_the_same_bytes(tmp_path: Path) -> None:
    trainer = RingFile.create(tmp_path, 1 << 16)
    bridge = RingFile.attach(tmp_path, trainer.name, trainer.nbytes, trainer.nonce)
    trainer.remove_name()
    assert list(tmp_path.iterdir()) == []
    bridge.span(HEADER_BYTES, 5)[:] = np.frombuffer(b"hello", np.uint8)
    assert trainer.span(HEADER_BYTES, 5).tobytes() == b"hello"
    trainer.check()
    os.ftruncate(bridge._descriptor, 4096)
    for end in (trainer, bridge):
        with pytest.raises(RefusedError, match="found 4096 bytes, expected 65536"):
            end.check()
        end.close()
        end.close()


@pytest.mark.parametrize("name", ["../etc/passwd", "slipstream-ring-", "x", ""])
def test_a_ring_is_opened_only_by_a_name_that_can_be_one(tmp_path: Path, name: str) -> None:
    with pytest.raises(RefusedError, match="shared_memory"):
        RingFile.attach(tmp_path, name, 1 << 16, bytes(16))


def test_another_size_nonce_or_format_is_not_the_trainers_ring(tmp_path: Path) -> None:
    ring = RingFile.create(tmp_path, 1 << 16)
    for nbytes, nonce in ((1 << 15, ring.nonce), (ring.nbytes, bytes(16))):
        with pytest.raises(RefusedError, match="another size, format or nonce"):
            RingFile.attach(tmp_path, ring.name, nbytes, nonce)
    os.pwrite(ring._descriptor, b"X", 0)
    with pytest.raises(RefusedError, match="another size, format or nonce"):
        RingFile.attach(tmp_path, ring.name, ring.nbytes, ring.nonce)


def test_stale_rings_are_told_from_living_ones_by_their_lock(tmp_path: Path) -> None:
    living = RingFile.create(tmp_path, 1 << 16)
    dead = RingFile.create(tmp_path, 1 << 16)
    dead.close()
    (tmp_path / "slipstream-ring-notes.txt").write_text("somebody else's")
    assert remove_stale(tmp_path) == [dead.name]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [living.name, "slipstream-ring-notes.txt"]
    )


def test_no_room_for_a_ring_is_a_refusal_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"server\.shared_memory"):
        RingFile.create(tmp_path, 1 << 60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [3, 16, 37, 700])
def test_a_block_has_every_tensor_where_it_belongs(dtype: torch.dtype, tokens: int) -> None:
    layout = layout_of(tokens, 3, 20, dtype)
    generator = torch.Generator().manual_seed(tokens)
    given = PackedTensors(
        token_ids=torch.randint(0, 99, (tokens,), generator=generator).int(),
        positions=torch.arange(tokens, dtype=torch.int32),
        segment_ids=torch.arange(tokens, dtype=torch.int32) // 2,
        sampled_logprobs=-torch.rand(tokens, generator=generator),
        sampled_logits=torch.randn(tokens, generator=generator),
        loss_mask=torch.rand(tokens, generator=generator) > 0.5,
        aux=torch.randn(tokens, 60, generator=generator).to(dtype),
        final=torch.randn(tokens, 20, generator=generator).to(dtype),
        scales=torch.empty(0),
    )
    block = torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8)
    write_block(given, layout, block.numpy())
    assert layout.nbytes % 64 == 0
    assert layout.aux_at % 64 == layout.final_at % 64 == 0
    back = tensors_in(block, layout)
    for name in vars(given):
        assert torch.equal(getattr(back, name).flatten(), getattr(given, name).flatten()), name
    assert torch.equal(back.aux, given.aux) and torch.equal(back.final, given.final)
    padding = torch.ones_like(block, dtype=torch.bool)
    width = tokens * 20 * dtype.itemsize
    for at, size in ((0, 21 * tokens), (layout.aux_at, 3 * width), (layout.final_at, width)):
        padding[at : at + size] = False
    assert not block[padding].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_hashed_as_a_whole_and_checked_from_where_states_begin(kind: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(BLOCK_BYTES + 1000, generator=generator).bfloat16()
    source = values.view(torch.uint8).numpy().copy()
    whole = checksum_of([source], kind)
    if kind == CRC32:
        assert whole == zlib.crc32(source)
    for nan_at, finite in ((None, True), (100, True), (700, False), (len(values) - 1, False)):
        given = values.clone()
        if nan_at is not None:
            given[nan_at] = float("nan")
        data = given.view(torch.uint8).numpy()
        copy = CheckedCopy(np.empty_like(data), kind, torch.bfloat16, states_at=1400)
        for start in (0, 1000, 500_002, len(data)):
            copy.put(data[copy._at : max(start, copy._at)])
        assert copy.finite == finite
        assert copy.checksum == checksum_of([data], kind)
        assert (copy.checksum == whole) == (nan_at is None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_finiteness_is_exact_for_every_bit_pattern(dtype: torch.dtype) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32)
    # Every 31st, and all around the infinities of each format.
    magnitude = bits & 0x7FFF
    near = ((magnitude - 0x7F80).abs() < 99) | ((magnitude - 0x7C00).abs() < 99)
    bits = bits[near | (bits % 31 == 0)]
    if dtype == torch.float32:
        patterns = (bits << 16) | 0x1
        patterns = torch.cat((patterns, bits << 16))
    else:
        patterns = bits.to(torch.uint16).view(torch.int16)
    values = patterns.view(dtype)
    wanted = torch.isfinite(values.float())
    data = values.view(torch.uint8).view(len(values), -1).numpy()
    assert [all_finite(row, dtype) for row in data] == wanted.tolist()
    largest = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(torch.cat((largest, -largest)).view(torch.uint8).numpy(), dtype)


def test_float8_restores_each_value_to_a_sixteenth_and_outliers_to_themselves() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3000, 2 * 64, generator=generator)
    # Layers of very different sizes, and massive activations as real residual streams have them.
    states[:, 64:] *= 300.0
    states[:, 5] = 900.0
    states[7] = 0.0
    values, scales = quantize(states.bfloat16(), 64)
    assert (values.dtype, scales.shape) == (torch.float8_e4m3fn, (2, 3000))
    assert scales[:, 7].tolist() == [1.0, 1.0]
    back = through_float8(states.bfloat16(), 64).float()
    exact = states.bfloat16().float()
    error = (back - exact).abs()
    step = scales.T.repeat_interleave(64, dim=1)
    # Half a unit of three mantissa bits, half the smallest subnormal, bfloat16's own rounding.
    bound = exact.abs() * (2.0**-4 + 2.0**-8) + step * 2.0**-10 * 1.01
    assert bool((error <= bound).all())
    assert float((error > exact.abs() * 2.0**-5).float().mean()) > 0.01
    assert torch.equal(back[:, 5][exact[:, 5] != 0], exact[:, 5][exact[:, 5] != 0])
    bad = states.bfloat16()
    bad[0, 0] = float("nan")
    assert not bool(torch.isfinite(quantize(bad, 64)[1]).all())


def requests() -> pb.StreamStatesRequest:
    sample = pb.VerifierStates(sample_id="a" * 200, policy_version=3, temperature=0.5)
    return pb.StreamStatesRequest(batch=pb.SampleBatch(samples=[sample] * 3))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 70_000])
def test_a_frame_is_what_protobuf_would_write(size: int) -> None:
    payload = np.arange(size, dtype=np.uint64).astype(np.uint8)
    data = frame(requests(), [payload[: size // 2], payload[size // 2 :]])
    parsed = pb.StreamStatesRequest.FromString(data)
    assert parsed.payload == payload.tobytes()
    whole = requests()
    whole.payload = payload.tobytes()
    assert data == whole.SerializeToString()
    for given in (
        data,
        frame(pb.StreamStatesRequest(payload=payload.tobytes())) + frame(requests()),
    ):
        framed = unframe(given)
        assert framed.request == requests()
        assert (framed.payload.tobytes(), framed.nbytes) == (payload.tobytes(), len(given))


@pytest.mark.parametrize("size", [0, 256, 257, 1000])
def test_a_long_payload_goes_ahead_in_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(framing, "PIECE_BYTES", 256)
    payload = np.arange(size, dtype=np.uint64).astype(np.uint8)
    *ahead, last = [unframe(b"".join(parts)) for parts in frames(requests(), [payload])]
    assert len(ahead) == max(0, round(size / 256) - 1)
    assert all(len(framed.payload) % 64 == 0 for framed in ahead)
    assert all(framed.request == pb.StreamStatesRequest() for framed in ahead)
    whole = last.behind(ahead)
    assert whole.request == requests()
    assert np.concatenate([*whole.ahead, whole.payload]).tobytes() == payload.tobytes()
    assert whole.nbytes == sum(framed.nbytes for framed in (*ahead, last))


@pytest.mark.parametrize(("length", "whole"), [(128, True), (100, False)])
def test_a_span_over_pieces_is_cut_out_of_them(length: int, whole: bool) -> None:
    """Pieces that are not of whole floats, as another client may cut them, are put together."""
    data = np.arange(1000, dtype=np.uint64).astype(np.uint8)
    pieces = [data[start : start + length] for start in range(0, 1000, length)]
    for start, end in ((0, 64), (64, 1000), (0, 1000), (128, 128)):
        found = _cut(pieces, start, end)
        assert b"".join(part.tobytes() for part in found) == data[start:end].tobytes()
        assert all(len(part) % 64 == 0 for part in found[:-1])
    assert (len(_cut(pieces, 0, 1000)) > 1) == whole


@pytest.mark.parametrize("keep", [1, 3, 100, -1])
def test_a_cut_frame_is_an_error(keep: int) -> None:
    data = frame(requests(), [np.ones(300, np.uint8)])
    with pytest.raises(DecodeError):
        unframe(data[:keep])


def test_fields_of_a_later_revision_are_skipped() -> None:
    data = frame(requests(), [np.ones(300, np.uint8)])
    framed = unframe(b"\x78\x05" + data)  # Field 15, a varint.
    assert framed.request.batch == requests().batch
    assert framed.payload.tobytes() == bytes([1]) * 300
