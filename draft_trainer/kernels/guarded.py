"""Copies out of memory that may be gone: of a file that somebody else may cut short."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from draft_trainer.kernels.library import all_kernels
from slipstream.checksums import Bytes


class SourceGoneError(Exception):
    """The file that a piece is mapped from was cut short; what was copied is worth nothing."""


def guarded_gather(kernels: ctypes.CDLL, pieces: Sequence[Bytes], destination: Bytes) -> None:
    """Copy pieces one after the other: uint8, together as long as ``destination``.

    Args:
        kernels: of ``all_kernels``; without them a piece that is gone is SIGBUS.
        pieces, destination: see above.

    Raises:
        SourceGoneError: a piece is gone.
    """
    if kernels.guarded_copy(ctypes.c_void_p(destination.ctypes.data), *arguments(pieces)):
        raise SourceGoneError


def guarded_rows(source: Bytes, offsets: Sequence[int], rows: Bytes) -> None:
    """Copy rows that lie in ``source``: as ``guarded_gather``, for many small pieces of one memory.

    Without the kernels a row that is gone is SIGBUS, which ends the process.

    Args:
        source: uint8 [N].
        offsets: where each row begins, within ``source``.
        rows: uint8 [len(offsets), n], contiguous.

    Raises:
        SourceGoneError: a row is gone.
    """
    kernels, (count, nbytes) = all_kernels(), rows.shape
    if kernels is None:
        for row, offset in zip(rows, offsets, strict=True):
            row[:] = source[offset : offset + nbytes]
        return
    # The address of an array costs as much as all else here: one is asked for, and not each row's.
    addresses = np.array(offsets, dtype=np.int64) + source.ctypes.data
    sizes = np.full(count, nbytes, dtype=np.int64)
    given = [ctypes.c_void_p(array.ctypes.data) for array in (rows, addresses, sizes)]
    if kernels.guarded_copy(*given, ctypes.c_int64(count)):
        raise SourceGoneError


def arguments(pieces: Sequence[Bytes]) -> tuple[Any, Any, ctypes.c_int64]:
    """Addresses, sizes and their number, for a kernel; the caller keeps the pieces meanwhile."""
    count = len(pieces)
    addresses = [piece.ctypes.data for piece in pieces]
    return (
        (ctypes.c_void_p * count)(*addresses),
        (ctypes.c_int64 * count)(*map(len, pieces)),
        ctypes.c_int64(count),
    )
