"""From a ``VerifierStates`` message to a ``Sample``, or a refusal that names the field.

Every check here stands for states that would otherwise train without an error
and never accept: swapped layers, another vocabulary, raw instead of normalised
log-probs, a packed batch whose positions run on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from draft_trainer.feed.sample import Sample
from slipstream.layers import decode_layers
from slipstream.refusal import RefusedError
from slipstream.tensors import decode, dtype_to_wire
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import tensor_pb2

MAX_ID_CHARACTERS = 256
LOGPROB_TOLERANCE = 1e-3
"""log p may exceed 0 by rounding of a float32 log-sum-exp, not by more."""

STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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


def sample_of(message: pb.VerifierStates, expected: Expected) -> Sample:
    """Check everything about a sample that does not depend on the run's history.

    Raises:
        RefusedError: the first thing that is wrong; ``field`` begins with the
            message's field name.
    """
    temperature = message.temperature
    if not (math.isfinite(temperature) and temperature > 0.0):
        raise RefusedError(
            "temperature",
            temperature,
            "a finite number > 0",
            "send the rollout's sampling temperature",
        )
    layers = decode_layers(message.aux_layers, "aux_layers")
    if layers != expected.aux_layer_ids:
        raise RefusedError(
            "aux_layers",
            f"{list(layers)} (after L layers)",
            f"{list(expected.aux_layer_ids)} (after L layers)",
            "capture the layers that OpenRun answered, in its convention",
        )
    token_ids = _integers(message.token_ids, "token_ids", None, expected)
    tokens = int(token_ids.shape[0])
    _in_range(token_ids, "token_ids", expected.vocab_size, "the policy's vocab_size")
    positions = _integers(message.positions, "positions", tokens, expected)
    segments = _integers(message.segment_ids, "segment_ids", tokens, expected)
    _in_range(positions, "positions", 1 << 31, "2^31")
    starts = _segment_starts(positions, segments)
    loss_mask = _loss_mask(message.loss_mask, tokens)
    offsets = (
        torch.arange(tokens) - torch.cummax(torch.where(starts, torch.arange(tokens), 0), 0)[0]
    )
    if not bool((loss_mask & (offsets >= 2)).any()):
        raise RefusedError(
            "loss_mask",
            "no true at or after the third token of a segment",
            "at least one target that an anchor can predict",
            "send windows that contain completion tokens",
        )
    width = expected.hidden_size
    aux = _states(
        message.aux_hidden_states, "aux_hidden_states", (tokens, len(layers) * width), None
    )
    final = _states(message.final_hidden_state, "final_hidden_state", (tokens, width), aux.dtype)
    logprobs = _floats(message.sampled_logprobs, "sampled_logprobs", tokens)
    if float(logprobs.max()) > LOGPROB_TOLERANCE:
        raise RefusedError(
            "sampled_logprobs",
            f"{float(logprobs.max()):.4g}",
            "log-probabilities, at most 0",
            "send log p(x_t | x_<t), normalised over the full vocabulary",
        )
    logits = _floats(message.sampled_logits, "sampled_logits", tokens)
    return Sample(
        sample_id=message.sample_id,
        policy_version=message.policy_version,
        temperature=temperature,
        token_ids=token_ids,
        positions=positions,
        segment_ids=segments,
        loss_mask=loss_mask,
        aux=aux,
        final_hidden=final,
        sampled_logprobs=logprobs,
        sampled_logits=logits,
    )


def check_sample_id(sample_id: str) -> None:
    """Raise RefusedError for an empty or overlong id."""
    if not 0 < len(sample_id) <= MAX_ID_CHARACTERS:
        raise RefusedError(
            "sample_id",
            f"{len(sample_id)} characters",
            f"1 to {MAX_ID_CHARACTERS} characters",
            "give every sample an id that is unique within the run",
        )


def _integers(
    message: tensor_pb2.Tensor, field: str, tokens: int | None, expected: Expected
) -> torch.Tensor:
    _declared(message, field, (torch.int32,), (tokens,))
    if tokens is None and not 3 <= message.shape[0] <= expected.max_tokens:
        raise RefusedError(
            field,
            f"{message.shape[0]} tokens",
            f"3 to {expected.max_tokens} tokens",
            "send windows of at most OpenRunResponse.max_tokens_per_sample tokens",
        )
    return decode(message, field)


def _in_range(values: torch.Tensor, field: str, bound: int, meaning: str) -> None:
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= bound:
        raise RefusedError(
            field,
            low if low < 0 else high,
            f"0 to {bound - 1} (below {meaning})",
            "check the tokenizer and the padding: a padding id is not a token",
        )


def _segment_starts(positions: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """bool [T]: true where a segment begins."""
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[1:] = segments[1:] != segments[:-1]
    if int(starts.sum()) != int(segments.unique().numel()):
        raise RefusedError(
            "segment_ids",
            "a number that comes back after another segment",
            "the tokens of one sequence side by side",
            "pack whole sequences one after the other",
        )
    broken = ~starts[1:] & (positions[1:] != positions[:-1] + 1)
    if bool(broken.any()):
        at = int(broken.nonzero()[0]) + 1
        raise RefusedError(
            "positions",
            f"{int(positions[at])} after {int(positions[at - 1])} at token {at}",
            "positions that rise by 1 within a segment",
            "drop padding, and start a new segment where a sequence ends",
        )
    return starts


def _loss_mask(message: tensor_pb2.Tensor, tokens: int) -> torch.Tensor:
    _declared(message, "loss_mask", (torch.bool,), (tokens,))
    mask = decode(message, "loss_mask")
    # Any other byte is undefined behaviour in a bool tensor.
    if int(mask.view(torch.uint8).max()) > 1:
        raise RefusedError(
            "loss_mask", "a byte above 1", "bytes 0 or 1", "send torch.bool, not a bit mask"
        )
    return mask


def _states(
    message: tensor_pb2.Tensor, field: str, shape: tuple[int, int], dtype: torch.dtype | None
) -> torch.Tensor:
    _declared(message, field, STATE_DTYPES if dtype is None else (dtype,), shape)
    states = decode(message, field)
    _finite(states, field)
    return states


def _floats(message: tensor_pb2.Tensor, field: str, tokens: int) -> torch.Tensor:
    _declared(message, field, (torch.float32,), (tokens,))
    values = decode(message, field)
    _finite(values, field)
    return values


def _finite(values: torch.Tensor, field: str) -> None:
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        bad = int((~finite).sum())
        raise RefusedError(
            field,
            f"{bad} of {values.numel()} values are not finite",
            "finite values",
            "look for an overflow in the policy's forward pass",
        )


def _declared(
    message: tensor_pb2.Tensor,
    field: str,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
) -> None:
    """Refuse a wrong dtype or shape before a byte of the data is touched."""
    known = {dtype_to_wire(dtype): dtype for dtype in dtypes}
    if message.dtype not in known:
        raise RefusedError(
            f"{field}.dtype",
            tensor_pb2.DType.Name(message.dtype)
            if message.dtype in tensor_pb2.DType.values()
            else message.dtype,
            " or ".join(tensor_pb2.DType.Name(value) for value in known),
            "cast the tensor before sending it",
        )
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
