"""``slipstream.checksums.copy_checked`` for large blocks, in one pass instead of four."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from draft_trainer.kernels.library import all_kernels
from slipstream.checksums import XXH3_64, Bytes, copy_checked

# Below it calling costs more than the passes: they are over what the first-level cache holds.
_SMALLEST_BYTES = 16 << 10
_STRIPE = 64
# All bits of a float's infinity but its sign: a float that has them is infinite or not a number.
_INFINITY = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F80_0000,
    # No infinities; the only NaNs are all ones.
    torch.float8_e4m3fn: 0x7F,
}


def fused_copy_checked(
    pieces: Sequence[Bytes], destination: Bytes, kind: int, dtype: torch.dtype, states_at: int
) -> tuple[int, bool]:
    """As ``copy_checked``, which it calls where the kernels do not run, or for a few bytes.

    Raises:
        RefusedError: as ``copy_checked``.
    """
    kernels = all_kernels() if kind == XXH3_64 and len(destination) > _SMALLEST_BYTES else None
    addresses = [piece.ctypes.data for piece in pieces] if kernels is not None else []
    whole = all(
        number % _STRIPE == 0 for number in (destination.ctypes.data, states_at, *map(len, pieces))
    )
    if kernels is None or not whole or sum(map(len, pieces)) != len(destination):
        return copy_checked(pieces, destination, kind, dtype, states_at)
    count = len(pieces)
    finite = ctypes.c_int64()
    checksum: int = kernels.checked_copy(
        ctypes.c_void_p(destination.ctypes.data),
        (ctypes.c_void_p * count)(*addresses),
        (ctypes.c_int64 * count)(*map(len, pieces)),
        ctypes.c_int64(count),
        ctypes.c_int64(states_at),
        ctypes.c_int64(dtype.itemsize),
        ctypes.c_uint32(_INFINITY[dtype]),
        ctypes.byref(finite),
    )
    return checksum, bool(finite.value)
