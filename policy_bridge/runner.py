"""Where the choice and the copies of a capture are done: beside the policy's own work.

On a GPU both are, on a stream and a thread of their own. On a CPU the choice is made at once,
because its numbers may come from weights that the next step changes, and the copies go to a
thread: the policy's backward pass runs without the interpreter's lock, so by then they cost it
nothing where there is a free core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from policy_bridge.side_thread import SideThread

# Of the policy's thread. Without it a loss of five operations took 0.4 ms longer.
_HEAD_START_SECONDS = 0.002

T = TypeVar("T")


class Runner(Protocol):
    """Runs the work of a bridge's windows, in order."""

    def submit(self, choose: Callable[[], T | None], copy: Callable[[T], None]) -> bool:
        """Call ``copy`` with what ``choose`` returned, unless that is None; each now or soon.

        Returns:
            False if too much waits: then neither was called, nor will be.
        """
        ...

    def settle(self) -> None:
        """Called inside ``copy``: wait until the copies that it has begun are done."""
        ...

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing runs or waits; False if that took longer, in seconds."""
        ...

    def close(self) -> None:
        """Finish what waits, within a deadline, and run no more."""
        ...


class Inline:
    """At once, in the caller's thread."""

    def submit(self, choose: Callable[[], T | None], copy: Callable[[T], None]) -> bool:
        """See ``Runner``."""
        chosen = choose()
        if chosen is not None:
            copy(chosen)
        return True

    def settle(self) -> None:
        """Copies between host tensors are done when they return."""

    def wait_idle(self, timeout: float) -> bool:
        """See ``Runner``: there is nothing to wait for."""
        return True

    def close(self) -> None:
        """Nothing runs."""


class HostRunner:
    """For policies on the CPU: chooses in the caller's thread, copies in one of its own.

    The copies begin a moment later: at once they would take the interpreter's lock from the
    caller between the operations that lead from the pass to its backward.
    """

    def __init__(self) -> None:
        self._thread = SideThread("slipstream-copies")

    def submit(self, choose: Callable[[], T | None], copy: Callable[[T], None]) -> bool:
        """See ``Runner``; too much never waits: the caller's thread copies then.

        Raises:
            RefusedError: what a ``copy`` before this one raised.
        """
        chosen = choose()
        if chosen is None:
            return True

        def job() -> None:
            time.sleep(_HEAD_START_SECONDS)
            copy(chosen)

        if not self._thread.submit(job):
            copy(chosen)
        return True

    def settle(self) -> None:
        """Copies between host tensors are done when they return."""

    def wait_idle(self, timeout: float) -> bool:
        """See ``Runner``."""
        return self._thread.wait_idle(timeout)

    def close(self) -> None:
        """See ``Runner``."""
        self._thread.close()


class DeviceRunner:
    """For policies on a CUDA device: chooses and copies in a thread and on a stream of its own.

    No synchronisation on the policy's stream: ``submit`` records an event there and
    returns. The thread makes its stream wait for that event, and every copy to the host,
    every ``tolist`` and the final wait are that stream's. The tensors that a job reads are
    referenced by the job until its stream has finished, so the allocator cannot hand their
    memory to the policy meanwhile.

    Args:
        device: the policy's.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._thread = SideThread("slipstream-copies")

    def submit(self, choose: Callable[[], T | None], copy: Callable[[T], None]) -> bool:
        """See ``Runner``. Call it on the stream that makes the tensors that are read.

        Raises:
            RefusedError: what a job before this one raised.
        """
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._stream.device))

        def job() -> None:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                try:
                    chosen = choose()
                    if chosen is not None:
                        copy(chosen)
                finally:
                    self._stream.synchronize()

        return self._thread.submit(job)

    def settle(self) -> None:
        """Wait, in the side thread, for the side stream alone."""
        self._stream.synchronize()

    def wait_idle(self, timeout: float) -> bool:
        """See ``Runner``."""
        return self._thread.wait_idle(timeout)

    def close(self) -> None:
        """See ``Runner``."""
        self._thread.close()


def runner_for(device: torch.device) -> Runner:
    """The runner for a policy on ``device``."""
    return DeviceRunner(device) if device.type == "cuda" else HostRunner()
