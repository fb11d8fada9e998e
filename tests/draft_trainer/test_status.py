"""The memory of the status: the last minute's acceptance, policy versions, the fleet."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from draft_trainer.cli import console
from draft_trainer.counters import Counters
from draft_trainer.releases import watch as watches
from draft_trainer.releases.fleet import Fleet
from draft_trainer.releases.rollout_client import Failure
from draft_trainer.server import status
from draft_trainer.server.diagnosis import OK, PROBLEM, WAITING, ProblemLog
from draft_trainer.server.status import FleetView, PolicyClock
from draft_trainer.state import State, described
from slipstream.errors import RefusedError
from slipstream.v1 import console_pb2 as pb
from slipstream.v1 import rollout_server_pb2
from slipstream.v1.draft_trainer_pb2 import TrainerStatus
from tests.draft_trainer.rig import make_config, rollouts, running


class Clock:
    """Stands in for ``time.time`` of the status."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000.0
        monkeypatch.setattr(status.time, "time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_acceptance_of_the_last_minute_by_server_and_release(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watches.time, "monotonic", lambda: clock.now)
    watch = watches.AcceptanceWatch(cast(Fleet, None))
    watch._seen = {address: deque(maxlen=watches.KEPT) for address in ("a:1", "b:1")}

    def grew(address: str, version: int, drafts: int, accepted: list[int]) -> None:
        counts = rollout_server_pb2.AcceptanceCounters(
            draft_version=version,
            tried_per_position=[drafts] * len(accepted),
            accepted_per_position=accepted,
        )
        watch._note(address, rollout_server_pb2.AcceptanceReport(counters=[counts]), {})

    def last_minute() -> dict[str, list[pb.Drafted]]:
        return status.last_minute(watch.recent(status.WINDOW_SECONDS))

    grew("a:1", 0, 100, [90, 80, 70])
    grew("b:1", 0, 300, [100])
    grew("a:1", 1, 10, [10, 10, 10])
    clock.now += 30
    grew("a:1", 1, 10, [0, 0, 0])
    found = last_minute()
    assert set(found) == {"", "a:1", "b:1"}
    zero, one = found[""]
    assert (zero.draft_version, zero.drafts) == (0, 400)
    assert list(zero.tried_per_position) == [400, 100, 100]
    assert list(zero.accepted_per_position) == [190, 80, 70]
    assert zero.acceptance_per_position == pytest.approx([190 / 400, 0.8, 0.7])
    shown = console.described(TrainerStatus(drafted=zero), [])
    assert any("1.850  by position 0.47 0.80 0.70  7 drafts/s" in line for line in shown)
    assert {d.draft_version: d.acceptance_length for d in found[""]} == {
        0: 1 + 340 / 400,
        1: 1 + 30 / 20,
    }
    assert [d.drafts for d in found["b:1"]] == [300] and one.drafts == 20
    clock.now += 45
    assert [d.drafts for d in last_minute()[""]] == [10], "the older reports are past"
    clock.now += 90
    assert last_minute() == {}
    # What is kept is bounded; nothing is kept of a server that is not followed.
    for version in range(watches.KEPT + 100):
        grew("a:1", version, 1, [1, 0, 0])
        grew("c:1", version, 1, [1, 0, 0])
    assert len(watch._seen["a:1"]) == watches.KEPT and "c:1" not in watch._seen


def test_staleness_counts_from_the_policys_move(clock: Clock) -> None:
    times = status.PolicyClock()
    assert times.newest_at is None
    assert times.registered(11) and times.newest_at == clock.now
    clock.now += 30
    assert times.behind_seconds(11) == 0
    for version in (12, 13, 13):
        times.registered(version)
        clock.now += 10
    assert times.behind_seconds(11) == 30
    assert times.behind_seconds(0) == 60, "release 0 was trained on nothing"
    # If two are registered at once, the older one may arrive last.
    assert not times.registered(12) and times.behind_seconds(0) == 60
    # Another run counts from its own versions, even if they follow those of the run before.
    times.began("another")
    assert times.newest_at is None and times.behind_seconds(0) == 0
    assert times.registered(13) and times.newest_at == clock.now
    clock.now += 5
    times.began("another")
    assert times.behind_seconds(0) == 5, "another client of the same run"
    times.began("a third")
    for version in range(2, status.VERSIONS_KEPT + 100):
        times.registered(version)
    assert len(times._seen) == status.VERSIONS_KEPT


def test_staleness_after_restart_counts_from_start(clock: Clock) -> None:
    times = PolicyClock("run", known=8)
    times.began("run")
    assert times.newest_at is None
    assert not times.registered(8), "the bridge registers it again"
    assert times.behind_seconds(3) == 0.0


def test_late_announcement_of_last_run_is_ignored() -> None:
    old, new = (
        SimpleNamespace(key=name, latest_policy_version=version)
        for name, version in (("old", 500), ("new", 1))
    )
    noted: list[int] = []
    here: Any = SimpleNamespace(
        runs=SimpleNamespace(current=new),
        policy_clock=PolicyClock("old"),
        counters=Counters(),
        events=SimpleNamespace(note=lambda kind, policy_version: noted.append(policy_version)),
    )
    for run in (old, new, old):
        status.Status.policy_announced(here, run)
    assert noted == [1]


def test_fleet_changes_are_events_once(tmp_path: Path) -> None:
    log = State(tmp_path).events
    view = FleetView(log)
    up = rollout_server_pb2.ServerState(draft_version=2, speculation_enabled=True)
    ill = rollout_server_pb2.ServerState(draft_version=2)
    ill.not_ready.add(reason=rollout_server_pb2.NOT_READY_REASON_ASLEEP, workers=[0])
    down = Failure("a:1: UNAVAILABLE", grpc.StatusCode.UNAVAILABLE)
    for answer in (down, down, up, up, ill, ill, up, down, down):
        view.looked({"a:1": answer})
    (server,) = view.servers()
    assert not server.reachable and server.error == "UNAVAILABLE"
    assert server.state.draft_version == 2
    view.looked({})
    assert view.servers() == []
    assert [event.kind for event in log.since(0)] == [
        *("server_joined", "server_unreachable", "server_back"),
        *("server_not_ready", "speculation_off", "server_ready", "speculation_on"),
        *("server_unreachable", "server_left"),
    ]


def test_server_where_no_draft_pays_is_ready(tmp_path: Path) -> None:
    log = State(tmp_path).events
    view = FleetView(log)
    on = rollout_server_pb2.ServerState(speculation_enabled=True, speculation_wanted=True)
    unpaid = rollout_server_pb2.ServerState(speculation_wanted=True)
    off = rollout_server_pb2.ServerState()
    for state in (on, unpaid, on, unpaid):
        view.looked({"a:1": state})
    assert status.standing(view.servers()[0]) == ("ready, no draft pays", OK)
    view.looked({"a:1": off})
    assert [e.kind for e in log.since(0)][1:] == ["speculation_off"]
    assert status.standing(view.servers()[0]) == ("ready, drafting off", WAITING)


def test_rates_cover_last_minute_of_this_process() -> None:
    now = TrainerStatus(time=1000.0, samples_accepted=70, tokens_trained=500)
    status._add_rates(now, [])
    assert not now.HasField("samples_per_second")
    minute = [
        TrainerStatus(time=980.0, samples_accepted=10, tokens_trained=100),
        TrainerStatus(time=990.0, samples_accepted=60, tokens_trained=100),
    ]
    status._add_rates(now, minute)
    assert (now.samples_per_second, now.tokens_per_second) == (3.0, 20.0)


def test_status_escapes_control_characters() -> None:
    event = pb.Event(kind="x\x1b[2J", server="a:1", reason="x\x1b[2J\ny\u202e")
    assert described(event) == r"a:1: x\x1b[2J\ny\u202e"
    now = TrainerStatus(run_id="x\x1b[2J", servers=[pb.ServerView(address="x\x1b[2J")])
    text = "".join(console.described(now, [event]))
    assert text.count(r"x\x1b[2J") == 4 and "\x1b" not in text


def test_diagnosis_uses_newest_snapshots_with_samples(
    tmp_path: Path,
) -> None:
    with running(make_config(tmp_path), train=False) as (server, client):
        client.open()
        client.announce(1)
        messages = rollouts(20)

        def refused_are_a_problem() -> bool:
            (samples,) = (one for one in client.status().diagnosis if one.part == "samples")
            return samples.severity == PROBLEM

        for _ in range(20):
            server._counters.refused("teacher")
        client.send(*messages[:9])
        assert refused_are_a_problem()
        # In a long step of the loop no sample comes.
        for _ in range(2 * status.LATELY_SNAPSHOTS):
            server.status.keep_snapshot()
        assert refused_are_a_problem()
        client.send(*messages[9:])
        server.status.keep_snapshot()
        assert not refused_are_a_problem()


def server(drafts: int, speed_up: float | None) -> pb.ServerView:
    state = rollout_server_pb2.ServerState(speed_up=speed_up)
    return pb.ServerView(state=state, last_minute=pb.Drafted(drafts=drafts))


def test_speed_up_is_mean_over_drafts_of_the_fleet() -> None:
    assert status._speed_up([]) is None
    assert status._speed_up([server(100, None), server(0, 1.5)]) is None
    found = status._speed_up([server(100, 1.0), server(300, 2.0), server(900, None)])
    assert found == pytest.approx(1.75)


@pytest.mark.parametrize("place", ["read", "add"])
@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error"),
        RefusedError("draft.registry", "no space", "space", "make room"),
    ],
)
def test_history_goes_on_after_a_failed_snapshot(
    caplog: pytest.LogCaptureFixture, error: Exception, place: str
) -> None:
    kept: list[float] = []
    failing = True

    def fails(at: str) -> None:
        if failing and at == place:
            raise error

    def read() -> TrainerStatus:
        fails("read")
        return TrainerStatus(time=7.0, code_version="1", servers=[pb.ServerView(address="a:1")])

    def add(snapshot: TrainerStatus) -> None:
        fails("add")
        assert not snapshot.servers and not snapshot.code_version
        kept.append(snapshot.time)

    here: Any = SimpleNamespace(
        state=SimpleNamespace(history=SimpleNamespace(add=add)),
        problems=ProblemLog(),
        read=read,
        _recent=deque([TrainerStatus()]),
        _minute=deque[TrainerStatus](),
    )
    status.Status.keep_snapshot(here)
    assert kept == [] and "was not kept" in caplog.text and str(error) in caplog.text
    failing = False
    status.Status.keep_snapshot(here)
    assert kept == [7.0]
