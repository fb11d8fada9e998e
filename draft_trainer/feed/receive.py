"""Brings a sample's block into the trainer's own memory: one copy, checked on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from draft_trainer.feed.validate import TENSORS
from draft_trainer.kernels.checked_copy import fused_copy_checked
from draft_trainer.kernels.guarded import SourceGoneError
from slipstream.checksums import Bytes, all_finite
from slipstream.fp8 import LARGEST, dequantize_into
from slipstream.packed import ALIGNMENT, FLOAT8, Layout, PackedTensors, tensors_in
from slipstream.refusal import RefusedError
from slipstream.ring import HEADER_BYTES, RingFile, RingTruncatedError
from slipstream.tensors import checked_data
from slipstream.v1 import draft_trainer_pb2 as pb

_LARGEST_SCALE = torch.finfo(torch.bfloat16).max / LARGEST


@dataclass(frozen=True)
class Memories:
    """What the spans of one request may point into.

    Attributes:
        payload: the request's, uint8 [n]: pieces one after the other.
        ring: the stream's, if it has one.
    """

    payload: Sequence[Bytes]
    ring: RingFile | None = None

    @cached_property
    def payload_bytes(self) -> int:
        """Of all pieces together."""
        return sum(map(len, self.payload))


def receive(
    message: pb.VerifierStates,
    memories: Memories,
    arriving: Layout,
    block: Bytes,
    kept: Layout,
) -> None:
    """Fill ``block`` and verify the checksum and that all states are finite.

    Args:
        message: whose declarations were checked.
        memories: where its span points.
        arriving: layout in which it comes.
        block: uint8 [kept.nbytes], the trainer's own.
        kept: layout in which it stays; another one for float8 only.

    Raises:
        RefusedError: a span that is outside, a wrong checksum, or a state that is not finite.
        RingTruncatedError: the ring was cut short while it was read.
    """
    if not message.HasField("packed"):
        _fill(message, block, arriving)
        finite = all_finite(block[arriving.aux_at : arriving.nbytes], arriving.dtype)
        _refuse_not_finite(finite, block, arriving)
        return
    source = source_of(message.packed.span, memories)
    if arriving.dtype == FLOAT8:
        arrived = np.empty(arriving.nbytes, dtype=np.uint8)
        _copy(message.packed, source, arrived, arriving, memories.ring)
        _decode(_tensors(arrived, arriving), _tensors(block, kept))
    else:
        _copy(message.packed, source, block, arriving, memories.ring)


def _copy(
    packed: pb.PackedStates,
    source: Sequence[Bytes],
    block: Bytes,
    layout: Layout,
    ring: RingFile | None,
) -> None:
    with ring_there(ring):
        checksum, finite = fused_copy_checked(
            source, block, packed.checksum_kind, layout.dtype, layout.aux_at
        )
    if checksum != packed.checksum:
        raise RefusedError(
            "packed.checksum",
            f"{packed.checksum:#x}",
            f"{checksum:#x} (of the bytes that arrived)",
            "send it again; if it repeats, look for a faulty link or an altered buffer",
        )
    _refuse_not_finite(finite, block, layout)


@contextmanager
def ring_there(ring: RingFile | None) -> Iterator[None]:
    """Says by name what is wrong where a copy's source was gone: only a ring can be cut short.

    Raises:
        RingTruncatedError: that happened in the body.
    """
    try:
        yield
    except SourceGoneError:
        assert ring is not None, "a payload is the process's own memory"
        raise RingTruncatedError.of("less while it was read", ring.nbytes) from None


def source_of(span: pb.Span, memories: Memories) -> Sequence[Bytes]:
    """The bytes that a span points to, in pieces of whole floats. Raises RefusedError: outside."""
    first, end, step = bounds_of(span.memory, memories)
    start, until = span.offset, span.offset + span.bytes
    if start < first or until > end or start % step:
        ring = f"[{first}, {end}), from a multiple of {step} on"
        within = ring if step > 1 else f"the payload's {end} bytes"
        raise RefusedError(
            "packed.span",
            f"{span.bytes} bytes from {start} on",
            f"within {within}",
            "describe bytes that were written before the message was sent",
        )
    if span.memory == pb.MEMORY_PAYLOAD:
        return _cut(memories.payload, start, until)
    assert memories.ring is not None
    return [memories.ring.span(start, span.bytes)]


def bounds_of(memory: int, memories: Memories) -> tuple[int, int, int]:
    """Where a span in this memory may begin first, where it must end, and what it is aligned to.

    Raises:
        RefusedError: there is no such memory.
    """
    if memory == pb.MEMORY_PAYLOAD:
        return 0, memories.payload_bytes, 1
    if memory != pb.MEMORY_RING:
        raise RefusedError(
            "packed.span.memory",
            memory,
            "MEMORY_PAYLOAD or MEMORY_RING",
            "say what the span points into",
        )
    if memories.ring is None:
        raise RefusedError(
            "packed.span.memory",
            "MEMORY_RING",
            "MEMORY_PAYLOAD: this stream has no ring",
            "name TRANSPORT_SHARED_MEMORY in the stream's header, or send the bytes along",
        )
    return HEADER_BYTES, memories.ring.nbytes, ALIGNMENT


def _cut(pieces: Sequence[Bytes], start: int, end: int) -> Sequence[Bytes]:
    """The bytes from ``start`` to ``end``, in pieces of whole floats."""
    found, at = [], 0
    for piece in pieces:
        if at >= end:
            break
        part = piece[max(start - at, 0) : end - at]
        if len(part):
            found.append(part)
        at += len(piece)
    if any(len(part) % ALIGNMENT for part in found[:-1]):
        return [np.concatenate(found)]
    return found


def _fill(message: pb.VerifierStates, block: Bytes, layout: Layout) -> None:
    """The tensors of a message that does not pack them, each with a checksum of its own."""
    tokens, at = layout.tokens, 0
    places = {}
    for field in ("token_ids", "positions", "segment_ids", "sampled_logprobs", "sampled_logits"):
        places[field], at = at, at + 4 * tokens
    places |= {
        "loss_mask": layout.mask_at,
        "aux_hidden_states": layout.aux_at,
        "final_hidden_state": layout.final_at,
    }
    assert places.keys() == {*TENSORS, "aux_hidden_states", "final_hidden_state"}
    block[layout.aux_at :] = 0
    for field, start in places.items():
        data = checked_data(getattr(message, field), field)
        block[start : start + len(data)] = np.frombuffer(data, dtype=np.uint8)


def _decode(arrived: PackedTensors, kept: PackedTensors) -> None:
    scales = arrived.scales
    if not bool(((scales > 0) & (scales <= _LARGEST_SCALE)).all()):
        raise RefusedError(
            "packed.scales",
            f"{float(scales.min()):.4g} to {float(scales.max()):.4g}",
            f"above 0 and at most {_LARGEST_SCALE:.4g}",
            "look for an overflow in the policy's forward pass",
        )
    for name in ("token_ids", "positions", "segment_ids", "sampled_logprobs", "sampled_logits"):
        getattr(kept, name).copy_(getattr(arrived, name))
    kept.loss_mask.view(torch.uint8).copy_(arrived.loss_mask.view(torch.uint8))
    dequantize_into(kept.aux, arrived.aux, scales[:-1])
    dequantize_into(kept.final, arrived.final, scales[-1:])


def _tensors(block: Bytes, layout: Layout) -> PackedTensors:
    return tensors_in(torch.from_numpy(block), layout)


def _refuse_not_finite(finite: bool, block: Bytes, layout: Layout) -> None:
    if finite:
        return
    tensors = _tensors(block, layout)
    named = {"aux_hidden_states": tensors.aux, "final_hidden_state": tensors.final}
    for field, values in named.items():
        bad = int((~torch.isfinite(values.float())).sum())
        if bad:
            raise RefusedError(
                field,
                f"{bad} of {values.numel()} values are not finite",
                "finite values",
                "look for an overflow in the policy's forward pass",
            )
    raise RefusedError(
        "packed", "padding that is not zero", "zeros", "lay the block out as docs/wire.md says"
    )
