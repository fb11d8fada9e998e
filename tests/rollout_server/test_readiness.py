"""When a server says that it should be sent no requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from torch import nn

from rollout_server.acceptance import AcceptanceTracker
from rollout_server.control import DRAFT, AcceptanceGuard, Readiness
from rollout_server.swap import ASLEEP, DIFFERS, SAME, ReadBack, watch_sleep
from tests.rollout_server.test_control import Plane, run


def test_no_drafts_are_no_verdict_and_one_accepted_token_in_a_hundred_is_enough() -> None:
    tracker = AcceptanceTracker()
    tracker.start(3)
    guard = AcceptanceGuard(tracker, 100)
    assert guard.check(3, 0) == ""
    tracker.record(99, 297, 0, [0, 0, 0])
    assert guard.check(3, 0) == ""
    tracker.record(1, 3, 0, [0, 0, 0])
    assert guard.check(3, 0) == "acceptance length of draft 3 is 1.00 over 100 drafts"
    tracker.record(50, 150, 0, [0, 0, 0])
    assert guard.check(3, 0) != "", "the last whole window counts"
    tracker.record(50, 150, 1, [1, 0, 0])
    assert guard.check(3, 0) == ""


def test_a_commit_begins_anew() -> None:
    tracker = AcceptanceTracker()
    tracker.start(3)
    guard = AcceptanceGuard(tracker, 10)
    guard.check(3, 0)
    tracker.record(10, 30, 0, [0, 0, 0])
    assert guard.check(3, 0) != ""
    assert guard.check(3, 1) == "", "the same release, committed again"
    tracker.record(9, 27, 0, [0, 0, 0])
    assert guard.check(3, 1) == ""


def test_reasons_come_and_go_by_source() -> None:
    readiness = Readiness()
    assert readiness.reason == ""
    readiness.say("b", "two")
    readiness.say("a", "one")
    assert readiness.reason == "one; two"
    readiness.say("b", "")
    readiness.say("never", "")
    assert readiness.reason == "one"


def test_a_commit_takes_the_read_backs_finding_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        plane = Plane(tmp_path)
        plane.engine.damage = "draft read back from memory: worker 0: differs"
        await plane.control.read_back()
        assert plane.control.readiness.reason == plane.engine.damage
        await plane.control.commit([plane.stage(DRAFT, 1)])
        assert plane.control.readiness.reason == ""
        plane.engine.damage = ""
        await plane.control.read_back()
        assert plane.control.readiness.reason == ""

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_committing_the_same_release_again_keeps_what_can_be_rolled_back_to(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        plane = Plane(tmp_path)
        await plane.control.commit([plane.stage(DRAFT, 1)])
        await plane.control.commit([plane.stage(DRAFT, 1)])
        assert plane.control.previous_draft is not None
        assert plane.control.previous_draft.version == 0
        await plane.control.roll_back()
        assert plane.engine.live[DRAFT] == "draft-0"

    run(scenario())


class Worker:
    """vLLM's, as far as sleeping and its models go."""

    def __init__(self) -> None:
        self.policy = nn.Linear(4, 4)
        self.draft = nn.Linear(4, 4)
        self.draft.embed_tokens = self.policy  # type: ignore[assignment]
        self.slipstream_read_back_state = ReadBack(self)

    def get_model(self) -> nn.Module:
        return self.policy

    def get_draft_model(self) -> nn.Module:
        return self.draft

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: list[str] | None = None) -> None: ...


def test_read_back_tells_a_written_draft_from_a_pushed_policy() -> None:
    worker = Worker()
    state = worker.slipstream_read_back_state
    with torch.no_grad():
        worker.policy.weight.add_(1.0)
    assert state.check() == SAME
    with torch.no_grad():
        worker.draft.weight[2, 1] = -worker.draft.weight[2, 1]
    assert state.check() == DIFFERS
    state.committed()
    assert state.check() == SAME


def test_a_draft_is_lost_in_sleep_level_2_and_not_in_level_1() -> None:
    class Sleeper(Worker):
        pass

    watch_sleep(Sleeper)
    watch_sleep(Sleeper)
    worker = Sleeper()
    state = worker.slipstream_read_back_state
    worker.sleep(1)
    assert state.check() == ASLEEP
    worker.wake_up(["kv_cache"])
    assert state.check() == ASLEEP
    worker.wake_up(["weights"])
    assert state.check() == SAME
    worker.sleep(2)
    worker.wake_up()
    assert state.check() == DIFFERS
    state.committed()
    assert state.check() == SAME
