"""One shape for every refusal: what field, what was found, what was expected, what to do.

A server raises ``RefusedError``; ``status_of`` turns it into a gRPC status whose
text is for people and whose trailing metadata is for programs; a client turns
the failed call back into the same ``RefusedError`` with ``refused_from``.
"""

from __future__ import annotations

import grpc

from slipstream.v1 import release_pb2

METADATA_KEY = "slipstream-refusal-bin"

_MOST_BYTES = 448
"""Of one text on the wire. gRPC takes 8 KiB of trailers, the texts twice in them and escaped: a
refusal that quoted a long name of the client's arrived as RESOURCE_EXHAUSTED without a word."""

StatusCode = grpc.StatusCode
"""Re-exported for the rooms' cores, which name a code and know nothing else of gRPC."""


class RefusedError(Exception):
    """A request, file or option that cannot be taken.

    Args:
        field: the field, option or file at fault, as the caller names it.
        found: what was there.
        expected: what would have been taken.
        next_step: what the caller should do.
        code: the gRPC status it travels under.
    """

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
        short = self._short()
        return release_pb2.Refusal(
            field=short.field, found=short.found, expected=short.expected, next_step=short.next_step
        )

    def for_wire(self) -> str:
        """The whole text, short enough for a status."""
        return str(self._short())

    def _short(self) -> RefusedError:
        texts = (self.field, self.found, self.expected, self.next_step)
        field, found, expected, next_step = map(_cut, texts)
        return RefusedError(field, found, expected, next_step, self.code)

    @classmethod
    def from_proto(
        cls,
        refusal: release_pb2.Refusal,
        code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT,
    ) -> RefusedError:
        """The inverse of ``to_proto``."""
        texts = (refusal.field, refusal.found, refusal.expected, refusal.next_step)
        field, found, expected, next_step = map(plain_text, texts)
        return cls(field, found, expected, next_step, code)


def plain_text(text: str, most: int = _MOST_BYTES) -> str:
    """One line of at most ``most`` printable characters: what is done to every text of another
    process where it arrives, so that it forges no log line, steers no terminal, fills no disk."""
    line = "".join(c if c.isprintable() else " " for c in text[:most])
    return line if len(text) <= most else line[:-3] + "..."


def _cut(text: str) -> str:
    data = text.encode(errors="replace")
    if len(data) <= _MOST_BYTES:
        return data.decode()
    return data[: _MOST_BYTES - 32].decode(errors="ignore") + f"... ({len(text)} characters)"


def trailing_metadata_of(error: RefusedError) -> tuple[tuple[str, bytes], ...]:
    """What a servicer passes to ``abort`` as trailing metadata."""
    return ((METADATA_KEY, error.to_proto().SerializeToString()),)


def abort_with(error: RefusedError, context: grpc.ServicerContext) -> None:
    """End a synchronous server call with ``error``. Never returns (gRPC raises)."""
    context.set_trailing_metadata(trailing_metadata_of(error))
    context.abort(error.code, error.for_wire())


def refused_from(error: grpc.RpcError) -> RefusedError | None:
    """The refusal inside a failed call, or None when the call failed otherwise.

    Works for ``grpc`` and ``grpc.aio`` errors alike.
    """
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return None
    for key, value in error.trailing_metadata() or ():
        if key == METADATA_KEY and isinstance(value, bytes):
            return RefusedError.from_proto(release_pb2.Refusal.FromString(value), error.code())
    return None
