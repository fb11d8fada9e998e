"""Keeps long background work out of the policy's way.

A thread that copies under the interpreter's lock stops the policy's thread for as long, and on
a machine without a free core every second of it is one of the policy's. So it works in small
blocks and sleeps between them, in proportion to the CPU time that each block took.
"""

from __future__ import annotations

import time

BLOCK_BYTES = 1 << 20
"""About a tenth of a millisecond of one core's memory traffic."""

_SHARE = 0.02


class Pace:
    """Of one thread, from its construction on.

    Args:
        nbytes: how many there are to work on; for a block or less there is no pause.
        most_seconds: bound on all pauses together; ahead of the share.
    """

    def __init__(self, nbytes: int, most_seconds: float) -> None:
        self._most = most_seconds * BLOCK_BYTES / nbytes if nbytes > BLOCK_BYTES else 0.0
        self._used = time.thread_time()

    def rest(self) -> None:
        """Sleep after a block."""
        used = time.thread_time()
        time.sleep(min(self._most, (used - self._used) * (1 / _SHARE - 1)))
        self._used = time.thread_time()
