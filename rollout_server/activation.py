"""Tells a vLLM process whether ``rollout-server`` started it.

vLLM loads the entry points of every installed package, so Slipstream's plug-ins
are imported by any vLLM in the same environment. They act only where this mark
is set; the launcher sets it and vLLM's child processes inherit it.

Nothing here imports torch or vLLM: an inert plug-in must cost nothing.
"""

from __future__ import annotations

import os

MARK = "SLIPSTREAM_ROLLOUT_SERVER"


def mark_process() -> None:
    """Make this process and its future children Slipstream's."""
    os.environ[MARK] = "1"


def is_active() -> bool:
    """Whether ``rollout-server`` started this process."""
    return os.environ.get(MARK) == "1"
