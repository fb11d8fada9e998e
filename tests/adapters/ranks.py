"""Two ranks on gloo: ``examples.torch_loop`` on FSDP2, and a policy that is sharded otherwise.

``python -m tests.adapters.ranks TRAINER CONTROL POLICY OUT``; each rank writes what it saw to
``OUT/rank-N.json``. One interpreter forks into two: importing twice would cost more than everything
else.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from examples.arithmetic_grpo.task import Problem
from examples.torch_loop.train import load, train
from policy_bridge import BridgeConfig, PolicyBridge
from policy_bridge.adapters.completions import Completion
from tests.policy_bridge.sharded_process import check_rank

STEPS = 2
AUX_LAYERS = (2, 5, 7)
DEADLINE = 300.0
TIMEOUT = timedelta(seconds=240)


def any_score(problem: Problem, text: str) -> float:
    """Tells random completions apart, so that there are advantages to train on."""
    return float(len(text) % 7)


class FixedRollouts:
    """Completions that depend on the prompts alone."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]
    ) -> list[Completion]:
        rng = random.Random(str(prompts))
        rows = [[*(rng.randrange(4, 100) for _ in range(rng.randrange(4, 20))), 2] for _ in prompts]
        return [Completion(row, [-1.0] * len(row)) for row in rows]


def loop(policy: Path, trainer: str, control: str) -> dict[str, Any]:
    """Train with a bridge and without, from the same weights on the same rollouts."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    plain = load(policy)
    before = get_model_state_dict(plain, options=whole).get("lm_head.weight")
    losses = train(plain, PolicyBridge.disabled(), FixedRollouts(), STEPS, 1e-3, any_score)
    expected = get_model_state_dict(plain, options=whole)
    bridged = load(policy)
    config = BridgeConfig(trainer, "ranks", (control,), states_dtype="float32")
    with PolicyBridge(bridged, config) as bridge:
        bridge.wait_connected(DEADLINE)
        same = losses == train(bridged, bridge, FixedRollouts(), STEPS, 1e-3, any_score)
        flushed = bridge.flush(DEADLINE)
        stats = bridge.stats()
    found = get_model_state_dict(bridged, options=whole)
    for name, tensor in expected.items():
        other = found[name]
        assert isinstance(tensor, torch.Tensor) and isinstance(other, torch.Tensor)
        same = same and torch.equal(tensor, other)
    after = expected.get("lm_head.weight")
    if isinstance(after, torch.Tensor) and isinstance(before, torch.Tensor):
        moved = float((after - before).abs().max())
    else:
        moved = 1.0  # rank 0 alone is given the whole state
    return {
        "same": same,
        "moved": moved,
        "flushed": flushed,
        "parameters": len(expected),
        "chosen": stats.chosen_samples,
        "accepted": stats.accepted,
        "shed": dict(stats.shed),
        "last_error": stats.last_error,
        "losses": losses,
    }


def main(argv: list[str]) -> int:
    child = os.fork()
    rank = int(child == 0)
    trainer, control, policy, out = argv
    store = f"file://{out}/store"
    dist.init_process_group("gloo", timeout=TIMEOUT, init_method=store, rank=rank, world_size=2)
    found = loop(Path(policy), trainer, control)
    check_rank()
    Path(out, f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return os.waitpid(child, 0)[1] if child else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
