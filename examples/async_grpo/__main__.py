"""Measures what speculation saves where generation and training overlap: a table, on real vLLM.

Synchronous (lag 0) and asynchronous (lag 1, or more), each without speculation, with a frozen draft
and with one that a draft trainer adapts beside the run. All arms train the same policy on the same
problems on one rollout server, one after the other.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draft_trainer.drafters.ops import cpu_precision
from examples.arithmetic_grpo.processes import ServiceError, Services, free_port
from examples.arithmetic_grpo.records import ADAPTED, FROZEN, OFF
from examples.async_grpo.loop import AsyncGrpo, AsyncSettings, AsyncStep
from examples.figures import Target, finish, table, write
from examples.local_services import (
    ARITHMETIC,
    DRAFT_LENGTH,
    READY_TIMEOUT,
    SHORT,
    RolloutServer,
    Settings,
    draft_trainer,
)
from policy_bridge import BridgeConfig, PolicyBridge
from policy_bridge.adapters.completions import CompletionsClient
from slipstream.client import open_channel
from slipstream.v1 import draft_trainer_pb2 as trainer_pb
from slipstream.v1 import draft_trainer_pb2_grpc as trainer_grpc

SPECULATION = (OFF, FROZEN, ADAPTED)
LAGS = (0, 1, 2, 4)
CALL_SECONDS = 60.0
SETTINGS: Settings = {
    **SHORT,
    "training": {
        **SHORT["training"],
        "compute_dtype": cpu_precision(),
        "weight_averaging": 0.95,
        # About one candidate for each sync.
        "steps_per_candidate": 32,
        # The policy's core and the engine's come first.
        "nice": 19,
    },
    "publish": {"num_speculative_tokens": DRAFT_LENGTH},
    "gate": {"newest_versions": 4, "confidence": 0.6},
    "trial": {"enabled": False},
}

Pair = tuple[int, int]
Counts = dict[Pair, tuple[int, int]]
"""Drafts and accepted tokens by draft and policy version."""


@dataclass
class Arm:
    """One run of the loop.

    Attributes:
        lag, speculation, seed: which.
        steps: of it.
        pairs: drafts and accepted tokens by pair of draft and policy version.
        policy_commits, draft_commits: that the server made.
        accepted, refused: samples that the draft trainer took and refused.
    """

    lag: int
    speculation: str
    seed: int
    steps: list[AsyncStep] = field(default_factory=list)
    pairs: Counts = field(default_factory=dict)
    policy_commits: int = 0
    draft_commits: int = 0
    accepted: int = 0
    refused: int = 0

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verification step; None without speculation."""
        drafts, accepted = (
            map(sum, zip(*self.pairs.values(), strict=True)) if self.pairs else (0, 0)
        )
        return 1 + accepted / drafts if drafts else None

    def mean(self, phase: str) -> float:
        """Mean seconds of a phase (or "step") over the steps after the first, which fills the
        pipeline."""
        counted = self.steps[1:] or self.steps
        return statistics.fmean(
            step.total if phase == "step" else step.seconds[phase] for step in counted
        )

    def figures(self) -> dict[str, Any]:
        """Return the arm's figures for JSON."""
        spans: dict[int, int] = {}
        for step in self.steps:
            for count, rows in step.spans.items():
                spans[count] = spans.get(count, 0) + rows
        return {
            "lag": self.lag,
            "speculation": self.speculation,
            "seed": self.seed,
            "step_seconds": self.mean("step"),
            "exposed_generation_seconds": self.mean("generation"),
            "training_seconds": self.mean("training"),
            "sync_seconds": self.mean("sync"),
            "batch_seconds": statistics.fmean(step.batch_seconds for step in self.steps),
            "tokens_per_step": statistics.fmean(step.tokens for step in self.steps),
            "acceptance_length": self.acceptance_length,
            "reward_last_steps": statistics.fmean(step.reward for step in self.steps[-5:]),
            "largest_lag": max(step.lag for step in self.steps),
            "completions_by_policy_versions": spans,
            "failed_requests": sum(len(step.failed) for step in self.steps),
            "policy_commits": self.policy_commits,
            "draft_commits": self.draft_commits,
            "samples_accepted": self.accepted,
            "samples_refused": self.refused,
            "pairs": [
                {"draft": draft, "policy": policy, "drafts": drafts, "accepted": accepted}
                for (draft, policy), (drafts, accepted) in sorted(self.pairs.items())
            ],
            "steps": [asdict(step) for step in self.steps],
        }


class Pairs:
    """The server's counts by pair of draft and policy, from one reading to the next."""

    def __init__(self, server: RolloutServer) -> None:
        self._server = server
        self._seen = self._read()

    def _read(self) -> Counts:
        return {
            (c.draft_version, c.policy_version): (c.drafts, c.accepted_tokens)
            for c in self._server.acceptance().pairs
        }

    def add_to(self, arm: Arm) -> None:
        """Add what was counted since the last call."""
        seen, self._seen = self._seen, self._read()
        for pair, (drafts, accepted) in self._seen.items():
            before = seen.get(pair, (0, 0))
            total = arm.pairs.get(pair, (0, 0))
            found = (total[0] + drafts - before[0], total[1] + accepted - before[1])
            if found[0]:
                arm.pairs[pair] = found


def run_arm(arm: Arm, options: argparse.Namespace, server: RolloutServer, folder: Path) -> None:
    """Take all steps of an arm on a server that is put back to where it began."""
    server.swap(0, load_file(options.draft / "model.safetensors"))
    server.speculate(arm.speculation != OFF)
    before = server.state()
    torch.manual_seed(arm.seed)
    model = AutoModelForCausalLM.from_pretrained(
        options.policy, dtype=torch.float32, attn_implementation="eager"
    )
    settings = AsyncSettings(
        options.steps, arm.lag, options.prompts, options.samples, options.learning_rate
    )
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        trainer = f"127.0.0.1:{free_port()}"
        if arm.speculation == ADAPTED:
            service = draft_trainer(folder, server.control, SETTINGS)
            stack.enter_context(Services(service))
            service.wait_ready(READY_TIMEOUT)
            trainer = service.health
        bridge = stack.enter_context(
            PolicyBridge(
                model,
                BridgeConfig(
                    trainer=trainer,
                    run_id=f"async-{arm.speculation}-{arm.lag}-{arm.seed}",
                    rollout_servers=(server.control,),
                    bytes_per_step=options.bytes_per_step,
                    states_dtype="bfloat16",
                ),
            )
        )
        if arm.speculation == ADAPTED and not bridge.wait_connected(READY_TIMEOUT):
            raise ServiceError(f"the draft trainer was not reached: {bridge.stats().last_error}")
        client = stack.enter_context(CompletionsClient([server.http], "policy"))
        pairs = Pairs(server)

        def after(step: AsyncStep) -> None:
            pairs.add_to(arm)
            server.service.check()
            arm.steps.append(step)
            show(arm)

        AsyncGrpo(model, bridge, client, settings, arm.seed).run(after)
        if arm.speculation == ADAPTED:
            with open_channel(trainer) as channel:
                stub = trainer_grpc.DraftTrainerStub(channel)
                status = stub.GetStatus(trainer_pb.GetStatusRequest(), timeout=CALL_SECONDS)
            arm.accepted, arm.refused = status.samples_accepted, status.samples_refused
    state = server.state()
    arm.policy_commits = state.policy_commits - before.policy_commits
    arm.draft_commits = state.draft_commits - before.draft_commits


def show(arm: Arm) -> None:
    """One line, over the one before."""
    step = arm.steps[-1]
    text = (
        f"seed {arm.seed}, lag {arm.lag}, {arm.speculation}: step {step.step + 1}, "
        f"{step.total:.2f} s, {step.exposed:.2f} s of it waiting for rollouts, "
        f"{step.lag} versions behind, reward {step.reward:.2f}"
    )
    print(f"\r{text:<100}", end="", flush=True)


def table_of(arms: Sequence[Arm]) -> str:
    """One line an arm."""
    names = ("loop", "seed", "speculation", "step s", "exposed s", "training s", "sync s")
    rows = []
    for arm in arms:
        found = arm.figures()
        length = found["acceptance_length"]
        seconds = ("step_seconds", "exposed_generation_seconds", "training_seconds", "sync_seconds")
        rows.append(
            [
                "synchronous" if arm.lag == 0 else f"lag {arm.lag}",
                *(arm.seed, arm.speculation),
                *(f"{found[name]:.2f}" for name in seconds),
                f"{found['tokens_per_step']:.0f}",
                "-" if length is None else f"{length:.2f}",
                *(found["largest_lag"], arm.draft_commits, found["failed_requests"]),
            ]
        )
    columns = (*names, "tokens", "acceptance", "behind", "drafts", "failed")
    return table("Means of a step", columns, rows)


def targets_of(arms: Sequence[Arm]) -> list[Target]:
    """Return what is promised of the arms that were run."""
    by_name = {(arm.seed, arm.lag, arm.speculation): arm for arm in arms}
    targets = []
    for seed, lag, speculation in by_name:
        if speculation != ADAPTED or lag == 0:
            continue
        adapted, name = by_name[seed, lag, ADAPTED], f"seed {seed}, lag {lag}"
        if off := by_name.get((seed, lag, OFF)):
            ratio = adapted.mean("generation") / off.mean("generation")
            title = f"{name}: exposed generation, adapted / no speculation"
            targets.append(Target.at_most(title, ratio, 1.0))
        synchronous = by_name.get((seed, 0, ADAPTED))
        lengths = [one.acceptance_length if one else None for one in (adapted, synchronous)]
        if lengths[0] is not None and lengths[1] is not None:
            difference = abs(lengths[0] / lengths[1] - 1)
            title = f"{name}: difference of the acceptance length from the synchronous run's"
            targets.append(Target.at_most(title, difference, 0.03))
    targets.append(
        Target.at_most("failed requests", sum(len(s.failed) for a in arms for s in a.steps), 0)
    )
    beyond = sum(step.lag > arm.lag for arm in arms for step in arm.steps)
    targets.append(Target.at_most("steps with a rollout older than the lag allows", beyond, 0))
    commits = min(arm.policy_commits - len(arm.steps) for arm in arms)
    targets.append(Target.at_least("policies committed less steps, fewest of an arm", commits, 1))
    return targets


def figures_of(arms: Sequence[Arm], options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Return the figures for JSON, without this machine's paths."""
    given = {name: value for name, value in vars(options).items() if name not in ("json", "out")}
    settings = {
        name: os.path.relpath(value) if isinstance(value, Path) else str(value)
        for name, value in given.items()
    }
    return {"settings": settings, "seconds": seconds, "arms": [arm.figures() for arm in arms]}


def main(argv: list[str] | None = None) -> int:
    """Run every arm; the exit status is 0 only if every target was met."""
    options = _parse(argv)
    folder = options.out or Path("runs") / time.strftime("async-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    # The services run in sessions of their own: SIGTERM has to stop them, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(1)
    began, arms = time.perf_counter(), []
    try:
        with RolloutServer(
            folder / "rollout-server.log",
            *("--max-num-seqs", str(options.at_once)),
            policy=options.policy,
            draft=options.draft,
        ) as server:
            for seed in options.seeds:
                for lag in options.lags:
                    for speculation in options.speculation:
                        arm = Arm(lag, speculation, seed)
                        arms.append(arm)
                        run_arm(arm, options, server, folder / f"{seed}-{lag}-{speculation}")
                        print()
    except ServiceError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted; everything was stopped, logs are in {folder}", file=sys.stderr)
        return 130
    figures, targets = figures_of(arms, options, time.perf_counter() - began), targets_of(arms)
    write(folder / "summary.json", {"figures": figures}, targets)
    print(f"\n{table_of(arms)}\n{folder / 'summary.json'}")
    for arm_figures in figures["arms"]:
        del arm_figures["steps"], arm_figures["pairs"]
    return finish(options.json, {"figures": figures}, targets)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.async_grpo",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of an arm")
    parser.add_argument(
        "--lags",
        type=int,
        nargs="+",
        choices=LAGS,
        default=[0, 1],
        help="policy versions that a rollout may be behind; 0 is synchronous",
    )
    parser.add_argument(
        "--speculation", nargs="+", choices=SPECULATION, default=list(SPECULATION), help="drafts"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="of problems: all arms for each"
    )
    parser.add_argument("--prompts", type=int, default=12, help="problems of a step")
    parser.add_argument("--samples", type=int, default=2, help="completions of each problem")
    # Few: generation takes longer than training then, as it does where speculation is used.
    parser.add_argument(
        "--at-once", type=int, default=3, help="completions that the server generates at a time"
    )
    parser.add_argument("--learning-rate", type=float, default=8e-4, help="of the policy")
    parser.add_argument(
        "--bytes-per-step", type=int, default=32 << 20, help="budget of captured states per step"
    )
    parser.add_argument(
        "--policy", type=Path, default=ARITHMETIC / "policy", help="checkpoint to train"
    )
    parser.add_argument("--draft", type=Path, default=ARITHMETIC / "draft", help="release 0")
    parser.add_argument(
        "--json", type=Path, help="also write the figures here, without steps and pairs"
    )
    parser.add_argument("--out", type=Path, help="run directory (default: runs/async-<date-time>)")
    options = parser.parse_args(argv)
    for name in ("policy", "draft"):
        if not (getattr(options, name) / "config.json").exists():
            parser.error(f"--{name}: {getattr(options, name)} holds no config.json")
    for name, least in (("steps", 1), ("prompts", 1), ("samples", 2), ("at-once", 1)):
        value = getattr(options, name.replace("-", "_"))
        if value < least:
            parser.error(f"--{name}: {value} is less than {least}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return options


if __name__ == "__main__":
    sys.exit(main())
