"""Clients that take places and give nothing: what each does, and how many there are of them.

Each opens what it opens and leaves it so until ``close``; sound clients are served meanwhile.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc

from slipstream.client import OPTIONS
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import rollout_server_pb2 as rollout_pb
from tests.robustness import traffic
from tests.robustness.caller import ROLLOUT, TRAINER, Method

_ONE_EACH = (*OPTIONS, ("grpc.use_local_subchannel_pool", 1))
_PER_CONNECTION = 100


class Crowd:
    """Channels and calls that are open. Closes them at the end.

    Args:
        address: of the server.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.over = threading.Event()
        self._channels: list[grpc.Channel] = []
        self._calls: list[Any] = []
        self._sockets: list[socket.socket] = []
        self._ended: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        for call in self._calls:
            call.cancel()
        for channel in self._channels:
            channel.close()
        for each in self._sockets:
            each.close()

    @property
    def ended(self) -> Counter[str]:
        """The number of calls that the server ended, by status."""
        with self._lock:
            return Counter(self._ended)

    def channel(self) -> grpc.Channel:
        """A connection of its own."""
        made = grpc.insecure_channel(self.address, options=_ONE_EACH)
        self._channels.append(made)
        return made

    def hold(self, path: str, requests: Iterator[bytes], channel: grpc.Channel) -> Any:
        """A call whose requests come from ``requests``, and whose answers stay unread."""
        call = channel.stream_stream(path)(requests)
        call.add_done_callback(lambda ended: self._count(ended.code()))
        self._calls.append(call)
        return call

    def silent_calls(self, methods: list[Method], count: int) -> None:
        """Calls that never send their request, of every method in turn."""
        channels = (self.channel() for _ in itertools.count())
        for number, method in zip(range(count), itertools.cycle(methods), strict=False):
            if number % _PER_CONNECTION == 0:
                channel = next(channels)
            self.hold(method.path, self._until_over(), channel)

    def idle_sessions(self, count: int) -> Counter[str]:
        """Runs that are opened on connections of their own, and never fed; how that went."""
        found: Counter[str] = Counter()
        for _ in range(count):
            open_run = self.channel().unary_unary("/slipstream.v1.DraftTrainer/OpenRun")
            try:
                open_run(traffic.open_run().SerializeToString(), timeout=60.0)
                found["OK"] += 1
            except grpc.RpcError as error:
                found[error.code().name] += 1
        return found

    def bare_connections(self, count: int) -> None:
        """TCP connections that never speak."""
        host, _, port = self.address.rpartition(":")
        self._sockets += [socket.create_connection((host, int(port)), 30) for _ in range(count)]

    def deaf_stream(self, session_id: str, messages: int) -> Any:
        """A sample stream that sends bad samples of a few bytes, and reads no answer."""

        def requests() -> Iterator[bytes]:
            yield traffic.header(session_id).SerializeToString()
            empty = pb.SampleBatch(samples=[pb.VerifierStates()])
            bad = pb.StreamStatesRequest(batch=empty).SerializeToString()
            for _ in range(messages):
                if self.over.is_set():
                    return
                yield bad
            self.over.wait()

        return self.hold("/slipstream.v1.DraftTrainer/StreamStates", requests(), self.channel())

    def slow_stages(self, count: int) -> None:
        """Stages of which a byte comes a second."""
        staged = traffic.stage("slow", traffic.draft())
        for number in range(count):
            header = rollout_pb.StageRequest()
            header.CopyFrom(staged[0])
            header.header.stage_id = f"slow-{number}"
            for spec in header.header.tensors:
                if spec.name not in ("d2t", "t2d"):
                    spec.sha256 = bytes([number % 256]) * 32
            chunk = next(each.chunk for each in staged[1:] if each.chunk.name == "fc.weight")
            self.hold(
                "/slipstream.v1.RolloutServer/Stage",
                self._a_byte_a_second(header, chunk.name, chunk.data),
                self.channel(),
            )

    def _a_byte_a_second(
        self, header: rollout_pb.StageRequest, name: str, data: bytes
    ) -> Iterator[bytes]:
        yield header.SerializeToString()
        for at in range(len(data)):
            if self.over.wait(1.0):
                return
            chunk = rollout_pb.StageRequest()
            chunk.chunk.name, chunk.chunk.offset, chunk.chunk.data = name, at, data[at : at + 1]
            yield chunk.SerializeToString()

    def _until_over(self) -> Iterator[bytes]:
        self.over.wait()
        yield from ()

    def _count(self, code: grpc.StatusCode) -> None:
        with self._lock:
            self._ended[code.name] += 1


def flood(address: str, path: str, request: bytes, count: int, at_once: int = 64) -> Counter[str]:
    """So many calls, a number of them at a time; how they ended."""
    found: Counter[str] = Counter()
    pending: list[Any] = []
    made: grpc.Channel | None = None
    for number in range(count):
        if number % 500 == 0:
            old, made = made, grpc.insecure_channel(address, options=_ONE_EACH)
            _settle(pending, found, 0)
            if old is not None:
                old.close()
        assert made is not None
        pending.append(made.unary_unary(path).future(request, timeout=60.0))
        _settle(pending, found, at_once)
    _settle(pending, found, 0)
    if made is not None:
        made.close()
    return found


def _settle(pending: list[Any], found: Counter[str], most: int) -> None:
    while len(pending) > most:
        call = pending.pop(0)
        call.exception()
        found[call.code().name] += 1


SILENT_TRAINER = [method for method in TRAINER if method.name != "OpenRun"]
SILENT_ROLLOUT = ROLLOUT
