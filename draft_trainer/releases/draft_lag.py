"""No draft proposes for a policy that it is further behind than configured.

Off before the policy goes live, on again after a draft has gone live that is fresh
enough: what is in between costs speed, the other way round would be rollouts with a
draft that nobody wanted to serve.
"""

from __future__ import annotations

import logging

from draft_trainer.releases.fleet import Failure, RolloutClient
from slipstream.v1 import rollout_server_pb2 as pb

logger = logging.getLogger(__name__)


class DraftLag:
    """Decides which servers speculate, where a limit is set; otherwise leaves them alone.

    Args:
        max_lag: policy versions that a draft may be behind; 0 for no limit.
    """

    def __init__(self, max_lag: int) -> None:
        self.max_lag = max_lag
        self._policy_version: int | None = None

    def policy_synced(self, policy_version: int) -> None:
        """Remember the newest policy, for servers whose policy the framework syncs itself."""
        self._policy_version = policy_version

    def fresh(self, state: pb.ServerState, policy_version: int | None = None) -> bool:
        """Whether a server's draft may propose for ``policy_version`` (the one it has now).

        A draft that was trained against no policy version yet (release 0) counts as
        trained against version 0; a policy without a version yet has no lag.
        """
        if policy_version is None:
            policy_version = (
                state.policy_version if state.HasField("policy_version") else self._policy_version
            )
        if policy_version is None:
            return True
        return policy_version - state.trained_against_policy_version <= self.max_lag

    def before_policy(self, client: RolloutClient, policy_version: int) -> Failure | None:
        """Turn speculation off where the draft that is live will be too old for this policy."""
        state = client.state()
        if isinstance(state, Failure):
            return state
        if state.speculation_enabled and not self.fresh(state, policy_version):
            return self._set(client, state, enabled=False)
        return None

    def apply(self, client: RolloutClient, state: pb.ServerState) -> Failure | None:
        """Bring a server's speculation in line with what it serves."""
        wanted = self.fresh(state)
        if not self.max_lag or state.speculation_enabled == wanted:
            return None
        return self._set(client, state, enabled=wanted)

    @staticmethod
    def _set(client: RolloutClient, state: pb.ServerState, enabled: bool) -> Failure | None:
        answer = client.set_speculation(enabled)
        if isinstance(answer, Failure):
            return answer
        logger.warning(
            "%s: speculation %s: draft %d was trained against policy version %d",
            client.address,
            "on" if enabled else "off",
            state.draft_version,
            state.trained_against_policy_version,
        )
        return None
