"""The numbers in the rollout server's scrapes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.publish_faults.memory_server import MemoryEngine
from rollout_server.control.acceptance_counts import KEPT_VERSIONS, AcceptanceTracker
from rollout_server.control.control import DRAFT, POLICY, RolloutControl, Weights
from rollout_server.control.draft_length import LengthChooser
from rollout_server.control.metrics import FACTS, CommitCounts, Observed, RolloutCollector
from rollout_server.control.stages import StageStore, WeightSource
from rollout_server.control.step_costs import MIXED, PLAIN, SPECULATIVE, StepCosts, StepSum
from slipstream.errors import Refusals, StatusCode
from slipstream.v1 import rollout_server_pb2 as pb
from tests.rollout_server.test_control import weights
from tests.scraping import of, scrape, value

R = "slipstream_rollout_"


def accepted(version: int, drafts: int, tokens: int) -> pb.AcceptanceCounters:
    return pb.AcceptanceCounters(draft_version=version, drafts=drafts, accepted_tokens=tokens)


class Server:
    """All that a scrape reads."""

    def __init__(self, tmp_path: Path) -> None:
        self.tracker = AcceptanceTracker()
        self.tracker.start(0)
        self.commits, self.costs, self.refused = CommitCounts(), StepCosts(), Refusals()
        self.chooser = LengthChooser(3, 64)
        self.store = StageStore(tmp_path, 1000)
        self.control = RolloutControl(
            MemoryEngine(),  # type: ignore[arg-type]
            self.store,
            self.tracker,
            self.commits.committed,
            weights(self.store, DRAFT, 0),
            Weights(POLICY, None, WeightSource()),
        )
        observed = Observed(
            *(self.tracker, self.control, self.store, self.commits, self.costs, self.refused),
            draft_length=3,
            lengths=self.chooser,
        )
        self.collector = RolloutCollector(observed, vllm="0.32.0")

    def commit(self, *staged: object) -> None:
        for one in staged:
            self.control.add_stage(one)  # type: ignore[arg-type]
        asyncio.run(self.control.commit([one.stage_id for one in staged]))  # type: ignore[attr-defined]


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def test_scrape_of_idle_server(server: Server) -> None:
    samples = scrape(server.collector)
    assert of(samples, R + "drafts_total") == {("0",): 0}, "its first draft must not begin it"
    assert of(samples, R + "all_accepted_per_position_total") == {("0",): 0, ("1",): 0, ("2",): 0}
    for absent in ("break_even_acceptance_length", "policy_version"):
        assert of(samples, R + absent) == {}, absent
    assert of(samples, R + "engine_steps_total") == {}
    assert len(of(samples, R + "commits_total")) == 12 and not sum(
        of(samples, R + "commits_total").values()
    )
    assert value(samples, R + "draft_length") == 3
    ((version, commit, vllm),) = [
        (labels["version"], labels["commit"], labels["vllm"])
        for (name, pairs) in samples
        if name == R + "build_info" and (labels := dict(pairs))
    ]
    assert (version, commit, vllm) == ("0.1.0", commit, "0.32.0")


def test_scrape_counts_acceptance_by_version_and_total(server: Server) -> None:
    server.tracker.record(4, 12, 5, [3, 1, 1])
    server.tracker.generated(9)
    server.tracker.switch(7, [4])
    server.tracker.record(2, 6, 2, [2, 0, 0])
    server.tracker.generated(4)
    samples = scrape(server.collector)
    assert of(samples, R + "drafts_total") == {("0",): 4, ("7",): 2}
    assert of(samples, R + "draft_tokens_total") == {("0",): 12, ("7",): 6}
    assert of(samples, R + "accepted_tokens_total") == {("0",): 5, ("7",): 2}
    assert of(samples, R + "generated_tokens_total") == {("0",): 9, ("7",): 4}
    assert value(samples, R + "accepted_per_position_total", draft_version="0", position="2") == 1
    totals = [
        value(samples, f"{R}all_{name}_total")
        for name in ("drafts", "draft_tokens", "accepted_tokens", "generated_tokens")
    ]
    assert totals == [6, 18, 7, 13]
    assert of(samples, R + "all_accepted_per_position_total") == {("0",): 5, ("1",): 1, ("2",): 1}
    assert of(samples, R + "all_tried_per_position_total") == {("0",): 6, ("1",): 6, ("2",): 6}


def test_series_are_bounded_over_many_releases(server: Server) -> None:
    first = len(scrape(server.collector))
    for version in range(1, 10_001):
        server.tracker.switch(version, [version - 1])
        server.tracker.record(1, 3, 1, [1, 0, 0])
        server.tracker.generated(2)
    # A roll back to a version that was forgotten, which has not drafted yet.
    server.tracker.switch(5, [10_000])
    samples = scrape(server.collector)
    assert len(samples) <= first + (KEPT_VERSIONS + 1) * 7
    drafts = of(samples, R + "drafts_total")
    assert len(drafts) == KEPT_VERSIONS + 1
    assert drafts["5",] == 0 and drafts["10000",] == 1 and ("9000",) not in drafts
    assert sum(drafts.values()) == KEPT_VERSIONS
    assert value(samples, R + "all_drafts_total") == 10_000
    assert value(samples, R + "all_generated_tokens_total") == 20_000
    # The live one stays, however many others are counted late.
    for _ in range(3):
        server.tracker.generated(1)
    assert of(scrape(server.collector), R + "generated_tokens_total")["5",] == 3


def test_boundaries_are_bounded_over_commits_without_drafts(server: Server) -> None:
    for version in range(1, 10_001):
        server.tracker.switch(version, [0])
    assert len(server.tracker._boundaries(0).ahead) == 1
    assert set(of(scrape(server.collector), R + "drafts_total")) == {("10000",)}


def test_scrape_shows_versions_staleness_and_commits(server: Server) -> None:
    began = value(scrape(server.collector), R + "draft_live_timestamp_seconds")
    assert began is not None
    draft = weights(server.store, DRAFT, 3, "draft-3")
    server.commit(draft, weights(server.store, POLICY, 12, "policy-12"))
    samples = scrape(server.collector)
    assert value(samples, R + "draft_version") == 3
    assert value(samples, R + "policy_version") == 12
    assert value(samples, R + "draft_staleness_versions") == 12, "trained on none counts as 0"
    live = value(samples, R + "draft_live_timestamp_seconds")
    assert live is not None and began < live
    assert value(samples, R + "commits_total", kind="both", outcome="ok") == 1
    assert value(samples, R + "commit_seconds_count", kind="both") == 1
    # The engine says 0.01 s, which is that bucket's bound.
    stall = [
        value(samples, R + "worker_stall_seconds_bucket", kind="both", le=le)
        for le in ("0.005", "0.01", "+Inf")
    ]
    assert stall == [0, 1, 1]
    assert value(samples, R + "stages") == 0
    assert value(samples, R + "staged_capacity_bytes") == 1000
    # As with a draft kind that has no weights.
    server.control.live[DRAFT] = Weights(DRAFT, 0, WeightSource())
    assert value(scrape(server.collector), R + "draft_staleness_versions") is None
    server.control.report("acceptance", [pb.NotReady()])
    assert value(scrape(server.collector), R + "ready") == 0


def test_break_even_compares_steps_of_equal_size(server: Server) -> None:
    costs = server.costs
    speculative = {(SPECULATIVE, 8, 3): StepSum(100, 1.8), (SPECULATIVE, 64, 3): StepSum(50, 2.0)}
    costs.add(0.0, speculative, accepted(0, 500, 400))
    assert value(scrape(server.collector), R + "break_even_acceptance_length") is None
    # 20 plain steps of as many requests as the 100: 10 ms each. The 50 have no like.
    sums = speculative | {(PLAIN, 8, 0): StepSum(20, 0.2), (PLAIN, 32, 0): StepSum(20, 9.0)}
    costs.add(2.0, sums | {(MIXED, 8, 0): StepSum(5, 9.0)}, accepted(0, 1000, 900))
    samples = scrape(server.collector)
    assert value(samples, R + "break_even_acceptance_length") == pytest.approx(1.8)
    assert (
        value(samples, R + "engine_steps_total", kind="plain", requests="8", draft_length="0") == 20
    )
    assert value(
        samples,
        R + "engine_step_seconds_total",
        kind="speculative",
        requests="64",
        draft_length="3",
    ) == pytest.approx(2.0)
    # 500 drafts since the first look, 500 accepted: 2.0 is more than 1.8.
    assert costs.speed_up(2.0) == pytest.approx(2.0 / 1.8)
    costs.add(4.0, sums, accepted(0, 2000, 1500))
    assert costs.speed_up(4.0) == pytest.approx((1 + 1100 / 1500) / 1.8)
    assert costs.speed_up(70.0) is None, "nothing was drafted in the last minute"


def test_scraped_speed_up_matches_state(server: Server) -> None:
    # The chooser keeps its last one while nothing is generated.
    server.chooser.speed_up = 1.5
    assert value(scrape(server.collector), R + "speculation_speed_up") is None
    for speed_up in (1.2, 0.8):
        server.tracker.speed_up = speed_up
        assert value(scrape(server.collector), R + "speculation_speed_up") == speed_up
        assert server.control.state().speed_up == speed_up


def test_break_even_uses_speculative_steps_of_last_minute() -> None:
    costs = StepCosts()
    plain = {(PLAIN, 1, 0): StepSum(100, 1.0)}
    costs.add(0.0, plain | {(SPECULATIVE, 1, 3): StepSum(1000, 15.0)}, accepted(1, 0, 0))
    assert costs.break_even == pytest.approx(1.5)
    for second in range(2, 122, 2):
        done = StepSum(1000 + second, 15.0 + 0.03 * second)
        costs.add(float(second), plain | {(SPECULATIVE, 1, 3): done}, accepted(1, second, 0))
    assert costs.break_even == pytest.approx(3.0)
    assert len(costs._readings) <= 32
    assert costs.length(120.0) is None, "60 drafts are too few"
    costs.add(122.0, plain | {(SPECULATIVE, 1, 3): done}, accepted(2, 5000, 9000))
    assert costs.length(122.0) is None, "another draft begins a new window"
    assert costs.break_even == pytest.approx(3.0)
    # Of another load nothing is known; while nothing is drafted, the last load is the present one.
    other = plain | {(SPECULATIVE, 1, 3): done, (SPECULATIVE, 4, 3): StepSum(100, 2.0)}
    costs.add(183.0, other, accepted(2, 6000, 9500))
    assert costs.break_even is None and costs.unknown_size == 4
    costs.add(185.0, other | {(PLAIN, 4, 0): StepSum(20, 0.2)}, accepted(2, 6000, 9500))
    assert costs.break_even == pytest.approx(2.0)
    for second in (250.0, 320.0):
        costs.add(second, other | {(PLAIN, 4, 0): StepSum(20, 0.2)}, accepted(2, 6000, 9500))
    assert costs.break_even == pytest.approx(2.0)


def test_scrape_exposes_every_fact(server: Server) -> None:
    draft = weights(server.store, DRAFT, 3, "draft-3")
    object.__setattr__(draft, "trained_against", 11)
    server.commit(draft, weights(server.store, POLICY, 12, "policy-12"))
    server.refused.note("/slipstream.v1.RolloutServer/Stage", StatusCode.INVALID_ARGUMENT, "x")
    sums = {(SPECULATIVE, 1, 3): StepSum(50, 1.0), (PLAIN, 1, 0): StepSum(50, 1.0)}
    server.costs.add(0.0, sums, accepted(3, 0, 0))
    server.costs.add(1.0, sums, accepted(3, 1000, 500))
    server.tracker.record(100, 300, 150, [80, 50, 20])
    server.tracker.speed_up = 1.5
    samples = scrape(server.collector)
    name = R + "calls_refused_total"
    assert value(samples, name, method="Stage", code="INVALID_ARGUMENT") == 1
    exposed = {name.removesuffix("_total") for name, _ in samples}
    assert {R + fact.name for fact in FACTS} <= exposed
