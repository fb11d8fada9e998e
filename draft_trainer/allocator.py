"""What the C library does with memory that was freed."""

from __future__ import annotations

import ctypes

KEPT_BYTES = 64 << 20

# malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The most that glibc takes.
_LARGEST_BYTES = 32 << 20


def keep_freed_memory() -> bool:
    """Have up to ``KEPT_BYTES`` of freed memory kept for what is allocated next.

    Every message of a stream is a megabyte of fresh memory, and glibc gives it back to the system
    as soon as it is freed: a fifth of the pages of each message were faulted in anew, and streams
    were a quarter slower.

    Returns:
        Whether this C library knows how.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    )
