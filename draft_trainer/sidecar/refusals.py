"""What every call of the service has in common: refusals, and streams of a header and chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from slipstream.refusal import RefusedError, abort_with
from slipstream.v1 import tensor_pb2


@contextmanager
def refusals(context: grpc.ServicerContext) -> Iterator[None]:
    """Turn a RefusedError into the call's status."""
    try:
        yield
    except RefusedError as error:
        abort_with(error, context)


def check_text(field: str, text: str, most: int) -> None:
    """Raise RefusedError for a text of the client's that is longer than ``most`` characters, or
    that would forge a line of a log."""
    if not text.isprintable():
        raise RefusedError(
            field, repr(text[:64]), "one line of printable characters", "send it without the others"
        )
    if len(text) > most:
        raise RefusedError(
            field, f"{len(text)} characters", f"at most {most} characters", "send a shorter one"
        )


def first(requests: Iterator[Any], kind: str) -> Any:
    """The first request of a stream. Raises RefusedError: it is not of ``kind``, or missing."""
    request = next(requests, None)
    found = request.WhichOneof("kind") if request is not None else "the end of the stream"
    if found != kind:
        raise wrong_kind(kind, found)
    return request


def chunks_after(requests: Iterator[Any]) -> Iterator[tensor_pb2.TensorChunk]:
    """The chunks of the other requests. Raises RefusedError where one is something else."""
    for request in requests:
        if request.WhichOneof("kind") != "chunk":
            raise wrong_kind("chunk", request.WhichOneof("kind"))
        yield request.chunk


def wrong_kind(expected: str, found: str | None) -> RefusedError:
    """A message of a stream that is not the one that must come now."""
    return RefusedError(
        "kind", found or "nothing", expected, "send the header first, and only once"
    )
