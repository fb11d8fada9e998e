"""``python -m benchmarks.hot_swap``: draft swaps under load on two real vLLM servers."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.harness import end_on_sigterm, finish, options, say, write
from benchmarks.hot_swap.figures import (
    NONE,
    OURS,
    PEER,
    Outcome,
    Window,
    figures,
    tables,
    targets,
)
from benchmarks.hot_swap.load import Load, Seen, Work, complete_all
from benchmarks.hot_swap.servers import Server, Servers, two_cores
from benchmarks.hot_swap.swaps import Ours, Swap, peer_files
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids
from examples.arithmetic_grpo.tokenizer import EOS_ID
from examples.local_services import ARITHMETIC
from tests.losslessness.joint import chi_square_p_value, exact_joint

SAMPLED_TOKENS = 4
PROMPTS = 64
IN_FLIGHT = 32
"""Requests on each server."""
WARM_UP_SECONDS = 5.0
REST_SECONDS = 0.25
"""Between the swaps after the windows."""


def main(argv: list[str] | None = None) -> int:
    """Command line entry; the exit status is 0 only if every target is met."""
    chosen = _parse(argv)
    end_on_sigterm()
    with tempfile.TemporaryDirectory() as temporary:
        found = figures(_measure(chosen, Path(temporary)))
    print(tables(found))
    return finish(chosen.json, found, targets(found, chosen.swaps))


def _measure(chosen: argparse.Namespace, folder: Path) -> Outcome:
    prompts = [prompt_ids(problem) for problem in held_out_problems(PROMPTS)]
    say("starting two rollout servers")
    servers = [
        Server(folder / f"rollout-server-{index}.log", core=core)
        for index, core in enumerate(two_cores())
    ]
    with Servers(servers) as pair:
        ours = Ours(
            ARITHMETIC / "draft", folder / "registry", [server.control for server in servers]
        )
        try:
            return _under_load(chosen, folder, pair, ours, prompts)
        finally:
            ours.close()


def _under_load(
    chosen: argparse.Namespace,
    folder: Path,
    pair: Servers,
    ours: Ours,
    prompts: list[list[int]],
) -> Outcome:
    servers = pair.all
    plain = []
    for server in servers:
        server.speculate(False)
        plain.append(complete_all(server.http, prompts, IN_FLIGHT))
        server.speculate(True)
    if plain[0] != plain[1]:
        raise RuntimeError("the two servers differ without speculation; nothing can be compared")
    files = peer_files(ours.registry, folder)
    http = tuple(server.http for server in servers)
    exact = exact_joint(_policy(), prompts[0], SAMPLED_TOKENS, floor=1e-6, eos=EOS_ID)
    say("load begins")
    load = Load(Work(http, prompts, plain[0], IN_FLIGHT, SAMPLED_TOKENS))
    windows: list[Window] = []
    swaps: list[Swap] = []
    peer_swaps: list[float] = []
    seen = [Seen() for _ in servers]

    def so_far(more: Sequence[Seen], complete: bool) -> Outcome:
        for one, new in zip(seen, more, strict=True):
            one.add(new)
        stall = "slipstream_rollout_worker_stall_seconds_"
        stalls = [
            [server.metric(stall + part, kind="draft") for part in ("sum", "count")]
            for server in servers
        ]
        samples = [sample for one in seen for sample in one.samples]
        return Outcome(
            windows,
            swaps,
            peer_swaps,
            seen,
            [server.control for server in servers],
            chi_square_p_value(samples, exact),
            len(samples),
            [total / count for total, count in stalls],
            _acceptance(servers),
            complete,
        )

    complete = False
    try:
        time.sleep(WARM_UP_SECONDS)
        # Staged once: from here on a swap moves no bytes, as in a fleet that goes back and forth.
        swaps += [ours.swap(), ours.swap()]
        for number in range(chosen.rounds):
            arms = [NONE, OURS, PEER] if number % 2 == 0 else [PEER, OURS, NONE]
            for arm in arms:
                windows += _windows(chosen, pair, arm, ours, files, swaps, peer_swaps)
            outcome = so_far(load.take(), complete=False)
            found = figures(outcome)
            write(chosen.json, found, targets(found, chosen.swaps))
            say(
                f"round {number + 1}: {len(swaps)} swaps, {found['failed']} failed, "
                f"{found['different']} differ, p = {outcome.p_value:.2g}"
            )
        left = chosen.swaps - len(swaps)
        say(f"{max(0, left)} swaps more, one every {REST_SECONDS} s")
        while len(swaps) < chosen.swaps:
            swaps.append(ours.swap())
            time.sleep(REST_SECONDS)
        complete = True
    except KeyboardInterrupt:
        say("cut short; what was measured follows")
        if len(windows) < 4:
            raise
    finally:
        last = load.stop()
    for server in servers:
        server.service.check()
    return so_far(last, complete)


def _windows(
    chosen: argparse.Namespace,
    pair: Servers,
    arm: str,
    ours: Ours,
    files: list[Path],
    swaps: list[Swap],
    peer_swaps: list[float],
) -> list[Window]:
    """One window of ``seconds``; without swaps two halves of it, one with each release.

    A worse draft makes fewer tokens a step, so both must be live for the same time in all.
    """
    if arm != NONE:
        return [_window(chosen.seconds, pair, arm, ours, files, swaps, peer_swaps)]
    first = _window(chosen.seconds / 2, pair, arm, ours, files, swaps, peer_swaps)
    swaps.append(ours.swap())
    return [first, _window(chosen.seconds / 2, pair, arm, ours, files, swaps, peer_swaps)]


def _window(
    seconds: float,
    pair: Servers,
    arm: str,
    ours: Ours,
    files: list[Path],
    swaps: list[Swap],
    peer_swaps: list[float],
) -> Window:
    before = sum(server.metric("vllm:generation_tokens_total") for server in pair.all)
    began = time.monotonic()
    count = 0
    # In the middle of each second, so that a window begins and ends between swaps. An even number
    # of them: at the end the peer has put back what we believe to be live.
    while arm != NONE and began + count + 0.5 < began + seconds:
        time.sleep(max(0.0, began + count + 0.5 - time.monotonic()))
        if arm == OURS:
            swaps.append(ours.swap())
        else:
            start = time.monotonic()
            pair.three_calls(files[(ours.live + 1 + count) % 2])
            peer_swaps.append(time.monotonic() - start)
        count += 1
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    tokens = sum(server.metric("vllm:generation_tokens_total") for server in pair.all) - before
    # As at the beginning, after both answers: under load each takes a while.
    ended = time.monotonic()
    return Window(arm, began, ended, tokens, count)


def _policy() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        ARITHMETIC / "policy", dtype=torch.float32
    )
    return model.eval()


def _acceptance(servers: tuple[Server, ...]) -> dict[int, float]:
    total: dict[int, list[int]] = {}
    for server in servers:
        for version, counters in server.counters().items():
            sums = total.setdefault(version, [0, 0])
            sums[0] += counters.drafts
            sums[1] += counters.accepted_tokens
    return {v: 1 + accepted / drafts for v, (drafts, accepted) in sorted(total.items())}


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options(
        "hot_swap",
        "Two real vLLM servers of the arithmetic example's policy under load. Draft "
        "releases of different quality are swapped fleet-wide by Slipstream's publisher and, in "
        "windows of their own, by vLLM's three calls under pause?mode=keep. Progress goes to "
        "stderr, tables to stdout.",
    )
    add = parser.add_argument
    add("--swaps", type=int, default=200, help="fleet-wide swaps of ours in all")
    add("--seconds", type=int, default=8, help="of a window, an even number; a swap in each")
    add("--rounds", type=int, default=8, help="of three windows")
    chosen = parser.parse_args(argv)
    if chosen.seconds < 2 or chosen.seconds % 2:
        parser.error(f"--seconds {chosen.seconds}: an even number from 2 on")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    return chosen


if __name__ == "__main__":
    sys.exit(main())
