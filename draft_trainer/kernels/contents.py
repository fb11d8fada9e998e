"""``contents.c``: ``feed.contents.check_contents`` of many blocks at once, for the usual case."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def sequences_right(
    kernels: ctypes.CDLL, blocks: Sequence[int], tokens: int, vocab_size: int, tolerance: float
) -> tuple[list[bool], list[int], Ids]:
    """Look at everything but the states of blocks in the packed layout, without scales.

    Args:
        kernels: of ``all_kernels``.
        blocks: their addresses; the caller keeps the memory meanwhile.
        tokens: T, of each.
        vocab_size: token ids are below it.
        tolerance: that a log-prob may exceed 0 by.

    Returns:
        Whether each is right, and one sequence in order; how many tokens it has before its first
        completion; and the token ids, int64 [n, T], those before it only.
    """
    count = len(blocks)
    addresses = np.array(blocks, dtype=np.uint64)
    right, prompts = np.empty(count, np.int64), np.empty(count, np.int64)
    ids = np.empty((count, tokens), np.int64)
    kernels.contents(
        ctypes.c_void_p(addresses.ctypes.data),
        *[ctypes.c_int64(number) for number in (count, tokens, vocab_size)],
        ctypes.c_float(tolerance),
        *[ctypes.c_void_p(array.ctypes.data) for array in (right, prompts, ids)],
    )
    return (right != 0).tolist(), prompts.tolist(), ids
