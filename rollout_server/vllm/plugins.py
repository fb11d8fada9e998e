"""vLLM's entry points into Slipstream, and what they share with the launcher.

vLLM loads the entry points of every installed package, so any vLLM in the same environment imports
this module. It acts only in processes that ``rollout-server`` started: the launcher sets a mark
which vLLM's child processes inherit. Nothing here imports torch or vLLM before that.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rollout_server.control.acceptance_counts import AcceptanceTracker

if TYPE_CHECKING:
    from rollout_server.control.service import ControlServer
    from rollout_server.control.step_costs import CostWatch
    from slipstream.serving.identity import Access

MARK = "SLIPSTREAM_ROLLOUT_SERVER"


@dataclass(frozen=True)
class Settings:
    """The launcher's options, checked."""

    model_dir: Path
    draft_dir: Path | None
    access: Access
    draft_kind: str = "eagle3"
    control_host: str = "127.0.0.1"
    control_port: int = 50061
    draft_length: int = 3
    speculation: str = "auto"
    draft_sample_method: str = "probabilistic"
    stage_bytes: int = 4 << 30
    guard_drafts: int = 512
    time_plain_steps: bool = False
    shared_registry: Path | None = None


@dataclass
class ApiProcess:
    """State of the API server's process: vLLM makes the plug-ins itself, so they share it here."""

    settings: Settings | None = None
    tracker: AcceptanceTracker = field(default_factory=AcceptanceTracker)
    control_server: ControlServer | None = None
    cost_watch: CostWatch | None = None
    closers: list[Callable[[], None]] = field(default_factory=list)


API = ApiProcess()


def mark_process() -> None:
    """Make this process and its future children Slipstream's."""
    os.environ[MARK] = "1"


def is_active() -> bool:
    """Return whether ``rollout-server`` started this process."""
    return os.environ.get(MARK) == "1"


def register_general() -> None:
    """Patch this vLLM process (``vllm.general_plugins``); safe to call more than once.

    Raises RefusedError: this vLLM lacks something that losslessness depends on.
    """
    if is_active():
        _patch_once()


@functools.cache
def _patch_once() -> None:
    # A patch wraps what it finds: a second one would wrap the first.
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker

    from rollout_server.vllm import engine_core, worker
    from rollout_server.vllm import patches as vllm_patches

    log_with_vllm()
    worker.install(Worker)
    engine_core.install(EngineCore)
    vllm_patches.install()


def log_with_vllm() -> None:
    """Give Slipstream's loggers the level and handlers of vLLM's, which configures only its own:
    otherwise messages below a warning would not be printed."""
    for name in ("rollout_server", "slipstream"):
        logger = logging.getLogger(name)
        logger.parent = logging.getLogger("vllm")
        # Clears the cache of levels that were looked up before.
        logger.setLevel(logging.NOTSET)


def make_endpoint_plugin() -> Any:
    """Make the control plane in the API server (``vllm.endpoint_plugins``)."""
    if not is_active():
        # vLLM skips a plug-in that is for none of its server's tasks.
        return SimpleNamespace(name="slipstream", required_tasks=())
    from rollout_server.vllm.api_server import ControlPlaneEndpoint

    return ControlPlaneEndpoint()
