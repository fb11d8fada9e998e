"""A wire of so many bytes a second: ``python -m benchmarks.policy_stall.throttle HOST:PORT RATE``.

Listens on a free port of loopback, prints it, and passes connections on to HOST:PORT. What
goes there is read at RATE bytes a second and no faster, so that the sender's buffers fill up
as they do before a receiver that is slow; what comes back is passed on at once.
"""

from __future__ import annotations

import socket
import sys
import threading
import time

_CHUNK = 1 << 14


def pump(source: socket.socket, sink: socket.socket, rate: float | None) -> None:
    """Pass bytes on until one end closes."""
    try:
        while data := source.recv(_CHUNK):
            sink.sendall(data)
            if rate is not None:
                time.sleep(len(data) / rate)
    except OSError:
        pass  # Closed by the other direction.
    finally:
        for end in (source, sink):
            end.close()


def main() -> None:
    """Serve until killed."""
    host, _, port = sys.argv[1].rpartition(":")
    rate = float(sys.argv[2])
    listener = socket.socket()
    # A small window, or the kernel alone swallows megabytes.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    listener.bind(("127.0.0.1", 0))
    listener.listen(8)
    print(listener.getsockname()[1], flush=True)
    while True:
        near, _ = listener.accept()
        far = socket.create_connection((host, int(port)))
        for source, sink, limit in ((near, far, rate), (far, near, None)):
            threading.Thread(target=pump, args=(source, sink, limit), daemon=True).start()


if __name__ == "__main__":
    main()
