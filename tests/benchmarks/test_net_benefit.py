"""The net benefit's loop without vLLM: every arm has the same work."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.net_benefit.__main__ import WORKLOADS
from benchmarks.net_benefit.policy_loop import Workload, train
from examples.arithmetic_grpo.tokenizer import EOS_ID, build_tokenizer
from tests.completions_server import Completions, choice, serving

LOOP = Workload("test", 3, 2, (2.0, 0.5, 4), 2, 1e-3, 2, 2)


class Solver(Completions):
    """Ends every completion at once; the second of a prompt's says a token more."""

    def answer(self, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        rows = [[5] * sample + [EOS_ID] for sample in range(body["n"])]
        return 200, [choice(row, None) for row in rows]


def test_net_benefit_loop_trains_every_turn_and_version() -> None:
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


def test_arms_of_a_round_generate_the_same_turns() -> None:
    tail = WORKLOADS["tail"]
    first, again = (tail.problems(random.Random(3)) for _ in range(2))
    assert first == again
    rng = random.Random(0)
    turns = sorted(len(group) for _ in range(500) for group in tail.problems(rng))
    assert turns[0] == 1 and turns[-1] == 40
    assert turns[len(turns) // 2] == 4
    assert turns[int(0.95 * len(turns))] >= 4 * turns[len(turns) // 2]
    assert all(len(group) == 1 for group in WORKLOADS["short"].problems(rng))
