"""What this machine moves a second: loopback, SHA-256, memory."""

from __future__ import annotations

import hashlib
import multiprocessing as mp
import socket
import time
from collections.abc import Callable

import torch

from slipstream.tensors import bytes_of

_PIECE = 4 << 20


def limits_of(size: int) -> dict[str, float]:
    """Bytes a second through loopback, SHA-256 and memory, each the best of three."""
    block = torch.zeros(_PIECE, dtype=torch.uint8).random_()
    source = torch.zeros(size, dtype=torch.uint8)
    copy = torch.zeros(size, dtype=torch.uint8)
    data = bytes(bytes_of(block))

    def sha256() -> int:
        digest = hashlib.sha256()
        for _ in range(16):
            digest.update(data)
        return 16 * _PIECE

    def memory() -> int:
        copy.copy_(source)
        return size

    works = {"loopback": lambda: _loopback(data, size), "sha256": sha256, "copy": memory}
    return {name: max(_rate(work) for _ in range(3)) for name, work in works.items()}


def _rate(work: Callable[[], int]) -> float:
    began = time.monotonic()
    done = work()
    return done / (time.monotonic() - began)


def _loopback(data: bytes, size: int) -> int:
    """Send ``size`` bytes to another process over TCP and have their number acknowledged."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        process = mp.get_context("fork").Process(target=_swallow, args=(port,), daemon=True)
        process.start()
        connection, _ = listener.accept()
    sent = 0
    with connection:
        while sent < size:
            connection.sendall(data)
            sent += len(data)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(8)
    process.join(10)
    return sent


def _swallow(port: int) -> None:
    room = memoryview(bytearray(_PIECE))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while connection.recv_into(room):
            pass
        connection.sendall(b"all")
