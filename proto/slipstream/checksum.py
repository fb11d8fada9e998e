"""Checksums of states, and the one pass that copies, hashes and looks for NaN and infinity.

A sample is 32 KiB a token at 8B. Copied first and read again for each check it comes from main
memory every time; copied block by block, the checks find the block in the processor's own cache.
numpy, zlib and xxhash let go of the interpreter's lock while they work.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import RefusedError
from slipstream.v1 import draft_trainer_pb2 as pb

try:
    from xxhash import xxh3_64, xxh3_64_intdigest
except ModuleNotFoundError:  # A training image without it uses CRC-32.
    xxh3_64 = None  # type: ignore[assignment,misc]
    xxh3_64_intdigest = None  # type: ignore[assignment]

Bytes = NDArray[np.uint8]

BLOCK_BYTES = 512 << 10
"""Copy and original together fit a second-level cache of 1 MiB."""

_SMALL_BYTES = 16 << 10

CRC32, XXH3_64 = pb.CHECKSUM_KIND_CRC32, pb.CHECKSUM_KIND_XXH3_64

KINDS: tuple[pb.ChecksumKind, ...] = (CRC32,) if xxh3_64 is None else (XXH3_64, CRC32)
"""What this process can compute, the fastest first."""

# As signed integers +inf and the positive NaNs are the largest values of a float's format, as
# unsigned integers -inf and the negative NaNs are: two maxima tell exactly.
_INFINITY: dict[torch.dtype, tuple[type, int, type, int]] = {
    torch.bfloat16: (np.int16, 0x7F80, np.uint16, 0xFF80),
    torch.float16: (np.int16, 0x7C00, np.uint16, 0xFC00),
    torch.float32: (np.int32, 0x7F80_0000, np.uint32, 0xFF80_0000),
    # No infinities; the only NaNs are all ones.
    torch.float8_e4m3fn: (np.int8, 0x7F, np.uint8, 0xFF),
}


def infinity_bits(dtype: torch.dtype) -> int:
    """Of positive infinity: a float with all of them set is infinite or not a number.

    float8_e4m3fn has no infinities; there they are those of its NaNs.
    """
    return _INFINITY[dtype][1]


class Hasher(Protocol):
    """A running checksum."""

    def update(self, data: Bytes, /) -> None:
        """Take more bytes."""

    def intdigest(self) -> int:
        """Of all bytes so far."""


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Bytes, /) -> None:
        self._value = zlib.crc32(data, self._value)  # type: ignore[arg-type]

    def intdigest(self) -> int:
        return self._value


def hasher(kind: int) -> Hasher:
    """A new checksum. Raises RefusedError for a kind that this process cannot compute."""
    if kind == XXH3_64 and xxh3_64 is not None:
        return xxh3_64()  # type: ignore[return-value]
    if kind == CRC32:
        return _Crc32()
    known = pb.ChecksumKind.values()
    raise RefusedError(
        "packed.checksum_kind",
        pb.ChecksumKind.Name(kind) if kind in known else kind,  # type: ignore[arg-type]
        " or ".join(pb.ChecksumKind.Name(each) for each in KINDS),
        "use a checksum that OpenRunResponse.checksums names",
    )


def checksum_of(pieces: Sequence[Bytes], kind: int) -> int:
    """The checksum of pieces one after the other. Raises RefusedError as ``hasher``."""
    if len(pieces) == 1 and kind == XXH3_64 and xxh3_64_intdigest is not None:
        return xxh3_64_intdigest(pieces[0])  # type: ignore[arg-type]
    running = hasher(kind)
    for piece in pieces:
        running.update(piece)
    return running.intdigest()


def all_finite(data: Bytes, dtype: torch.dtype) -> bool:
    """Whether bytes, read as ``dtype``, hold neither NaN nor infinity. Exact.

    Args:
        data: uint8 [n * itemsize], contiguous.
        dtype: bfloat16, float16, float32 or float8_e4m3fn.
    """
    signed, positive, unsigned, negative = _INFINITY[dtype]
    if not len(data):
        return True
    if len(data) <= _SMALL_BYTES:
        # Without the sign it takes one pass, but over a copy.
        values: NDArray[np.unsignedinteger[Any]] = data.view(unsigned)
        return int(np.maximum.reduce(values + values)) < 2 * positive
    return bool(data.view(signed).max() < positive and data.view(unsigned).max() < negative)


def copy_checked(
    pieces: Sequence[Bytes], destination: Bytes, kind: int, dtype: torch.dtype, states_at: int
) -> tuple[int, bool]:
    """All of ``CheckedCopy`` for some pieces: the copy's checksum, and whether it is finite.

    Raises:
        RefusedError: as ``CheckedCopy``.
    """
    if len(destination) <= _SMALL_BYTES and len(pieces) == 1:
        np.copyto(destination, pieces[0])
        return checksum_of([destination], kind), all_finite(destination[states_at:], dtype)
    copy = CheckedCopy(destination, kind, dtype, states_at)
    for piece in pieces:
        copy.put(piece)
    return copy.checksum, copy.finite


def copy_hashed(source: Bytes, destination: Bytes, kind: int) -> int:
    """Copy ``source`` to ``destination``, uint8 [n], contiguous; the checksum of what is there.

    Raises:
        RefusedError: as ``CheckedCopy``.
    """
    if len(source) <= _SMALL_BYTES:
        np.copyto(destination, source)
        return checksum_of([destination], kind)
    copy = CheckedCopy(destination, kind)
    copy.put(source)
    return copy.checksum


class CheckedCopy:
    """Fills ``destination`` from front to back and hashes what arrived there.

    What is checked is the copy: the original may be shared memory that its other owner changes.

    Args:
        destination: uint8 [n], contiguous.
        kind: of the checksum.
        dtype: of the floats from byte ``states_at`` on; None looks at none.
        states_at: a multiple of the itemsize.

    Raises:
        RefusedError: a kind of checksum that this process cannot compute.
    """

    def __init__(
        self, destination: Bytes, kind: int, dtype: torch.dtype | None = None, states_at: int = 0
    ) -> None:
        self._destination = destination
        self._hasher = hasher(kind)
        self._dtype = dtype
        self._states_at = states_at
        self._at = 0
        self.finite = True

    @property
    def checksum(self) -> int:
        """Of everything copied so far."""
        return self._hasher.intdigest()

    def put(self, source: Bytes) -> None:
        """Append ``source``: uint8 [m], contiguous, at most what is left; of whole floats."""
        for start in range(0, len(source), BLOCK_BYTES):
            piece = source[start : start + BLOCK_BYTES]
            block = self._destination[self._at : self._at + len(piece)]
            np.copyto(block, piece)
            self._hasher.update(block)
            states = max(0, self._states_at - self._at)
            if self._dtype is not None and self.finite and states < len(block):
                self.finite = all_finite(block[states:], self._dtype)
            self._at += len(piece)
