"""``slipstream.checksums.copy_checked`` for large blocks or many, in one pass instead of four."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from draft_trainer.kernels.guarded import (
    SourceGoneError,
    arguments,
    guarded_gather,
    guarded_rows,
)
from draft_trainer.kernels.library import all_kernels
from slipstream.checksums import (
    XXH3_64,
    Bytes,
    checksum_of,
    copy_checked,
    finite_rows,
    infinity_bits,
)

# Below it calling costs more than the passes: they are over what the first-level cache holds.
_SMALLEST_BYTES = 16 << 10
_STRIPE = 64
# Shorter inputs have a hash of their own.
_LEAST_BYTES = 256


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


def fused_rows_checked(
    source: Bytes,
    offsets: Sequence[int],
    rows: Bytes,
    kind: int,
    dtype: torch.dtype,
    states_at: int,
) -> tuple[list[int], NDArray[np.bool_]]:
    """Copy blocks that lie in one memory, and look at each as ``copy_checked`` does.

    Args:
        source: uint8 [N].
        offsets: where each block begins, within ``source``.
        rows: uint8 [len(offsets), n], contiguous, for them.
        kind: of the checksums.
        dtype: of the floats from byte ``states_at`` of each block on.
        states_at: a multiple of the itemsize.

    Returns:
        The checksum of each block's copy, and whether it is finite: bool [len(offsets)].

    Raises:
        RefusedError: as ``copy_checked``.
        SourceGoneError: a block is of a file that was cut short; see ``guarded_rows``.
    """
    kernels, (count, nbytes) = all_kernels(), rows.shape
    whole = not any(number % _STRIPE for number in (rows.ctypes.data, nbytes, states_at))
    if kernels is None or kind != XXH3_64 or nbytes < _LEAST_BYTES or not whole:
        guarded_rows(source, offsets, rows)
        checksums = [checksum_of([row], kind) for row in rows]
        return checksums, finite_rows(rows[:, states_at:], dtype)
    # The address of an array costs as much as all else here: one is asked for, and not each row's.
    addresses = np.array(offsets, dtype=np.int64) + source.ctypes.data
    found, finite = np.empty(count, np.uint64), np.empty(count, np.int64)
    if kernels.checked_rows(
        *[ctypes.c_void_p(array.ctypes.data) for array in (rows, addresses)],
        *[ctypes.c_int64(number) for number in (count, nbytes, states_at, dtype.itemsize)],
        ctypes.c_uint32(infinity_bits(dtype)),
        *[ctypes.c_void_p(array.ctypes.data) for array in (found, finite)],
    ):
        raise SourceGoneError
    return found.tolist(), finite != 0


def _in_stripes(pieces: Sequence[Bytes], destination: Bytes, states_at: int) -> bool:
    """Whether the pieces fill the destination, and everything begins and ends with a stripe."""
    sizes = list(map(len, pieces))
    bounds = (destination.ctypes.data, states_at, *sizes)
    return sum(sizes) == len(destination) and all(number % _STRIPE == 0 for number in bounds)
