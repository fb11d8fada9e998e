"""Selects and copies captured states in parallel with the policy's own work.

For a policy on a GPU both are done on a stream and a thread of their own, without a synchronisation
on the policy's stream. For one on a CPU the choice is made at once, because its numbers may come
from weights that the next step changes, and the copies go to the thread: the backward pass runs
without the interpreter's lock, so there they cost the policy nothing where there is a free core.

Blocks are assembled in host memory, page-locked for a CUDA device, and written from there to the
outbox's file, once. Allocators keep that memory, so it is not mapped or locked anew each time.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

from slipstream.errors import RefusedError
from slipstream.shortage import raise_unless_shortage

Job = Callable[[], None]
T = TypeVar("T")
JOBS = 2
"""The most jobs that wait for a policy on a CPU, whose own thread does what is beyond them.

On a device there is no such bound: jobs begin when the device has made their states, and a host
that runs ahead of it may have queued any number of passes. What they hold is bounded in bytes, by
who submits them.
"""

GROUP_BYTES = 16 << 20
"""The bound on blocks that are assembled together; a larger block is assembled alone."""

_JOIN_SECONDS = 5.0
# Delay of copies on a CPU: started at once, they would take the interpreter's lock from the
# policy's thread between the operations that lead from the pass to its backward.
_HEAD_START_SECONDS = 0.002


class Copier:
    """Runs the work of a bridge's windows in order, on a thread that the first job starts.

    On a CUDA device ``submit`` records an event on the policy's stream and returns; the thread's
    own stream waits for it. A job references the tensors that it reads until that stream has
    finished, so the allocator cannot hand their memory to the policy meanwhile.

    Args:
        device: of the policy; None: everything is done in the caller's thread.

    Attributes:
        deferred: whether the choice is made after ``submit`` returns, on a stream of its own.
        pinned: whether blocks are assembled in page-locked memory, for asynchronous copies.
        died: whether the thread ended with an unexpected error: nothing is copied any more.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        cuda = device is not None and device.type == "cuda"
        self._inline, self.deferred, self.pinned = device is None, cuda, cuda
        self._stream = torch.cuda.Stream(device) if cuda else None
        self.died = False
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Job, int]] = deque()
        self._running = self._closed = False
        self._bytes = 0
        self._error: RefusedError | None = None
        self._thread: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        """Device memory held by jobs that have not ended, in bytes."""
        with self._changed:
            return self._bytes

    def submit(
        self, choose: Callable[[], T | None], copy: Callable[[T], None], nbytes: int = 0
    ) -> bool:
        """Call ``choose``, and ``copy`` with its result unless that is None; each now or soon.

        On a device, call this on the stream that makes the tensors to be read, ``nbytes`` in all.

        Returns:
            False if nothing is taken any more, or the device has no memory for an event: then
            neither was called, nor will be.

        Raises:
            RefusedError: what a job before this one raised.
        """
        if (stream := self._stream) is not None:
            ready = torch.cuda.Event()
            try:
                ready.record(torch.cuda.current_stream(stream.device))
            except RuntimeError as error:
                raise_unless_shortage(error)
                return False

            def on_stream() -> None:
                with torch.cuda.stream(stream):
                    stream.wait_event(ready)
                    try:
                        chosen = choose()
                        if chosen is not None:
                            copy(chosen)
                    finally:
                        stream.synchronize()

            return self.put(on_stream, nbytes)
        chosen = choose()
        if chosen is None:
            return True

        def later() -> None:
            time.sleep(_HEAD_START_SECONDS)
            copy(chosen)

        # Where too much waits the caller's thread copies: its memory is the policy's own.
        if self._inline or not self.put(later):
            copy(chosen)
        return True

    def put(self, job: Job, nbytes: int = 0) -> bool:
        """Run ``job`` soon; False if it will not be run: too many wait on a CPU, or the thread has
        ended.

        It holds ``nbytes`` of device memory until it has run.

        Raises:
            RefusedError: what a job before this one raised.
        """
        with self._changed:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._closed or (len(self._jobs) >= JOBS and not self.deferred):
                return False
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="slipstream-copies", daemon=True
                )
                self._thread.start()
                # A thread that is inside torch while the interpreter ends aborts the process.
                atexit.register(self._close_at_exit, os.getpid())
            self._jobs.append((job, nbytes))
            self._bytes += nbytes
            self._changed.notify_all()
            return True

    def settle(self) -> None:
        """Wait, inside ``copy``, for the copies that it has begun."""
        if self._stream is not None:
            self._stream.synchronize()

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing runs or waits; False if that took longer, in seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._running, timeout)

    def close(self) -> None:
        """Take no more and finish what waits within a deadline. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self, process: int) -> None:
        # Not in a forked child, where another thread may have held the lock.
        if os.getpid() == process:
            self.close()

    def _run(self) -> None:
        try:
            if self._stream is not None:
                # Otherwise leaving the stream switches to GPU 0, and creates a context there.
                torch.cuda.set_device(self._stream.device)
            while (taken := self._next_job()) is not None:
                job, nbytes = taken
                try:
                    job()
                except RefusedError as error:
                    with self._changed:
                        # Its traceback would keep the states.
                        self._error = error.with_traceback(None)
                # Free its states before the thread is idle or waits for the next job.
                del taken, job
                self._job_ended(nbytes)
        finally:
            with self._changed:
                self.died = not self._closed
                self._closed = True
                self._jobs.clear()
            self._job_ended()

    def _next_job(self) -> tuple[Job, int] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            self._running = bool(self._jobs)
            return self._jobs.popleft() if self._jobs else None

    def _job_ended(self, nbytes: int = 0) -> None:
        with self._changed:
            self._running = False
            self._bytes -= nbytes
            self._changed.notify_all()
