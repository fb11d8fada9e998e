"""The engine steps that are timed, and as what."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import rollout_server.vllm.engine_core
from rollout_server.vllm.engine_core import WITHOUT_DRAFT, SchedulerSwitch, StepClock


class Core:
    """The part of vLLM's ``EngineCore`` that is looked at, with a clock that only steps move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.left = True
        self.batch_queue: list[Any] = []
        self.scheduler = SimpleNamespace(
            schedule=lambda: None,
            update_from_output=lambda output, result: result,
            has_requests=lambda: self.left,
            set_pause_state=lambda pause_state: None,
            num_spec_tokens=3,
            dynamic_sd_lookup=None,
        )
        fake = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(rollout_server.vllm.engine_core, "time", fake)
        self.switch = SchedulerSwitch(self)
        self.clock = StepClock(self, self.switch)

    def step(
        self,
        seconds: float,
        requests: Sequence[int],
        new: bool = False,
        left: bool = True,
        planned: int | None = None,
        got: Sequence[int] | None = None,
        without_draft: bool = False,
    ) -> None:
        """A step in which each request verifies so many drafts; ``planned`` are made next.

        Args:
            got: tokens of each request; by default it got all drafts and one more.
        """
        self.scheduler.schedule()
        self.now += seconds
        self.left = left
        names = [str(index) for index in range(len(requests))]
        tokens = {name: 1 + drafts for name, drafts in zip(names, requests, strict=True)}
        output = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens={
                n: [0] * d for n, d in zip(names, requests, strict=True) if d
            },
            scheduled_new_reqs=["new"] if new else [],
            num_spec_tokens_to_schedule=max(requests, default=0) if planned is None else planned,
        )
        if without_draft:
            setattr(output, WITHOUT_DRAFT, True)
        new = [SimpleNamespace(new_token_ids=[0] * n) for n in got or tokens.values()]
        result = {0: SimpleNamespace(outputs=new)}
        assert self.scheduler.update_from_output(output, result) is result

    @property
    def sums(self) -> dict[tuple[str, int, int], tuple[int, float]]:
        return {(kind, n, k): (steps, spent) for kind, n, k, steps, spent, *_ in self.clock.sums()}


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    return Core(monkeypatch)


def test_decode_steps_without_draft_are_plain(core: Core) -> None:
    core.scheduler.num_spec_tokens = 0
    core.step(1.0, [0, 0], new=True)
    core.step(0.5, [0, 0])
    assert core.sums == {("mixed", 2, 0): (1, 1.0), ("plain", 2, 0): (1, 0.5)}


def test_steps_are_summed_by_kind_and_size(core: Core) -> None:
    core.step(1.0, [0, 0], new=True)
    core.step(2.0, [3, 3])
    core.step(2.5, [3, 2])
    core.step(1.0, [3, 0])
    core.switch.enabled = False
    core.step(1.0, [3, 3])
    core.step(0.5, [0] * 5)
    assert core.sums == {
        ("mixed", 2, 0): (2, 2.0),
        ("speculative", 2, 3): (2, 4.5),
        ("mixed", 2, 3): (1, 1.0),
        ("plain", 6, 0): (1, 0.5),
    }


def test_steps_marked_without_draft_are_plain(core: Core) -> None:
    core.step(1.0, [3, 3], planned=0, without_draft=True)
    core.step(0.5, [0, 0], without_draft=True)
    core.step(0.25, [0, 0])
    assert core.sums == {
        ("mixed", 2, 0): (1, 1.0),
        ("plain", 2, 0): (1, 0.5),
        ("speculative", 2, 0): (1, 0.25),
    }


def test_step_without_drafts_is_mixed_while_drafting(core: Core) -> None:
    core.step(1.0, [0], planned=3)
    assert core.sums == {("mixed", 1, 3): (1, 1.0)}


def test_tokens_that_requests_got_are_summed(core: Core) -> None:
    core.step(1.0, [0, 0, 0], new=True, planned=3, got=[1, 0, 1])  # one prompt is read in parts
    core.step(2.0, [3, 3], got=[4, 1])
    core.step(2.0, [3, 3], got=[2, 1])
    core.switch.enabled = False
    core.step(1.0, [0, 0])
    assert core.clock.sums() == [
        ["mixed", 3, 3, 1, 1.0, 2, 2, 1],
        ["speculative", 2, 3, 2, 4.0, 4, 8, 0],
        ["plain", 2, 0, 1, 1.0, 2, 2, 0],
    ]


def test_steps_are_summed_by_constant_draft_length(core: Core) -> None:
    core.step(1.0, [3, 3])
    core.step(2.0, [3, 3], planned=1)
    core.step(4.0, [1, 1])
    core.step(8.0, [1, 1], planned=0)
    core.step(16.0, [0, 0])
    assert core.sums == {
        ("speculative", 2, 3): (1, 1.0),
        ("mixed", 2, 1): (1, 2.0),
        ("speculative", 2, 1): (1, 4.0),
        ("mixed", 2, 0): (1, 8.0),
        ("speculative", 2, 0): (1, 16.0),
    }


def test_busy_step_lasts_from_output_to_output(core: Core) -> None:
    core.step(1.0, [3])
    core.now += 0.25
    core.step(1.0, [3], left=False)
    core.now += 100.0
    core.step(1.0, [3])
    assert core.sums == {("speculative", 1, 3): (3, 3.25)}
    core.step(0.0, [])
    core.now += 7.0
    core.step(1.0, [3])
    assert core.sums["speculative", 1, 3] == (4, 4.25), "an empty step says that it was idle"


@pytest.mark.parametrize("pause", [False, True])
def test_interrupted_step_is_not_timed(core: Core, pause: bool) -> None:
    """A worker call or a pause interrupts it."""
    core.step(1.0, [3])
    if pause:
        core.scheduler.set_pause_state("PAUSED_ALL")
    core.now += 60.0
    if pause:
        core.scheduler.set_pause_state("UNPAUSED")
    else:
        core.clock.interrupted()
    core.step(1.0, [3])
    assert core.sums == {("speculative", 1, 3): (2, 2.0)}


def test_step_in_flight_at_worker_call_is_not_timed(core: Core) -> None:
    """Its output waits for the engine after the call, with asynchronous scheduling."""
    core.switch.enabled = False
    core.step(1.0, [0, 0])
    core.batch_queue = [("future", "planned while drafting was off")]
    core.now += 5.0
    core.switch.enabled = True
    core.clock.interrupted()
    core.step(0.125, [0, 0], planned=0)
    assert core.sums == {("plain", 2, 0): (1, 1.0)}
    core.step(2.0, [3, 3])
    assert core.sums == {("plain", 2, 0): (1, 1.0), ("speculative", 2, 3): (1, 2.0)}
