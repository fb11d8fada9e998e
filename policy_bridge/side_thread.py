"""A thread for short jobs beside the policy's own: bounded, waited for, stopped by its owner."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from slipstream.refusal import RefusedError

Job = Callable[[], None]
JOBS = 2
"""How many wait at most: each holds the states of a whole window."""

_JOIN_SECONDS = 5.0


class SideThread:
    """Runs jobs one after the other, in the order in which they came.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._running = False
        self._closed = False
        self._error: RefusedError | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> bool:
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
        """Wait until no job runs or waits; False if that took longer, in seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._running, timeout)

    def close(self) -> None:
        """Take no more, finish what waits, end the thread; one that hangs is left. Idempotent."""
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
