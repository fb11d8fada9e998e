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

import numpy as np
import torch

from slipstream.checksums import Bytes

ALIGNMENT = 64
_SMALL_BYTES = 64 << 10
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
    aux_bytes = tokens * layout.aux_layers * layout.hidden_size * layout.dtype.itemsize
    final_bytes = tokens * layout.hidden_size * layout.dtype.itemsize
    return PackedTensors(
        token_ids=ids[0],
        positions=ids[1],
        segment_ids=ids[2],
        sampled_logprobs=logprobs,
        sampled_logits=logits,
        loss_mask=block[layout.mask_at : layout.mask_at + tokens].view(torch.bool),
        aux=block[layout.aux_at : layout.aux_at + aux_bytes].view(layout.dtype).view(tokens, -1),
        final=block[layout.final_at : layout.final_at + final_bytes]
        .view(layout.dtype)
        .view(tokens, -1),
        scales=floats[2:],
    )


def is_small(layout: Layout) -> bool:
    """Whether a block is best written as one piece, by ``write_block``."""
    return layout.nbytes <= _SMALL_BYTES


def write_block(tensors: PackedTensors, layout: Layout, block: Bytes) -> None:
    """Write the whole block.

    Args:
        tensors: on the CPU, of the layout's shapes and dtypes.
        layout: of the block.
        block: uint8 [layout.nbytes].
    """
    _write_head(tensors, layout, block)
    for states, start, end in (
        (tensors.aux, layout.aux_at, layout.final_at),
        (tensors.final, layout.final_at, layout.nbytes),
    ):
        data = states.view(torch.uint8).numpy()
        at = start + data.size
        block[start:at].reshape(data.shape)[:] = data
        if at < end:
            block[at:end] = 0


def pieces_of(tensors: PackedTensors, layout: Layout) -> list[Bytes]:
    """The block in pieces that need only be put one behind the other.

    States are not copied, but in a small block, which is one piece.

    Args:
        tensors: on the CPU, of the layout's shapes and dtypes.
        layout: of the block.
    """
    if is_small(layout):
        block = np.empty(layout.nbytes, dtype=np.uint8)
        write_block(tensors, layout, block)
        return [block]
    head = np.empty(layout.aux_at, dtype=np.uint8)
    _write_head(tensors, layout, head)
    pieces, at = [head], layout.aux_at
    for states, end in ((tensors.aux, layout.final_at), (tensors.final, layout.nbytes)):
        data = states.contiguous().view(torch.uint8).numpy().reshape(-1)
        pieces.append(data)
        at += len(data)
        if at < end:
            pieces.append(np.zeros(end - at, dtype=np.uint8))
            at = end
    return pieces


def _write_head(tensors: PackedTensors, layout: Layout, head: Bytes) -> None:
    """Everything up to the states."""
    tokens = layout.tokens
    ids = head[: 12 * tokens].view(np.int32).reshape(3, tokens)
    ids[0], ids[1] = tensors.token_ids.numpy(), tensors.positions.numpy()
    ids[2] = tensors.segment_ids.numpy() if tensors.segment_ids.numel() else 0
    floats = head[12 * tokens : layout.mask_at].view(np.float32).reshape(-1, tokens)
    floats[0], floats[1] = tensors.sampled_logprobs.numpy(), tensors.sampled_logits.numpy()
    if layout.scales:
        floats[2:] = tensors.scales.numpy()
    mask_end = layout.mask_at + tokens
    head[layout.mask_at : mask_end] = tensors.loss_mask.numpy()
    if mask_end < layout.aux_at:
        head[mask_end : layout.aux_at] = 0


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
