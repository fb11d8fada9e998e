"""Where the choice and the copies of a capture are done: beside the policy's own work.

On a GPU both are, on a stream and a thread of their own. On a CPU the choice is made at once,
because its numbers may come from weights that the next step changes, and the copies go to a
thread: the policy's backward pass runs without the interpreter's lock, so by then they cost it
nothing where there is a free core.

Blocks are assembled in a small staging buffer, page-locked for a CUDA device, and written from
there to the outbox's file, once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from slipstream.errors import RefusedError

Job = Callable[[], None]
T = TypeVar("T")
JOBS = 2
"""How many wait at most: each holds the states of a whole window."""

STAGING_BYTES = 16 << 20

_JOIN_SECONDS = 5.0
# Of the policy's thread. Without it a short loss takes longer.
_HEAD_START_SECONDS = 0.002


class Staging:
    """Host memory in which blocks are assembled: one buffer, used again. Thread-safe.

    Args:
        nbytes: of the buffer, which is made when it is first needed.
        pinned: page-lock it, for asynchronous copies from a CUDA device.
    """

    def __init__(self, nbytes: int = STAGING_BYTES, *, pinned: bool = False) -> None:
        self.nbytes = nbytes
        self._pinned = pinned
        self._lock = threading.Lock()
        self._buffer: torch.Tensor | None = None

    @contextmanager
    def borrow(self, nbytes: int) -> Iterator[torch.Tensor]:
        """uint8 [nbytes], undefined content: of the buffer, where that is free and large enough."""
        # Not waited for: one of the two threads that copy may be the policy's.
        if nbytes > self.nbytes or not self._lock.acquire(blocking=False):
            yield torch.empty(nbytes, dtype=torch.uint8)
            return
        try:
            if self._buffer is None:
                self._buffer = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self._pinned)
            yield self._buffer[:nbytes]
        finally:
            self._lock.release()


class Runner:
    """Runs the work of a bridge's windows in order. This one does so in the caller's thread."""

    died = False
    """Whether its thread ended of an unexpected error: it copies nothing any more."""

    def submit(self, choose: Callable[[], T | None], copy: Callable[[T], None]) -> bool:
        """Call ``copy`` with what ``choose`` returned, unless that is None; each now or soon.

        Returns:
            False if too much waits: then neither was called, nor will be.

        Raises:
            RefusedError: what a job before this one raised.
        """
        chosen = choose()
        if chosen is not None:
            copy(chosen)
        return True

    def settle(self) -> None:
        """Inside ``copy``: wait for the copies it has begun. Between host tensors they are done."""

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing runs or waits; False if that took longer, in seconds."""
        return True

    def close(self) -> None:
        """Take no more, finish what waits within a deadline. Idempotent."""


class SideThread(Runner):
    """Runs jobs one after the other in a thread of its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._running = False
        self._closed = False
        self._error: RefusedError | None = None
        self._thread = threading.Thread(target=self._run, name="slipstream-copies", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> bool:
        """Run ``job`` soon; False if too many wait or the thread has ended: it will not be run.

        Raises:
            RefusedError: what a job before this one raised.
        """
        with self._changed:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if len(self._jobs) >= JOBS or self._closed:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def wait_idle(self, timeout: float) -> bool:
        """See ``Runner``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._running, timeout)

    def close(self) -> None:
        """See ``Runner``; a job that hangs is left."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                try:
                    job()
                except RefusedError as error:
                    with self._changed:
                        self._error = error
                # Its states go before it is idle, and before the next one is waited for.
                del job
                self._ended()
        finally:
            with self._changed:
                self.died = not self._closed
                self._closed = True
                self._jobs.clear()
            self._ended()

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            self._running = bool(self._jobs)
            return self._jobs.popleft() if self._jobs else None

    def _ended(self) -> None:
        with self._changed:
            self._running = False
            self._changed.notify_all()


class HostRunner(SideThread):
    """For policies on the CPU: chooses in the caller's thread, copies in its own.

    The copies begin a moment later: at once they would take the interpreter's lock from the
    caller between the operations that lead from the pass to its backward.
    """

    def submit(self, choose: Callable[[], T | None], copy: Callable[[T], None]) -> bool:
        """See ``Runner``; too much never waits: the caller's thread copies then."""
        chosen = choose()
        if chosen is None:
            return True

        def job() -> None:
            time.sleep(_HEAD_START_SECONDS)
            copy(chosen)

        if not self.put(job):
            copy(chosen)
        return True


class DeviceRunner(SideThread):
    """For policies on a CUDA device: chooses and copies in a thread and on a stream of its own.

    No synchronisation on the policy's stream: ``submit`` records an event there and
    returns. The thread makes its stream wait for that event, and every copy to the host,
    every ``tolist`` and the final wait are that stream's. The tensors that a job reads are
    referenced by the job until its stream has finished, so the allocator cannot hand their
    memory to the policy meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._stream = torch.cuda.Stream(device)

    def submit(self, choose: Callable[[], T | None], copy: Callable[[T], None]) -> bool:
        """See ``Runner``. Call it on the stream that makes the tensors that are read."""
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

        return self.put(job)

    def settle(self) -> None:
        """Wait, in the side thread, for the side stream alone."""
        self._stream.synchronize()
