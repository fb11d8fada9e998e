"""Ends the process when it is told to stop before the server is up.

vLLM raises KeyboardInterrupt from its signal handler during start-up. Under uvloop
and pyzmq that exception gets lost: the process either came up and served all the
same, or waited for ever for an engine that had been stopped. Here the handler
itself stops the children and leaves. Once the API server runs, vLLM replaces it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from types import FrameType

_CHILD_SECONDS = 10.0


def install(closers: Iterable[Callable[[], None]]) -> None:
    """Handle SIGTERM and SIGINT from now until somebody else does.

    Args:
        closers: called before leaving, for what outlives a process (shared memory).
    """

    def stop(number: int, frame: FrameType | None) -> None:
        children = multiprocessing.active_children()
        for child in children:
            child.terminate()
        for child in children:
            child.join(_CHILD_SECONDS)
            if child.is_alive():
                child.kill()
        for close in closers:
            close()
        # Not sys.exit: the interpreter's own end would wait for vLLM's threads.
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
