"""What the C library does with memory that was freed, and how often Python looks for more."""

from __future__ import annotations

import ctypes
import gc

KEPT_BYTES = 64 << 20

# malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The most that glibc takes.
_LARGEST_BYTES = 32 << 20
# Containers more than there were, after which the collector looks at the new ones. Python's own 700
# is a message of small samples; what came since then, stored samples too, was looked at twice.
# Training leaves three a step for the collector, and no tensor.
_FIRST_GENERATION = 100_000


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


def settle_collector() -> None:
    """Have Python's cyclic collector leave alone what is there now, and look less often.

    The imports' objects live as long as the process. Every full collection went through all of
    them, which cost ingest more than small samples did.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_FIRST_GENERATION, *gc.get_threshold()[1:])
