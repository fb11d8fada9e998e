"""The stall benchmark's own arithmetic, on a policy of two layers and without trainers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.policy_stall.__main__ import rows_table, targets
from benchmarks.policy_stall.policy import Case, Policy
from benchmarks.policy_stall.rounds import CHECKS, Rounds, Row, Times, growth
from benchmarks.policy_stall.trainers import confine


def small() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def rows_of(spoil: bool) -> list[Row]:
    """Three rows without a bridge; with ``spoil`` the third row's gradients differ by one bit."""
    policy = Policy(Case("small", 2, 12, small, 1 << 20))
    rows = [Row("absent", None), Row("again", None), Row("other", None)]
    rounds = Rounds(policy, rows, None)
    for _ in range(3):
        rounds.time(counted=True)
    if spoil:
        step, calls = policy.step, iter(range(1_000_000))

        def spoiled(bridge: object, capture: bool = False) -> None:
            step(bridge, capture)
            # One of the four steps of a check; the first is the reference.
            if next(calls) % 4 == 3:
                policy.gradients()[0][0, 0] += 1e-6

        policy.step = spoiled  # type: ignore[method-assign]
    for _ in range(CHECKS):
        rounds.check()
    return rows


def test_all_rows_take_the_same_step_from_the_same_state() -> None:
    rows = rows_of(spoil=False)
    assert [row.same_bits for row in rows] == [CHECKS] * 3
    assert [len(row.taken) for row in rows] == [3] * 3
    for number in range(3):
        befores = {row.taken[number][0] for row in rows}
        afters = {row.taken[number][2] for row in rows}
        # A step without a bridge between two rows belongs to both.
        assert len(befores & afters) == 2


def test_one_bit_more_in_one_gradient_is_seen() -> None:
    rows = rows_of(spoil=True)
    assert sum(row.same_bits for row in rows) < sum(row.checked for row in rows) == 3 * CHECKS


def test_figures_become_targets() -> None:
    absent, slower = Row("absent", None), Row("healthy", None)
    near, far, plain = Times(0.99, 1.0), Times(1.01, 1.0), Times(1.0, 1.0)
    for step in [Times(1.02, 1.0)] * 29 + [Times(2.0, 1.0)]:
        absent.taken.append((near, plain, far))
        slower.taken.append((far, step, near))
    for row in (absent, slower):
        row.same_bits = row.checked = 3
    figures = {row.name: row.figures() for row in (absent, slower)}
    assert figures["healthy"]["paired_wall"]["median"] == pytest.approx(1.02)
    assert figures["healthy"]["paired_wall"]["low_95"] == pytest.approx(1.02)
    assert figures["absent"]["paired_wall"]["median"] == pytest.approx(1.0)
    met = {t.name: t.ok for t in targets("x", figures, 0.02)}
    assert not met["x, healthy: median of the step's wall time"]
    assert met["x, healthy: median of the step's thread CPU time"]
    assert met["x, healthy: gradients bit-identical"]
    assert not met["x: growth of resident memory"]
    assert "healthy" in rows_table("", figures)


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
