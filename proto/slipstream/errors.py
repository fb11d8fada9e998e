"""Refusals, and what is kept of text that came over the wire.

A server raises ``RefusedError``; ``abort_with`` turns it into a gRPC status whose text is for
people and whose trailing metadata is for programs; ``refused_from`` turns the failed call back into
the same ``RefusedError`` on the client. Text of the other side is bounded and cleaned where it is
received, so no log, file, terminal or exception needs to.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import DecodeError

from slipstream.v1 import release_pb2

METADATA_KEY = "slipstream-refusal-bin"

MAX_TEXT_BYTES = 448
"""Of one text on the wire. gRPC takes 8 KiB of trailers, the texts twice in them and escaped; a
larger refusal arrives as RESOURCE_EXHAUSTED without its text."""

StatusCode = grpc.StatusCode
"""Re-exported for code that names a status and uses nothing else of gRPC."""


def clean(text: str, limit: int = MAX_TEXT_BYTES) -> str:
    """Text of another process as one line of printable characters.

    Args:
        text: as it was received.
        limit: bytes of the result in UTF-8, at least 64. A longer text is cut, and its length said.
    """
    start = text[:limit]
    if not start.isprintable():
        start = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in start)
    data = start.encode()
    if len(text) <= limit and len(data) <= limit:
        return start
    return data[: limit - 32].decode(errors="ignore") + f"... ({len(text)} characters)"


class RefusedError(Exception):
    """A request, file or option that cannot be taken."""

    def __init__(
        self,
        field: str,
        found: object,
        expected: object,
        next_step: str,
        code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT,
    ) -> None:
        self.field = field
        self.found = str(found)
        self.expected = str(expected)
        self.next_step = next_step
        self.code = code
        super().__init__(
            f"{field}: found {self.found}, expected {self.expected}. Next step: {next_step}"
        )

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Survive a process boundary inside vLLM's own worker RPC."""
        return type(self), (self.field, self.found, self.expected, self.next_step, self.code)

    def to_proto(self) -> release_pb2.Refusal:
        """The four texts as a message."""
        return release_pb2.Refusal(
            field=clean(self.field),
            found=clean(self.found),
            expected=clean(self.expected),
            next_step=clean(self.next_step),
        )

    def for_wire(self) -> str:
        """The whole text, short enough for a status."""
        return str(self.from_proto(self.to_proto()))

    @classmethod
    def from_proto(
        cls, refusal: release_pb2.Refusal, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
    ) -> RefusedError:
        """The inverse of ``to_proto``; the texts are the other side's and are cleaned."""
        texts = (refusal.field, refusal.found, refusal.expected, refusal.next_step)
        field, found, expected, next_step = map(clean, texts)
        return cls(field, found, expected, next_step, code)


def abort_with(error: RefusedError, context: Any) -> Any:
    """End a server's call with ``error``: gRPC raises here, or where asyncio code awaits this."""
    context.set_trailing_metadata(((METADATA_KEY, error.to_proto().SerializeToString()),))
    return context.abort(error.code, error.for_wire())


def refused_from(error: grpc.RpcError) -> RefusedError | None:
    """The refusal inside a failed call, or None when the call failed otherwise.

    Works for ``grpc`` and ``grpc.aio`` errors alike.
    """
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return None
    for key, value in error.trailing_metadata() or ():
        if key == METADATA_KEY and isinstance(value, bytes):
            try:
                refusal = release_pb2.Refusal.FromString(value)
            except DecodeError:
                return None
            return RefusedError.from_proto(refusal, error.code())
    return None


def failure_text(error: grpc.RpcError) -> str:
    """Why a call failed, as one line: the refusal, or gRPC's status and the other side's text."""
    refusal = refused_from(error)
    if refusal is not None:
        return str(refusal)
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return clean(str(error))
    code = error.code()
    return f"{'UNKNOWN' if code is None else code.name}: {clean(error.details() or '')}"
