"""Whatever is sent, the answer has a status that says what was wrong, and nothing else changes.

``pytest tests/robustness --long`` sends 100,000 messages in all.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.robustness.caller import ROLLOUT, TRAINER, Caller, Method
from tests.robustness.examples_of_calls import Calls
from tests.robustness.mutate import mutated
from tests.robustness.services import Process

from .conftest import Rollout, Size, Trainer

pytestmark = pytest.mark.contract("hostile peers")

SEED = 0
CALLS = (40, 1500)
"""Calls of each method, in a short and in a long run."""
SETTLED = (0, 750)
"""Calls before the memory is looked at: in a long run, the allocator has its caches by then."""
MORE_MEMORY = 64 << 20
"""Bytes that the allocator may keep of a few thousand hostile messages."""


def fuzz(process: Process, calls: Calls, method: Method, size: Size) -> int:
    """Damaged calls of one method; the bytes of memory that the process had, once settled."""
    count, settled, memory = size(*CALLS), size(*SETTLED), [process.rss]
    caller = Caller(process.health)

    # Not derandomize, with which other damage is drawn whenever this function changes.
    @seed(SEED)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def check(rng: random.Random) -> None:
        caller.call(method, mutated(calls.of(method, rng), rng))
        assert caller.untyped == []
        if len(memory) <= settled:
            memory.append(process.rss)

    try:
        check()
    finally:
        caller.close()
    return memory[settled]


@pytest.mark.parametrize("method", TRAINER, ids=lambda method: method.name)
def test_fuzzed_trainer_answers_and_keeps_its_state(
    trainer: Trainer, method: Method, size: Size
) -> None:
    before = trainer.feeder.serve()
    memory = fuzz(trainer.process, Calls(trainer.feeder.session_id), method, size)
    assert trainer.process.alive
    after = trainer.feeder.serve()
    for field in ("policy_version", "newest_release", "promoted_release"):
        assert getattr(after, field) == getattr(before, field), field
    assert after.samples_accepted > before.samples_accepted
    assert trainer.process.rss - memory < MORE_MEMORY
    assert "Traceback" not in trainer.process.text, trainer.process.text


@pytest.mark.parametrize("method", ROLLOUT, ids=lambda method: method.name)
def test_fuzzed_rollout_server_answers_and_keeps_its_state(
    rollout: Rollout, method: Method, size: Size
) -> None:
    before = rollout.stager.serve()
    memory = fuzz(rollout.process, Calls(), method, size)
    assert rollout.process.alive
    after = rollout.stager.serve()
    for field in ("draft_version", "draft_sha256", "draft_commits", "policy_commits", "staged"):
        assert getattr(after, field) == getattr(before, field), field
    assert rollout.process.rss - memory < MORE_MEMORY
    assert "Traceback" not in rollout.process.text, rollout.process.text
