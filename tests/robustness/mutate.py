"""Damages messages: fields out of their ranges, and bytes that are no message any more.

Everything is drawn from one ``random.Random``: hypothesis gives it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_F = FieldDescriptor
_BITS = {
    getattr(_F, f"TYPE_{kind}{bits}"): (bits, kind[0] not in "UF")
    for bits in (32, 64)
    for kind in ("INT", "SINT", "SFIXED", "UINT", "FIXED")
}
"""Size in bits and whether signed, of every integer type."""

_FLOATS = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, -1.0, 1e-45, 3e38, 0.5)
_TEXTS = (
    "",
    "x",
    "draft-0",
    "../../../../etc/passwd",
    "/dev/zero",
    "a/../b\x00c",
    "two\nlines\r\n2026-01-01 INFO forged",
    "naïve ≠ 🜁",
    "%s%n{0}",
    "\N{RIGHT-TO-LEFT OVERRIDE}evil",
    "n" * 257,
    "long" * 4000,
    "≠" * 40_000,
)
_MOST_REPEATED = 2000


def mutated(messages: Sequence[Message], rng: random.Random) -> list[bytes]:
    """The messages of a call, with something wrong: in fields, in their order, or in bytes."""
    given = [_copy(message) for message in messages]
    kind = rng.random()
    if kind < 0.6 and given:
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            mutate(rng.choice(given), rng)
    if rng.random() < 0.25:
        _reorder(given, rng)
    data = [message.SerializeToString() for message in given]
    if kind >= 0.6 and data:
        at = rng.randrange(len(data))
        data[at] = damaged(data[at], rng)
    return data


def mutate(message: Message, rng: random.Random) -> None:
    """Set one field of it, or of a message in it, to something that it should not be."""
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    if fields:
        _change(message, rng.choice(fields), rng)


def filled(message: Message, rng: random.Random, depth: int = 3) -> Message:
    """A message that has no example, with some of its fields set."""
    for field in message.DESCRIPTOR.fields:
        if depth and rng.random() < 0.7:
            _change(message, field, rng)
            if field.type == _F.TYPE_MESSAGE and not field.is_repeated:
                filled(getattr(message, field.name), rng, depth - 1)
    return message


def _change(message: Message, field: Any, rng: random.Random) -> None:
    value, nested = getattr(message, field.name), field.type == _F.TYPE_MESSAGE
    if nested and field.message_type.GetOptions().map_entry:
        of_key, of_value = field.message_type.fields
        if value and rng.random() < 0.2:
            value.pop(rng.choice(list(value)))
        for _ in range(rng.choice((1, 5, 300, _MOST_REPEATED))):
            key = rng.randrange(1 << 20) if of_key.type in _BITS else _value(of_key, "", rng)
            value[key] = _value(of_value, 0, rng)
    elif field.is_repeated:
        what = rng.randrange(4)
        if what == 0:
            del value[rng.randrange(len(value) + 1) :]
        elif what == 1:
            new = GetMessageClass(field.message_type)() if nested else _value(field, "", rng)
            value.extend([new] * rng.choice((1, 5, 300, _MOST_REPEATED)))
        elif value and what == 2:
            value.extend([rng.choice(value)])
        elif value:
            at = rng.randrange(len(value))
            if nested:
                mutate(value[at], rng)
            else:
                value[at] = _value(field, value[at], rng)
    elif not nested:
        setattr(message, field.name, _value(field, value, rng))
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        value.SetInParent()
        mutate(value, rng)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes with some flipped, missing, foreign, spliced in, doubled or nested."""
    at = rng.randrange(len(data) + 1)
    what = rng.randrange(7)
    if what == 0:
        return data[:at]
    if what == 1:
        return rng.randbytes(rng.choice((0, 1, 2, 7, 64, 1000)))
    if what == 2:
        return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
    if what == 3:
        return data * rng.choice((2, 3, 40))
    if what == 4:
        # Length-delimited fields in one another, deeper than a parser follows.
        for _ in range(rng.choice((5, 150))):
            data = data[:16000]
            head, length = bytes([rng.randrange(1, 16) << 3 | 2]), len(data)
            data = head + bytes([length & 0x7F | 0x80, length >> 7 & 0x7F]) + data
        return data
    changed = bytearray(data)
    for _ in range(min(len(changed), rng.choice((1, 1, 2, 8)))):
        # Most often where the structure is, not in the states.
        most = len(changed) if rng.random() < 0.3 else min(len(changed), 200)
        changed[rng.randrange(most)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _reorder(given: list[Any], rng: random.Random) -> None:
    what = rng.randrange(4)
    if what == 0:
        rng.shuffle(given)
    elif given and what == 1:
        del given[rng.randrange(len(given))]
    elif given and what == 2:
        given.insert(rng.randrange(len(given) + 1), _copy(rng.choice(given)))
    elif given:
        given += [_copy(given[-1])] * rng.randrange(1, 20)


def _value(field: FieldDescriptor, now: Any, rng: random.Random) -> Any:
    if field.type in _BITS:
        bits, signed = _BITS[field.type]
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        near = now + rng.choice((-1, 1)) if isinstance(now, int) else 1
        edges = (0, 1, 2, low, high, high - 1, high // 2, near, rng.randint(low, high))
        return max(low, min(high, rng.choice(edges)))
    if field.type in (_F.TYPE_FLOAT, _F.TYPE_DOUBLE):
        return rng.choice(_FLOATS)
    if field.type == _F.TYPE_BOOL:
        return not now
    if field.type == _F.TYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 7, 77, -1, (1 << 31) - 1))
    if field.type == _F.TYPE_STRING:
        return rng.choice((*_TEXTS, str(now) + "x", str(now)[:-1]))
    data = now if isinstance(now, bytes) else b""
    return rng.choice((b"", data[:-1], data + b"\0", rng.randbytes(32), damaged(data, rng)))


def _copy(message: Message) -> Any:
    made = type(message)()
    made.CopyFrom(message)
    return made
