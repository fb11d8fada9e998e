"""Refusals, and the cleaning of text that comes over the wire.

A server raises ``RefusedError``; ``abort_with`` turns it into a gRPC status whose text is for
people and whose trailing metadata is for programs; ``refused_from`` turns the failed call back into
the same ``RefusedError`` on the client. Text of the other side is bounded and cleaned where it is
received, so no log, file, terminal or exception needs to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from slipstream.v1 import release_pb2

logger = logging.getLogger(__name__)

METADATA_KEY = "slipstream-refusal-bin"

MAX_TEXT_BYTES = 448
"""The bound on one text on the wire. gRPC takes 8 KiB of trailers, which hold the texts twice and
escaped; a larger refusal arrives as RESOURCE_EXHAUSTED without its text."""

LOG_SECONDS = 60.0
"""The least time between two log lines about refusals of one kind."""

StatusCode = grpc.StatusCode
"""Re-exported for code that names a status and uses nothing else of gRPC."""

OVERLOADED = (release_pb2.REFUSAL_REASON_BUSY, release_pb2.REFUSAL_REASON_LIMIT)
"""Reasons that say nothing about the request: the server had too much to do, or the caller sent too
often or too slowly."""


def clean(text: str, limit: int = MAX_TEXT_BYTES) -> str:
    """Return a text of another process as one line of printable characters.

    Args:
        text: as it was received.
        limit: bytes of the result in UTF-8, at least 64. A longer text is cut, and its length
            appended.
    """
    start = text[:limit]
    if not start.isprintable():
        start = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in start)
    data = start.encode()
    if len(text) <= limit and len(data) <= limit:
        return start
    return data[: limit - 32].decode(errors="ignore") + f"... ({len(text)} characters)"


class RefusedError(Exception):
    """A request, file or option that cannot be taken.

    The texts are for people; code decides by ``reason``, on this side of the wire or the other.
    """

    def __init__(
        self,
        field: str,
        found: object,
        expected: object,
        next_step: str,
        code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT,
        reason: release_pb2.RefusalReason = release_pb2.REFUSAL_REASON_UNSPECIFIED,
    ) -> None:
        self.field = field
        self.found = str(found)
        self.expected = str(expected)
        self.next_step = next_step
        self.code = code
        self.reason = reason
        super().__init__(
            f"{field}: found {self.found}, expected {self.expected}. Next step: {next_step}"
        )

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Pickle all arguments: vLLM's worker RPC carries these errors between processes."""
        texts = (self.field, self.found, self.expected, self.next_step)
        return type(self), (*texts, self.code, self.reason)

    def to_proto(self) -> release_pb2.Refusal:
        """The four texts and the reason as a message."""
        return release_pb2.Refusal(
            field=clean(self.field),
            found=clean(self.found),
            expected=clean(self.expected),
            next_step=clean(self.next_step),
            reason=self.reason,
        )

    def for_wire(self) -> str:
        """The whole text, short enough for a status."""
        return str(self.from_proto(self.to_proto()))

    @classmethod
    def from_proto(
        cls, refusal: release_pb2.Refusal, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
    ) -> RefusedError:
        """The inverse of ``to_proto``; the texts are the other side's and are cleaned, and a reason
        that this side does not know is none."""
        texts = (refusal.field, refusal.found, refusal.expected, refusal.next_step)
        field, found, expected, next_step = map(clean, texts)
        known = refusal.reason in release_pb2.RefusalReason.values()
        reason = refusal.reason if known else release_pb2.REFUSAL_REASON_UNSPECIFIED
        return cls(field, found, expected, next_step, code, reason)


def missing_package(
    error: ModuleNotFoundError, extras: Mapping[str, str], extra: str
) -> RefusedError:
    """The refusal that a console shows, without a traceback, if an extra was not installed.

    Args:
        error: of the import.
        extras: the extra of a package, by its import name.
        extra: of the packages that ``extras`` does not have.

    Raises:
        ModuleNotFoundError: ``error`` itself; a module of Slipstream is missing, not a package.
    """
    name = (error.name or "").partition(".")[0]
    if name in ("", "slipstream", "policy_bridge", "draft_trainer", "rollout_server"):
        raise error
    command = f"pip install 'slipstream-rl[{extras.get(name, extra)}]'"
    return RefusedError(f"package {name}", "none", "it to be installed", command)


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
    """The failure of a call in one line: the refusal, or gRPC's status and the peer's text."""
    refusal = refused_from(error)
    if refusal is not None:
        return str(refusal)
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return clean(str(error))
    code = error.code()
    return f"{'UNKNOWN' if code is None else code.name}: {clean(error.details() or '')}"


class Refusals:
    """Counts what a server refused, and logs each kind at most once a minute. Thread-safe.

    A kind is a method and a status, or a reason: nothing that a client writes makes a new kind.

    Attributes:
        by_method: refused calls, by method and gRPC status.
        by_reason: calls and handshakes without the right to them, by reason (``security.REASONS``).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.by_method: Counter[tuple[str, str]] = Counter()
        self.by_reason: Counter[str] = Counter()
        self._clock = clock
        self._lock = threading.Lock()
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}

    def note(self, method: str, code: grpc.StatusCode, text: str) -> None:
        """Count a refused call; ``text`` may hold what the client wrote."""
        kind = (method.rpartition("/")[2], code.name)
        with self._lock:
            self.by_method[kind] += 1
            self._log(kind, "{} refused ({})".format(*kind), self.by_method[kind], text)

    def denied(self, reason: str, peer: str, text: str) -> None:
        """Count a call of a ``peer`` that may not do what it asked for."""
        with self._lock:
            self.by_reason[reason] += 1
            self._log(("", reason), f"refused {peer}", self.by_reason[reason], text)

    def _log(self, kind: tuple[str, str], what: str, count: int, text: str) -> None:
        now = self._clock()
        last, logged = self._logged.get(kind, (now - LOG_SECONDS, 0))
        if now - last >= LOG_SECONDS:
            self._logged[kind] = (now, count)
            # repr: a line break in the text would forge a line of the log.
            logger.warning("%s, %d since the last line: %r", what, count - logged, text)
