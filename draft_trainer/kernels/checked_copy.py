"""``slipstream.checksums.copy_checked`` for large blocks, in one pass instead of four."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from draft_trainer.kernels.guarded import SourceGoneError, arguments, guarded_gather
from draft_trainer.kernels.library import all_kernels
from slipstream.checksums import XXH3_64, Bytes, copy_checked, infinity_bits

# Below it calling costs more than the passes: they are over what the first-level cache holds.
_SMALLEST_BYTES = 16 << 10
_STRIPE = 64


def fused_copy_checked(
    pieces: Sequence[Bytes], destination: Bytes, kind: int, dtype: torch.dtype, states_at: int
) -> tuple[int, bool]:
    """As ``copy_checked``, which it calls where the kernels do not run, or for a few bytes.

    Raises:
        RefusedError: as ``copy_checked``.
        SourceGoneError: a piece is of a file that was cut short; see ``guarded_gather``.
    """
    kernels = all_kernels()
    if kernels is None:
        return copy_checked(pieces, destination, kind, dtype, states_at)
    large = len(destination) > _SMALLEST_BYTES and _in_stripes(pieces, destination, states_at)
    if kind != XXH3_64 or not large:
        guarded_gather(kernels, pieces, destination)
        return copy_checked([destination], destination, kind, dtype, states_at)
    finite = ctypes.c_int64()
    checksum: int = kernels.checked_copy(
        ctypes.c_void_p(destination.ctypes.data),
        *arguments(pieces),
        ctypes.c_int64(states_at),
        ctypes.c_int64(dtype.itemsize),
        ctypes.c_uint32(infinity_bits(dtype)),
        ctypes.byref(finite),
    )
    if finite.value < 0:
        raise SourceGoneError
    return checksum, bool(finite.value)


def _in_stripes(pieces: Sequence[Bytes], destination: Bytes, states_at: int) -> bool:
    """Whether the pieces fill the destination, and everything begins and ends with a stripe."""
    sizes = list(map(len, pieces))
    bounds = (destination.ctypes.data, states_at, *sizes)
    return sum(sizes) == len(destination) and all(number % _STRIPE == 0 for number in bounds)
