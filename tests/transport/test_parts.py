"""The parts of a transport: the file and its free parts, the sample, checksums, framing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError

from slipstream.errors import RefusedError
from slipstream.sample import Sample, layout_of
from slipstream.shm import SharedFile, remove_stale
from slipstream.tensors import all_finite, frame, unframe
from slipstream.v1 import draft_trainer_pb2 as pb

from .rig import samples


def test_shared_file_with_other_size_nonce_or_kind_refused(tmp_path: Path) -> None:
    made = SharedFile.create(tmp_path, 1 << 16)
    with pytest.raises(RefusedError, match="owner or size"):
        SharedFile.open(tmp_path, made.name, 1 << 15, made.nonce)
    with pytest.raises(RefusedError, match="format or nonce"):
        SharedFile.open(tmp_path, made.name, made.nbytes, bytes(16))
    os.pwrite(made._descriptor, b"X", 0)
    with pytest.raises(RefusedError, match="format or nonce"):
        SharedFile.open(tmp_path, made.name, made.nbytes, made.nonce)
    fifo = "slipstream-samples-" + "0" * 32
    os.mkfifo(tmp_path / fifo)
    with pytest.raises(RefusedError, match="of another kind"):
        SharedFile.open(tmp_path, fifo, made.nbytes, made.nonce)


def test_remove_stale_keeps_locked_and_foreign_files(tmp_path: Path) -> None:
    living = SharedFile.create(tmp_path, 1 << 16)
    dead = SharedFile.create(tmp_path, 1 << 16)
    dead.close()
    others = {"slipstream-samples-notes.txt", "slipstream-samples-" + "0" * 32}
    for name in others:
        (tmp_path / name).write_text("another program's")
    assert remove_stale(tmp_path) == [dead.name]
    assert {p.name for p in tmp_path.iterdir()} == {living.name, *others}


def test_shared_file_without_memory_refused_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="shared_memory"):
        SharedFile.create(tmp_path, 1 << 60)
    with pytest.raises(RefusedError, match="No such file"):
        SharedFile.create(tmp_path / "nowhere", 1 << 16)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [
        *((torch.bfloat16, tokens) for tokens in (3, 16, 37, 700)),
        (torch.float16, 37),
        (torch.float32, 37),
    ],
)
def test_sample_block_layout_holds_every_tensor(dtype: torch.dtype, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    given = {
        "token_ids": torch.randint(0, 99, (tokens,), generator=generator),
        "positions": torch.arange(tokens),
        "segment_ids": torch.arange(tokens) // 2,
        "sampled_logprobs": -torch.rand(tokens, generator=generator),
        "sampled_logits": torch.randn(tokens, generator=generator),
        "loss_mask": torch.rand(tokens, generator=generator) > 0.5,
        "aux": torch.randn(tokens, 60, generator=generator).to(dtype),
        "final_hidden": torch.randn(tokens, 20, generator=generator).to(dtype),
    }
    sample = Sample.pack("s", 3, 0.5, (1, 2, 5), **given)
    assert (sample.sample_id, sample.policy_version, sample.temperature) == ("s", 3, 0.5)
    layout, block = sample.layout, sample.block
    assert layout == layout_of(tokens, 3, 20, dtype)
    assert (sample.tokens, sample.nbytes) == (tokens, len(block))
    assert layout.nbytes % 64 == layout.aux_at % 64 == layout.final_at % 64 == 0
    for name, tensor in given.items():
        assert torch.equal(getattr(sample, name), tensor), name
    padding = torch.ones_like(block, dtype=torch.bool)
    width = tokens * 20 * dtype.itemsize
    for at, size in ((0, 21 * tokens), (layout.aux_at, 3 * width), (layout.final_at, width)):
        padding[at : at + size] = False
    assert not block[padding].any()
    dirty = Sample(sample.header, torch.full_like(block, 0xFF))
    dirty.clear_padding()
    assert not dirty.block[padding].any() and bool((dirty.block[~padding] == 0xFF).all())
    with pytest.raises(RefusedError, match="loss_mask"):
        sample.repacked(loss_mask=given["loss_mask"][1:])


def test_samples_of_one_prompt_share_group() -> None:
    first, *others = samples(3)
    assert len({first.group, *(sample.group for sample in others)}) == 3
    same = others[0].repacked(token_ids=torch.cat([first.token_ids[:4], others[0].token_ids[4:]]))
    assert same.group == first.group
    window = first.repacked(loss_mask=torch.ones_like(first.loss_mask))
    assert window.group == window.sample_id


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


def requests() -> pb.StreamStatesRequest:
    sample = pb.VerifierStates(sample_id="a" * 200, policy_version=3, temperature=0.5)
    return pb.StreamStatesRequest(batch=pb.SampleBatch(samples=[sample] * 3))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 70_000])
def test_frame_equals_protobuf_bytes(size: int) -> None:
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


@pytest.mark.parametrize("keep", [1, 3, 100, -1])
def test_frame_truncated_raises(keep: int) -> None:
    data = frame(requests(), [np.ones(300, np.uint8)])
    with pytest.raises(DecodeError):
        unframe(data[:keep])


def test_frame_unknown_field_is_skipped() -> None:
    data = frame(requests(), [np.ones(300, np.uint8)])
    framed = unframe(b"\x78\x05" + data)  # Field 15, a varint.
    assert framed.request.batch == requests().batch
    assert framed.payload.tobytes() == bytes([1]) * 300
