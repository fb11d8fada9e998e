"""What the console remembers: events in order, acceptance exact however thinned, the fleet."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import grpc

from draft_trainer.cli.events import described
from draft_trainer.cli.past import DASH, length, number, slot_lengths
from draft_trainer.cli.sparkline import bar, sparkline
from draft_trainer.releases.fleet import Failure
from draft_trainer.server import status as acceptance_history
from draft_trainer.server.status import AcceptanceHistory, FleetView, Thinned
from draft_trainer.state import State
from slipstream.v1 import console_pb2 as pb
from slipstream.v1 import rollout_server_pb2


def state(policy: int | None) -> rollout_server_pb2.ServerState:
    return rollout_server_pb2.ServerState(policy_version=policy)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_acceptance_is_kept_by_release_and_policy_version() -> None:
    clock = Clock()
    history = AcceptanceHistory(lambda: 9, clock=clock)
    history.grew("a:1", state(4), 0, 100, [90, 80, 70])
    history.grew("b:1", state(4), 0, 300, [100, 0, 0])
    history.grew("a:1", state(5), 1, 10, [10, 10, 10])
    clock.now += 30
    history.grew("a:1", state(None), 1, 10, [0, 0, 0])
    zero, one, later = history.cells()
    assert (zero.draft_version, zero.first_policy_version, zero.drafts) == (0, 4, 400)
    assert list(zero.accepted_per_position) == [190, 80, 70]
    assert (one.draft_version, one.first_policy_version, one.last_policy_version) == (1, 5, 5)
    # The framework syncs the policy: the newest that the trainer knows.
    assert later.first_policy_version == 9
    fleet = {d.draft_version: d.acceptance_length for d in history.last_minute()}
    assert fleet == {0: 1 + 340 / 400, 1: 1 + 30 / 20}
    assert [d.drafts for d in history.last_minute("b:1")] == [300]
    assert history.total == (420, (200, 90, 80))
    clock.now += 90
    assert history.last_minute() == []
    clock.now += 600
    assert history.servers() == []


def test_acceptance_stays_exact_and_bounded_over_thousands_of_releases() -> None:
    clock = Clock()
    history = AcceptanceHistory(lambda: None, clock=clock)
    for policy in range(12_000):
        history.grew("a:1", state(policy), policy // 3, 10, [9, policy % 7])
    cells = history.cells()
    assert 400 < len(cells) <= acceptance_history.MAX_CELLS
    for cell in cells:
        policies = range(cell.first_policy_version, cell.last_policy_version + 1)
        assert cell.drafts == 10 * len(policies)
        assert list(cell.accepted_per_position) == [
            9 * len(policies),
            sum(policy % 7 for policy in policies),
        ]
    assert cells[-1].last_policy_version == 11_999
    # One release over many policy versions is thinned, not dropped.
    history = AcceptanceHistory(lambda: None, clock=clock)
    for policy in range(12_000):
        history.grew("a:1", state(policy), 7, 10, [9])
    cells = history.cells()
    assert sum(cell.drafts for cell in cells) == 120_000
    assert cells[0].first_policy_version == 0 and len(cells) <= acceptance_history.MAX_CELLS


def test_thinned_keeps_the_first_the_newest_and_even_steps_between() -> None:
    kept: Thinned[int] = Thinned(16)
    for value in range(1001):
        kept.add(value)
    values = list(kept)
    assert len(values) <= 17 and values[0] == 0 and values[-1] == 1000
    steps = {b - a for a, b in pairwise(values[:-1])}
    assert len(steps) == 1


def test_the_fleets_changes_are_events_once(tmp_path: Path) -> None:
    log = State(tmp_path).events
    view = FleetView(log)
    up = rollout_server_pb2.ServerState(draft_version=2, speculation_enabled=True)
    ill = rollout_server_pb2.ServerState(draft_version=2, not_ready="nothing is accepted")
    down = Failure("a:1: UNAVAILABLE", grpc.StatusCode.UNAVAILABLE)
    for answer in (down, down, up, up, ill, ill, up, down, down):
        view.looked({"a:1": answer})
    (server,) = view.messages()
    assert not server.reachable and server.error == "UNAVAILABLE"
    assert server.state.draft_version == 2
    view.looked({})
    assert view.messages() == []
    kinds = [pb.EventKind.Name(e.kind).removeprefix("EVENT_KIND_") for e in log.since(0)]
    assert kinds == [
        *("SERVER_JOINED", "SERVER_UNREACHABLE", "SERVER_BACK"),
        *("SERVER_NOT_READY", "SPECULATION_OFF", "SERVER_READY", "SPECULATION_ON"),
        *("SERVER_UNREACHABLE", "SERVER_LEFT"),
    ]


def test_no_drafts_are_a_dash() -> None:
    assert length(0, 0) is None and number(length(0, 0)) == DASH
    assert number(length(10, 0)) == "1.000"
    past = pb.ServerPast(
        slots=[pb.AcceptanceSlot(time=90.0, drafts=10, accepted_per_position=[5, 5])]
    )
    assert slot_lengths(past, 5.0, 101.0, 4) == [None, None, 2.0, None]


def test_what_others_wrote_steers_no_terminal() -> None:
    event = pb.Event(kind=pb.EVENT_KIND_HEALED, server="a:1", reason="x\x1b[2J\ny\u202e")
    assert described(event) == "a:1: x [2J y "


def test_sparkline_and_bar() -> None:
    assert sparkline([1.0, None, 2.0, 3.0], 6) == "  ▁ ▅█"
    assert sparkline([], 3) == "   " and sparkline([None, 2.0], 2) == " ▄"
    assert bar(0.5, 4) == "██  " and bar(0.0, 2) == "  " and bar(2.0, 2) == "██"
