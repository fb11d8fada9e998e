"""What one call may cost a server, and how refused calls are told; the same in both rooms.

Every limit here stands for a client that took a server down: protobuf that does not parse ended in
INTERNAL and a stack trace a message, one message of two million empty entries in gigabytes.

Asks a service for its standard gRPC health; as a command, the probe of a container.

    python -m slipstream.serving 127.0.0.1:50061 slipstream.v1.RolloutServer/ready

Kubernetes' own gRPC probes know no TLS, and images hold no second program for it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.errors import RefusedError, StatusCode
from slipstream.tensors import CHUNK_BYTES

logger = logging.getLogger(__name__)

SMALL_MESSAGE_BYTES = 64 << 10
"""Largest request without tensors."""

CHUNK_MESSAGE_BYTES = CHUNK_BYTES + (1 << 20)
"""Largest request that carries a chunk, or names the tensors that will come."""

LOG_SECONDS = 60.0
"""Between two lines about refusals of one kind."""

_PEERS = 4096


@dataclass(frozen=True)
class Limit:
    """Of one method.

    Attributes:
        calls: in progress at a time.
        message_bytes: of one request, serialized.
        call_seconds: within which all requests must have come and all answers been read; None: only
            the first request is waited for with a deadline.
    """

    calls: int
    message_bytes: int = SMALL_MESSAGE_BYTES
    call_seconds: float | None = None


@dataclass(frozen=True)
class Unreadable:
    """Stands for a request that could not be read; why."""

    refusal: RefusedError


def reader(parse: Callable[[bytes], Any], method: str, most: int) -> Callable[[bytes], Any]:
    """``parse`` that answers ``Unreadable`` where gRPC would log a stack trace and say INTERNAL.

    Args:
        parse: bytes to a message; DecodeError or RefusedError.
        method: whose requests they are.
        most: bytes.
    """
    name = method.rpartition("/")[2]

    def read(data: bytes) -> Any:
        if len(data) > most:
            return Unreadable(
                RefusedError(
                    f"{name} request",
                    f"{len(data)} bytes",
                    f"at most {most} bytes",
                    "send less at a time",
                    StatusCode.RESOURCE_EXHAUSTED,
                )
            )
        try:
            return parse(data)
        except RefusedError as error:
            return Unreadable(error)
        except DecodeError:
            return Unreadable(
                RefusedError(
                    f"{name} request",
                    f"{len(data)} bytes that are no such message",
                    "protobuf of slipstream.v1",
                    "look for a faulty link, or a client of another service",
                )
            )

    return read


def silent(seconds: float) -> RefusedError:
    """A client that leaves a call open and sends nothing, or not enough."""
    return RefusedError(
        "server.message_timeout_s",
        f"a call whose next message did not come in {seconds:.0f} s",
        "messages without pauses",
        "call again",
        StatusCode.DEADLINE_EXCEEDED,
    )


def not_implemented(method: str) -> RefusedError:
    """A method that a server registers and does not have; gRPC would log a stack trace a call."""
    return RefusedError(
        method.rpartition("/")[2],
        "a call",
        "none: it is not implemented here",
        "ask the reflection service what is",
        StatusCode.UNIMPLEMENTED,
    )


class Places:
    """How many calls of each method are in progress. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, method: str, most: int) -> Iterator[None]:
        """A place for the length of a ``with`` block. Raises RefusedError: there is none."""
        with self._lock:
            if self._taken[method] >= most:
                raise RefusedError(
                    "server.max_calls",
                    f"{most} calls of {method.rpartition('/')[2]} in progress",
                    f"at most {most}",
                    "wait for one of them to end, then call again",
                    StatusCode.RESOURCE_EXHAUSTED,
                )
            self._taken[method] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[method] -= 1


class CallRate:
    """Bounds the calls of one connection: a client in an endless loop leaves time for the others.

    Thread-safe. Two seconds' worth may come at once.

    Args:
        per_second: calls of one connection.
        clock: seconds.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def spend(self, peer: str) -> None:
        """One more call. Raises RefusedError: too many."""
        most, now = 2 * self._rate, self._clock()
        with self._lock:
            left, then = self._left.pop(peer, (most, now))
            left = min(most, left + (now - then) * self._rate)
            self._left[peer] = (max(left - 1.0, 0.0), now)
            if len(self._left) > _PEERS:
                self._left.popitem(last=False)
        if left < 1.0:
            raise RefusedError(
                "server.calls_per_s",
                "more calls of one connection",
                f"at most {self._rate:g} a second",
                "look for a loop without a pause",
                StatusCode.RESOURCE_EXHAUSTED,
            )


class RefusedCalls:
    """Counts refused calls, and logs each kind at most once a minute, with how many there were.

    Thread-safe. A kind is a method and a status: what a client writes makes no new ones.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """By method and status."""
        with self._lock:
            return dict(self._counts)

    def note(self, method: str, code: StatusCode, text: str) -> None:
        """One more; ``text`` may hold what the client wrote."""
        kind, now = (method.rpartition("/")[2], code.name), self._clock()
        with self._lock:
            self._counts[kind] += 1
            last, told = self._logged.get(kind, (now - LOG_SECONDS, 0))
            if now - last < LOG_SECONDS:
                return
            count = self._counts[kind]
            self._logged[kind] = (now, count)
        # repr: a line break in it would forge a line of the log.
        logger.warning("%s refused (%s), %d since the last line: %r", *kind, count - told, text)


TIMEOUT = 5.0
"""Seconds within which a live service answers."""


def serving(channel: grpc.Channel, service: str = "", timeout: float = TIMEOUT) -> bool:
    """Whether it says SERVING. ``service`` empty: the process as a whole.

    Raises:
        grpc.RpcError: it does not answer, or knows no such service.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 only if it serves; 1, and what is the matter on stderr, if not."""
    parser = argparse.ArgumentParser(prog="python -m slipstream.serving", description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("service", nargs="?", default="", help="default: the process as a whole")
    # No token: health is open to everybody who may connect.
    parser.add_argument("--ca", type=Path, help="PEM of the CA of its certificate; turns TLS on")
    parser.add_argument("--certificate", type=Path, help="PEM, where it asks for one")
    parser.add_argument("--key", type=Path, help="PEM of its private key")
    args = parser.parse_args(argv)
    try:
        pem = [p.read_bytes() if p else None for p in (args.ca, args.key, args.certificate)]
    except OSError as error:
        parser.error(str(error))
    tls = grpc.ssl_channel_credentials(*pem)
    with (
        grpc.secure_channel(args.address, tls) if args.ca else grpc.insecure_channel(args.address)
    ) as channel:
        try:
            if serving(channel, args.service):
                return 0
            print("not serving", file=sys.stderr)
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
