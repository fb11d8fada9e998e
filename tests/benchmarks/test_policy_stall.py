"""The stall benchmark's own arithmetic, on a policy of two layers and without trainers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.policy_stall.affinity import confine
from benchmarks.policy_stall.neighbour import Neighbour, summary
from benchmarks.policy_stall.policy import Case, Policy
from benchmarks.policy_stall.progress import Progress
from benchmarks.policy_stall.ratios import growth, ratio_of_p99
from benchmarks.policy_stall.report import table, targets
from benchmarks.policy_stall.rounds import CHECKS, Rounds, measure
from benchmarks.policy_stall.row import Round, Row, Times


def small() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def rows_of(spoil: bool) -> list[Row]:
    """Three rows without a bridge; the last one's step is another where it is to be spoiled."""
    policy = Policy(Case("small", 2, 12, small, 1 << 20))
    rows = [Row("absent", None), Row("again", None), Row("other", None)]
    if spoil:
        step, calls = policy.step, iter(range(1_000_000))

        def spoiled(bridge: object, capture: bool = False) -> None:
            step(bridge, capture)
            # Of the four steps of a check, the reference's among them, one.
            if next(calls) % 4 == 3:
                policy.gradients()[0][0, 0] += 1e-6

        policy.step = spoiled  # type: ignore[method-assign]
    resident = measure(
        Rounds(policy, rows, None),
        rows,
        warmup=1,
        steps=3,
        before_counting=lambda: None,
        before_round=lambda _: None,
        progress=Progress("small", 7, verbose=False),
    )
    assert len(resident) == 3
    return rows


def test_all_rows_take_the_same_step_from_the_same_state() -> None:
    rows = rows_of(spoil=False)
    assert [row.same_bits for row in rows] == [CHECKS] * 3
    for number in range(3):
        # One step without a bridge lies between two rows, and is both's.
        taken = rows[0].taken[number][0]
        assert all(row.taken[number][0] is taken for row in rows) and len(taken.steps) == 3 + 4
        # Nobody has a bridge here: all but those that lack a neighbour.
        assert taken.bare == [1, 2, 3, 4, 5]
        assert sorted(row.taken[number][1] for row in rows) == [1, 3, 5]


def test_one_bit_more_in_one_gradient_is_seen() -> None:
    rows = rows_of(spoil=True)
    assert sum(row.same_bits for row in rows) < sum(row.checked for row in rows) == 3 * CHECKS


def test_figures_become_targets() -> None:
    absent, slower = Row("absent", None), Row("healthy", None)
    for step in [Times(1.02, 1.0, 1.1)] * 29 + [Times(2.0, 1.0, 1.1)]:
        first, mine, second, last = (Times(t, t, t) for t in (0.99, 1.0, 1.01, 0.99))
        for place, row in enumerate((absent, slower)):
            row.taken.append((Round([first, mine, second, step, last], bare=[1, 2]), 2 * place + 1))
    for row in (absent, slower):
        row.same_bits = row.checked = 3
    figures = {row.name: row.figures() for row in (absent, slower)}
    assert figures["healthy"]["paired_wall"]["median"] == pytest.approx(1.02)
    assert figures["healthy"]["paired_process_cpu"]["median"] == pytest.approx(1.1)
    assert figures["absent"]["paired_wall"]["median"] == pytest.approx(1.0)
    assert figures["healthy"]["wall_before"] == [1.01] * 30
    # 28.71 of 29 places up; of a third of all resamplings the one slow step is not part.
    assert figures["healthy"]["p99_wall"] == pytest.approx(
        {"ratio": 1.02 + 0.71 * 0.98, "low_95": 1.02, "high_95": 2.0}
    )
    free = {t.name: t.ok for t in targets("x", figures, 0.0, free_core=True)}
    shared = {t.name: t.ok for t in targets("x", figures, 0.02, free_core=False)}
    assert (
        not free["x, healthy: median of the step's wall time"]
        and shared["x, healthy: median of the step's wall time"]
    )
    assert not free["x, healthy: p99 of the step's wall time"]
    assert free["x, healthy: gradients bit-identical"]
    assert free["x: growth of resident memory"] and not shared["x: growth of resident memory"]
    assert "healthy" in table(figures)


@pytest.mark.parametrize(("rest", "p99"), [(2.0, 1.0), (1.0, 2.0)])
def test_a_p99_tells_a_stalled_row_from_a_slow_machine(rest: float, p99: float) -> None:
    row = Row("killed", None)
    for number in range(100):
        own, others = (2.0, rest) if number < 3 else (1.0, 1.0)
        steps = [Times(t, t, t) for t in (others, others, others, own, others)]
        row.taken.append((Round(steps, bare=[1]), 3))
    assert row.figures()["p99_wall"]["ratio"] == pytest.approx(p99)


def test_a_p99_is_held_against_the_mean_of_as_many() -> None:
    # 98.01 of 99 places up: one slow step of the row is a hundredth part of it.
    stalled = ratio_of_p99([1.0] * 99 + [3.0], [[1.0, 1.0, 1.0]] * 100)
    assert stalled["ratio"] == pytest.approx(1.02) and stalled["high_95"] == pytest.approx(3.0)
    # Of the three peers one has a p99 of 2; of their 300 figures together it would be 1.
    peers = [[1.0, 1.0, 1.0]] * 98 + [[1.0, 1.0, 2.0]] * 2
    assert ratio_of_p99([1.0] * 98 + [2.0, 2.0], peers)["ratio"] == pytest.approx(2.0 / (4 / 3))


def test_growth_is_of_the_second_half_by_a_line() -> None:
    assert growth([5, 9, 100, 100, 100, 100]) == 0.0
    assert growth([100] * 10 + [1000 + 10 * n for n in range(10)]) == pytest.approx(100 / 1045)


def test_every_thread_of_a_process_is_confined_but_those_named() -> None:
    code = "from threading import Thread; Thread(target=input).start(); print(flush=True); input()"
    core, all_cores = min(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        threads = [int(task.name) for task in Path(f"/proc/{child.pid}/task").iterdir()]
        assert len(threads) == 2
        confine(child.pid, {core}, but=(child.pid,))
        found = {thread: os.sched_getaffinity(thread) for thread in threads}
        child.kill()
    assert found.pop(child.pid) == all_cores
    assert list(found.values()) == [{core}]


def test_looks_at_the_other_core() -> None:
    assert summary([1.0, 0.98, 1.9, 1.02]) == {"looks": 4, "median": 1.01, "shared": 0.25}
    core = min(os.sched_getaffinity(0))
    with Neighbour(core) as neighbour:
        child = neighbour.process
        assert os.sched_getaffinity(child.pid) == {core}
        for busy_first in (True, False):
            assert neighbour.look(busy_first) > 0.0
            # Told to stop, and waited for: it burdens no step.
            assert os.waitid(os.P_PID, child.pid, os.WSTOPPED) is not None
    assert child.returncode == -signal.SIGKILL
