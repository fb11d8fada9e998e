"""Whatever is sent, the answer has a status that says what was wrong, and nothing else changes.

The long mode is ``python -m benchmarks.robustness``.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.robustness.caller import ROLLOUT, TRAINER, Caller, Method
from benchmarks.robustness.examples_of_calls import Calls
from benchmarks.robustness.mutate import mutated

from .conftest import Rollout, Trainer

EXAMPLES = 40
MORE_MEMORY = 64 << 20
"""What the allocator may keep of a few thousand hostile messages."""

SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def fuzz(caller: Caller, calls: Calls, method: Method) -> None:
    """Damaged calls of one method."""

    @SETTINGS
    @given(st.randoms(use_true_random=False))
    def check(rng: random.Random) -> None:
        caller.call(method, mutated(calls.of(method, rng), rng))
        assert caller.tally.untyped == []

    check()


@pytest.mark.parametrize("method", TRAINER, ids=lambda method: method.name)
def test_trainer(trainer: Trainer, method: Method) -> None:
    before, memory = trainer.feeder.serve(), trainer.process.rss
    caller = Caller(trainer.process.address)
    try:
        fuzz(caller, Calls(trainer.feeder.session_id), method)
    finally:
        caller.close()
    assert trainer.process.alive
    after = trainer.feeder.serve()
    for field in ("policy_version", "newest_release", "promoted_release"):
        assert getattr(after, field) == getattr(before, field), field
    assert after.samples_accepted > before.samples_accepted
    assert trainer.process.rss - memory < MORE_MEMORY
    assert "Traceback" not in trainer.process.log, trainer.process.log


@pytest.mark.parametrize("method", ROLLOUT, ids=lambda method: method.name)
def test_rollout_server(rollout: Rollout, method: Method) -> None:
    before, memory = rollout.stager.serve(), rollout.process.rss
    caller = Caller(rollout.process.address)
    try:
        fuzz(caller, Calls(), method)
    finally:
        caller.close()
    assert rollout.process.alive
    after = rollout.stager.serve()
    for field in ("draft_version", "draft_sha256", "draft_commits", "policy_commits", "staged"):
        assert getattr(after, field) == getattr(before, field), field
    assert rollout.process.rss - memory < MORE_MEMORY
    assert "Traceback" not in rollout.process.log, rollout.process.log
