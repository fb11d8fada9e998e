"""Samples that are checked together get the verdict that each would get alone."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from draft_trainer.config import ReplayConfig
from draft_trainer.counters import Counters
from draft_trainer.ingest import arena
from draft_trainer.ingest import ingest as filling
from draft_trainer.ingest.arena import Extent
from draft_trainer.ingest.ingest import (
    Expected,
    Ingest,
    Memories,
    Outcome,
    check_contents,
    fill_rooms,
    fill_together,
    receive,
)
from draft_trainer.ingest.store import Reservation, SampleStore
from draft_trainer.kernels.library import using_kernels
from draft_trainer.sample import group_of
from slipstream.checksum import KINDS, Bytes, checksum_of
from slipstream.errors import RefusedError, StatusCode
from slipstream.layers import encode_layers
from slipstream.sample import Layout, layout_of, tensors_in
from slipstream.shm import HEADER_BYTES, RingFile, RingTruncatedError
from slipstream.tensors import dtype_to_wire
from slipstream.v1 import draft_trainer_pb2 as pb

TOKENS, HIDDEN, LAYERS, VOCAB = 9, 16, (1, 2), 50
LAYOUT = layout_of(TOKENS, len(LAYERS), HIDDEN, torch.bfloat16)
EXPECTED = Expected(HIDDEN, VOCAB, LAYERS, 64)
pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"
)
RUN: Any = SimpleNamespace(check_policy_version=lambda version: None)


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with using_kernels("on"):
        yield


def good(seed: int, layout: Layout = LAYOUT) -> Bytes:
    """A block that is right."""
    rng = np.random.default_rng(seed)
    block = np.zeros(layout.nbytes, dtype=np.uint8)
    numbers = block[: 12 * TOKENS].view(np.int32).reshape(3, TOKENS)
    numbers[0], numbers[1] = rng.integers(0, VOCAB, TOKENS), np.arange(TOKENS) + 7 * seed
    block[12 * TOKENS : 16 * TOKENS].view(np.float32)[:] = -rng.random(TOKENS)
    block[layout.mask_at : layout.mask_at + TOKENS] = np.arange(TOKENS) > 3
    states = torch.from_numpy(rng.normal(size=(layout.nbytes - layout.aux_at) // 2))
    # The padding behind each kind of state stays zero.
    aux = block[layout.aux_at :].view(np.uint16)[: TOKENS * HIDDEN * len(LAYERS)]
    aux[:] = states.bfloat16().view(torch.uint16).numpy()[: len(aux)]
    return block


def number(at: int, value: int) -> Callable[[Bytes], None]:
    """Sets one of the integers [3, T]."""
    return lambda block: block[4 * at : 4 * at + 4].view(np.int32).__setitem__(0, value)


def real(at: int, value: float) -> Callable[[Bytes], None]:
    """Sets one of the floats [2, T]."""
    start = 12 * TOKENS + 4 * at
    return lambda block: block[start : start + 4].view(np.float32).__setitem__(0, value)


def byte(at: int, value: int) -> Callable[[Bytes], None]:
    """Sets a byte."""
    return lambda block: block.__setitem__(at, value)


def nothing_to_learn(block: Bytes) -> None:
    block[LAYOUT.mask_at : LAYOUT.mask_at + TOKENS] = 0


def two_sequences(block: Bytes) -> None:
    numbers = block[: 12 * TOKENS].view(np.int32).reshape(3, TOKENS)
    numbers[1, 5:], numbers[2, 5:] = np.arange(TOKENS - 5), 1


WRONG: dict[str, Callable[[Bytes], None]] = {
    "a token beyond the vocabulary": number(3, VOCAB),
    "a negative token": number(0, -1),
    "a position that is left out": number(TOKENS + 4, 99),
    "a negative position": number(TOKENS, -1),
    "a segment that comes back": number(2 * TOKENS + 4, 5),
    "a log-prob above 0": real(2, 0.5),
    "a log-prob that is not a number": real(2, float("nan")),
    "an infinite logit": real(TOKENS + 2, float("inf")),
    "a mask of 2": byte(LAYOUT.mask_at + 5, 2),
    "nothing to learn": nothing_to_learn,
    "a state that is not a number": lambda block: (
        block[LAYOUT.aux_at :].view(np.uint16).__setitem__(4, 0x7FC0)
    ),
    "an infinite last state": lambda block: block[-2:].view(np.uint16).__setitem__(0, 0xFF80),
}
# Right, but not the usual case: left to the checks of one sample.
UNUSUAL: dict[str, Callable[[Bytes], None]] = {"two sequences": two_sequences}


@dataclass
class One:
    """A sample as it arrives: its description, where its span points, and its bytes."""

    message: pb.VerifierStates
    memories: Memories
    data: Bytes


def arriving(data: Bytes, checksum: int | None = None, kind: int = KINDS[0]) -> One:
    span = pb.Span(memory=pb.MEMORY_PAYLOAD, offset=0, bytes=len(data))
    packed = pb.PackedStates(
        tokens=TOKENS,
        hidden_size=LAYOUT.hidden_size,
        states_dtype=dtype_to_wire(torch.bfloat16),
        span=span,
        checksum=checksum_of([data], KINDS[0]) if checksum is None else checksum,
        checksum_kind=kind,  # type: ignore[arg-type]
    )
    return One(pb.VerifierStates(sample_id="x", packed=packed), Memories([data]), data)


def one_message(samples: list[One], pieces: int = 1) -> list[One]:
    """The samples with their blocks one after the other in one payload, of so many pieces."""
    payload, at = np.concatenate([sample.data for sample in samples]), 0
    for sample in samples:
        sample.message.packed.span.offset += at
        at += len(sample.data)
    step = -(-len(payload) // pieces // 64) * 64
    memories = Memories([payload[start : start + step] for start in range(0, at, step)])
    return [One(sample.message, memories, sample.data) for sample in samples]


def rooms_for(samples: list[One], gap: int = 0) -> list[Reservation]:
    """One after the other, or with a gap between them, and filled with something."""
    size = LAYOUT.nbytes
    memory = np.full(len(samples) * (size + gap) + 64, 0xEE, dtype=np.uint8)
    shared = memory[-memory.ctypes.data % 64 :]
    starts = [number * (size + gap) for number in range(len(samples))]
    address = shared.ctypes.data
    return [Reservation(Extent(at, size), shared, at, address + at, size) for at in starts]


def taken_together(samples: list[One], gap: int = 0) -> tuple[list[bool], list[Bytes]]:
    """Whether each was found to be right with the others, and what is in its room."""
    rooms = rooms_for(samples, gap)
    arrived = [(sample.message, sample.memories) for sample in samples]
    wanted = [(at, LAYOUT) for at in range(len(samples))]
    filled = dict(fill_together(arrived, wanted, rooms, EXPECTED))
    return [at in filled for at in range(len(samples))], [room.block for room in rooms]


def outcomes(samples: list[One]) -> list[Outcome]:
    """What becomes of each, whether with the others or alone."""
    rooms = rooms_for(samples)
    arrived = [(sample.message, sample.memories) for sample in samples]
    wanted = [(at, LAYOUT) for at in range(len(samples))]
    found = fill_rooms(arrived, wanted, [LAYOUT] * len(samples), rooms, EXPECTED)
    for at, (sample, room) in enumerate(zip(samples, rooms, strict=True)):
        if isinstance(found[at], str):
            assert np.array_equal(room.block, sample.data)
    return [found[at] for at in range(len(samples))]


def named(blocks: dict[str, Bytes]) -> list[One]:
    """The blocks as samples that a run would take."""
    samples = [arriving(block) for block in blocks.values()]
    for name, sample in zip(blocks, samples, strict=True):
        sample.message.sample_id = name
        sample.message.policy_version, sample.message.temperature = 1, 1.0
        sample.message.aux_layers.CopyFrom(encode_layers(LAYERS))
    return samples


def ingesting(folder: Path) -> tuple[SampleStore, Ingest]:
    """A store with an open run, and what takes samples into it."""
    store = SampleStore(folder, ReplayConfig(capacity_bytes=1 << 20))
    store.begin("run", {})
    return store, Ingest(EXPECTED, store, Counters(), threading.Event())


def alone(sample: One) -> bool:
    block = np.empty(LAYOUT.nbytes, dtype=np.uint8)
    try:
        receive(sample.message, sample.memories, LAYOUT, block, LAYOUT)
        check_contents(block, LAYOUT, EXPECTED)
    except RefusedError:
        return False
    return True


@pytest.mark.parametrize("gap", [0, 64])
@pytest.mark.parametrize("name", [*WRONG, *UNUSUAL])
def test_one_that_is_wrong_costs_the_others_nothing(name: str, gap: int) -> None:
    blocks = [good(seed) for seed in range(5)]
    (WRONG | UNUSUAL)[name](blocks[2])
    batch = one_message([arriving(block) for block in blocks])
    right, rooms = taken_together(batch, gap)
    assert right == [True, True, False, True, True]
    assert [alone(sample) for sample in batch] == [True, True, name in UNUSUAL, True, True]
    for at in (0, 1, 3, 4):
        assert np.array_equal(rooms[at], blocks[at])


@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("name", [*WRONG, *UNUSUAL])
def test_each_has_one_outcome_however_it_was_found(
    name: str, pieces: int, mode: Literal["on", "off"]
) -> None:
    blocks = [good(seed) for seed in range(5)]
    (WRONG | UNUSUAL)[name](blocks[2])
    samples = [arriving(block) for block in blocks]
    batch = one_message(samples, pieces)
    assert len(batch[0].memories.payload) == pieces
    with using_kernels(mode):
        found = outcomes(batch)
        together, _ = taken_together(batch)
    # Without the kernels, or where a payload is in pieces, each is looked at alone.
    assert any(together) == (mode == "on" and pieces == 1)
    assert isinstance(found[2], str) == (name in UNUSUAL)
    for at in (0, 1, 3, 4):
        tensors = tensors_in(torch.from_numpy(blocks[at]), LAYOUT)
        assert found[at] == group_of("own", tensors.token_ids, tensors.loss_mask) != "own"


def test_a_changed_byte_anywhere_is_never_taken() -> None:
    block = good(1)
    checksum = checksum_of([block], KINDS[0])
    batch = []
    for at in range(len(block)):
        changed = block.copy()
        changed[at] ^= 1
        batch.append(arriving(changed, checksum))
    together = one_message([*batch, arriving(block)])
    assert taken_together(together)[0] == [False] * len(batch) + [True]


def test_a_span_outside_and_an_unknown_checksum_are_left_to_the_one_that_names_them() -> None:
    outside = arriving(good(0))
    outside.message.packed.span.offset = 1 << 20
    batch = one_message([outside, arriving(good(1)), arriving(good(2))])
    right, rooms = taken_together(batch)
    assert right == [False, True, True]
    assert np.array_equal(rooms[2], batch[2].data)
    unknown = one_message([arriving(good(seed), kind=77) for seed in range(4)])
    assert taken_together(unknown)[0] == [False] * 4
    for outcome in outcomes(unknown):
        assert isinstance(outcome, RefusedError) and "checksum_kind" in outcome.field
    assert [getattr(outcome, "field", "") for outcome in outcomes(batch)] == ["packed.span", "", ""]


def test_bytes_at_random_get_the_same_verdict() -> None:
    rng = np.random.default_rng(0)
    batch = []
    for seed in range(2000):
        block = good(seed % 50)
        for _ in range(rng.integers(0, 3)):
            block[rng.integers(0, len(block))] = rng.choice([0, 1, 2, 0x7F, 0x80, 0xFF])
        batch.append(arriving(block))
    batch = one_message(batch)
    together, _ = taken_together(batch)
    for right, sample in zip(together, batch, strict=True):
        # Another segment number may be right alone.
        at = sample.message.packed.span.offset
        segments = sample.memories.payload[0][at + 8 * TOKENS : at + 12 * TOKENS]
        assert right == alone(sample) or (not right and segments.any())
    assert 500 < sum(together) < 1900


def test_a_ring_that_is_cut_short_while_it_is_read_is_an_error_by_name(tmp_path: Path) -> None:
    ring = RingFile.create(tmp_path, 1 << 20)
    memories = Memories([], ring)
    blocks, at, batch = [good(seed) for seed in range(8)], HEADER_BYTES, []
    for block in blocks:
        ring.span(at, len(block))[:] = block
        sample = arriving(block)
        sample.message.packed.span.CopyFrom(
            pb.Span(memory=pb.MEMORY_RING, offset=at, bytes=len(block))
        )
        batch.append(One(sample.message, memories, block))
        # Some on either side of where it will end.
        at += 1 << 16
    right, rooms = taken_together(batch)
    assert right == [True] * 8 and all(map(np.array_equal, rooms, blocks))
    os.ftruncate(ring._descriptor, 1 << 18)
    with pytest.raises(RingTruncatedError, match="less while it was read"):
        taken_together(batch)
    with pytest.raises(RingTruncatedError, match="less while it was read"):
        outcomes(batch)
    assert taken_together(batch[:3])[0] == [True] * 3
    with pytest.raises(RingTruncatedError) as caught:
        sample = batch[-1]
        receive(sample.message, sample.memories, LAYOUT, rooms[-1], LAYOUT)
    assert caught.value.code is StatusCode.DATA_LOSS
    ring.close()


@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("wrong", ["checksum", "contents"])
@pytest.mark.parametrize("count", [1, 6])
def test_what_is_refused_gives_its_room_back_at_once(
    tmp_path: Path, count: int, wrong: str, mode: Literal["on", "off"]
) -> None:
    store, taking = ingesting(tmp_path)
    blocks = {f"s{seed}": good(seed) for seed in range(count)}
    if wrong == "contents":
        for block in blocks.values():
            WRONG["a log-prob above 0"](block)
    samples = one_message(named(blocks))
    if wrong == "checksum":
        for sample in samples:
            sample.message.packed.checksum ^= 1
    gc.disable()
    try:
        with using_kernels(mode):
            acks = taking.take(RUN, [(s.message, s.memories) for s in samples])
        assert [ack.status for ack in acks] == [pb.ACK_STATUS_REFUSED] * count
        assert store.nbytes == 0
    finally:
        gc.enable()
    store.close()


def assert_kept(store: SampleStore, blocks: dict[str, Bytes]) -> None:
    """The store has these samples and no other, each with its own bytes."""
    drawn = [*store.draw("run", len(blocks) * TOKENS).samples, *store.held_out("run")]
    assert {sample.sample_id for sample in drawn} == set(blocks)
    for sample in drawn:
        tensors = tensors_in(torch.from_numpy(blocks[sample.sample_id]), LAYOUT)
        assert torch.equal(sample.token_ids, tensors.token_ids)
        assert torch.equal(sample.aux.view(torch.int16), tensors.aux.view(torch.int16))


def test_messages_that_are_taken_together_have_a_payload_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Taken one by one they would be right whatever they were grouped by.
    monkeypatch.setattr(filling, "receive", None)
    store, taking = ingesting(tmp_path)
    blocks = {f"s{seed}": good(seed) for seed in range(10)}
    samples = named(blocks)
    together = [*one_message(samples[:5]), *one_message(samples[5:])]
    acks = taking.take(RUN, [(s.message, s.memories) for s in together])
    assert [(ack.sample_id, ack.status) for ack in acks] == [
        (name, pb.ACK_STATUS_ACCEPTED) for name in blocks
    ]
    assert_kept(store, blocks)
    store.close()


def test_rooms_in_several_views_are_filled_with_what_is_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "receive", None)
    monkeypatch.setattr(arena, "MOST_SHARED", 5 * LAYOUT.nbytes)
    store, taking = ingesting(tmp_path)
    blocks = {f"s{seed}": good(seed) for seed in range(15)}
    samples = one_message(named(blocks))
    acks = taking.take(RUN, [(s.message, s.memories) for s in samples])
    assert [ack.status for ack in acks] == [pb.ACK_STATUS_ACCEPTED] * 15
    assert_kept(store, blocks)
    store.close()


def test_float8_and_what_is_not_packed_is_left_to_the_one_that_decodes_it() -> None:
    sample = arriving(good(0))
    plain = pb.VerifierStates(sample_id="x")
    eight = layout_of(TOKENS, 2, HIDDEN, torch.float8_e4m3fn)
    (room,) = rooms_for([sample])
    for message, layout, taken in (
        (sample.message, LAYOUT, [0]),
        (sample.message, eight, []),
        (plain, LAYOUT, []),
    ):
        found = fill_together([(message, sample.memories)], [(0, layout)], [room], EXPECTED)
        assert [at for at, _ in found] == taken
