"""``ServerState``: what is served, as a message."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_server.control import RolloutControl
from rollout_server.weights import DRAFT, POLICY
from slipstream.release_digest import release_digest
from slipstream.v1 import rollout_server_pb2 as pb


@dataclass(frozen=True)
class StateMessage:
    """Builds the message from the control plane's state and what never changes.

    Attributes:
        control: the state.
        draft_length: num_speculative_tokens.
        draft_sample_method: "greedy" or "probabilistic".
        model: for people.
        http_port: of the OpenAI API.
    """

    control: RolloutControl
    draft_length: int
    draft_sample_method: str
    model: str
    http_port: int

    def build(self) -> pb.ServerState:
        """The state now."""
        control = self.control
        draft, previous = control.live[DRAFT], control.previous_draft
        return pb.ServerState(
            draft_version=draft.version,
            trained_against_policy_version=draft.trained_against,
            policy_version=control.live[POLICY].version,
            previous_draft_version=None if previous is None else previous.version,
            staged=list(control.staged),
            num_speculative_tokens=self.draft_length,
            draft_sample_method=self.draft_sample_method,
            speculation_enabled=control.speculation_enabled,
            draft_commits=control.commits[DRAFT],
            policy_commits=control.commits[POLICY],
            model=self.model,
            http_port=self.http_port,
            draft_sha256=release_digest(draft.digests),
            not_ready=control.readiness.reason,
        )
