"""The wire between bridge and trainer, which can be cut or slow, or passes nothing back."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from dataclasses import dataclass, field

_CHUNK = 1 << 16
_RESET = struct.pack("ii", 1, 0)


class Wire:
    """A TCP proxy on a port of its own, in this process; ``close`` ends it and its threads.

    Args:
        rate: bytes a second that it takes from the policy; as many as come if None.

    Attributes:
        address: host:port to connect to.
    """

    def __init__(self, rate: float | None = None) -> None:
        self._rate = rate
        self._listener = socket.create_server(("127.0.0.1", 0))
        if rate is not None:
            # For what is accepted: the kernel would buffer megabytes.
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._trainer: tuple[str, int] | None = None
        self._connections: set[_Connection] = set()
        self._mute = False
        self._swallowed = 0
        threading.Thread(target=self._accept, name="wire", daemon=True).start()

    def lead_to(self, address: str) -> None:
        """Lead new connections to this address from now on."""
        host, _, port = address.rpartition(":")
        with self._lock:
            self._trainer = (host, int(port))

    def mute(self) -> None:
        """Pass nothing back to the policy: what the trainer says is lost."""
        with self._lock:
            self._mute, self._swallowed = True, 0

    @property
    def swallowed(self) -> int:
        """Bytes that were lost since ``mute``."""
        with self._lock:
            return self._swallowed

    def reset(self) -> int:
        """End every connection with RST at both ends, and pass everything again; how many."""
        with self._lock:
            connections = list(self._connections)
            self._connections.clear()
            self._mute = False
        for connection in connections:
            connection.reset()
        return len(connections)

    def close(self) -> None:
        """End everything."""
        # Closing alone leaves the thread in accept.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                trainer = self._trainer
            try:
                if trainer is None:
                    raise ConnectionRefusedError
                far = socket.create_connection(trainer, timeout=5.0)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(near, far)
            with self._lock:
                self._connections.add(connection)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(
                    target=self._pump, args=(connection, source, sink), daemon=True
                ).start()

    def _pump(self, connection: _Connection, source: socket.socket, sink: socket.socket) -> None:
        back = source is connection.far
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                with self._lock:
                    lost = back and self._mute
                    self._swallowed += len(data) if lost else 0
                if not lost:
                    sink.sendall(data)
                if self._rate is not None and not back:
                    time.sleep(len(data) / self._rate)
        with self._lock:
            self._connections.discard(connection)
        connection.end()


@dataclass(eq=False)
class _Connection:
    near: socket.socket
    far: socket.socket
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: int = 2

    def reset(self) -> None:
        for end in (self.near, self.far):
            with contextlib.suppress(OSError):
                # With this a shutdown's close sends RST.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._shut()

    def end(self) -> None:
        """One direction is over: so is the other. Closed by the last of both threads."""
        self._shut()
        with self._lock:
            self._threads -= 1
            last = not self._threads
        if last:
            self.near.close()
            self.far.close()

    def _shut(self) -> None:
        for end in (self.near, self.far):
            with contextlib.suppress(OSError):
                # Wakes the thread that reads; a close alone does not. For reading only, so that
                # no FIN goes out before the RST.
                end.shutdown(socket.SHUT_RD)
