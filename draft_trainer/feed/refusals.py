"""What the sample store refuses."""

from __future__ import annotations

from slipstream.refusal import RefusedError, StatusCode


def too_large(nbytes: int, expected: str) -> RefusedError:
    """A sample for which there is no room."""
    return RefusedError(
        "sample",
        f"{nbytes} bytes",
        f"{expected} (replay.capacity_bytes)",
        "send shorter windows, or raise replay.capacity_bytes",
        StatusCode.RESOURCE_EXHAUSTED,
    )


def another_run(run_id: str, current: str) -> RefusedError:
    """A call for a run that is not the current one any more."""
    return RefusedError(
        "run_id",
        run_id,
        f"{current!r}, which began meanwhile",
        "end that run first, or start another draft-trainer for this one",
        StatusCode.FAILED_PRECONDITION,
    )
