"""Copies out of memory that may be gone: of a file that somebody else may cut short."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from slipstream.checksum import Bytes


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


def arguments(pieces: Sequence[Bytes]) -> tuple[Any, Any, ctypes.c_int64]:
    """Addresses, sizes and their number, for a kernel; the caller keeps the pieces meanwhile."""
    count = len(pieces)
    addresses = [piece.ctypes.data for piece in pieces]
    return (
        (ctypes.c_void_p * count)(*addresses),
        (ctypes.c_int64 * count)(*map(len, pieces)),
        ctypes.c_int64(count),
    )
