"""Checksums of blocks, and the check that their floats are finite.

numpy and xxhash release the interpreter's lock while they work.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

Bytes = NDArray[np.uint8]

# As signed integers +inf and the positive NaNs are the largest values of a float's format, as
# unsigned integers -inf and the negative NaNs are: two maxima tell exactly.
_INFINITY: dict[torch.dtype, tuple[type, int, type, int]] = {
    torch.bfloat16: (np.int16, 0x7F80, np.uint16, 0xFF80),
    torch.float16: (np.int16, 0x7C00, np.uint16, 0xFC00),
    torch.float32: (np.int32, 0x7F80_0000, np.uint32, 0xFF80_0000),
}


def checksum_of(block: Bytes) -> int:
    """XXH3 of uint8 [n], 64 bits, seed 0."""
    return xxh3_64_intdigest(block)  # type: ignore[arg-type]


def all_finite(data: Bytes, dtype: torch.dtype) -> bool:
    """Whether bytes, read as ``dtype``, hold neither NaN nor infinity. Exact.

    Args:
        data: uint8 [n * itemsize], contiguous.
        dtype: bfloat16, float16 or float32.
    """
    if not len(data):
        return True
    signed, positive, unsigned, negative = _INFINITY[dtype]
    return bool(data.view(signed).max() < positive and data.view(unsigned).max() < negative)
