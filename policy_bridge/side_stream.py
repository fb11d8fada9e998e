"""Runs the choice and the copies of a capture beside the policy's own work on a GPU.

No synchronisation on the policy's stream: ``submit`` records an event there and
returns. A thread of its own makes a stream of its own wait for that event, and
every copy to the host, every ``tolist`` and the final wait are that stream's. The
tensors that a job reads are referenced by the job until its stream has finished,
so the allocator cannot hand their memory to the policy meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

from slipstream.refusal import RefusedError

Job = Callable[[], None]
_JOBS = 2
_JOIN_SECONDS = 5.0


class Runner(Protocol):
    """Runs the jobs of a bridge, in order."""

    def submit(self, job: Job) -> bool:
        """Run ``job`` now or soon; False if too many wait and it will not be run."""
        ...

    def settle(self) -> None:
        """Called inside a job: wait until the copies that it has begun are done."""
        ...

    def close(self) -> None:
        """Run no more."""
        ...


class Inline:
    """For policies on the CPU: at once, in the caller's thread."""

    def submit(self, job: Job) -> bool:
        """See ``Runner``."""
        job()
        return True

    def settle(self) -> None:
        """Copies between host tensors are done when they return."""

    def close(self) -> None:
        """Nothing runs."""


class SideStream:
    """For policies on a CUDA device.

    Args:
        device: the policy's.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        # Bounded: a job holds the states of a whole window on the device.
        self._jobs: queue.Queue[tuple[torch.cuda.Event, Job] | None] = queue.Queue(_JOBS)
        self._closed = threading.Event()
        self._error: RefusedError | None = None
        self._thread = threading.Thread(target=self._run, name="slipstream-copies", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> bool:
        """See ``Runner``. Call it on the stream that makes the job's tensors.

        Raises:
            RefusedError: what a job before this one raised.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._stream.device))
        try:
            self._jobs.put_nowait((ready, job))
        except queue.Full:
            return False
        return True

    def settle(self) -> None:
        """Wait, in the side thread, for the side stream alone."""
        self._stream.synchronize()

    def close(self) -> None:
        """End the thread; a job that runs is finished, those that wait are dropped."""
        self._closed.set()
        # Full of jobs: then the thread wakes by itself and sees that it is closed.
        with suppress(queue.Full):
            self._jobs.put_nowait(None)
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        with torch.cuda.stream(self._stream):
            while (item := self._jobs.get()) is not None and not self._closed.is_set():
                ready, job = item
                self._stream.wait_event(ready)
                try:
                    job()
                except RefusedError as error:
                    self._error = error
                self._stream.synchronize()
                # Let the states go before waiting for the next job.
                del item, ready, job


def runner_for(device: torch.device) -> Runner:
    """The runner for a policy on ``device``."""
    return SideStream(device) if device.type == "cuda" else Inline()
