"""Requests with their payload left where it is: of StreamStates, and chunks of AnnouncePolicy.

protobuf's Python runtime copies a bytes field on the way in and again on the way out of a message,
and holds the interpreter's lock meanwhile; at 32 KiB a token that costs more than the checks. The
bytes here are those that protobuf would write: the payload is put behind the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slipstream.checksums import Bytes
from slipstream.packed import ALIGNMENT
from slipstream.refusal import RefusedError, StatusCode
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import tensor_pb2

_PAYLOAD = pb.StreamStatesRequest.PAYLOAD_FIELD_NUMBER
_CHUNK = pb.AnnouncePolicyRequest.CHUNK_FIELD_NUMBER
_CHUNK_DATA = tensor_pb2.TensorChunk.DATA_FIELD_NUMBER
_BATCH = pb.StreamStatesRequest.BATCH_FIELD_NUMBER
_LENGTH_DELIMITED = 2

# What a client may make the reader do for a message of 64 MiB: millions of fields of two bytes took
# a minute, and a batch of empty samples gigabytes.
_MOST_FIELDS = 16
_MOST_BATCH_BYTES = 1 << 20
PIECE_BYTES = 1 << 20
"""About the payload of a message, where a sample's is longer."""


@dataclass(frozen=True)
class Framed:
    """A request as it arrived.

    Attributes:
        request: everything but the payload.
        payload: uint8 [n], read-only.
        nbytes: of the serialized message, as credits count them.
        ahead: payloads that came ahead of it, in messages of their own.
    """

    request: pb.StreamStatesRequest
    payload: Bytes
    nbytes: int
    ahead: tuple[Bytes, ...] = ()

    def behind(self, ahead: Sequence[Framed]) -> Framed:
        """With the messages that came ahead of it."""
        if not ahead:
            return self
        nbytes = self.nbytes + sum(framed.nbytes for framed in ahead)
        return replace(self, nbytes=nbytes, ahead=tuple(framed.payload for framed in ahead))


Parts = list["bytes | Bytes"]
"""Of a serialized message, to be joined: the payload among them is not copied yet."""


def frame(request: pb.StreamStatesRequest, payload: Sequence[Bytes] = ()) -> bytes:
    """``request`` serialized, with a payload that is copied once."""
    return b"".join(_parts(request, payload))  # type: ignore[arg-type]


def frames(request: pb.StreamStatesRequest, payload: Sequence[Bytes]) -> Iterator[Parts]:
    """The messages of ``request``: one, or where the payload is long pieces of it ahead of that.

    gRPC copies a message several times and takes fresh memory for each copy; in pieces that a
    processor's cache holds a byte costs a third of what it does in a message of 32 MiB.
    """
    length = sum(map(len, payload))
    count = round(length / PIECE_BYTES)
    if count > 1:
        # Evenly: a message costs as much for a few bytes that were left over.
        step = -(-length // (count * ALIGNMENT)) * ALIGNMENT
        *ahead, last = [
            piece[start : start + step] for piece in payload for start in range(0, len(piece), step)
        ]
        for piece in ahead:
            yield _parts(pb.StreamStatesRequest(), [piece])
        payload = [last]
    yield _parts(request, payload)


def frame_chunk(name: str, offset: int, data: memoryview) -> bytes:
    """An AnnouncePolicyRequest with a chunk of a tensor, whose data is copied once."""
    chunk = tensor_pb2.TensorChunk(name=name, offset=offset).SerializeToString()
    chunk += _field(_CHUNK_DATA, len(data))
    return b"".join((_field(_CHUNK, len(chunk) + len(data)), chunk, data))


def unframe(data: bytes) -> Framed:
    """The inverse of ``frame``, for any order of fields.

    Raises:
        google.protobuf.message.DecodeError: not a StreamStatesRequest.
        RefusedError: more fields than it has, or a batch that describes too much.
    """
    at = fields = 0
    payload = np.empty(0, dtype=np.uint8)
    rest = []
    while at < len(data):
        begin = at
        fields += 1
        if fields > _MOST_FIELDS:
            raise RefusedError(
                "request",
                f"more than {_MOST_FIELDS} fields",
                "a header, sample or batch, and a payload",
                "send one message at a time",
            )
        tag, at = _read_varint(data, at)
        if tag & 7 != _LENGTH_DELIMITED:
            # A field of a later revision: protobuf knows how to skip it.
            request = pb.StreamStatesRequest.FromString(data)
            return Framed(request, np.frombuffer(request.payload, dtype=np.uint8), len(data))
        length, at = _read_varint(data, at)
        if tag >> 3 == _BATCH and length > _MOST_BATCH_BYTES:
            raise RefusedError(
                "batch",
                f"{length} bytes",
                f"at most {_MOST_BATCH_BYTES} bytes",
                "put the states into the payload or the ring, or send smaller batches",
                StatusCode.RESOURCE_EXHAUSTED,
            )
        if tag >> 3 == _PAYLOAD and at + length <= len(data):
            payload = np.frombuffer(data, np.uint8, length, at)
        else:
            rest.append(data[begin : at + length])
        at += length
    request = pb.StreamStatesRequest.FromString(b"".join(rest))
    return Framed(request, payload, len(data))


def _parts(request: pb.StreamStatesRequest, payload: Sequence[Bytes]) -> Parts:
    parts: Parts = [request.SerializeToString()]
    length = sum(map(len, payload))
    if length:
        parts += [_field(_PAYLOAD, length), *payload]
    return parts


def _field(number: int, length: int) -> bytes:
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(length)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number, and where it ends; a cut one ends at the end, for protobuf to refuse."""
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, at
