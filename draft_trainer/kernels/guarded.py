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


def guarded_gather(pieces: Sequence[Bytes], destination: Bytes) -> None:
    """Copy pieces one after the other: uint8, together as long as ``destination``.

    Without the kernels a piece that is gone is SIGBUS, which ends the process.

    Raises:
        SourceGoneError: a piece is gone.
    """
    kernels = all_kernels()
    if kernels is None:
        np.concatenate(pieces, out=destination)
        return
    if kernels.guarded_copy(ctypes.c_void_p(destination.ctypes.data), *arguments(pieces)):
        raise SourceGoneError


def arguments(pieces: Sequence[Bytes]) -> tuple[Any, Any, ctypes.c_int64]:
    """Addresses, sizes and their number, for a kernel; the caller keeps the pieces meanwhile."""
    count = len(pieces)
    addresses = [piece.__array_interface__["data"][0] for piece in pieces]
    return (
        (ctypes.c_void_p * count)(*addresses),
        (ctypes.c_int64 * count)(*map(len, pieces)),
        ctypes.c_int64(count),
    )
