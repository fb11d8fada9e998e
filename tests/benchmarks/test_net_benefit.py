"""The net benefit's loop without vLLM, and what its runs are held to."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.net_benefit.__main__ import WORKLOADS, targets_of
from benchmarks.net_benefit.policy_loop import Workload, train
from examples.arithmetic_grpo.tokenizer import EOS_ID, build_tokenizer
from tests.completions_server import Completions, choice, serving

LOOP = Workload("test", 3, 2, (2.0, 0.5, 4), 2, 1e-3, 2, 2)


class Solver(Completions):
    """Ends every completion at once; the second of a prompt's says a token more."""

    def answer(self, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        rows = [[5] * sample + [EOS_ID] for sample in range(body["n"])]
        return 200, [choice(row, None) for row in rows]


def test_a_run_generates_every_turn_and_pushes_every_version() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    vocabulary = len(build_tokenizer())
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes, **heads))
    before = model.lm_head.weight.detach().clone()
    pushed: list[int] = []
    with serving(Solver) as port:
        run = train(model, LOOP, 0, f"http://127.0.0.1:{port}", pushed.append, None, lambda: None)
    rng = random.Random(0)
    turns = 0
    for _ in range(LOOP.steps):
        groups = sum(map(len, LOOP.problems(rng)))
        rng.sample(range(groups), LOOP.trained)
        turns += groups
    assert run.tokens == turns * (1 + 2)
    assert pushed == [0, 1, 2]
    assert run.seconds >= sum(run.phases.values())
    assert not torch.equal(model.lm_head.weight, before)


def test_arms_of_a_round_meet_the_same_turns_and_few_rollouts_are_long() -> None:
    tail = WORKLOADS["tail"]
    first, again = (tail.problems(random.Random(3)) for _ in range(2))
    assert first == again
    rng = random.Random(0)
    turns = sorted(len(group) for _ in range(500) for group in tail.problems(rng))
    assert turns[0] == 1 and turns[-1] == 40
    assert turns[len(turns) // 2] == 4
    assert turns[int(0.95 * len(turns))] >= 4 * turns[len(turns) // 2]
    assert all(len(group) == 1 for group in WORKLOADS["short"].problems(rng))


def runs(**seconds: float) -> dict[str, list[dict[str, Any]]]:
    cpu = {"always": 50.0, "when-it-pays": 1.0}
    return {
        arm.replace("_", "-"): [
            {"seconds": value, "trainer_cpu_seconds": cpu.get(arm.replace("_", "-"), 0.0)}
        ]
        for arm, value in seconds.items()
    }


@pytest.mark.parametrize(("pays", "met"), [(80.0, [True] * 3), (90.0, [False, False, False])])
def test_targets_of_the_tail(pays: float, met: list[bool]) -> None:
    found = runs(none=100.0, frozen=92.0, always=80.0, when_it_pays=pays)
    targets = targets_of("tail", found)
    assert [target.ok for target in targets] == met
    assert targets[0].value == pytest.approx(pays / 80.0)
    assert targets[1].value == pytest.approx(100.0 / pays)
    assert targets[2].value == pytest.approx(92.0 / pays)


def test_a_policy_that_stands_still_costs_the_trainer_almost_nothing() -> None:
    found = runs(none=100.0, frozen=90.0, always=99.0, when_it_pays=91.0)
    targets = targets_of("still", found)
    assert [target.ok for target in targets] == [True, True]
    assert targets[1].value == pytest.approx(0.02)
    assert targets_of("still", {"none": found["none"]}) == []
