"""``python -m benchmarks.mechanisms``: what each draft mechanism gains over no speculation.

One rollout server for each mechanism, all of the example's policy written as a Qwen3-Next model,
each on the same core and taking turns: a ratio within a round is of wall seconds that nothing else
shares. Judged by tokens a sequence-step, which counts the steps without a draft as well: vLLM's
acceptance length leaves them out, and n-gram drafting has none in most steps. What a step costs is
that over the speed-up. Training is one pass of the trainer's own steps, with its defaults, over
the same rollouts for every mechanism.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.draft_length.__main__ import REST_SECONDS, Load
from benchmarks.harness import (
    Target,
    end_on_sigterm,
    finish,
    interleaved,
    options,
    ratios,
    say,
    spread_text,
    table,
)
from benchmarks.learning.moving import drawn
from draft_trainer.config import TrainingConfig
from draft_trainer.drafters import DRAFTERS
from draft_trainer.kernels.library import use_kernels
from draft_trainer.training.learner import Learner
from examples.arithmetic_grpo import task
from examples.arithmetic_grpo.make_mtp import policy_with_mtp
from examples.arithmetic_grpo.sampling import solutions
from examples.arithmetic_grpo.states import states_of
from examples.local_services import ARITHMETIC, RolloutServer, precision

NONE = "none"
ARMS: dict[str, Path | None] = {
    NONE: None,
    "ngram": None,
    "eagle3": ARITHMETIC / "draft",
    "mtp": ARITHMETIC / "mtp",
    "draft_model": ARITHMETIC / "draft_model",
    "dflash": ARITHMETIC / "dflash",
}
TRAINED = {kind: draft for kind, draft in ARMS.items() if draft is not None}
ROLLOUTS = 256
DRAFT_LENGTH = 3
CORE = 0


class Training:
    """The trainer's steps of one mechanism, from its draft in the example."""

    def __init__(
        self,
        kind: str,
        policy: Path,
        model: PreTrainedModel,
        rollouts: Sequence[tuple[list[int], list[int]]],
    ) -> None:
        head = DRAFTERS[kind].read(TRAINED[kind], policy).draft()
        states = states_of(model, rollouts, head.config.aux_layer_ids)
        self._samples, self._heads = states.samples, states.heads(head.target_ids())
        self.tokens = sum(sample.tokens for sample in self._samples)
        self.state_bytes = sum(s.aux.nbytes + s.final_hidden.nbytes for s in self._samples)
        config = TrainingConfig(ttt_steps=DRAFT_LENGTH, compute_dtype=precision())
        self._learner = Learner(head, config)

    def run(self) -> float:
        """CPU seconds a 1,000 tokens, of a pass over the rollouts."""
        steps = list(drawn(self._samples, 1, self._learner, random.Random(0)))
        began = time.process_time()
        for samples in steps:
            self._learner.step(samples, self._heads)
        return 1000 * (time.process_time() - began) / self.tokens


def training(policy: Path, rounds: int) -> dict[str, dict[str, Any]]:
    """The costs of each mechanism: CPU seconds a 1,000 tokens, and bytes of states a token."""
    model = AutoModelForCausalLM.from_pretrained(ARITHMETIC / "policy", dtype=torch.float32)
    model.eval()
    rollouts = [one for part in solutions(model, ROLLOUTS, 0, task) for one in part]
    trained = {kind: Training(kind, policy, model, rollouts) for kind in TRAINED}
    for one in trained.values():
        one.run()
    seconds = interleaved({kind: one.run for kind, one in trained.items()}, rounds)
    return {
        kind: {
            "cpu_seconds_per_1000_tokens": seconds[kind],
            "state_bytes_per_token": one.state_bytes / one.tokens,
        }
        for kind, one in trained.items()
    }


def tokens_per_step(kind: str, server: RolloutServer) -> float:
    """Tokens that a sequence got in a step, since the server's start.

    A draft's sequences have one step for their prompt and one for each draft. n-gram drafting has
    steps without: theirs follow from what was accepted, which vLLM counts up to and including what
    it drops behind the end of a completion.
    """
    counted = server.counters().values()
    tokens = server.metric("vllm:generation_tokens_total")
    if kind in TRAINED:
        requests = server.metric("vllm:request_success_total")
        return tokens / (requests + sum(one.drafts for one in counted))
    return tokens / (tokens - sum(one.accepted_tokens for one in counted))


def main(argv: Sequence[str] | None = None) -> int:
    """Start the servers, measure every batch size, print."""
    parser = options("mechanisms", (__doc__ or "").split("\n\n")[1])
    parser.add_argument("--rounds", type=int, default=7, help="of each batch size")
    parser.add_argument("--requests", nargs="+", default=["1", "8", "32"], help="at once")
    parsed = parser.parse_args(argv)
    end_on_sigterm()
    torch.set_num_threads(1)
    use_kernels("auto")
    cells, targets = [], []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        policy = policy_with_mtp(ARITHMETIC / "policy", folder / "policy")
        say("training")
        trained = training(policy, parsed.rounds)
        servers = {}
        for kind, draft in ARMS.items():
            say(f"starting the server of arm {kind}")
            log = folder / f"{kind}.log"
            server = RolloutServer(log, "--draft-kind", kind, policy=policy, draft=draft, core=CORE)
            servers[kind] = stack.enter_context(server)
        number = [0]

        def run(server: RolloutServer, requests: str) -> float:
            time.sleep(REST_SECONDS)
            return asyncio.run(Load(requests, number[0]).run(server.http))

        for requests in parsed.requests:
            say(f"{requests} requests")
            for server in servers.values():
                run(server, requests)
            speeds = interleaved(
                {kind: partial(run, server, requests) for kind, server in servers.items()},
                parsed.rounds,
                after_round=partial(number.__setitem__, 0),
            )
            over = {kind: ratios(values, speeds[NONE]) for kind, values in speeds.items()}
            cells.append({"requests": requests, "tokens_per_second": speeds, "over_none": over})
        steps = {kind: tokens_per_step(kind, server) for kind, server in servers.items()}
    slow = max(statistics.median(cell["over_none"]["ngram"]) for cell in cells)
    targets.append(Target.at_most("n-gram / none, at its best batch size", slow, 1.0))
    for kind in ("eagle3", "mtp", "draft_model", "dflash"):
        single = statistics.median(cells[0]["over_none"][kind])
        targets.append(Target.at_least(f"{kind} / none, {cells[0]['requests']} at once", single, 1))
    print(
        table(
            "Generation speed over no speculation, median (min .. max)",
            [
                "mechanism",
                "tokens a sequence-step",
                *(f"B = {c['requests']}" for c in cells),
                f"a step's cost, B = {cells[0]['requests']}",
                "training, CPU s per 1,000 tokens",
                "bytes of states a token",
            ],
            [
                [
                    kind,
                    f"{steps[kind]:.2f}",
                    *(spread_text(c["over_none"][kind]) for c in cells),
                    f"{steps[kind] / statistics.median(cells[0]['over_none'][kind]):.2f}",
                    *_trained(trained.get(kind)),
                ]
                for kind in ARMS
            ],
        )
    )
    found = {
        "rounds": parsed.rounds,
        "tokens_per_sequence_step": steps,
        "training": trained,
        "cells": cells,
    }
    return finish(parsed.json, found, targets)


def _trained(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["-", "-"]
    seconds = spread_text(found["cpu_seconds_per_1000_tokens"])
    return [seconds, f"{found['state_bytes_per_token']:,.0f}"]


if __name__ == "__main__":
    sys.exit(main())
