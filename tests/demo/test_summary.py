"""The figures of ``summary.json`` are computed from the record as they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.arithmetic_grpo.records import (
    ADAPTED,
    ARMS,
    FROZEN,
    NGRAM,
    OFF,
    ArmRecord,
    RunRecord,
    StepRecord,
    SwapRecord,
)
from examples.arithmetic_grpo.report import write_report
from examples.arithmetic_grpo.rollouts import SpecCounters
from examples.arithmetic_grpo.summary import (
    pooled_length,
    pooled_positions,
    speed_ratios,
    surprise_against_off,
    targets_of,
    write_summary,
)
from examples.figures import Target, target_table
from slipstream.v1 import rollout_server_pb2 as pb


def arm(name: str, accepted: int, failed: int = 0) -> ArmRecord:
    drafts = 0 if name == OFF else 100
    return ArmRecord(
        requests=8,
        failed=failed,
        tokens=400,
        seconds=1.0,
        drafts=drafts,
        draft_tokens=3 * drafts,
        accepted=accepted if drafts else 0,
        per_position=(accepted // 2, accepted // 3, accepted // 6) if drafts else (0, 0, 0),
        reward=1.0,
        correct=0.5,
        style_share=0.5,
        surprise=4.0 if name == FROZEN else 0.0,
        surprise_variance=8.0,
        entropy=40.0,
        draft_version=None if name == OFF else 1,
    )


@pytest.fixture
def run() -> RunRecord:
    steps = [
        StepRecord(
            step=index,
            policy_version=index,
            draft_version=index,
            trained_against=index - 1 if index else None,
            arms={
                name: arm(name, accepted=120 if name == FROZEN and index else 210) for name in ARMS
            },
            seconds=dict.fromkeys(("data", "generation", "log_prob", "training", "sync"), 1.0),
            draft_train_seconds=0.5,
            reward=1.0,
        )
        for index in range(6)
    ]
    swaps = [SwapRecord(0, "in flight", 1, s, s / 2, 16) for s in (0.02, 0.04, 0.2)]
    swaps.append(SwapRecord(0, "between arms", 1, 9.0, 9.0, 0))
    return RunRecord(
        settings={},
        steps=steps,
        swaps=swaps,
        speed={
            "1": {
                FROZEN: [80.0, 90.0],
                ADAPTED: [150.0, 120.0],
                OFF: [100.0, 100.0],
            }
        },
        ngram_speed={"1": {NGRAM: [95.0, 85.0], OFF: [100.0, 100.0]}},
        tokens_per_step={NGRAM: 1.06},
        total_seconds=10.0,
        trainer={"swaps_made": 12, "swaps_counted": 12},
    )


def test_spec_counters_between_two_readings() -> None:
    def read(version: int, drafts: int, *accepted: int) -> dict[int, pb.AcceptanceCounters]:
        counters = pb.AcceptanceCounters(
            drafts=drafts,
            draft_tokens=3 * drafts,
            accepted_tokens=sum(accepted),
            accepted_per_position=accepted,
        )
        return {version: counters}

    # The server has forgotten version 1 since, and version 3 is new.
    before = read(1, 70, 60, 50, 40) | read(2, 10, 9, 6, 3)
    after = read(2, 16, 14, 8, 4) | read(3, 4, 4, 4, 1)
    counters = SpecCounters.between(before, after)
    assert counters == SpecCounters(10, 30, 17, (9, 6, 2))
    assert counters.acceptance_length == pytest.approx(2.7)
    nothing = SpecCounters.between(after, after)
    assert nothing == SpecCounters(per_position=(0, 0, 0))
    assert nothing.acceptance_length is None


def test_summary_pools_figures_over_steps(run: RunRecord) -> None:
    assert pooled_length(run.steps[-5:], FROZEN) == pytest.approx(2.2)
    assert pooled_length(run.steps, ADAPTED) == pytest.approx(3.1)
    assert pooled_length(run.steps, OFF) is None
    assert pooled_positions(run.steps, ADAPTED) == pytest.approx([1.05, 0.7, 0.35])
    assert speed_ratios(run, "1", ADAPTED) == [1.5, 1.2]
    assert speed_ratios(run, "1", NGRAM) == [0.95, 0.85]
    difference, z = surprise_against_off(run, FROZEN)
    assert difference == pytest.approx(4 / 400)
    # Six steps of 400 tokens and variance 8 on either side: 0.01 / sqrt(2 * 48 / 2400^2).
    assert z == pytest.approx(0.01 / (2 * 48 / 2400**2) ** 0.5)


def test_summary_and_report_have_every_target(run: RunRecord, tmp_path: Path) -> None:
    targets = {target.name: target for target in targets_of(run)}
    ratio = targets["adapted acceptance length over the frozen one's, end"]
    assert ratio.value == pytest.approx(3.1 / 2.2)
    assert ratio.ok
    swap = targets["live swap, median seconds from call to answer"]
    assert swap.value == pytest.approx(0.04), "swaps of an idle server do not count"
    assert swap.ok
    assert targets[f"losslessness: |z| of {FROZEN} against no speculation"].ok
    written = write_summary(run, tmp_path / "summary.json")
    write_report(run, targets_of(run), tmp_path / "report.html")
    document = json.loads((tmp_path / "summary.json").read_text())
    assert {t["name"] for t in document["targets"]} == set(targets)
    assert written == {key: value for key, value in document.items() if key != "run"}
    loop = document["figures"]["speed_in_the_loop"]
    assert (loop["requests"], loop[ADAPTED]["median"]) == (8, 1.0)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img ") == 7
    assert "http" not in page.replace("http-equiv", ""), "the page must be self-contained"


@pytest.mark.parametrize(
    ("ratios", "ok", "text"),
    [
        ([0.99, 1.0, 1.01], True, "met          x: 1 [0.9754, 1.025] (>= 0.97)"),
        ([0.9, 0.91, 0.9], False, "MISSED       x: 0.9033 [0.8891, 0.9178] (>= 0.97)"),
        ([0.9, 1.1, 1.0], None, "not decided  x: 0.9967 [0.7767, 1.279] (>= 0.97)"),
    ],
)
def test_ratio_is_decided_by_its_whole_interval(
    ratios: list[float], ok: bool | None, text: str
) -> None:
    target = Target.of_ratios("x", ratios, least=0.97)
    assert target.ok is ok and target_table([target]) == text
