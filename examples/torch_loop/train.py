"""A GRPO loop in plain PyTorch around any Hugging Face model, sharded by FSDP2 under torchrun.

    python -m examples.torch_loop.train --steps 5
    torchrun --nproc-per-node 2 -m examples.torch_loop.train --steps 5

``--trainer`` and ``--servers`` join services that run already (deploy/compose, deploy/kubernetes).
Every rank has a bridge and feeds its own sequences; all ranks call ``bridge.sync``;
rank 0 alone pushes the policy.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.arithmetic_grpo.grpo import (
    group_advantages,
    log_prob_forward,
    pad_batch,
    policy_loss,
)
from examples.arithmetic_grpo.processes import Services
from examples.arithmetic_grpo.sampling import completion_text, prompt_ids
from examples.arithmetic_grpo.task import (
    MAX_COMPLETION_TOKENS,
    Problem,
    grade,
    sample_problem,
)
from examples.arithmetic_grpo.tokenizer import PAD_ID
from examples.local_services import (
    ARITHMETIC,
    LOGPROBS,
    READY_TIMEOUT,
    RolloutServer,
    draft_trainer,
)
from examples.task import reward
from examples.torch_loop.options import build_parser
from policy_bridge import BridgeConfig, DisabledBridge, PolicyBridge
from policy_bridge.adapters.completions import CompletionsClient, Rollouts

PROMPTS, SAMPLES = 4, 8


def load(path: Path) -> PreTrainedModel:
    """The policy in float32, sharded over the ranks if there is a process group."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if dist.is_initialized():
        # Without a mesh, fully_shard moves the policy to a GPU if there is one; batches stay here.
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def sync(model: PreTrainedModel, bridge: PolicyBridge | DisabledBridge, version: int) -> None:
    """Bring the policy to the rollout servers, the draft that is ready with it."""
    # Collective: rank 0 gets the whole policy, the others an empty dictionary.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    policy = cast(dict[str, torch.Tensor], get_model_state_dict(model, options=options))
    with bridge.sync(version, lead=rank() == 0) as window:
        if rank() == 0 and isinstance(bridge, PolicyBridge):
            window.push_policy(policy)
    if dist.is_initialized():
        dist.barrier()  # no rank generates before rank 0 has committed


def train(
    model: PreTrainedModel,
    bridge: PolicyBridge | DisabledBridge,
    rollouts: Rollouts,
    steps: int,
    learning_rate: float = 2e-4,
    score: Callable[[Problem, str], float] = lambda problem, text: reward(grade(problem, text)),
) -> list[float]:
    """GRPO with one optimizer step per generation; the loss of each step, of this rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    rng, losses = random.Random(rank()), []
    for step in range(steps):
        sync(model, bridge, step)
        problems = [sample_problem(rng) for _ in range(PROMPTS)]
        problems = [problem for problem in problems for _ in range(SAMPLES)]
        prompts = [prompt_ids(problem) for problem in problems]
        sampling = {"temperature": 1.0, "max_tokens": MAX_COMPLETION_TOKENS}
        completions = [c.token_ids for c in rollouts.generate(prompts, sampling)]
        texts = map(completion_text, completions)
        rewards = [score(*pair) for pair in zip(problems, texts, strict=True)]
        advantages = group_advantages(torch.tensor(rewards), SAMPLES)
        batch = pad_batch(prompts, completions, advantages, PAD_ID)
        ids, attention, mask = batch.input_ids, batch.attention_mask, batch.completion_mask
        with bridge.capture(temperature=1.0, training=True) as capture:
            log_probs = log_prob_forward(model, ids, attention)
            capture.ship(
                ids,
                attention_mask=attention,
                loss_mask=mask,
                sampled_logprobs=log_probs.detach(),
            )
        loss = policy_loss(log_probs, log_probs.detach(), advantages, mask, clip=0.2)
        loss = loss / mask.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def rank() -> int:
    """This process's number; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def main(argv: list[str] | None = None) -> int:
    """Run the example: rank 0 starts the services unless they run, every rank trains."""
    options = build_parser().parse_args(argv)
    with ExitStack() as stack:
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
        # Without control addresses the bridge asks the trainer for its fleet.
        addresses = [options.trainer, "", options.servers]
        if rank() == 0 and not options.trainer:
            options.out.mkdir(parents=True, exist_ok=True)
            server = RolloutServer(options.out / "rollout-server.log", *LOGPROBS)
            stack.enter_context(server)
            trainer = draft_trainer(options.out, server.control)
            stack.enter_context(Services(trainer))
            trainer.wait_ready(READY_TIMEOUT)
            addresses = [trainer.health, server.control, server.http]
        if dist.is_initialized():
            dist.broadcast_object_list(addresses)
        model = load(ARITHMETIC / "policy")
        config = BridgeConfig(
            addresses[0],
            "torch-loop",
            tuple(filter(None, addresses[1:2])),
            states_dtype="bfloat16",
            shared_memory=options.shared_memory,
        )
        bridge = stack.enter_context(PolicyBridge(model, config))
        client = stack.enter_context(CompletionsClient(addresses[2].split(","), "policy"))
        losses = train(model, bridge, client, options.steps)
        bridge.flush(30.0)
        print(f"rank {rank()}: losses {losses}\n{bridge.stats()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
