"""How many servers are reachable, ready and on the release that they should serve."""

from __future__ import annotations

from collections.abc import Mapping

from draft_trainer.releases.commits import Payloads
from draft_trainer.releases.fleet import Failure
from draft_trainer.releases.promotions import Promotion
from draft_trainer.sidecar.board import Servers
from slipstream.v1 import rollout_server_pb2 as pb


def look(
    states: Mapping[str, pb.ServerState | Failure], now: Promotion, payloads: Payloads
) -> Servers:
    """Count them.

    Args:
        states: every server of the fleet, as it answered.
        now: what each should serve.
        payloads: knows a release by its content.
    """
    reached = {a: s for a, s in states.items() if not isinstance(s, Failure)}
    return Servers(
        known=len(states),
        reachable=len(reached),
        ready=sum(not state.not_ready for state in reached.values()),
        current=sum(payloads.is_served(s, now.wanted_on(a)) for a, s in reached.items()),
    )
