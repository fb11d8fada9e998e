"""The old home of ``slipstream.sample.Sample``, until every caller imports it from there."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from slipstream.checksum import Bytes
from slipstream.sample import STATE_DTYPES, Layout, Sample, group_of, is_held_out

__all__ = ["STATE_DTYPES", "Sample", "group_of", "is_held_out", "prompt_in", "prompt_of"]


def prompt_of(token_ids: NDArray[np.int64]) -> str:
    """A hash of tokens."""
    return hashlib.blake2b(token_ids.tobytes(), digest_size=16).hexdigest()


def prompt_in(block: Bytes, layout: Layout) -> str:
    """A hash of the tokens before the first completion in a block; empty where there are none.

    The group of a sample without any is its id. See ``group_of``.
    """
    length = block[layout.mask_at : layout.mask_at + layout.tokens].tobytes().find(1)
    return prompt_of(block[: 4 * length].view(np.int32).astype(np.int64)) if length > 0 else ""
