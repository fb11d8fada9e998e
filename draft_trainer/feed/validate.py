"""What a ``VerifierStates`` message declares, checked before a byte of its states is touched.

Every check here and in ``contents`` stands for states that would otherwise train without an error
and never accept: swapped layers, another vocabulary, raw instead of normalised log-probs, a packed
batch whose positions run on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from slipstream.layers import decode_layers, encode_layers
from slipstream.packed import FLOAT8, Layout, layout_of
from slipstream.refusal import RefusedError
from slipstream.tensors import dtype_to_wire
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import tensor_pb2

MAX_ID_CHARACTERS = 256

STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
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
    def known_layouts(self) -> dict[tuple[int, int, int], Layout]:
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
    key = packed.tokens, packed.states_dtype, packed.span.bytes
    known = expected.known_layouts.get(key)
    if known is not None:
        return known
    _check_tokens("packed.tokens", packed.tokens, expected)
    dtype = _dtype_among("packed.states_dtype", packed.states_dtype, _PACKED_DTYPES)
    layout = layout_of(packed.tokens, len(expected.aux_layer_ids), expected.hidden_size, dtype)
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
    for field, dtype in TENSORS.items():
        _declared(getattr(message, field), field, (dtype,), (tokens,))
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
