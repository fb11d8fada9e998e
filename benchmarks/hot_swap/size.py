"""``--size``: a head of an 8B policy's dimensions, staged and committed on one real server."""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness import Target
from benchmarks.hot_swap import big
from benchmarks.hot_swap.limits import limits_of
from benchmarks.hot_swap.servers import CALL_TIMEOUT, MODEL, Server, Servers
from slipstream.client import stage
from slipstream.tensors import spec_of
from slipstream.v1 import rollout_server_pb2 as pb

STREAMS = 2
_HELD = 4.2
"""Releases that fit into the server's store: the one from its start, live, previous, coming."""


def measure(
    options: argparse.Namespace, folder: Path, example: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Stage and commit new releases, first on an idle server, then on one that generates.

    Args:
        options: ``size_vocabulary``, ``size_releases``, ``cores``.
        folder: for checkpoints and the server's log.
        example: whose tokenizer the policy borrows.
        say: takes progress.

    Returns:
        Figures, targets as the last entry.
    """
    say("writing the checkpoints")
    policy = big.write_policy(folder / "policy", options.size_vocabulary, example / "policy")
    draft = big.write_draft(folder / "draft", options.size_vocabulary)
    size = big.size_of(big.another(draft, 0))
    say(f"{size / 1e9:.2f} GB; limits of this machine")
    limits = limits_of(size)
    say("starting a rollout server")
    server = Server(
        policy,
        draft,
        folder / "rollout-server.log",
        (
            *("--dtype", "bfloat16", "--max-num-seqs", "4", "--num-gpu-blocks-override", "64"),
            *("--stage-bytes", str(int(_HELD * size))),
        ),
        core=None if options.cores is None else options.cores[0],
    )
    releases: list[dict[str, Any]] = []
    with Servers([server]):
        for number in range(1, 1 + 2 * options.size_releases):
            loaded = number > options.size_releases
            tensors = big.another(draft, number)
            with _load(server.http, STREAMS if loaded else 0) as seen:
                releases.append(_release(server, tensors, number, loaded))
            del tensors
            releases[-1] |= {"failed": seen.failed, "steps": seen.gaps}
            say(_line(releases[-1]))
        server.service.check()
    return _figures(size, limits, releases)


def _release(server: Server, tensors: big.Tensors, number: int, loaded: bool) -> dict[str, Any]:
    """Stage, commit, go back, go forth."""
    specs = [spec_of(name, tensor) for name, tensor in sorted(tensors.items())]
    name = f"draft-{number}"

    def send() -> pb.StageResult:
        return stage(
            server.stub,
            stage_id=name,
            kind=pb.STAGE_KIND_DRAFT,
            version=number,
            tensors=tensors,
            specs=specs,
            timeout=10 * CALL_TIMEOUT,
        )

    began = time.monotonic()
    staged = send()
    seconds = time.monotonic() - began
    commits = [server.stub.Commit(pb.CommitRequest(stage_ids=[name]), timeout=CALL_TIMEOUT)]
    commits.append(server.stub.RollBack(pb.RollBackRequest(), timeout=CALL_TIMEOUT))
    again = send()
    commits.append(server.stub.Commit(pb.CommitRequest(stage_ids=[name]), timeout=CALL_TIMEOUT))
    state = server.stub.GetState(pb.GetStateRequest(read_back=True), timeout=CALL_TIMEOUT)
    return {
        "loaded": loaded,
        "bytes": staged.bytes_received,
        "bytes_again": again.bytes_received,
        "seconds": seconds,
        "prepare_seconds": staged.prepare_seconds,
        "not_prepared": staged.not_prepared,
        "commit_seconds": [commit.seconds for commit in commits],
        "worker_seconds": [commit.worker_seconds for commit in commits],
        "not_ready": state.not_ready,
    }


def _figures(size: int, limits: dict[str, float], releases: list[dict[str, Any]]) -> dict[str, Any]:
    def median(key: str, loaded: bool) -> float:
        found = [r[key] for r in releases if r["loaded"] is loaded]
        return statistics.median(
            value for one in found for value in (one if isinstance(one, list) else [one])
        )

    def rate(loaded: bool) -> float:
        return statistics.median(
            r["bytes"] / (r["seconds"] - r["prepare_seconds"])
            for r in releases
            if r["loaded"] is loaded
        )

    step = median("steps", True)
    worker = max(median("worker_seconds", False), median("worker_seconds", True))
    commit_steps = median("commit_seconds", True) / step
    found: dict[str, Any] = {
        "bytes": size,
        "limits": limits,
        "staged_bytes_per_second": {"idle": rate(False), "generating": rate(True)},
        "staged_of_loopback": {
            "idle": rate(False) / limits["loopback"],
            "generating": rate(True) / limits["loopback"],
        },
        "prepare_seconds": {
            "idle": median("prepare_seconds", False),
            "generating": median("prepare_seconds", True),
        },
        "commit_seconds": {
            "idle": median("commit_seconds", False),
            "generating": median("commit_seconds", True),
        },
        "commit_worker_seconds": {
            "idle": median("worker_seconds", False),
            "generating": median("worker_seconds", True),
        },
        "copy_seconds": size / limits["copy"],
        "step_seconds": step,
        "commit_steps": commit_steps,
        "releases": [{k: v for k, v in r.items() if k != "steps"} for r in releases],
    }
    failed = sum(len(r["failed"]) for r in releases)
    wrong = sum(bool(r["not_ready"] or r["not_prepared"]) for r in releases)
    again = sum(r["bytes_again"] for r in releases)
    copies = worker / (size / limits["copy"])
    rows: list[tuple[str, float, str, bool]] = [
        ("size of the head, GB", size / 1e9, "0.4 .. 0.8", 0.4e9 <= size <= 0.81e9),
        ("failed requests", failed, "0", failed == 0),
        ("releases that were not prepared or not read back", wrong, "0", wrong == 0),
        ("bytes sent to go back and forth", again, "0", again == 0),
        ("engine's stall / a memory copy of the bytes", copies, "<= 1", copies <= 1),
        ("commit, median, in steps", commit_steps, "<= 2", commit_steps <= 2),
    ]
    found["targets"] = [asdict(Target(*row)) for row in rows]
    return found


def table(found: dict[str, Any]) -> str:
    """For people."""
    limits = found["limits"]
    lines = [
        f"a head of {found['bytes'] / 1e9:.2f} GB; loopback {limits['loopback'] / 1e9:.2f} GB/s, "
        f"SHA-256 {limits['sha256'] / 1e9:.2f} GB/s, memory copy {limits['copy'] / 1e9:.2f} GB/s "
        f"({1e3 * found['copy_seconds']:.0f} ms), a step {1e3 * found['step_seconds']:.0f} ms",
        f"{'server':<12}{'staged GB/s':>12}{'of loopback':>13}{'prepare s':>11}{'commit ms':>11}"
        f"{'stall ms':>10}",
    ]
    for kind in ("idle", "generating"):
        lines.append(
            f"{kind:<12}{found['staged_bytes_per_second'][kind] / 1e9:>12.3f}"
            f"{found['staged_of_loopback'][kind]:>13.3f}{found['prepare_seconds'][kind]:>11.2f}"
            f"{1e3 * found['commit_seconds'][kind]:>11.1f}"
            f"{1e3 * found['commit_worker_seconds'][kind]:>10.2f}"
        )
    return "\n".join(lines)


def _line(release: dict[str, Any]) -> str:
    worker = ", ".join(f"{1e3 * s:.1f}" for s in release["worker_seconds"])
    return (
        f"{'generating' if release['loaded'] else 'idle'}: {release['bytes'] / 1e9:.2f} GB staged "
        f"in {release['seconds']:.1f} s, {release['prepare_seconds']:.1f} of them to prepare; "
        f"stalls {worker} ms {release['not_prepared']}"
    )


class _Seen:
    def __init__(self) -> None:
        self.failed: list[str] = []
        self.gaps: list[float] = []


@contextmanager
def _load(http: str, streams: int) -> Iterator[_Seen]:
    """So many requests in flight, streamed, until the block ends."""
    seen, over = _Seen(), threading.Event()
    threads = [
        threading.Thread(target=_stream, args=(http, number, seen, over))
        for number in range(streams)
    ]
    for thread in threads:
        thread.start()
    try:
        if streams:
            # Steps before anything else happens.
            deadline = time.monotonic() + CALL_TIMEOUT
            while len(seen.gaps) < 8 and not seen.failed and time.monotonic() < deadline:
                time.sleep(0.05)
        yield seen
    finally:
        over.set()
        for thread in threads:
            thread.join(CALL_TIMEOUT)


def _stream(http: str, number: int, seen: _Seen, over: threading.Event) -> None:
    body = {
        "model": MODEL,
        "prompt": [3 + number, 5, 8, 13],
        "max_tokens": 200,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.Client(base_url=http, timeout=CALL_TIMEOUT) as client:
        while not over.is_set() and len(seen.failed) < 10:
            try:
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    last = 0.0
                    for line in answer.iter_lines():
                        if over.is_set():
                            break
                        if not line.startswith("data: {"):
                            continue
                        now = time.monotonic()
                        if last:
                            seen.gaps.append(now - last)
                        last = now
            except httpx.HTTPError as error:
                seen.failed.append(f"{type(error).__name__}: {error}")
