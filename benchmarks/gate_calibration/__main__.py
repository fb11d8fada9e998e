"""``python -m benchmarks.gate_calibration``: predicted against measured acceptance in real vLLM."""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness import Target, end_on_sigterm, finish, options, say, table, write
from draft_trainer.drafters import Draft
from draft_trainer.drafters.acceptance import AcceptanceEstimate, Method, expected_acceptance
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.offline.record import Recorder
from draft_trainer.recordings.recording import Recording
from draft_trainer.releases.registry import Registry
from examples.arithmetic_grpo.rollouts import RolloutClient, SpecCounters
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids
from examples.local_services import RolloutServer
from slipstream.v1 import release_pb2

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "arithmetic_grpo"
NOISE = [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 1.0]
SEED = 0
_PROMPTS_AT_ONCE = 64
DRAFT_LENGTH = 3
PROBLEMS = 256
SAMPLES = 4
"""Completions of each problem."""
TOLERANCE = 0.02
STANDARD_ERROR = 0.01
LEAST_RELEASES = 10


@dataclass(frozen=True)
class Point:
    """Acceptance lengths of one release.

    Attributes:
        version: draft version.
        noise: share of noise in its matrices.
        predicted: by the gate's estimator from states of the very rollouts that were measured.
        held_out: by the same from states of other rollouts of the same prompts, recorded before, as
            a gate predicts.
        held_out_error: standard error of ``held_out``.
        per_position: ``predicted`` at each draft position, chained.
        measured: vLLM's counters.
        seconds: of both predictions.
    """

    version: int
    noise: float
    predicted: float
    held_out: float
    held_out_error: float
    per_position: tuple[float, ...]
    measured: SpecCounters
    seconds: float

    @property
    def measured_length(self) -> float:
        """Tokens per verification step, bonus token included."""
        return self.measured.acceptance_length or 1.0

    @property
    def relative(self) -> float:
        """``predicted`` over measured, less 1."""
        return self.predicted / self.measured_length - 1

    @property
    def held_out_relative(self) -> float:
        """``held_out`` over measured, less 1."""
        return self.held_out / self.measured_length - 1

    @property
    def measured_error(self) -> float:
        """Standard error of the measurement over it."""
        return self.measured.standard_error / self.measured_length

    def to_dict(self) -> dict[str, Any]:
        """All figures."""
        return asdict(self) | {
            "measured_length": self.measured_length,
            "measured_standard_error": self.measured.standard_error,
            "relative": self.relative,
            "held_out_relative": self.held_out_relative,
        }


COLUMNS = [
    *("draft", "noise", "drafts", "measured", "s.e.", "predicted", "off by"),
    *("held out", "s.e.", "off by"),
]


def row(p: Point) -> list[str]:
    """A release's line of the table."""
    found = p.measured
    return [
        *(str(p.version), f"{p.noise:.2f}", str(found.drafts), f"{p.measured_length:.3f}"),
        *(f"{found.standard_error:.3f}", f"{p.predicted:.3f}", f"{p.relative:+.2%}"),
        *(f"{p.held_out:.3f}", f"{p.held_out_error:.3f}", f"{p.held_out_relative:+.2%}"),
    ]


def targets(points: Sequence[Point]) -> list[Target]:
    """What the gate's figures are held to."""
    lengths = [p.measured_length for p in points]
    off_by = "greatest |predicted / measured - 1|, states of"
    return [
        Target.at_least("releases", len(points), LEAST_RELEASES),
        Target.at_least("spread of measured lengths", max(lengths) - min(lengths), 1.0),
        Target.at_most(
            "greatest standard error of a measurement, relative",
            max(p.measured_error for p in points),
            STANDARD_ERROR,
        ),
        Target.at_most(
            f"{off_by} the measured rollouts", max(abs(p.relative) for p in points), TOLERANCE
        ),
        Target.at_most(
            f"{off_by} other rollouts of the prompts",
            max(abs(p.held_out_relative) for p in points),
            TOLERANCE,
        ),
    ]


def main(argv: list[str] | None = None) -> int:
    """Command line entry; the exit status is 0 only if every prediction is within 2 %."""
    chosen = _parse(argv)
    end_on_sigterm()
    points: list[Point] = []
    with (
        tempfile.TemporaryDirectory() as temporary,
        contextlib.closing(_measure(chosen, Path(temporary))) as measured,
    ):
        for point in measured:
            points.append(point)
            say("  ".join(row(point)))
            write(chosen.json, _figures(chosen, points, complete=False), targets(points))
    print(table("", COLUMNS, [row(point) for point in points]))
    return finish(chosen.json, _figures(chosen, points, complete=True), targets(points))


def _figures(chosen: argparse.Namespace, points: Sequence[Point], complete: bool) -> dict[str, Any]:
    return {
        "settings": {
            "policy": "examples/arithmetic_grpo/policy",
            "draft": "examples/arithmetic_grpo/draft",
            "draft_length": DRAFT_LENGTH,
            "draft_sample_method": chosen.method,
            "temperature": 1.0,
            "problems": PROBLEMS,
            "samples": SAMPLES,
        },
        "complete": complete,
        "points": [point.to_dict() for point in points],
    }


def make_releases(draft: Path, registry: Registry, noise: list[float], seed: int) -> list[int]:
    """Write the draft as release 0, then one release for each share of noise in its matrices.

    A share a makes of a matrix W the matrix (1 - a) W + a N, with N normal and of W's own spread:
    at 1 it is a random head.

    Args:
        draft: a trained draft.
        registry: an empty one.
        noise: shares in [0, 1].
        seed: of the noise.

    Returns:
        The draft versions, release 0 first.
    """
    registry.import_initial(draft)
    versions = [0]
    generator = torch.Generator().manual_seed(seed)
    for share in noise:
        head = Eagle3().read(registry.path(0)).draft()
        with torch.no_grad():
            for weight in head.parameters():
                if weight.dim() > 1:
                    drawn = torch.randn(weight.shape, generator=generator) * weight.std()
                    weight.mul_(1 - share).add_(drawn, alpha=share)
        manifest = registry.create(
            head, release_pb2.ReleaseManifest(parent_version=0, run_id=f"noise {share:g}")
        )
        versions.append(manifest.draft_version)
    return versions


def _measure(chosen: argparse.Namespace, folder: Path) -> Generator[Point]:
    """One release after the other; while the server answers for one, the last is predicted."""
    registry = Registry(folder / "releases")
    versions = make_releases(EXAMPLE / "draft", registry, NOISE, SEED)
    prompts = [prompt_ids(problem) for problem in held_out_problems(PROBLEMS)]
    predictor = _Predictor(registry, folder, prompts, chosen)
    predictions: collections.deque[Future[Point]] = collections.deque()
    say("starting rollout-server (real vLLM)")
    with (
        RolloutServer(
            folder / "rollout-server.log",
            *("--draft-length", str(DRAFT_LENGTH)),
            *("--draft-sample-method", chosen.method),
            draft=registry.path(0),
        ) as server,
        # One thread: its work is done in the order in which it was given.
        ThreadPoolExecutor(1) as pool,
    ):
        # Rollouts of a draft that is measured nowhere else: what a gate would hold out.
        server.swap(len(versions), registry.tensors(0))
        before = rollouts(server, prompts, SAMPLES)
        held_out = pool.submit(predictor.states, before)
        try:
            for version, noise in zip(versions, [0.0, *NOISE], strict=True):
                # Version 0 has drafted while the server warmed up.
                number = len(versions) + 1 + version
                server.swap(number, registry.tensors(version))
                completions = rollouts(server, prompts, SAMPLES)
                measured = counters_of(server, number)
                predictions.append(
                    pool.submit(predictor.point, version, noise, measured, completions, held_out)
                )
                while predictions and predictions[0].done():
                    yield predictions.popleft().result()
            while predictions:
                yield predictions.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def rollouts(
    server: RolloutServer, prompts: Sequence[list[int]], samples: int, temperature: float = 1.0
) -> list[list[int]]:
    """Completions: all of the first prompt, of the second, ... Raises RuntimeError: one failed."""
    # It asks a trainer only for releases, of which there are none.
    client = RolloutClient(server.http, server.control, server.control, "policy")
    completions: list[list[int]] = []
    try:
        # Some at a time: a starved server drops some of 500 connections.
        for start in range(0, len(prompts), _PROMPTS_AT_ONCE):
            some = prompts[start : start + _PROMPTS_AT_ONCE]
            generation, _ = client.generate(some, samples, temperature=temperature)
            if generation.failed:
                raise RuntimeError(f"{len(generation.failed)} failed: {generation.failed[0]}")
            completions += generation.completions
    finally:
        client.close()
    return completions


def counters_of(server: RolloutServer, version: int) -> SpecCounters:
    """vLLM's counters of a draft version."""
    found = server.counters()[version]
    positions = tuple(found.accepted_per_position)
    return SpecCounters(found.drafts, found.draft_tokens, found.accepted_tokens, positions)


class _Predictor:
    """Has the policy's own forward pass record rollouts, as a running loop would, and predicts.

    Args:
        registry: the releases.
        folder: recordings go there, one at a time.
        prompts: token ids of each.
        chosen: as they were given.
    """

    def __init__(
        self,
        registry: Registry,
        folder: Path,
        prompts: Sequence[list[int]],
        chosen: argparse.Namespace,
    ) -> None:
        self._registry, self._folder = registry, folder
        self._prompts, self._options = prompts, chosen
        self._model = AutoModelForCausalLM.from_pretrained(EXAMPLE / "policy").eval()
        self._number = 0

    def states(self, completions: Sequence[list[int]]) -> Recording:
        """Of ``samples`` completions of each prompt."""
        self._number += 1
        folder = self._folder / f"states-{self._number}"
        rows = [self._prompts[i // SAMPLES] for i in range(len(completions))]
        with Recorder(self._model, folder) as recorder:
            recorder.add(list(zip(rows, completions, strict=True)))
        return Recording(folder)

    def point(
        self,
        version: int,
        noise: float,
        measured: SpecCounters,
        completions: Sequence[list[int]],
        held_out: Future[Recording],
    ) -> Point:
        """Both predictions of a release beside its measurement."""
        clock = time.perf_counter()
        head = Eagle3().read(self._registry.path(version)).draft()
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

    def _expected(self, head: Draft, recording: Recording) -> AcceptanceEstimate:
        recording.fit_to(head.config)
        samples = [recording[i] for i in range(len(recording))]
        assert head.draft_vocab_ids is not None
        heads = recording.policy_heads(head.draft_vocab_ids)
        method: Method = self._options.method
        return expected_acceptance(head, samples, heads, DRAFT_LENGTH, method)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options(
        "gate_calibration",
        "Makes twelve releases of the arithmetic example's draft, from trained to "
        "random, swaps each into one real vLLM server, and compares vLLM's own counters with the "
        "acceptance length that the gate expects. Progress goes to stderr, tables to stdout.",
    )
    parser.add_argument(
        "--method",
        choices=("probabilistic", "greedy"),
        default="probabilistic",
        help="how vLLM drafts",
    )
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
