"""What no transport can beat here: a copy, a read pass with the checks, a bare gRPC stream."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence

import grpc
import numpy as np
import torch

from slipstream.checksum import KINDS, Bytes, all_finite, checksum_of
from slipstream.client import MAX_MESSAGE_BYTES, open_channel
from slipstream.sample import Sample


def states_of(samples: Sequence[Sample]) -> list[Bytes]:
    """The bytes of every sample's auxiliary states."""
    return [s.aux.view(torch.uint8).numpy().reshape(-1) for s in samples]


def messages_of(samples: Sequence[Sample]) -> list[bytes]:
    """As many byte strings as samples, of their sizes and with their bytes.

    One message sent over and over is in a cache all the time, and one of zeros is a single page.
    """
    return [sample.block.numpy().tobytes()[:MAX_MESSAGE_BYTES] for sample in samples]


def copy_rate(sources: Sequence[Bytes], destinations: Sequence[Bytes]) -> float:
    """Bytes a second of one memcpy, between memories that no cache holds."""
    started = time.perf_counter()
    for source, destination in zip(sources, destinations, strict=True):
        np.copyto(destination, source)
    return sum(map(len, sources)) / (time.perf_counter() - started)


def read_rate(sources: Sequence[Bytes]) -> float:
    """Bytes a second of the checks of a block: checksum and finiteness."""
    started = time.perf_counter()
    for source in sources:
        checksum_of(source, KINDS[0])
        assert all_finite(source, torch.bfloat16)
    return sum(map(len, sources)) / (time.perf_counter() - started)


def bare_seconds(address: str, messages: Sequence[bytes], count: int, window_bytes: int) -> float:
    """Seconds to send ``count`` of ``messages`` through gRPC, each answered by a byte.

    In flight is as much as the real stream may have: without a bound gRPC queues all of them.
    """
    room = threading.BoundedSemaphore(max(1, window_bytes // len(messages[0])))

    def sent() -> Iterator[bytes]:
        for message in itertools.islice(itertools.cycle(messages), count):
            room.acquire()
            yield message

    with open_channel(address) as channel:
        call = channel.stream_stream("/Bare/Stream")
        assert next(call(iter([b"warm"]))) == b"1"
        started = time.perf_counter()
        answers = 0
        responses: grpc.Call = call(sent())
        for _ in responses:  # type: ignore[attr-defined]
            answers += 1
            room.release()
        assert answers == count
        return time.perf_counter() - started


def memory_for(samples: Sequence[Sample]) -> list[Bytes]:
    """Destinations of the copies, their pages touched."""
    return [np.ones(len(states), dtype=np.uint8) for states in states_of(samples)]


def plain_read_rate(sources: Sequence[Bytes]) -> float:
    """Bytes a second of the cheapest pass there is, a sum: a harder floor than is asked for."""
    started = time.perf_counter()
    for source in sources:
        source[: len(source) // 8 * 8].view(np.int64).sum()
    return sum(map(len, sources)) / (time.perf_counter() - started)
