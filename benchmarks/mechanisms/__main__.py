"""``python -m benchmarks.mechanisms``: what each draft mechanism gains over no speculation.

One rollout server for each mechanism, all of the example's policy written as a Qwen3-Next model,
each on the same core and taking turns: a ratio within a round is of wall seconds that nothing else
shares. Judged by tokens a sequence-step, which counts the steps without a draft as well: vLLM's
acceptance length leaves them out, and n-gram drafting has none in most steps.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.draft_length.__main__ import Load
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
from examples.arithmetic_grpo.make_mtp import policy_with_mtp
from examples.local_services import ARITHMETIC, RolloutServer

NONE = "none"
ARMS: dict[str, Path | None] = {
    NONE: None,
    "ngram": None,
    "eagle3": ARITHMETIC / "draft",
    "mtp": ARITHMETIC / "mtp",
    "draft_model": ARITHMETIC / "draft_model",
    "dflash": ARITHMETIC / "dflash",
}
CORE = 0


def tokens_per_step(server: RolloutServer) -> float:
    """Tokens that a sequence got in a step, since the server's start: 1 and its accepted drafts."""
    counted = server.counters().values()
    tokens = server.metric("vllm:generation_tokens_total")
    return tokens / (tokens - sum(one.accepted_tokens for one in counted))


def main(argv: Sequence[str] | None = None) -> int:
    """Start the servers, measure every batch size, print."""
    parser = options("mechanisms", (__doc__ or "").split("\n\n")[1])
    parser.add_argument("--rounds", type=int, default=7, help="of each batch size")
    parser.add_argument("--requests", nargs="+", default=["1", "8", "32"], help="at once")
    parsed = parser.parse_args(argv)
    end_on_sigterm()
    cells, targets = [], []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        policy = policy_with_mtp(ARITHMETIC / "policy", folder / "policy")
        servers = {}
        for kind, draft in ARMS.items():
            say(f"starting the server of arm {kind}")
            log = folder / f"{kind}.log"
            server = RolloutServer(log, "--draft-kind", kind, policy=policy, draft=draft, core=CORE)
            servers[kind] = stack.enter_context(server)
        number = [0]

        def run(server: RolloutServer, requests: str) -> float:
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
        steps = {kind: tokens_per_step(server) for kind, server in servers.items()}
    slow = max(statistics.median(cell["over_none"]["ngram"]) for cell in cells)
    targets.append(Target.at_most("n-gram / none, at its best batch size", slow, 1.0))
    for kind in ("eagle3", "mtp", "draft_model", "dflash"):
        single = statistics.median(cells[0]["over_none"][kind])
        targets.append(Target.at_least(f"{kind} / none, {cells[0]['requests']} at once", single, 1))
    print(
        table(
            "Generation speed over no speculation, median (min .. max)",
            ["mechanism", "tokens a sequence-step", *(f"B = {c['requests']}" for c in cells)],
            [
                [kind, f"{steps[kind]:.2f}", *(spread_text(c["over_none"][kind]) for c in cells)]
                for kind in ARMS
            ],
        )
    )
    found = {"rounds": parsed.rounds, "tokens_per_sequence_step": steps, "cells": cells}
    return finish(parsed.json, found, targets)


if __name__ == "__main__":
    sys.exit(main())
