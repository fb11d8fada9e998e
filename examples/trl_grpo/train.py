"""TRL's ``GRPOTrainer`` on arithmetic, its rollouts from real vLLM, its draft head kept fresh.

``python -m examples.trl_grpo.train`` starts a draft trainer and a rollout server, trains
for ``--steps`` and prints what became of every captured sample.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.arithmetic_grpo.processes import Services
from examples.arithmetic_grpo.task import (
    MAX_COMPLETION_TOKENS,
    Problem,
    grade,
    sample_problem,
)
from examples.arithmetic_grpo.tokenizer import build_tokenizer
from examples.local_services import (
    ARITHMETIC,
    LOGPROBS,
    READY_TIMEOUT,
    SHORT,
    RolloutServer,
    draft_trainer,
)
from examples.task import reward
from policy_bridge import BridgeConfig, ModulePaths, PolicyBridge
from policy_bridge.adapters.completions import CompletionsClient
from policy_bridge.adapters.trl import TrlRollouts

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# rollout_func is TRL's seam for this; that it may still change it says at every start.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def arithmetic(problem: Problem, text: str) -> float:
    """The task's reward."""
    return reward(grade(problem, text))


def grpo_trainer(
    model: PreTrainedModel,
    rollouts: TrlRollouts,
    out: Path,
    score: Callable[[Problem, str], float] = arithmetic,
    **settings: Any,
) -> Any:
    """An ordinary ``GRPOTrainer`` but for ``rollout_func``; ``settings`` go to ``GRPOConfig``."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rng = random.Random(0)
    problems = [sample_problem(rng) for _ in range(512)]

    def rewards(completions: list[str], problem: list[int], **_: Any) -> list[float]:
        pairs = zip(problem, completions, strict=True)
        return [score(problems[index], text) for index, text in pairs]

    args = GRPOConfig(
        **{
            "output_dir": str(out),
            "per_device_train_batch_size": 32,
            "gradient_accumulation_steps": 2,
            "num_generations": 8,
            "max_completion_length": MAX_COMPLETION_TOKENS,
            "learning_rate": 2e-4,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": False,
            **settings,
        }
    )
    return GRPOTrainer(
        model,
        rewards,
        args,
        Dataset.from_list([{"prompt": p.prompt, "problem": i} for i, p in enumerate(problems)]),
        processing_class=build_tokenizer(),
        rollout_func=rollouts,
    )


def open_bridge(
    model: PreTrainedModel, trainer: str, servers: tuple[str, ...], **settings: Any
) -> PolicyBridge:
    """A bridge for TRL, whose loss never calls lm_head: the final norm is named instead."""
    paths = ModulePaths(final_norm="model.norm")
    settings = {"states_dtype": "bfloat16", **settings}
    config = BridgeConfig(trainer, "trl-arithmetic", servers, modules=paths, **settings)
    return PolicyBridge(model, config)


def main(argv: list[str] | None = None) -> int:
    """Run the example."""
    parser = argparse.ArgumentParser(prog="python -m examples.trl_grpo.train")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/trl"))
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    server = RolloutServer(options.out / "rollout-server.log", *LOGPROBS)
    trainer = draft_trainer(options.out, server.control, {**SHORT, "gate": {"confidence": 0.6}})
    with server, Services(trainer):
        model = AutoModelForCausalLM.from_pretrained(ARITHMETIC / "policy", dtype=torch.float32)
        trainer.wait_ready(READY_TIMEOUT)
        with (
            open_bridge(model, trainer.health, (server.control,)) as bridge,
            CompletionsClient([server.http], "policy") as client,
        ):
            rollouts = TrlRollouts(bridge, client)
            grpo_trainer(model, rollouts, options.out, max_steps=options.steps).train()
            bridge.flush(30.0)
            print(bridge.stats())
    return 0


if __name__ == "__main__":
    sys.exit(main())
