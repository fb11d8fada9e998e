"""What the parts of the API server's process share: launcher, stat logger, endpoint plug-in.

vLLM creates the two plug-ins itself, so they can only meet here.

Tells a vLLM process whether ``rollout-server`` started it.

vLLM loads the entry points of every installed package, so Slipstream's plug-ins
are imported by any vLLM in the same environment. They act only where this mark
is set; the launcher sets it and vLLM's child processes inherit it.

Nothing here imports torch or vLLM: an inert plug-in must cost nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_server.acceptance import AcceptanceTracker

if TYPE_CHECKING:
    from rollout_server.service import ControlServer
    from rollout_server.step_costs import CostWatch
    from slipstream.security import Access


@dataclass(frozen=True)
class Settings:
    """What the launcher was told and has checked.

    Attributes:
        model_dir: the policy's checkpoint.
        draft_dir: the draft's checkpoint.
        control_host: address the control plane listens on.
        control_port: its port.
        draft_length: num_speculative_tokens.
        draft_sample_method: "probabilistic" or "greedy".
        stage_bytes: bound of the content store.
        guard_drafts: drafts after which acceptance is judged.
        time_plain_steps: turn drafting off for a moment where a plain step's cost is unknown.
        access: who may use the control plane.
    """

    model_dir: Path
    draft_dir: Path
    control_host: str
    control_port: int
    draft_length: int
    draft_sample_method: str
    stage_bytes: int
    guard_drafts: int
    access: Access
    time_plain_steps: bool = False


@dataclass
class ApiProcess:
    """One per API server process."""

    settings: Settings | None = None
    tracker: AcceptanceTracker = field(default_factory=AcceptanceTracker)
    control_server: ControlServer | None = None
    cost_watch: CostWatch | None = None
    closers: list[Callable[[], None]] = field(default_factory=list)


API = ApiProcess()


MARK = "SLIPSTREAM_ROLLOUT_SERVER"


def mark_process() -> None:
    """Make this process and its future children Slipstream's."""
    os.environ[MARK] = "1"


def is_active() -> bool:
    """Whether ``rollout-server`` started this process."""
    return os.environ.get(MARK) == "1"
