"""A gRPC stream of bytes, as Python has it: what an inline transport is compared with.

``python -m benchmarks.transport.bare``. Prints its address; then, for every line on standard input,
the process's CPU seconds so far. Nothing of the trainer's is in it: that one has the C library keep
freed memory, which makes any stream of a MiB a message about half as fast again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from slipstream.serving import SERVER_OPTIONS


def bare_server() -> tuple[grpc.Server, int]:
    """A server that answers every message with a byte, and its port on loopback."""

    def answer(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        for _message in requests:
            yield b"1"

    server = grpc.server(ThreadPoolExecutor(2), options=SERVER_OPTIONS)
    handlers = {"Stream": grpc.stream_stream_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bare", handlers),))
    return server, server.add_insecure_port("127.0.0.1:0")


def main() -> None:
    """See the module."""
    server, port = bare_server()
    server.start()
    try:
        print(f"127.0.0.1:{port}", flush=True)
        for _ in sys.stdin:
            print(time.process_time(), flush=True)
    finally:
        server.stop(grace=None).wait(10.0)


if __name__ == "__main__":
    main()
