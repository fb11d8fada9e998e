"""What the status remembers: the last minute's acceptance, policy versions, the fleet."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import grpc
import pytest
from rich.console import Console

from draft_trainer.cli.top import DASH, Seen, number, picture, shares
from draft_trainer.counters import Counters
from draft_trainer.releases import canary
from draft_trainer.releases.client import Failure
from draft_trainer.releases.fleet import Fleet
from draft_trainer.server import status
from draft_trainer.server.diagnosis import PROBLEM, ProblemLog
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
    monkeypatch.setattr(canary.time, "monotonic", lambda: clock.now)
    watch = canary.AcceptanceWatch(cast(Fleet, None))
    watch._seen = {address: deque(maxlen=canary.KEPT) for address in ("a:1", "b:1")}

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
    console = Console(width=160, highlight=False)
    with console.capture() as taken:
        console.print(picture(Seen("", TrainerStatus(last_minute=[zero]))))
    assert "1.850  by position .47 .80 .70" in taken.get()
    assert {d.draft_version: d.acceptance_length for d in found[""]} == {
        0: 1 + 340 / 400,
        1: 1 + 30 / 20,
    }
    assert [d.drafts for d in found["b:1"]] == [300] and one.drafts == 20
    clock.now += 45
    assert [d.drafts for d in last_minute()[""]] == [10], "the older reports are past"
    clock.now += 90
    assert last_minute() == {}
    # However much is reported, so much is kept; nothing of a server that is not followed.
    for version in range(canary.KEPT + 100):
        grew("a:1", version, 1, [1, 0, 0])
        grew("c:1", version, 1, [1, 0, 0])
    assert len(watch._seen["a:1"]) == canary.KEPT and "c:1" not in watch._seen


def test_staleness_counts_from_when_the_policy_moved_past_the_draft(clock: Clock) -> None:
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
    # Of two that were registered at once, the older one may be told of last.
    assert not times.registered(12) and times.behind_seconds(0) == 60
    # Another run counts from its own versions, also where they go on from those of the one before.
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


def test_a_restarted_trainer_counts_from_its_start(clock: Clock) -> None:
    times = PolicyClock("run", known=8)
    times.began("run")
    assert times.newest_at is None
    assert not times.registered(8), "the bridge registers it again"
    assert times.behind_seconds(3) == 0.0


def test_a_late_announcement_of_the_run_before_is_none_of_this_one() -> None:
    old, new = (
        SimpleNamespace(run_id=name, latest_policy_version=version)
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


def test_the_fleets_changes_are_events_once(tmp_path: Path) -> None:
    log = State(tmp_path).events
    view = FleetView(log)
    up = rollout_server_pb2.ServerState(draft_version=2, speculation_enabled=True)
    ill = rollout_server_pb2.ServerState(draft_version=2, not_ready="nothing is accepted")
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


def test_a_server_on_which_no_draft_pays_is_ready_and_no_event(tmp_path: Path) -> None:
    log = State(tmp_path).events
    view = FleetView(log)
    on = rollout_server_pb2.ServerState(speculation_enabled=True, speculation_wanted=True)
    unpaid = rollout_server_pb2.ServerState(speculation_wanted=True)
    off = rollout_server_pb2.ServerState()
    for state in (on, unpaid, on, unpaid):
        view.looked({"a:1": state})
    console = Console(width=160, highlight=False)
    with console.capture() as taken:
        console.print(picture(Seen("a:1", TrainerStatus(servers=view.servers()))))
    assert "fleet, 1 of 1 ready" in taken.get() and "ready, no draft pays" in taken.get()
    view.looked({"a:1": off})
    assert [e.kind for e in log.since(0)][1:] == ["speculation_off"]
    with console.capture() as taken:
        console.print(picture(Seen("a:1", TrainerStatus(servers=view.servers()))))
    assert "fleet, 1 of 1 ready" in taken.get() and "ready, drafting off" in taken.get()


def test_no_drafts_are_a_dash() -> None:
    assert number(None) == DASH and number(1.0) == "1.000"
    assert shares([0.9, 1.0, 0.0]) == ".90 1.0 .00"


def test_rates_are_those_of_the_last_minute_of_this_process() -> None:
    now = TrainerStatus(time=1000.0, started_at=900.0, samples_accepted=70)
    seen = Seen("", now)
    assert seen.rate("samples_accepted") is None
    seen.past.append(TrainerStatus(time=970.0, started_at=1.0, samples_accepted=1000))
    seen.past.append(TrainerStatus(time=930.0, started_at=900.0, samples_accepted=0))
    seen.past.append(TrainerStatus(time=980.0, started_at=900.0, samples_accepted=10))
    assert seen.rate("samples_accepted") == 3.0


def test_what_others_wrote_steers_no_terminal() -> None:
    event = pb.Event(kind="x\x1b[2J", server="a:1", reason="x\x1b[2J\ny\u202e")
    assert described(event) == r"a:1: x\x1b[2J\ny\u202e"
    console = Console(width=160, highlight=False)
    with console.capture() as taken:
        console.print(picture(Seen("a:1", TrainerStatus(), events=[event])))
    assert r"x\x1b[2J" in taken.get() and "\x1b[2J" not in taken.get()


def test_a_full_disk_does_not_end_the_history(caplog: pytest.LogCaptureFixture) -> None:
    kept: list[float] = []

    class History:
        full = True

        def add(self, status: TrainerStatus) -> None:
            if self.full:
                raise RefusedError("draft.registry", "no space", "space", "make room")
            assert not status.servers and not status.code_version
            kept.append(status.time)

    class Fake:
        state = SimpleNamespace(history=History())
        problems = ProblemLog()
        _recent: ClassVar = deque([TrainerStatus()])

        def read(self) -> TrainerStatus:
            return TrainerStatus(time=7.0, code_version="1", servers=[pb.ServerView(address="a:1")])

    status.Status.keep_snapshot(Fake())  # type: ignore[arg-type]
    assert kept == [] and "was not kept: draft.registry: found no space" in caplog.text
    Fake.state.history.full = False
    status.Status.keep_snapshot(Fake())  # type: ignore[arg-type]
    assert kept == [7.0]


def test_what_is_wrong_is_judged_by_the_newest_snapshots_to_which_a_sample_came(
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
        # In a long step of the loop none comes.
        for _ in range(2 * status.LATELY_SNAPSHOTS):
            server._status.keep_snapshot()
        assert refused_are_a_problem()
        client.send(*messages[9:])
        server._status.keep_snapshot()
        assert not refused_are_a_problem()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("out of range")])
def test_a_status_that_cannot_be_made_does_not_end_the_history(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    class Fake:
        def read(self) -> TrainerStatus:
            raise error

    status.Status.keep_snapshot(Fake())  # type: ignore[arg-type]
    assert "was not kept" in caplog.text and str(error) in caplog.text


def server(drafts: int, speed_up: float | None) -> pb.ServerView:
    state = rollout_server_pb2.ServerState(speed_up=speed_up)
    return pb.ServerView(state=state, last_minute=pb.Drafted(drafts=drafts))


def test_the_speed_up_is_the_fleets_by_drafts_and_only_of_servers_that_know() -> None:
    assert status._speed_up([]) is None
    assert status._speed_up([server(100, None), server(0, 1.5)]) is None
    for wrong in (float("nan"), float("inf"), -1.0, 0.0):
        assert status._speed_up([server(100, wrong)]) is None
    found = status._speed_up([server(100, 1.0), server(300, 2.0), server(900, None)])
    assert found == pytest.approx(1.75)


def test_a_terminal_shows_what_is_served_and_what_it_gains() -> None:
    now = TrainerStatus(
        policy_version=9, served_release=3, promoted_release=4, newest_release=5, speed_up=1.52
    )
    now.last_verdict.outcome, now.last_verdict.reason = "failed", "gains 0.01, and needs 0.05"
    now.training_paused, now.training_decision = True, "training does not pay: it saves 1 s"
    now.servers.add(address="[fd00::1]:50061")
    console = Console(width=160, highlight=False)
    with console.capture() as taken:
        console.print(picture(Seen("a:1", now)))
    text = taken.get()
    assert "[fd00::1]:50061" in text
    assert "serves draft 3   promoted release 4, not served yet   newest 5" in text
    assert "now, 1.52x of generation without speculation where drafts run" in text
    assert "gains 0.01, and needs 0.05" in text
    assert " training paused: training does not pay: it saves 1 s  loss" in text


def test_the_log_says_what_the_events_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "draft_trainer.state")
    events = State(tmp_path).events
    events.note("committed", draft_version=7, server="a:1", reason="in 18 ms")
    assert caplog.messages == ["event 1: committed: draft 7, a:1: in 18 ms"]
