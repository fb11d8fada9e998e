"""A small HTTP server in place of ``/v1/completions``."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Completions(BaseHTTPRequestHandler):
    """Answers each request with what ``answer`` says and ``beside``, or 400 and ``refusal``, and
    with ``extra``'s headers; and says which models are ``served``."""

    served: Sequence[str] = ()
    extra: Mapping[str, str] = {}
    beside: Mapping[str, Any] = {}
    refusal: bytes = b""

    def answer(self, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        """Status and choices for a request."""
        raise NotImplementedError

    def do_POST(self) -> None:
        status, choices = self.answer(
            json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        )
        data = json.dumps({"choices": choices, **self.beside}).encode()
        if self.refusal:
            status, data = 400, self.refusal
        self._send(status, data)

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": name} for name in self.served]}).encode())

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in self.extra.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def choice(tokens: list[int], logprobs: Sequence[float | None] | None) -> dict[str, Any]:
    """One completion."""
    return {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # clients connect for all prompts at once


@contextmanager
def serving(handler: type[Completions]) -> Iterator[int]:
    """The port on loopback on which it answers."""
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
