"""The fleet as the trainer last saw it, and an event for everything that changed in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from draft_trainer.releases.fleet import Failure
from draft_trainer.sidecar.events import EventLog
from slipstream.v1 import console_pb2 as pb
from slipstream.v1 import rollout_server_pb2 as rollout_pb


@dataclass
class _Server:
    """``error`` is that of the last look, ``state`` the last answer."""

    error: str = ""
    state: rollout_pb.ServerState = field(default_factory=rollout_pb.ServerState)
    seen_at: float = 0.0


class FleetView:
    """Told of every look at the fleet; remembers the last. Thread-safe.

    Args:
        events: learns of servers that come, go, or change their mind about requests.
        on_look: called after every look.
    """

    def __init__(self, events: EventLog, on_look: Callable[[], None] = lambda: None) -> None:
        self._on_look = on_look
        self._events = events
        self._lock = threading.Lock()
        self._servers: dict[str, _Server] = {}

    def looked(self, states: Mapping[str, rollout_pb.ServerState | Failure]) -> None:
        """All servers of the fleet were asked; what each answered."""
        now = time.time()
        with self._lock:
            for address in set(self._servers) - set(states):
                del self._servers[address]
                self._events.note(pb.EVENT_KIND_SERVER_LEFT, server=address)
            for address, state in states.items():
                if address not in self._servers:
                    self._servers[address] = _Server()
                    self._events.note(pb.EVENT_KIND_SERVER_JOINED, server=address)
                self._saw(address, state, now)
        self._on_look()

    def messages(self) -> list[pb.ServerView]:
        """Every server, by address; without its acceptance."""
        with self._lock:
            return [
                pb.ServerView(
                    address=address,
                    reachable=bool(server.seen_at) and not server.error,
                    error=server.error,
                    state=server.state if server.seen_at else None,
                    seen_at=server.seen_at,
                )
                for address, server in sorted(self._servers.items())
            ]

    def _saw(self, address: str, state: rollout_pb.ServerState | Failure, now: float) -> None:
        server = self._servers[address]
        if isinstance(state, Failure):
            error = state.text.removeprefix(f"{address}: ")
            if not server.error:
                self._note(pb.EVENT_KIND_SERVER_UNREACHABLE, address, server, error)
            server.error = error
            return
        first, before = not server.seen_at, server.state
        if server.error:
            self._note(pb.EVENT_KIND_SERVER_BACK, address, server)
        server.error, server.state, server.seen_at = "", state, now
        if state.not_ready and (first or not before.not_ready):
            self._note(pb.EVENT_KIND_SERVER_NOT_READY, address, server, state.not_ready)
        elif before.not_ready and not state.not_ready:
            self._note(pb.EVENT_KIND_SERVER_READY, address, server)
        if not first and before.speculation_enabled != state.speculation_enabled:
            on = state.speculation_enabled
            kind = pb.EVENT_KIND_SPECULATION_ON if on else pb.EVENT_KIND_SPECULATION_OFF
            self._note(kind, address, server)

    def _note(self, kind: pb.EventKind, address: str, server: _Server, reason: str = "") -> None:
        known = bool(server.seen_at)
        version = server.state.draft_version if known else None
        self._events.note(kind, draft_version=version, server=address, reason=reason)
