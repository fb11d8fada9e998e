"""One checksum for a whole draft: what a server reads back, compared with a release's manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from slipstream.v1 import tensor_pb2


def release_digest(tensors: Iterable[tuple[str, str]]) -> bytes:
    """SHA-256 over (name, SHA-256 hex of the bytes) of every tensor, in the order of names."""
    lines = (f"{name}\0{sha256}\n" for name, sha256 in sorted(tensors))
    return hashlib.sha256("".join(lines).encode()).digest()


def digest_of_specs(specs: Iterable[tensor_pb2.TensorSpec]) -> bytes:
    """The same, of a manifest's tensors."""
    return release_digest((spec.name, spec.sha256.hex()) for spec in specs)
