"""``slipstream.checksum.copy_checked`` for large blocks or many, in one pass instead of four."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from draft_trainer.kernels.guarded import SourceGoneError, arguments, guarded_gather
from draft_trainer.kernels.library import all_kernels
from slipstream.checksum import XXH3_64, Bytes, copy_checked, infinity_bits

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


def fits_copies(nbytes: int, kind: int, states_at: int) -> bool:
    """Whether blocks of so many bytes are what ``copies_checked`` takes."""
    return kind == XXH3_64 and nbytes >= _LEAST_BYTES and not (nbytes | states_at) % _STRIPE


def copies_checked(
    kernels: ctypes.CDLL,
    sources: Sequence[int],
    destinations: Sequence[int],
    nbytes: int,
    dtype: torch.dtype,
    states_at: int,
) -> tuple[list[int], NDArray[np.bool_]]:
    """Copy blocks of one size, and look at each as ``copy_checked`` does, with XXH3_64.

    Args:
        kernels: of ``all_kernels``.
        sources: addresses of the blocks; the caller keeps the memory meanwhile.
        destinations: addresses, multiples of 64.
        nbytes: of each, as ``fits_copies`` says.
        dtype: of the floats from byte ``states_at`` of each block on.
        states_at: a multiple of 64.

    Returns:
        The checksum of each block's copy, and whether it is finite: bool [n].

    Raises:
        SourceGoneError: a block is of a file that was cut short.
    """
    given = [np.array(addresses, dtype=np.uint64) for addresses in (destinations, sources)]
    found, finite = np.empty(len(sources), np.uint64), np.empty(len(sources), np.int64)
    numbers = (len(sources), nbytes, states_at, dtype.itemsize)
    if kernels.checked_copies(
        *[ctypes.c_void_p(array.ctypes.data) for array in given],
        *[ctypes.c_int64(number) for number in numbers],
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
