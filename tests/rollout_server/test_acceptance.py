"""Attribution of vLLM's counters to draft versions, and the guard that watches them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from policy_bridge.adapters.completions import CompletionsClient
from rollout_server.control.acceptance_counts import (
    KEPT_DRAFTS,
    KEPT_VERSIONS,
    AcceptanceGuard,
    AcceptanceTracker,
    RecentAcceptance,
    tried,
)
from rollout_server.vllm import api_server as app
from slipstream.errors import RefusedError
from slipstream.readiness import not_ready_text
from tests.completions_server import Completions, choice, serving


@pytest.fixture
def tracker() -> AcceptanceTracker:
    tracker = AcceptanceTracker()
    tracker.start(0)
    return tracker


def test_drafts_before_commit_count_for_old_version(tracker: AcceptanceTracker) -> None:
    tracker.record(4, 12, 5, [3, 1, 1])
    # The commit's answer overtakes the statistics of two steps of 4 drafts.
    tracker.switch(7, [12])
    tracker.record(4, 12, 1, [1, 0, 0])
    tracker.record(4, 12, 2, [1, 1, 0])
    assert set(tracker.counters()) == {0}
    tracker.record(4, 12, 12, [4, 4, 4])
    old, new = tracker.counters()[0], tracker.counters()[7]
    assert (old.drafts, old.draft_tokens, old.accepted_tokens) == (12, 36, 8)
    assert old.accepted_per_position == [5, 2, 1]
    assert (new.drafts, new.accepted_tokens, new.accepted_per_position) == (4, 12, [4, 4, 4])


def test_counters_continue_after_roll_back(tracker: AcceptanceTracker) -> None:
    tracker.record(2, 6, 2, [2, 0, 0])
    tracker.switch(1, [2])
    tracker.record(3, 9, 0, [0, 0, 0])
    tracker.switch(0, [5])
    tracker.record(5, 15, 5, [5, 0, 0])
    assert {v: c.drafts for v, c in tracker.counters().items()} == {0: 7, 1: 3}


def test_tries_per_position_use_vllm_counts_when_present(
    tracker: AcceptanceTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    monkeypatch.setattr(app, "is_active", lambda: True)
    monkeypatch.setattr(app.API, "tracker", tracker)
    stats, logger = SpecDecodingStats.new(3), app.AcceptanceStatLogger(None)
    # A grammar dropped tokens of four drafts.
    for drafted, accepted in [(3, 3)] * 4 + [(3, 1), (2, 1), (2, 0), (1, 1), (1, 0)]:
        stats.observe_draft(drafted, accepted)
    logger.record(SimpleNamespace(spec_decoding_stats=stats), None)
    assert tracker.all.tried_per_position == [9, 7, 5]
    assert tracker.all.accepted_per_position == [7, 4, 4]
    # A vLLM that does not say.
    del stats.num_draft_tokens_per_pos
    logger.record(SimpleNamespace(spec_decoding_stats=stats), None)
    assert tracker.all.tried_per_position == [18, 16, 9]


def pairs(tracker: AcceptanceTracker) -> dict[tuple[int, int], tuple[int, int]]:
    return {
        (c.draft_version, c.policy_version): (c.drafts, c.accepted_tokens) for c in tracker.pairs()
    }


def test_drafts_count_for_proposing_draft_and_policy(tracker: AcceptanceTracker) -> None:
    tracker.record(4, 12, 6, [4, 1, 1])
    assert pairs(tracker) == {}, "no policy was pushed"
    tracker.switch_policy(1, [4], {})
    tracker.record(4, 12, 5, [3, 1, 1])
    # Its answer overtakes the statistics of a step of 4 drafts.
    tracker.switch_policy(2, [12], {})
    tracker.record(4, 12, 3, [3, 0, 0])
    tracker.record(2, 6, 1, [1, 0, 0])
    # A commit of both: the policy may come first or last.
    tracker.switch(7, [14])
    tracker.switch_policy(3, [14], {})
    tracker.record(5, 15, 15, [5, 5, 5])
    assert pairs(tracker) == {(0, 1): (8, 8), (0, 2): (2, 1), (7, 3): (5, 15)}
    assert {v: c.drafts for v, c in tracker.counters().items()} == {0: 14, 7: 5}


def test_commit_boundary_is_per_engine_core(tracker: AcceptanceTracker) -> None:
    tracker.record(2, 6, 0, [0, 0, 0], engine=1)
    tracker.switch_policy(1, [0, 4], {})
    tracker.record(3, 9, 3, [3, 0, 0], engine=0)
    tracker.record(2, 6, 0, [0, 0, 0], engine=1)
    tracker.record(1, 3, 3, [1, 1, 1], engine=1)
    assert pairs(tracker) == {(0, 1): (4, 6)}


def test_recent_acceptance_resets_on_draft_not_policy_commit() -> None:
    tracker = AcceptanceTracker()
    tracker.record(10, 30, 5, [5, 0, 0])
    assert tracker.all.drafts == 0, "the calibration belongs to no version"
    tracker.start(0)
    tracker.record(100, 300, 200, [80, 70, 50])
    assert tracker.recent.rates() == pytest.approx((0.8, 0.7, 0.5))
    tracker.switch_policy(1, [110], {})
    tracker.record(1, 3, 0, [0, 0, 0])
    assert tracker.recent.rates() == pytest.approx((0.8, 0.7, 0.5), abs=0.01)
    # Ten of the calibration and 101 since were before the commit.
    tracker.switch(1, [111])
    tracker.switch_policy(2, [111], {})
    assert tracker.recent.rates() is None
    tracker.record(60, 180, 60, [30, 20, 10])
    assert tracker.recent.rates() == pytest.approx((0.5, 1 / 3, 1 / 6))
    assert tracker.counters()[1].drafts == 60


def test_recent_acceptance_counts_tried_positions_only() -> None:
    assert tried(40, 40, [20, 0, 0]) == [40, 0, 0]
    assert tried(60, 170, [30, 24, 12]) == [60, 60, 50]
    assert tried(10, 28, [9, 9, 9]) == [10, 10, 9], "what was accepted was tried"
    recent = RecentAcceptance()
    recent.add(40, [40, 0, 0], [20, 0, 0])
    assert recent.rates() is None
    recent.add(60, [60, 60, 60], [30, 24, 12])
    # Each step fades what came before it by a factor that both counts share.
    keep = math.exp(-60 / KEPT_DRAFTS)
    first = (20 * keep + 30) / (40 * keep + 60)
    assert recent.rates() == pytest.approx((first, 24 / 60, 12 / 60))


def test_version_pairs_keep_newest_only(tracker: AcceptanceTracker) -> None:
    for version in range(1, 3 * KEPT_VERSIONS):
        tracker.switch_policy(version, [version - 1], {})
        tracker.record(1, 3, 0, [0, 0, 0])
    kept = [c.policy_version for c in tracker.pairs()]
    assert kept == [*range(2 * KEPT_VERSIONS, 3 * KEPT_VERSIONS)]


def test_acceptance_guard_judges_last_whole_window() -> None:
    tracker = AcceptanceTracker()
    tracker.start(3)
    guard = AcceptanceGuard(tracker, 100)
    assert not guard.check(3, 0)
    tracker.record(99, 297, 0, [0, 0, 0])
    assert not guard.check(3, 0), "too few drafts say nothing"
    tracker.record(1, 3, 0, [0, 0, 0])
    text = not_ready_text(guard.check(3, 0))
    assert text == "acceptance length of draft 3 is 1.00 over 100 drafts"
    tracker.record(50, 150, 0, [0, 0, 0])
    assert guard.check(3, 0)
    tracker.record(50, 150, 1, [1, 0, 0])
    assert not guard.check(3, 0)


@pytest.mark.parametrize(("accepted", "sound"), [(4, False), (5, True)])
def test_acceptance_guard_finds_draft_accepted_by_chance(accepted: int, sound: bool) -> None:
    """A ruined draft is right once in a while: its server stays ready and none heals it."""
    tracker = AcceptanceTracker()
    tracker.start(3)
    guard = AcceptanceGuard(tracker, 1000)
    guard.check(3, 0)
    tracker.record(1000, 3000, accepted, [accepted, 0, 0])
    assert (not guard.check(3, 0)) is sound


def test_acceptance_guard_starts_new_window_on_commit() -> None:
    tracker = AcceptanceTracker()
    tracker.start(3)
    guard = AcceptanceGuard(tracker, 10)
    guard.check(3, 0)
    tracker.record(10, 30, 0, [0, 0, 0])
    assert guard.check(3, 0)
    assert not guard.check(3, 1), "the same release, committed again"
    tracker.record(9, 27, 0, [0, 0, 0])
    assert not guard.check(3, 1)


def test_completion_has_vllms_count_of_its_request() -> None:
    """The shape is that of vLLM's own classes; another is refused."""
    from vllm.entrypoints.generate.base import protocol
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    class Counted(Completions):
        def answer(self, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
            return 200, [choice([5, 6], [-1.0, -2.0])]

    def found(metrics: Any) -> float | None:
        handler = type("Handler", (Counted,), {"beside": {"metrics": metrics}})
        with (
            serving(handler) as port,
            CompletionsClient([f"http://127.0.0.1:{port}"], "policy") as client,
        ):
            return client.generate([[1, 2]], {})[0].acceptance_length

    def told(counted: RequestSpecDecodeMetrics) -> Any:
        speculative = protocol.SpeculativeDecodingMetrics(**counted.to_dict())
        return protocol.PerRequestMetrics(speculative_decoding=speculative).model_dump()

    counted = RequestSpecDecodeMetrics.new(3)
    assert found(told(counted)) is None, "no step verified a draft"
    counted.observe(num_draft_tokens=3, num_accepted=3)
    counted.observe(num_draft_tokens=3, num_accepted=0)
    assert found(told(counted)) == 2.5
    assert found(None) is None and found(protocol.PerRequestMetrics().model_dump()) is None
    with pytest.raises(RefusedError, match=r"metrics\.speculative_decoding: found .*steps"):
        found({"speculative_decoding": {"steps": 2}})
