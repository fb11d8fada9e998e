"""A rollout server's real control plane over any engine, for example one in memory.

``rollout_server.app`` puts the same pieces together around vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollout_server.acceptance import AcceptanceTracker
from rollout_server.app import _expected_draft, _ingest_draft
from rollout_server.checkpoint import Expected
from rollout_server.content_store import ContentStore
from rollout_server.control import (
    DRAFT,
    POLICY,
    AcceptanceGuard,
    Committed,
    RolloutControl,
    StateMessage,
    Weights,
)
from rollout_server.engine import Engine
from rollout_server.reload import WeightSource
from rollout_server.runtime import Settings
from rollout_server.service import ControlServer, RolloutService
from slipstream.security import Access


class _Nobody:
    """Takes no metrics."""

    def committed(self, kind: str, outcome: str, took: Committed | None) -> None: ...


async def control_plane(
    engine: Engine, store: ContentStore, draft_dir: Path, access: Access
) -> Callable[[], ControlServer]:
    """What makes a server of one and the same state, again after each that was stopped.

    Args:
        engine: not started yet.
        store: of what is staged.
        draft_dir: the draft that it starts with; it serves as the policy's layout too.
        access: who may use it.
    """
    description = await engine.start()
    settings = Settings(
        *(draft_dir, draft_dir, "127.0.0.1", 0, 3, "probabilistic", store.capacity, 512, access)
    )
    draft, specs = _ingest_draft(settings, store)
    tracker = AcceptanceTracker()
    tracker.start(draft.version or 0)
    policy = Weights(POLICY, None, WeightSource(directory=str(draft_dir)))
    control = RolloutControl(engine, store, tracker, _Nobody(), draft, policy)
    expected = _expected_draft(specs, description)
    service = RolloutService(
        control,
        engine,
        store,
        tracker,
        {DRAFT: expected, POLICY: Expected(POLICY, expected.layout, "bfloat16")},
        StateMessage(control, 3, "probabilistic", "policy", 1),
    )

    def server() -> ControlServer:
        guard = AcceptanceGuard(tracker, 512)
        return ControlServer(service, control, engine, guard, lambda: True, lambda: None, access)

    return server
