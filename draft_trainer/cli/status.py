"""``draft-trainer status``: where a running trainer stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draft_trainer.cli.past import DASH, number, per_position, share
from draft_trainer.cli.trainer import (
    Connection,
    as_dict,
    plain,
    print_json,
    print_table,
    when,
)
from slipstream.v1 import draft_trainer_pb2 as pb

_TABLES = ("servers", "last_minute", "trial", "last_verdict", "last_gate")


@dataclass(frozen=True, kw_only=True)
class Status(Connection):
    """Where a running trainer stands."""

    json: bool = False
    """The whole status as JSON."""

    def run(self) -> int:
        """Prints it."""
        with self.trainer() as stub:
            status = stub.GetStatus(pb.GetStatusRequest(), timeout=self.timeout)
        if self.json:
            print_json(as_dict(status))
        else:
            _print(status)
        return 0


def _print(status: pb.TrainerStatus) -> None:
    for field in status.DESCRIPTOR.fields:
        if field.name not in _TABLES:
            print(f"{field.name.replace('_', ' '):32}{_text(status, field)}")
    verdict = status.last_verdict
    gate = f"{when(verdict.judged_at)} {plain(verdict.reason)}"
    print(f"{'gate':32}{gate if status.HasField('last_verdict') else 'none yet'}")
    if status.HasField("trial"):
        trial = status.trial
        text = f"draft {trial.draft_version} against {trial.incumbent_version}"
        print(f"{'trial':32}{text} on {', '.join(map(plain, trial.servers))}")
    _fleet(status)


def _fleet(status: pb.TrainerStatus) -> None:
    from draft_trainer.cli.fleet_lines import state_of

    rows: list[list[object]] = [
        ["rollout server ", "state ", "draft", "policy", "length", "by position ", "why "]
    ]
    for server in status.servers:
        state, drafted = server.state, server.last_minute
        known, policy = server.HasField("state"), state.HasField("policy_version")
        length = drafted.acceptance_length if drafted.HasField("acceptance_length") else None
        shares = per_position(drafted.drafts, drafted.accepted_per_position)
        rows.append(
            [
                plain(server.address),
                state_of(server),
                state.draft_version if known else DASH,
                state.policy_version if policy else DASH,
                number(length),
                " ".join(map(share, shares)) or DASH,
                plain(server.error or state.not_ready),
            ]
        )
    print()
    if len(rows) == 1:
        print("no rollout servers (publish.rollout_servers)")
    else:
        print_table(rows)


def _text(status: pb.TrainerStatus, field: Any) -> str:
    if field.has_presence and not status.HasField(field.name):
        return "none yet"
    value = getattr(status, field.name)
    if field.name == "started_at":
        return when(value)
    if field.name == "step_acceptance":
        return " ".join(f"{v:.3f}" for v in value) or DASH
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {value[name]}" for name in sorted(value)) or DASH
    text = f"{value:.4g}" if isinstance(value, float) else plain(str(value))
    return text or DASH
