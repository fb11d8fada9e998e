"""The stall benchmark compares like with like, on a policy of two layers and without trainers."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.policy_stall.policy import Case, Policy
from benchmarks.policy_stall.rounds import CHECKS, Rounds, Row


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


def test_arms_step_from_the_same_state() -> None:
    rows = rows_of(spoil=False)
    assert [row.same_bits for row in rows] == [CHECKS] * 3
    assert [len(row.taken) for row in rows] == [3] * 3
    for number in range(3):
        befores = {row.taken[number][0] for row in rows}
        afters = {row.taken[number][2] for row in rows}
        # A step without a bridge between two rows belongs to both.
        assert len(befores & afters) == 2


def test_one_changed_gradient_bit_is_detected() -> None:
    rows = rows_of(spoil=True)
    assert sum(row.same_bits for row in rows) < sum(row.checked for row in rows) == 3 * CHECKS
