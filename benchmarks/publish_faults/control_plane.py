"""A rollout server's real control plane over any engine, for example one in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout_server.acceptance import AcceptanceGuard, AcceptanceTracker
from rollout_server.app import control_plane as build
from rollout_server.plugins import Settings
from rollout_server.reload import Result
from rollout_server.service import ControlServer
from rollout_server.store import ContentStore
from slipstream.checkpoints import read_layout
from slipstream.security import Access, ClientCredentials
from slipstream.v1 import rollout_server_pb2 as pb


def _no_metrics(kind: str, outcome: str, result: Result | None) -> None: ...


async def control_plane(
    engine: Any,
    store: ContentStore,
    draft_dir: Path,
    access: Access,
    tracker: AcceptanceTracker | None = None,
    peers: ClientCredentials | None = None,
) -> Callable[[], ControlServer]:
    """What makes a server of one and the same state, again after each that was stopped.

    Args:
        engine: takes what is committed: it has the methods of ``VllmEngine``.
        store: of what is staged.
        draft_dir: the draft that it starts with; it serves as the policy's layout too.
        access: who may use it.
        tracker: counts what is drafted.
        peers: what other servers are shown.
    """
    tracker = tracker or AcceptanceTracker()
    settings = Settings(draft_dir, draft_dir, access, peers=peers)
    layout = read_layout(draft_dir)
    del layout["t2d"]
    shown = pb.ServerState(model="policy", http_port=1)
    control, service = await build(engine, store, settings, layout, tracker, _no_metrics, shown)

    def server() -> ControlServer:
        guard = AcceptanceGuard(tracker, settings.guard_drafts)
        return ControlServer(service, control, guard, lambda: True, lambda: None, access)

    return server
