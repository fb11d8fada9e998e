"""Whether the tokens, positions, masks and log-probs of a block can be a sample's.

With numpy and the common case first: a small sample is to cost microseconds, and a torch operation
on sixteen numbers takes one by itself.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from draft_trainer.feed.validate import Expected
from slipstream.checksums import Bytes
from slipstream.packed import Layout
from slipstream.refusal import RefusedError

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
