"""Decides the fate of samples: accepted once, recognised, or refused by name.

Brings a sample's block into the trainer's own memory: one copy, checked on the way.

What a ``VerifierStates`` message declares, checked before a byte of its states is touched.

Every check here and in ``contents`` stands for states that would otherwise train without an error
and never accept: swapped layers, another vocabulary, raw instead of normalised log-probs, a packed
batch whose positions run on.

Whether the tokens, positions, masks and log-probs of a block can be a sample's.

With numpy and the common case first: a small sample is to cost microseconds, and a torch operation
on sixteen numbers takes one by itself.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from draft_trainer.counters import Counters
from draft_trainer.ingest.run import Run
from draft_trainer.ingest.store import SampleStore
from draft_trainer.kernels.checked_copy import fused_copy_checked
from draft_trainer.kernels.guarded import SourceGoneError
from draft_trainer.sample import STATE_DTYPES
from slipstream.checksum import Bytes, all_finite
from slipstream.errors import RefusedError, StatusCode
from slipstream.layers import decode_layers, encode_layers
from slipstream.sample import (
    ALIGNMENT,
    FLOAT8,
    Layout,
    PackedTensors,
    Sample,
    header_of,
    layout_of,
    tensors_in,
)
from slipstream.shm import HEADER_BYTES, RingFile, RingTruncatedError
from slipstream.tensors import LARGEST, checked_data, dequantize_into, dtype_to_wire
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import tensor_pb2

MAX_ID_CHARACTERS = 256

_PACKED_DTYPES: dict[int, torch.dtype] = {
    dtype_to_wire(dtype): dtype for dtype in (*STATE_DTYPES, FLOAT8)
}

TENSORS: dict[str, torch.dtype] = {
    "token_ids": torch.int32,
    "positions": torch.int32,
    "segment_ids": torch.int32,
    "loss_mask": torch.bool,
    "sampled_logprobs": torch.float32,
    "sampled_logits": torch.float32,
}
"""The tensors [T] of a message that does not pack them, but for the states."""


@dataclass(frozen=True)
class Expected:
    """What every sample of this trainer must look like.

    Args:
        hidden_size: H of the policy.
        vocab_size: token ids are below it.
        aux_layer_ids: the run's layers, "after L layers".
        max_tokens: longest sample.
    """

    hidden_size: int
    vocab_size: int
    aux_layer_ids: tuple[int, ...]
    max_tokens: int

    @cached_property
    def aux_layers_message(self) -> tensor_pb2.AuxLayers:
        """The layers as most samples name them."""
        return encode_layers(self.aux_layer_ids)

    @cached_property
    def known_layouts(self) -> dict[tuple[int, ...], Layout]:
        """By tokens, dtype and bytes, of packed samples that were right: no other has them too."""
        return {}


def declared(message: pb.VerifierStates, expected: Expected) -> Layout:
    """The layout of the sample's block, as it arrives.

    Raises:
        RefusedError: the first thing that is wrong; ``field`` begins with the message's field
            name.
    """
    temperature = message.temperature
    if not (math.isfinite(temperature) and temperature > 0.0):
        raise RefusedError(
            "temperature",
            temperature,
            "a finite number > 0",
            "send the rollout's sampling temperature",
        )
    same = message.aux_layers == expected.aux_layers_message
    layers = () if same else decode_layers(message.aux_layers, "aux_layers")
    if not same and layers != expected.aux_layer_ids:
        raise RefusedError(
            "aux_layers",
            f"{list(layers)} (after L layers)",
            f"{list(expected.aux_layer_ids)} (after L layers)",
            "capture the layers that OpenRun answered, in its convention",
        )
    if message.HasField("packed"):
        return _packed(message.packed, expected)
    return _tensors(message, expected)


def kept_layout(arriving: Layout) -> Layout:
    """How the trainer keeps a block of this layout: float8 states are decoded to bfloat16."""
    if arriving.dtype != FLOAT8:
        return arriving
    return layout_of(arriving.tokens, arriving.aux_layers, arriving.hidden_size, torch.bfloat16)


def check_sample_id(sample_id: str) -> None:
    """Raise RefusedError for an empty or overlong id."""
    if not 0 < len(sample_id) <= MAX_ID_CHARACTERS:
        raise RefusedError(
            "sample_id",
            f"{len(sample_id)} characters",
            f"1 to {MAX_ID_CHARACTERS} characters",
            "give every sample an id that is unique within the run",
        )


def _packed(packed: pb.PackedStates, expected: Expected) -> Layout:
    key = (*(packed.tokens, packed.states_dtype, packed.span.bytes), packed.hidden_size)
    known = expected.known_layouts.get(key)
    if known is not None:
        return known
    _check_tokens("packed.tokens", packed.tokens, expected)
    dtype = _dtype_among("packed.states_dtype", packed.states_dtype, _PACKED_DTYPES)
    layout = layout_of(packed.tokens, len(expected.aux_layer_ids), expected.hidden_size, dtype)
    if packed.hidden_size != expected.hidden_size:
        raise RefusedError(
            "packed.hidden_size",
            packed.hidden_size,
            f"{expected.hidden_size}, the policy's",
            "send the states of the policy that OpenRun named",
        )
    if packed.span.bytes != layout.nbytes:
        raise RefusedError(
            "packed.span.bytes",
            packed.span.bytes,
            f"{layout.nbytes} for {packed.tokens} tokens of "
            f"{len(expected.aux_layer_ids) + 1} states of {expected.hidden_size}",
            "lay the block out as docs/wire.md says; check the hidden size and the layers",
        )
    expected.known_layouts[key] = layout
    return layout


def _tensors(message: pb.VerifierStates, expected: Expected) -> Layout:
    _declared(message.token_ids, "token_ids", (torch.int32,), (None,))
    tokens = message.token_ids.shape[0]
    _check_tokens("token_ids", tokens, expected)
    for name, dtype in TENSORS.items():
        _declared(getattr(message, name), name, (dtype,), (tokens,))
    width, layers = expected.hidden_size, len(expected.aux_layer_ids)
    aux = message.aux_hidden_states
    _declared(aux, "aux_hidden_states", STATE_DTYPES, (tokens, layers * width))
    dtype = _PACKED_DTYPES[aux.dtype]
    _declared(message.final_hidden_state, "final_hidden_state", (dtype,), (tokens, width))
    return layout_of(tokens, layers, width, dtype)


def _check_tokens(field: str, tokens: int, expected: Expected) -> None:
    if not 3 <= tokens <= expected.max_tokens:
        raise RefusedError(
            field,
            f"{tokens} tokens",
            f"3 to {expected.max_tokens} tokens",
            "send windows of at most OpenRunResponse.max_tokens_per_sample tokens",
        )


def _dtype_among(field: str, found: int, known: Mapping[int, torch.dtype]) -> torch.dtype:
    if found not in known:
        raise RefusedError(
            field,
            tensor_pb2.DType.Name(found) if found in tensor_pb2.DType.values() else found,  # type: ignore[arg-type]
            " or ".join(tensor_pb2.DType.Name(value) for value in known),
            "cast the tensor before sending it",
        )
    return known[found]


def _declared(
    message: tensor_pb2.Tensor,
    field: str,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
) -> None:
    known: dict[int, torch.dtype] = {dtype_to_wire(dtype): dtype for dtype in dtypes}
    _dtype_among(f"{field}.dtype", message.dtype, known)
    found = tuple(message.shape)
    same = len(found) == len(shape) and all(
        want is None or have == want for have, want in zip(found, shape, strict=True)
    )
    if not same:
        wanted = ["T" if want is None else want for want in shape]
        raise RefusedError(
            f"{field}.shape",
            list(found),
            wanted,
            "check the hidden size, the number of layers and the number of tokens",
        )


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
        _decode(_tensors_receive(arrived, arriving), _tensors_receive(block, kept))
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
    for name in ("token_ids", "positions", "segment_ids", "sampled_logprobs", "sampled_logits"):
        places[name], at = at, at + 4 * tokens
    places |= {
        "loss_mask": layout.mask_at,
        "aux_hidden_states": layout.aux_at,
        "final_hidden_state": layout.final_at,
    }
    assert places.keys() == {*TENSORS, "aux_hidden_states", "final_hidden_state"}
    block[layout.aux_at :] = 0
    for name, start in places.items():
        data = checked_data(getattr(message, name), name)
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


def _tensors_receive(block: Bytes, layout: Layout) -> PackedTensors:
    return tensors_in(torch.from_numpy(block), layout)


def _refuse_not_finite(finite: bool, block: Bytes, layout: Layout) -> None:
    if finite:
        return
    tensors = _tensors_receive(block, layout)
    named = {"aux_hidden_states": tensors.aux, "final_hidden_state": tensors.final}
    for name, values in named.items():
        bad = int((~torch.isfinite(values.float())).sum())
        if bad:
            raise RefusedError(
                name,
                f"{bad} of {values.numel()} values are not finite",
                "finite values",
                "look for an overflow in the policy's forward pass",
            )
    raise RefusedError(
        "packed", "padding that is not zero", "zeros", "lay the block out as docs/wire.md says"
    )


LOGPROB_TOLERANCE = 1e-3
"""log p may exceed 0 by rounding of a float32 log-sum-exp, not by more."""

Integers = NDArray[np.int32]
Mask = NDArray[np.bool_]

_MOST = 1 << 16
_STEPS, _ZEROS = np.arange(_MOST, dtype="<i4").tobytes(), bytes(4 * _MOST)


def check_contents(block: Bytes, layout: Layout, expected: Expected) -> None:
    """Check everything but the states.

    Args:
        block: uint8 [layout.nbytes].
        layout: as the trainer keeps it.
        expected: of every sample.

    Raises:
        RefusedError: the first thing that is wrong, by its name in ``VerifierStates``.
    """
    tokens = layout.tokens
    token_ids = block[: 4 * tokens].view(np.int32)
    mask = block[layout.mask_at : layout.mask_at + tokens].tobytes()
    _in_range(token_ids, "token_ids", expected.vocab_size, "the policy's vocab_size")
    # Any other byte is undefined behaviour in a bool tensor.
    if mask.translate(None, b"\0\1"):
        raise RefusedError(
            "loss_mask", "a byte above 1", "bytes 0 or 1", "send torch.bool, not a bit mask"
        )
    if _is_one_sequence(block[4 * tokens : 12 * tokens].tobytes()):
        targets = mask.find(1, 2) > 0
    else:
        positions, segments = block[4 * tokens : 12 * tokens].view(np.int32).reshape(2, tokens)
        targets = _has_targets(positions, segments, np.frombuffer(mask, dtype=np.bool_))
    if not targets:
        raise RefusedError(
            "loss_mask",
            "no true at or after the third token of a segment",
            "at least one target that an anchor can predict",
            "send windows that contain completion tokens",
        )
    floats = block[12 * tokens : 20 * tokens].view(np.float32)
    logprobs, logits = floats.reshape(2, tokens)
    # Squares that overflow are looked at again.
    if not math.isfinite(np.dot(floats, floats)):
        _finite(logprobs, "sampled_logprobs")
        _finite(logits, "sampled_logits")
    highest = np.maximum.reduce(logprobs)
    if highest > LOGPROB_TOLERANCE:
        raise RefusedError(
            "sampled_logprobs",
            f"{float(highest):.4g}",
            "log-probabilities, at most 0",
            "send log p(x_t | x_<t), normalised over the full vocabulary",
        )


def _is_one_sequence(numbers: bytes) -> bool:
    """Whether positions are n, n + 1 and so on, and all segments 0, of int32 [2, T].

    False also where that is not easily seen. Compared as bytes: an operation on arrays costs as
    much as all of it.
    """
    nbytes = len(numbers) // 2
    at = 4 * int.from_bytes(numbers[:4], "little")
    return numbers == _STEPS[at : at + nbytes] + _ZEROS[:nbytes]


def _has_targets(positions: Integers, segments: Integers, mask: Mask) -> bool:
    """Whether a token that an anchor can predict is to be trained on; any number of segments."""
    _in_range(positions, "positions", 1 << 31, "2^31")
    starts = _segment_starts(segments)
    _rising(positions, starts)
    steps = np.arange(len(segments))
    offsets = steps - np.maximum.accumulate(np.where(starts, steps, 0))
    return bool((mask & (offsets >= 2)).any())


def _in_range(values: Integers, field: str, bound: int, meaning: str) -> None:
    # Read as unsigned a negative number is beyond every bound.
    if np.maximum.reduce(values.view(np.uint32)) >= bound:
        low, high = int(values.min()), int(values.max())
        raise RefusedError(
            field,
            low if low < 0 else high,
            f"0 to {bound - 1} (below {meaning})",
            "check the tokenizer and the padding: a padding id is not a token",
        )


def _segment_starts(segments: Integers) -> Mask:
    """True where a segment begins."""
    starts = np.ones(len(segments), dtype=np.bool_)
    starts[1:] = segments[1:] != segments[:-1]
    if starts.sum() != len(np.unique(segments)):
        raise RefusedError(
            "segment_ids",
            "a number that comes back after another segment",
            "the tokens of one sequence side by side",
            "pack whole sequences one after the other",
        )
    return starts


def _rising(positions: Integers, starts: Mask) -> None:
    """Refuse positions that do not rise by 1, but where a segment starts."""
    # They were found to be in range: a difference cannot overflow.
    rises = (positions[1:] - positions[:-1] == 1) | starts[1:]
    if not rises.all():
        at = int(np.flatnonzero(~rises)[0]) + 1
        raise RefusedError(
            "positions",
            f"{int(positions[at])} after {int(positions[at - 1])} at token {at}",
            "positions that rise by 1 within a segment",
            "drop padding, and start a new segment where a sequence ends",
        )


def _finite(values: NDArray[np.float32], field: str) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        raise RefusedError(
            field,
            f"{int((~finite).sum())} of {len(values)} values are not finite",
            "finite values",
            "look for an overflow in the policy's forward pass",
        )


_LEAST_CREDIT = 1 << 16


class Ingest:
    """Validates, de-duplicates and stores samples. Thread-safe.

    Args:
        expected: what every sample must look like.
        store: keeps them.
        counters: counts samples.
        arrived: set whenever there may be something new to train on.
        record: called with every sample that was taken, to keep it elsewhere too; never blocks
            for long.
    """

    def __init__(
        self,
        expected: Expected,
        store: SampleStore,
        counters: Counters,
        arrived: threading.Event,
        record: Callable[[Run, Sample], None] | None = None,
    ) -> None:
        self.expected = expected
        self._store = store
        self._counters = counters
        self._arrived = arrived
        self._record = record

    def credit_bytes(self, most: int) -> int:
        """What a stream may have in flight: ``most``, or less where the store is small.

        Enough for a sample even where the store has room for none: it is refused by name then.
        """
        return min(most, max(self._store.credit_bytes(), _LEAST_CREDIT))

    def take(self, run: Run, samples: Sequence[tuple[pb.VerifierStates, Memories]]) -> list[pb.Ack]:
        """Answer samples, in their order. They are recorded before they are acknowledged.

        A bad sample is refused in its own answer and costs the others nothing.

        Raises:
            RingTruncatedError: the stream's ring was truncated; nothing was taken.
        """
        for ring in {memories.ring for _, memories in samples if memories.ring is not None}:
            ring.check()
        acks = [pb.Ack(sample_id=message.sample_id[: 1 << 10]) for message, _ in samples]
        taken: list[tuple[pb.Ack, Sample]] = []
        for at, layout in self._wanted(run, samples, acks):
            try:
                taken.append((acks[at], self._received(*samples[at], layout)))
            except RingTruncatedError:
                # A truncated ring fails the whole stream, not one sample.
                raise
            except RefusedError as error:
                self._refuse(acks[at], error)
        if taken:
            self._accept(run, taken)
        return acks

    def answered(self, nbytes: Mapping[str, int], waited: Sequence[tuple[float, int]]) -> None:
        """Samples are acknowledged now.

        Args:
            nbytes: that they took, by transport.
            waited: seconds since they arrived, and how many of them, by message.
        """
        self._counters.received(nbytes, waited)

    def _wanted(
        self,
        run: Run,
        samples: Sequence[tuple[pb.VerifierStates, Memories]],
        acks: Sequence[pb.Ack],
    ) -> list[tuple[int, Layout]]:
        """Index and layout of those whose declarations are right; the others are answered."""
        wanted = []
        known: set[int] = set()
        for at, (message, _) in enumerate(samples):
            try:
                check_sample_id(message.sample_id)
                # A retry after a lost acknowledgement is recognised before its states are read.
                if self._store.seen(message.sample_id):
                    self._duplicate(acks[at])
                    continue
                if message.policy_version not in known:
                    run.check_policy_version(message.policy_version)
                    known.add(message.policy_version)
                wanted.append((at, declared(message, self.expected)))
            except RefusedError as error:
                self._refuse(acks[at], error)
        return wanted

    def _received(self, message: pb.VerifierStates, memories: Memories, arriving: Layout) -> Sample:
        """The sample in the store's memory, checked, not accepted yet."""
        layout = kept_layout(arriving)
        block = self._store.reserve(layout.nbytes)
        receive(message, memories, arriving, block, layout)
        check_contents(block, layout, self.expected)
        facts = (message.sample_id, message.policy_version, message.temperature)
        header = header_of(*facts, self.expected.aux_layer_ids, layout)
        if message.HasField("packed") and arriving == layout:
            header.packed.checksum = message.packed.checksum
            header.packed.checksum_kind = message.packed.checksum_kind
        return Sample(header, torch.from_numpy(block))

    def _accept(self, run: Run, taken: Sequence[tuple[pb.Ack, Sample]]) -> None:
        try:
            fresh = self._store.accept([sample for _, sample in taken])
        except RefusedError as error:
            for ack, _ in taken:
                self._refuse(ack, error)
            return
        for (ack, sample), new in zip(taken, fresh, strict=True):
            if not new:
                self._duplicate(ack)
                continue
            ack.status = pb.ACK_STATUS_ACCEPTED
            if self._record is not None:
                self._record(run, sample)
        if accepted := sum(fresh):
            self._counters.samples.labels("accepted").inc(accepted)
            self._arrived.set()

    def _duplicate(self, ack: pb.Ack) -> None:
        ack.status = pb.ACK_STATUS_DUPLICATE
        self._counters.samples.labels("duplicate").inc()

    def _refuse(self, ack: pb.Ack, error: RefusedError) -> None:
        ack.status = pb.ACK_STATUS_REFUSED
        ack.refusal.CopyFrom(error.to_proto())
        # The first word is a field of VerifierStates: a bounded set of metric labels.
        self._counters.refused(error.field.partition(".")[0])


@dataclass
class CreditWindow:
    """What one stream may still send, in serialized bytes. One thread spends, another gives back.

    The window bounds what the trainer holds of a stream before a sample's fate
    is decided; it is handed back with the acknowledgement. It does not wait for
    training: where the trainer lags, the replay buffer drops the oldest states,
    and the newest, which are worth most, are not kept waiting behind them.
    """

    left: int

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def spend(self, size: int) -> None:
        """Raise RefusedError (RESOURCE_EXHAUSTED) when more is sent than was credited."""
        with self._lock:
            if size > self.left:
                raise overrun(size, self.left)
            self.left -= size

    def give_back(self, size: int) -> None:
        """The bytes are free again."""
        with self._lock:
            self.left += size


def overrun(size: int, left: int) -> RefusedError:
    """The refusal of a client that sends more than it may."""
    return RefusedError(
        "credit",
        f"a message of {size} bytes with {left} bytes of credit left",
        "samples within the credit that was granted",
        "wait for credit before sending, and open the stream again",
        StatusCode.RESOURCE_EXHAUSTED,
    )
