"""The layout of a sample's tensors as one block, the same on every transport and in the trainer.

In this order, little-endian, T tokens, A auxiliary layers, H hidden size, S = A + 1 scales for
float8 and otherwise none:

    int32   [3, T]        token ids, positions, segment ids
    float32 [2 + S, T]    sampled log-probs, sampled logits, scales
    uint8   [T]           loss mask, 0 or 1
    states  [T, A * H]    from the next multiple of 64 on
    states  [T, H]        from the next multiple of 64 on
    zeros                 to the next multiple of 64

One block has one checksum, is copied once, and needs no message for each tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checksum import Bytes

ALIGNMENT = 64
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Layout:
    """Where everything is in a block.

    Attributes:
        tokens: T.
        aux_layers: A.
        hidden_size: H.
        dtype: of both states.
    """

    tokens: int
    aux_layers: int
    hidden_size: int
    dtype: torch.dtype

    @cached_property
    def scales(self) -> int:
        """S: scales a token."""
        return self.aux_layers + 1 if self.dtype == FLOAT8 else 0

    @cached_property
    def mask_at(self) -> int:
        """First byte of the loss mask."""
        return 4 * self.tokens * (5 + self.scales)

    @cached_property
    def aux_at(self) -> int:
        """First byte of the auxiliary states."""
        return _up(self.mask_at + self.tokens)

    @cached_property
    def final_at(self) -> int:
        """First byte of the final states."""
        width = self.aux_layers * self.hidden_size
        return _up(self.aux_at + self.tokens * width * self.dtype.itemsize)

    @cached_property
    def nbytes(self) -> int:
        """Of the block."""
        return _up(self.final_at + self.tokens * self.hidden_size * self.dtype.itemsize)


@lru_cache(maxsize=4096)
def layout_of(tokens: int, aux_layers: int, hidden_size: int, dtype: torch.dtype) -> Layout:
    """The layout, made once for each shape."""
    return Layout(tokens, aux_layers, hidden_size, dtype)


@dataclass(frozen=True)
class PackedTensors:
    """The tensors of a block. Semantics are those of ``VerifierStates``.

    Attributes:
        token_ids, positions: int32 [T].
        segment_ids: int32 [T]; to be written also empty, for one segment.
        sampled_logprobs, sampled_logits: float32 [T].
        loss_mask: bool [T].
        aux: [T, A * H].
        final: [T, H], same dtype.
        scales: float32 [S, T], of each auxiliary layer and of the final state; S may be 0.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    segment_ids: torch.Tensor
    sampled_logprobs: torch.Tensor
    sampled_logits: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    final: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class Numbers:
    """What a block holds beside states: numpy arrays [T], or one number for all tokens.

    Attributes:
        token_ids, positions, segment_ids: whole numbers.
        sampled_logprobs, sampled_logits: floats.
        loss_mask: bool.
    """

    token_ids: NDArray[np.integer[Any]]
    positions: NDArray[np.integer[Any]]
    segment_ids: NDArray[np.integer[Any]] | int
    sampled_logprobs: NDArray[np.float32]
    sampled_logits: NDArray[np.float32]
    loss_mask: NDArray[np.bool_]


def tensors_in(block: torch.Tensor, layout: Layout) -> PackedTensors:
    """The tensors of a block as views of it.

    Args:
        block: uint8 [at least layout.nbytes], 64-byte aligned.
        layout: of it; the mask's bytes must be 0 or 1 before it is read.
    """
    tokens = layout.tokens
    ids = block[: 12 * tokens].view(torch.int32).view(3, tokens).unbind()
    floats = block[12 * tokens : layout.mask_at].view(torch.float32).view(-1, tokens)
    logprobs, logits = floats[:2].unbind()
    aux, final = states_in(block[: layout.nbytes], layout)
    return PackedTensors(
        token_ids=ids[0],
        positions=ids[1],
        segment_ids=ids[2],
        sampled_logprobs=logprobs,
        sampled_logits=logits,
        loss_mask=block[layout.mask_at : layout.mask_at + tokens].view(torch.bool),
        aux=aux,
        final=final,
        scales=floats[2:],
    )


def states_in(block: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """A block's auxiliary states [T, A * H] and final states [T, H] as views of it."""
    values = block.view(layout.dtype)
    tokens, hidden, itemsize = layout.tokens, layout.hidden_size, layout.dtype.itemsize
    width, first = layout.aux_layers * hidden, values.storage_offset()
    aux = values.as_strided((tokens, width), (width, 1), first + layout.aux_at // itemsize)
    final = values.as_strided((tokens, hidden), (hidden, 1), first + layout.final_at // itemsize)
    return aux, final


def write_block(tensors: PackedTensors, layout: Layout, block: Bytes) -> None:
    """Write the whole block.

    Args:
        tensors: on the CPU, of the layout's shapes and dtypes.
        layout: of the block.
        block: uint8 [layout.nbytes].
    """
    tokens = layout.tokens
    if layout.scales:
        floats = block[12 * tokens : layout.mask_at].view(np.float32).reshape(-1, tokens)
        floats[2:] = tensors.scales.numpy()
    numbers = Numbers(
        token_ids=tensors.token_ids.numpy(),
        positions=tensors.positions.numpy(),
        segment_ids=tensors.segment_ids.numpy() if tensors.segment_ids.numel() else 0,
        sampled_logprobs=tensors.sampled_logprobs.numpy(),
        sampled_logits=tensors.sampled_logits.numpy(),
        loss_mask=tensors.loss_mask.numpy(),
    )
    write_numbers(numbers, layout, block)
    for states, start in ((tensors.aux, layout.aux_at), (tensors.final, layout.final_at)):
        data = states.view(torch.uint8).numpy()
        block[start : start + data.size].reshape(data.shape)[:] = data


def write_numbers(numbers: Numbers, layout: Layout, block: Bytes) -> None:
    """Write everything but the states and their scales, and zeros where nothing belongs.

    With numpy: on a short sequence a torch operation takes longer than what it does.

    Args:
        numbers: of the layout's shapes.
        layout: of the block.
        block: uint8 [layout.nbytes].
    """
    tokens, mask_end = layout.tokens, layout.mask_at + layout.tokens
    ids = block[: 12 * tokens].view(np.int32).reshape(3, tokens)
    ids[0], ids[1], ids[2] = numbers.token_ids, numbers.positions, numbers.segment_ids
    floats = block[12 * tokens : 20 * tokens].view(np.float32).reshape(2, tokens)
    floats[0], floats[1] = numbers.sampled_logprobs, numbers.sampled_logits
    block[layout.mask_at : mask_end] = numbers.loss_mask
    block[mask_end : layout.aux_at] = 0
    width = layout.hidden_size * layout.dtype.itemsize * tokens
    block[layout.aux_at + layout.aux_layers * width : layout.final_at] = 0
    block[layout.final_at + width :] = 0


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
