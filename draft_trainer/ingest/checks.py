"""Validates a sample: its header, and the contents of its block other than states.

Every check stands for states that would otherwise train without an error and never be accepted by
the policy: swapped layers, another vocabulary, raw instead of normalised log-probs, a packed batch
whose positions run on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import RefusedError
from slipstream.sample import STATE_DTYPES, Layout, Sample, layout_of
from slipstream.sampling import check_sampling
from slipstream.tensors import all_finite, dtype_to_wire
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import tensor_pb2

MAX_ID_CHARACTERS = 256
PROMPT_BYTES = 16
LOGPROB_TOLERANCE = 1e-3
"""The most by which log p may exceed 0: the rounding of a float32 log-sum-exp."""

_OVERFLOW = "look for an overflow in the policy's forward pass"
_NARROW = (
    'set states_dtype = "bfloat16" in BridgeConfig: float16, in which they were sent, ends at '
    f"65,504; if that does not help, {_OVERFLOW}"
)
_DTYPES = {dtype_to_wire(dtype): dtype for dtype in STATE_DTYPES}

Integers = NDArray[np.int32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Expected:
    """The properties that every sample of this trainer must have.

    Attributes:
        hidden_size: H of the policy.
        vocab_size: token ids are below it.
        aux_layer_ids: the run's layers, "after L layers".
        max_tokens: longest sample.
    """

    hidden_size: int
    vocab_size: int
    aux_layer_ids: tuple[int, ...]
    max_tokens: int

    @property
    def longest(self) -> Layout:
        """The layout of the longest sample in bfloat16."""
        layers = len(self.aux_layer_ids)
        return layout_of(self.max_tokens, layers, self.hidden_size, torch.bfloat16)


def check_sample_id(sample_id: str) -> None:
    """Raise RefusedError for an empty or overlong id."""
    if not 0 < len(sample_id) <= MAX_ID_CHARACTERS:
        raise RefusedError(
            "sample_id", f"{len(sample_id)} characters", f"1 to {MAX_ID_CHARACTERS}", "shorten it"
        )


def check_header(header: pb.VerifierStates, expected: Expected) -> Layout:
    """The layout of the sample's block.

    Raises:
        RefusedError: the first thing that is wrong; ``field`` begins with the header's field name.
    """
    if not (math.isfinite(header.temperature) and header.temperature > 0.0):
        raise RefusedError(
            "temperature", header.temperature, "a finite number > 0", "send the rollout's"
        )
    layers = tuple(header.aux_layers)
    if layers != expected.aux_layer_ids:
        raise RefusedError(
            "aux_layers", [*layers], [*expected.aux_layer_ids], "capture OpenRun's layers"
        )
    if len(header.prompt) not in (0, PROMPT_BYTES):
        raise RefusedError(
            "prompt", f"{len(header.prompt)} bytes", f"{PROMPT_BYTES} or none", "send a hash"
        )
    # The rollout's version may be much older: the states are those of this pass.
    if header.HasField("rollout_policy_version"):
        sampled = header.rollout_policy_version
        if sampled > header.policy_version:
            expected_version = f"at most {header.policy_version}, that of the states"
            advice = "sync the version that samples before its states are captured"
            raise RefusedError("rollout_policy_version", sampled, expected_version, advice)
    check_sampling(header.sampling, expected.vocab_size)
    packed, hidden = header.packed, expected.hidden_size
    if not 3 <= packed.tokens <= expected.max_tokens:
        raise RefusedError(
            "packed.tokens", f"{packed.tokens} tokens", f"3 to {expected.max_tokens}", "cut windows"
        )
    if packed.hidden_size != hidden:
        raise RefusedError(
            "packed.hidden_size", packed.hidden_size, f"{hidden}, the policy's", "send its states"
        )
    if packed.states_dtype not in _DTYPES:
        names = {number: name for name, number in tensor_pb2.DType.items()}
        found = names.get(packed.states_dtype, packed.states_dtype)
        raise RefusedError(
            "packed.states_dtype", found, f"one of {[names[d] for d in _DTYPES]}", "cast them"
        )
    if header.logits_dtype and _DTYPES.get(header.logits_dtype) not in STATE_DTYPES:
        raise RefusedError(
            "logits_dtype", header.logits_dtype, "a floating dtype, or 0", "send the policy's"
        )
    return layout_of(packed.tokens, len(layers), hidden, _DTYPES[packed.states_dtype])


def check_contents(sample: Sample, expected: Expected) -> None:
    """Check what is in a block.

    Raises:
        RefusedError: the first thing that is wrong, by its name.
    """
    layout = sample.layout
    if not all_finite(sample.block.numpy()[layout.aux_at : layout.nbytes], layout.dtype):
        _check_finite("aux_hidden_states", sample.aux)
        _check_finite("final_hidden_state", sample.final_hidden)
        advice = "lay the block out as docs/wire.md says"
        raise RefusedError("packed", "padding that is not zero", "zeros", advice)
    token_ids, positions = sample.token_ids.numpy(), sample.positions.numpy()
    _check_range(token_ids, "token_ids", expected.vocab_size, "the policy's vocab_size")
    # Any other byte is undefined behaviour in a bool tensor.
    if sample.loss_mask.view(torch.uint8).numpy().max() > 1:
        raise RefusedError(
            "loss_mask", "a byte above 1", "bytes 0 or 1", "send torch.bool, not a bit mask"
        )
    _check_range(positions, "positions", 1 << 31, "2^31")
    starts = _segment_starts(sample.segment_ids.numpy())
    _check_rising(positions, starts)
    steps = np.arange(sample.tokens)
    offsets = steps - np.maximum.accumulate(np.where(starts, steps, 0))
    if not (sample.loss_mask.numpy() & (offsets >= 2)).any():
        raise RefusedError(
            "loss_mask", "no true for an anchor", "at least one target", "send completions"
        )
    _check_finite("sampled_logprobs", sample.sampled_logprobs)
    _check_finite("sampled_logits", sample.sampled_logits)
    highest = float(sample.sampled_logprobs.max())
    if highest > LOGPROB_TOLERANCE:
        raise RefusedError(
            "sampled_logprobs", f"{highest:.4g}", "at most 0", "normalise over the vocabulary"
        )


def _check_finite(name: str, values: torch.Tensor) -> None:
    """Raise RefusedError where a value is not finite."""
    finite = np.isfinite(values.float().numpy())
    if not finite.all():
        found = f"{int((~finite).sum())} of {finite.size} values are not finite"
        narrow = values.dtype == torch.float16
        raise RefusedError(name, found, "finite values", _NARROW if narrow else _OVERFLOW)


def _check_range(values: Integers, field: str, bound: int, meaning: str) -> None:
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= bound:
        raise RefusedError(
            field, low if low < 0 else high, f"0 to {bound - 1} ({meaning})", "send no padding"
        )


def _segment_starts(segments: Integers) -> Mask:
    """Return True where a segment begins. Raises RefusedError: one is in several runs."""
    starts = np.ones(len(segments), dtype=np.bool_)
    starts[1:] = segments[1:] != segments[:-1]
    ids, runs = np.unique(segments[starts], return_counts=True)
    if runs.max() > 1:
        twice = int(ids[runs > 1][0])
        raise RefusedError(
            "segment_ids",
            f"segment {twice} in separate runs",
            "one contiguous run for each packed sequence",
            "pack sequences whole",
        )
    return starts


def _check_rising(positions: Integers, starts: Mask) -> None:
    """Refuse positions that do not rise by 1, except where a segment starts."""
    # They are in range, so a difference cannot overflow.
    rises = (positions[1:] - positions[:-1] == 1) | starts[1:]
    if not rises.all():
        at = int(np.flatnonzero(~rises)[0]) + 1
        found = f"{int(positions[at])} after {int(positions[at - 1])} at token {at}"
        raise RefusedError(
            "positions", found, "positions that rise by 1 within a segment", "drop padding"
        )
