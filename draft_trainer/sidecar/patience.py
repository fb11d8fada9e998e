"""A call's requests, each waited for with a deadline; and the calls that sent nothing yet.

A handler of synchronous gRPC waits for its client on a thread of the pool, for ever: forty clients
that opened a call and sent nothing had all of them, and no other call was answered.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import grpc

from slipstream.limits import Unreadable, silent
from slipstream.refusal import RefusedError, StatusCode


class PatientRequests:
    """An iterator over requests that gives up. Owns one thread until ``close``.

    gRPC receives a message only when it is asked for it, and nothing is asked for ahead.

    Args:
        requests: gRPC's own iterator.
        seconds: longest wait for one.
        in_all: longest wait for all of them together.
    """

    def __init__(self, requests: Iterator[Any], seconds: float, in_all: float) -> None:
        self._requests = requests
        self._seconds = seconds
        self._end = time.monotonic() + in_all
        self._in_all = in_all
        self._wanted = threading.Semaphore(0)
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended = False
        self._closed = False
        threading.Thread(target=self._read, name="requests", daemon=True).start()

    def __iter__(self) -> PatientRequests:
        return self

    def __next__(self) -> Any:
        """The next request.

        Raises:
            RefusedError: it did not come in time, or cannot be read.
            grpc.RpcError: the call ended.
        """
        if self._ended:
            raise StopIteration
        left = self._end - time.monotonic()
        self._wanted.release()
        try:
            item = self._arrived.get(timeout=max(min(self._seconds, left), 0.0))
        except queue.Empty:
            raise silent(self._seconds if left > self._seconds else self._in_all) from None
        if item is None:
            self._ended = True
            raise StopIteration
        if isinstance(item, Exception):
            raise item
        return readable(item)

    def give_up(self, error: RefusedError) -> None:
        """Whoever waits for a request gets this error instead."""
        self._arrived.put(error)

    def close(self) -> None:
        """Ask for nothing more; the thread ends with the request that it waits for, or now."""
        self._closed = True
        self._wanted.release()

    def _read(self) -> None:
        while True:
            self._wanted.acquire()
            if self._closed:
                return
            try:
                item = next(self._requests, None)
            except grpc.RpcError as error:
                item = error
            self._arrived.put(item)
            if item is None or isinstance(item, grpc.RpcError):
                return


def readable(item: Any) -> Any:
    """A request. Raises RefusedError for one that could not be read."""
    if isinstance(item, Unreadable):
        raise item.refusal
    return item


class WaitingRoom:
    """Calls whose first request has not come yet. Where there are too many the oldest gives way:
    a client that means it sends its request at once. Thread-safe.

    Args:
        most: calls.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int, PatientRequests] = OrderedDict()

    def first(self, requests: PatientRequests) -> Any:
        """Its first request; None where there is none. Raises as ``PatientRequests``."""
        with self._lock:
            if len(self._waiting) >= self._most:
                _, oldest = self._waiting.popitem(last=False)
                oldest.give_up(
                    RefusedError(
                        "server.max_calls",
                        f"{self._most} calls that sent nothing yet",
                        "a request with the call",
                        "call again, and send at once",
                        StatusCode.RESOURCE_EXHAUSTED,
                    )
                )
            self._waiting[id(requests)] = requests
        try:
            return next(requests, None)
        finally:
            with self._lock:
                self._waiting.pop(id(requests), None)
