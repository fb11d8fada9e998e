"""Which vLLM this is, for the guards of the workarounds."""

from __future__ import annotations

import re

from slipstream.refusal import RefusedError


def release_of(version: str) -> tuple[int, int]:
    """``(major, minor)`` of a vLLM version such as "0.32.0+cpu".

    Raises:
        RefusedError: not of that form (a development build without a tag).
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise RefusedError(
            "vllm.__version__", version, "a release such as 0.32.0", "install a released vLLM"
        )
    return int(match[1]), int(match[2])


def installed_release() -> tuple[int, int]:
    """``(major, minor)`` of the vLLM that is imported here."""
    from vllm.version import __version__

    return release_of(__version__)
