"""``python -m benchmarks.hot_swap``: draft swaps under load on two real vLLM servers."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.draft_training.report import Target, machine, target_table
from benchmarks.hot_swap import size
from benchmarks.hot_swap.figures import NONE, OURS, PEER, Outcome, Window, figures
from benchmarks.hot_swap.load import Load, Seen, Work, complete_all
from benchmarks.hot_swap.servers import Server, Servers
from benchmarks.hot_swap.swaps import Ours, Swap, peer_files
from draft_trainer.durable import written_whole
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids
from examples.arithmetic_grpo.tokenizer import EOS_ID
from tests.losslessness.joint import chi_square_p_value, exact_joint

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "arithmetic_grpo"
POLICY, DRAFT = EXAMPLE / "policy", EXAMPLE / "draft"
# The distribution that torch computes here is then the servers' own.
PRECISION = ("--dtype", "float32")
SAMPLED_TOKENS = 4
PROMPTS = 64


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 only if every target was met."""
    options = _parse(argv)
    # So that ``timeout`` and a terminal's Ctrl-C end the servers, and what was measured is told.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if options.size:
            found = size.measure(options, folder, EXAMPLE, _say)
            print(size.table(found))
        else:
            outcome = _measure(options, folder)
            found = figures(outcome, options.swaps) | {"complete": outcome.complete}
            print(_table(found))
    print("\n" + target_table([Target(**target) for target in found["targets"]]))
    _write(options, found)
    return 0 if all(target["ok"] for target in found["targets"]) else 1


def _write(options: argparse.Namespace, found: dict[str, Any]) -> None:
    if options.json is not None:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        everything = {"machine": machine(), "settings": settings} | found
        with written_whole(options.json) as path:
            path.write_text(json.dumps(everything, indent=1, default=str) + "\n")


def _measure(options: argparse.Namespace, folder: Path) -> Outcome:
    prompts = [prompt_ids(problem) for problem in held_out_problems(PROMPTS)]
    _say("starting two rollout servers")
    servers = [
        Server(POLICY, DRAFT, folder / f"rollout-server-{index}.log", PRECISION, core)
        for index, core in enumerate(options.cores or (None, None))
    ]
    with Servers(servers) as pair:
        ours = Ours(DRAFT, folder / "registry", [server.control for server in servers])
        try:
            return _under_load(options, folder, pair, ours, prompts)
        finally:
            ours.close()


def _under_load(
    options: argparse.Namespace,
    folder: Path,
    pair: Servers,
    ours: Ours,
    prompts: list[list[int]],
) -> Outcome:
    servers = pair.all
    plain = []
    for server in servers:
        server.speculate(False)
        plain.append(complete_all(server.http, prompts, options.in_flight))
        server.speculate(True)
    if plain[0] != plain[1]:
        raise RuntimeError("the two servers differ without speculation; nothing can be compared")
    files = peer_files(ours.registry, folder)
    http = tuple(server.http for server in servers)
    exact = exact_joint(_policy(), prompts[0], SAMPLED_TOKENS, floor=1e-6, eos=EOS_ID)
    _say("load begins")
    load = Load(Work(http, prompts, plain[0], options.in_flight, SAMPLED_TOKENS))
    windows: list[Window] = []
    swaps: list[Swap] = []
    peer_swaps: list[float] = []
    seen = [Seen() for _ in servers]

    def so_far(more: Sequence[Seen], complete: bool) -> Outcome:
        for one, new in zip(seen, more, strict=True):
            one.add(new)
        stalls = [server.stall() for server in servers]
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
        time.sleep(options.warmup)
        # Staged once: from here on a swap moves no bytes, as in a fleet that goes back and forth.
        swaps += [ours.swap(), ours.swap()]
        for number in range(options.rounds):
            arms = [NONE, OURS, PEER] if number % 2 == 0 else [PEER, OURS, NONE]
            for arm in arms:
                windows.append(_window(options, pair, arm, ours, files, swaps, peer_swaps))
            outcome = so_far(load.take(), complete=False)
            _write(options, figures(outcome, options.swaps) | {"complete": False})
            _say(_progress(number + 1, outcome))
        left = options.swaps - len(swaps)
        _say(f"{max(0, left)} swaps more, one every {options.rest} s")
        while len(swaps) < options.swaps:
            swaps.append(ours.swap())
            time.sleep(options.rest)
        complete = True
    except KeyboardInterrupt:
        _say("cut short; what was measured follows")
        if len(windows) < 3:
            raise
    finally:
        last = load.stop()
    for server in servers:
        server.service.check()
    return so_far(last, complete)


def _progress(number: int, outcome: Outcome) -> str:
    rates = ", ".join(f"{w.arm} {w.rate:.0f} tokens/s" for w in outcome.windows[-3:])
    return (
        f"round {number}: {rates}; {len(outcome.swaps)} swaps, "
        f"{sum(len(s.failed) for s in outcome.seen)} failed, "
        f"{sum(s.different for s in outcome.seen)} differ, p = {outcome.p_value:.2g}, stall "
        + " and ".join(f"{1e3 * seconds:.1f} ms" for seconds in outcome.stall)
    )


def _window(
    options: argparse.Namespace,
    pair: Servers,
    arm: str,
    ours: Ours,
    files: list[Path],
    swaps: list[Swap],
    peer_swaps: list[float],
) -> Window:
    before = sum(server.generated() for server in pair.all)
    began = time.monotonic()
    count = 0
    while True:
        # In the middle of each second, so that a window begins and ends between swaps.
        due = began + count + 0.5
        if due >= began + options.seconds:
            break
        time.sleep(max(0.0, due - time.monotonic()))
        if arm == OURS:
            swaps.append(ours.swap())
        elif arm == PEER:
            start = time.monotonic()
            pair.three_calls(files[count % 2])
            peer_swaps.append(time.monotonic() - start)
        count += 1
    time.sleep(max(0.0, began + options.seconds - time.monotonic()))
    ended = time.monotonic()
    tokens = sum(server.generated() for server in pair.all) - before
    return Window(arm, began, ended, tokens, 0 if arm == NONE else count)


def _policy() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    return model.eval()


def _acceptance(servers: tuple[Server, ...]) -> dict[int, float]:
    total: dict[int, tuple[int, int]] = {}
    for server in servers:
        for version, (drafts, accepted) in server.acceptance().items():
            sums = total.get(version, (0, 0))
            total[version] = (sums[0] + drafts, sums[1] + accepted)
    return {v: 1 + accepted / drafts for v, (drafts, accepted) in sorted(total.items())}


def _table(found: dict[str, Any]) -> str:
    lines = [
        f"{found['swaps']} fleet-wide swaps of ours, {found['peer_swaps']} of vLLM's, "
        f"{found['requests']} requests, {len(found['failed'])} failed, "
        f"{found['different']} of {found['greedy']} greedy outputs differ, "
        f"p = {found['p_value']:.3g} over {found['samples']} samples at T = 1",
        "acceptance length: "
        + ", ".join(f"draft {v} {length:.2f}" for v, length in found["acceptance_length"].items()),
        f"\n{'server':<8}{'step ms':>9}{'commit ms':>11}{'p99':>8}{'steps':>8}{'p99':>7}"
        f"{'stall ms':>10}{'gap p99 ms: none':>18}{'swapping':>10}{'across':>8}{'peer':>8}",
    ]
    for index, s in enumerate(found["servers"]):
        gap = s["gap_p99"]
        across = 1e3 * gap["across_a_swap"] if gap["across_a_swap"] is not None else float("nan")
        lines.append(
            f"{index:<8}{1e3 * s['step_seconds']:>9.1f}"
            f"{1e3 * s['commit_seconds']['median']:>11.1f}{1e3 * s['commit_seconds']['p99']:>8.1f}"
            f"{s['commit_steps']['median']:>8.2f}{s['commit_steps']['p99']:>7.2f}"
            f"{1e3 * s['stall_seconds']:>10.1f}{1e3 * gap['no_swaps']:>18.1f}"
            f"{1e3 * gap['windows_with_swaps']:>10.1f}{across:>8.1f}"
            f"{1e3 * gap['peer_windows']:>8.1f}"
        )
    lines.append(f"\n{'swap every second':<22}{'tokens/s':>10}{'(min .. max)':>18}{'of none':>9}")
    for arm, rate in found["throughput"].items():
        ratio = found["throughput_ratio"].get(arm)
        text = f"({rate['min']:.0f} .. {rate['max']:.0f})"
        share = "" if ratio is None else f"{ratio['median']:>9.3f}"
        lines.append(f"{arm:<22}{rate['median']:>10.0f}{text:>18}{share}")
    swap, peer = found["swap_seconds"], found["peer_swap_seconds"]
    lines.append(
        f"a fleet-wide swap: ours {1e3 * swap['median']:.0f} ms"
        + ("" if peer is None else f", vLLM's three calls {1e3 * peer['median']:.0f} ms")
    )
    return "\n".join(lines)


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hot_swap",
        description="Two real vLLM servers of the arithmetic example's policy under load. Draft "
        "releases of different quality are swapped fleet-wide by Slipstream's publisher and, in "
        "windows of their own, by vLLM's three calls under pause?mode=keep. Progress goes to "
        "stderr, tables to stdout.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--swaps", type=int, default=200, help="fleet-wide swaps of ours in all")
    add("--seconds", type=float, default=8.0, help="of a window; a swap in each")
    add("--rounds", type=int, default=8, help="of three windows")
    add("--rest", type=float, default=0.25, help="seconds between the swaps after the windows")
    add("--warmup", type=float, default=5.0, help="seconds of load before the first window")
    add("--in-flight", type=int, default=32, help="requests in flight on each server")
    add("--size", action="store_true", help="instead: a head of an 8B policy's size, one server")
    add("--size-vocabulary", type=int, default=16000, help="of that head")
    add("--size-releases", type=int, default=3, help="staged on an idle server, and as many on "
        "one that generates")  # fmt: skip
    add("--cores", type=_cores, metavar="A,B", default=_two_cores(),
        help="one for all processes of each server; empty leaves them to the kernel")  # fmt: skip
    add("--keep", type=Path, metavar="DIR", help="folder for registry and logs")
    add("--json", type=Path, help="write figures and targets there")
    options = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    return options


def _cores(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    first, second = (int(core) for core in text.split(","))
    return first, second


def _two_cores() -> tuple[int, int] | None:
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[1]) if len(cores) > 1 else None


if __name__ == "__main__":
    sys.exit(main())
