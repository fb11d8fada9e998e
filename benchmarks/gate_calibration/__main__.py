"""``python -m benchmarks.gate_calibration``: predicted against measured acceptance in real vLLM."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.acceptance_curve.curve import Acceptance
from benchmarks.acceptance_curve.server import Server
from benchmarks.draft_training.report import machine, target_table
from benchmarks.gate_calibration.points import Point, table, targets
from benchmarks.gate_calibration.releases import make_releases
from draft_trainer.checkpoints.checkpoint import load_head
from draft_trainer.drafters.eagle3.acceptance import AcceptanceEstimate, Method, expected_acceptance
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.files import written_whole
from draft_trainer.recordings.recording import Recording
from draft_trainer.releases.registry import Registry
from examples.arithmetic_grpo.record import Recorder
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "arithmetic_grpo"
NOISE = [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 1.0]
SEED = 0
_PROMPTS_AT_ONCE = 64


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 only if every prediction is within 2 %."""
    options = _parse(argv)
    began = time.perf_counter()
    # So that ``timeout`` ends the server too; what was measured is in the JSON by then.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    points: list[Point] = []
    with (
        tempfile.TemporaryDirectory() as temporary,
        contextlib.closing(_measure(options, Path(temporary))) as measured,
    ):
        for point in measured:
            points.append(point)
            _say(table([point]).splitlines()[1])
            _write(options, points, time.perf_counter() - began, complete=False)
    found = targets(points)
    print(f"{table(points)}\n\n{target_table(found)}")
    _write(options, points, time.perf_counter() - began, complete=True)
    return 0 if all(target.ok for target in found) else 1


def _write(
    options: argparse.Namespace, points: Sequence[Point], seconds: float, complete: bool
) -> None:
    if options.json is None:
        return
    figures = {
        "machine": machine(),
        "settings": {
            "policy": "examples/arithmetic_grpo/policy",
            "draft": "examples/arithmetic_grpo/draft",
            "draft_length": options.draft_length,
            "draft_sample_method": options.method,
            "temperature": 1.0,
            "problems": options.problems,
            "samples": options.samples,
        },
        "complete": complete,
        "seconds": seconds,
        "points": [point.to_dict() for point in points],
        "targets": [dataclasses.asdict(target) for target in targets(points)],
    }
    with written_whole(options.json) as path:
        path.write_text(json.dumps(figures, indent=1) + "\n")


def _measure(options: argparse.Namespace, folder: Path) -> Generator[Point]:
    """One release after the other; while the server answers for one, the last is predicted."""
    registry = Registry(folder / "releases")
    versions = make_releases(EXAMPLE / "draft", registry, NOISE, SEED)
    prompts = [prompt_ids(problem) for problem in held_out_problems(options.problems)]
    predictor = _Predictor(registry, folder, prompts, options)
    predictions: collections.deque[Future[Point]] = collections.deque()
    _say("starting rollout-server (real vLLM)")
    with (
        Server(
            EXAMPLE / "policy",
            registry.path(0),
            folder / "rollout-server.log",
            options.draft_length,
            options.method,
        ) as server,
        # One thread: its work is done in the order in which it was given.
        ThreadPoolExecutor(1) as pool,
    ):
        # Rollouts of a draft that is measured nowhere else: what a gate would hold out.
        server.swap(len(versions), registry.path(0))
        _, before = _rollouts(server, len(versions), prompts, options.samples)
        held_out = pool.submit(predictor.states, before)
        try:
            for version, noise in zip(versions, [0.0, *NOISE], strict=True):
                # Version 0 has drafted while the server warmed up.
                number = len(versions) + 1 + version
                server.swap(number, registry.path(version))
                measured, completions = _rollouts(server, number, prompts, options.samples)
                predictions.append(
                    pool.submit(predictor.point, version, noise, measured, completions, held_out)
                )
                while predictions and predictions[0].done():
                    yield predictions.popleft().result()
            while predictions:
                yield predictions.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _rollouts(
    server: Server, version: int, prompts: Sequence[list[int]], samples: int
) -> tuple[Acceptance, list[list[int]]]:
    """As ``Server.rollouts``, some at a time: a starved server drops some of 500 connections."""
    completions: list[list[int]] = []
    for start in range(0, len(prompts), _PROMPTS_AT_ONCE):
        some = prompts[start : start + _PROMPTS_AT_ONCE]
        # The counters of a version go on from call to call.
        acceptance, more = server.rollouts(version, some, samples)
        completions += more
    return acceptance, completions


class _Predictor:
    """Has the policy's own forward pass record rollouts, as a running loop would, and predicts.

    Args:
        registry: the releases.
        folder: recordings go there, one at a time.
        prompts: token ids of each.
        options: as they were given.
    """

    def __init__(
        self,
        registry: Registry,
        folder: Path,
        prompts: Sequence[list[int]],
        options: argparse.Namespace,
    ) -> None:
        self._registry, self._folder = registry, folder
        self._prompts, self._options = prompts, options
        self._model = AutoModelForCausalLM.from_pretrained(EXAMPLE / "policy").eval()
        self._number = 0

    def states(self, completions: Sequence[list[int]]) -> Recording:
        """Of ``samples`` completions of each prompt."""
        self._number += 1
        folder = self._folder / f"states-{self._number}"
        rows = [self._prompts[i // self._options.samples] for i in range(len(completions))]
        with Recorder(self._model, folder) as recorder:
            recorder.add(list(zip(rows, completions, strict=True)))
        return Recording(folder)

    def point(
        self,
        version: int,
        noise: float,
        measured: Acceptance,
        completions: Sequence[list[int]],
        held_out: Future[Recording],
    ) -> Point:
        """Both predictions of a release beside its measurement."""
        clock = time.perf_counter()
        head, _ = load_head(self._registry.path(version))
        own = self._expected(head, self.states(completions))
        other = self._expected(head, held_out.result())
        return Point(
            version,
            noise,
            own.acceptance_length,
            other.acceptance_length,
            float(other.per_sequence.std()) / other.sequences**0.5,
            own.accepted_per_position,
            measured,
            time.perf_counter() - clock,
        )

    def _expected(self, head: Eagle3Head, recording: Recording) -> AcceptanceEstimate:
        recording.fit_to(head.config)
        samples = [recording[i] for i in range(len(recording))]
        assert head.draft_vocab_ids is not None
        heads = recording.policy_heads(head.draft_vocab_ids)
        method: Method = self._options.method
        return expected_acceptance(head, samples, heads, self._options.draft_length, method)


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gate_calibration",
        description="Makes twelve releases of the arithmetic example's draft, from trained to "
        "random, swaps each into one real vLLM server, and compares vLLM's own counters with the "
        "acceptance length that the gate expects. Progress goes to stderr, tables to stdout.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--problems", type=int, default=256, help="that vLLM solves with every release")
    add("--samples", type=int, default=4, help="completions of each problem")
    add("--draft-length", type=int, default=3, help="k that is served")
    add("--method", choices=("probabilistic", "greedy"), default="probabilistic",
        help="how vLLM drafts")  # fmt: skip
    add("--threads", type=int, default=1, help="torch CPU threads of the predictions")
    add("--json", type=Path, help="write figures and targets there")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return options


if __name__ == "__main__":
    sys.exit(main())
