"""Which revision of slipstream.v1 a peer must speak."""

from __future__ import annotations

from slipstream.refusal import RefusedError, StatusCode

SCHEMA_VERSION = 2
"""2: samples packed as one block, batches, shared memory."""


def check_schema(found: int, whose: str, upgrade: str) -> None:
    """Raise RefusedError (FAILED_PRECONDITION) unless a peer speaks this revision.

    Args:
        found: its ``schema_version``; 0, an absent one, means 1.
        whose: "the trainer's", for the error.
        upgrade: how to make it speak this revision.
    """
    version = found or 1
    if version != SCHEMA_VERSION:
        raise RefusedError(
            "schema_version",
            f"{version} ({whose})",
            SCHEMA_VERSION,
            upgrade,
            StatusCode.FAILED_PRECONDITION,
        )
