"""GRPO on SmolLM2-135M-Instruct with a frozen and an adapted draft, on real vLLM.

``python -m examples.smollm_grpo.run`` (or ``make real``) runs the demo's loop on a real language
model: policy with float32 masters, draft trainer and vLLM server as three processes. It
prints a live table, keeps its state after every step, and goes on where it was interrupted. Each
seed leaves ``report.html``, ``acceptance.png`` and ``summary.json``.

vLLM drafts three tokens for every request (``--speculation fixed``): on a CPU, ``auto`` would draft
nothing for the 16 requests of an arm, and there would be no acceptance to compare.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from draft_trainer.drafters.ops import cpu_precision
from draft_trainer.files import written_whole
from examples.arithmetic_grpo.live_table import LiveTable
from examples.arithmetic_grpo.loop import GrpoLoop, LoopSettings
from examples.arithmetic_grpo.processes import ServiceError, Services
from examples.arithmetic_grpo.records import (
    ADAPTED,
    FROZEN,
    MIXED,
    OFF,
    RunRecord,
    StepRecord,
)
from examples.arithmetic_grpo.report import write_report
from examples.arithmetic_grpo.rollouts import RolloutClient
from examples.figures import finish, write
from examples.local_services import (
    DRAFT_LENGTH,
    READY_TIMEOUT,
    RolloutServer,
    Settings,
    draft_trainer,
)
from examples.smollm_grpo import model as smollm
from examples.smollm_grpo.masters import MasterAdamW
from examples.smollm_grpo.summary import (
    greedy_differences,
    record_from,
    targets_of,
    targets_over,
    verdicts_of,
    write_summary,
)
from examples.smollm_grpo.task import Tasks
from policy_bridge import BridgeConfig, PolicyBridge
from slipstream.errors import RefusedError
from slipstream.v1 import release_pb2 as release_pb

HERE = Path(__file__).resolve().parent
SAMPLES = {FROZEN: 2, ADAPTED: 2, OFF: 1, MIXED: 1}
"""Completions of each prompt by arm."""
GREEDY_PROMPTS = 16


def main(argv: list[str] | None = None) -> int:
    """Run every seed that is not finished; the exit status is 0 only if every claim holds."""
    options = _parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # The services run in sessions of their own: SIGTERM has to stop them, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    documents: dict[int, dict[str, Any]] = {}
    try:
        documents = _measured(options.json, options.steps)
        for seed in (seed for seed in options.seeds if seed not in documents):
            directory = options.out / f"seed-{seed}"
            directory.mkdir(parents=True, exist_ok=True)
            summary = directory / "summary.json"
            if not summary.exists():
                smollm.check()
                run = _Run(options, seed, directory).run()
                write_report(run, targets_of(run), directory / "report.html")
                write_summary(run, summary)
            print(f"{summary}\n{directory / 'report.html'}")
            documents[seed] = json.loads(summary.read_text())
            documents[seed]["figures"] |= {"cpu": documents[seed]["machine"]["cpu"]}
            write(options.json, _figures(documents, options.steps), targets_over(documents))
    except RefusedError as error:
        print(f"smollm: {error}", file=sys.stderr)
        return 2
    except ServiceError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command goes on. Logs: {directory}", file=sys.stderr)
        return 130
    return finish(options.json, _figures(documents, options.steps), targets_over(documents))


def _figures(documents: dict[int, dict[str, Any]], steps: int) -> dict[str, Any]:
    seeds = {str(seed): document["figures"] for seed, document in documents.items()}
    return {"steps": steps, "seeds": seeds}


def _measured(path: Path | None, steps: int) -> dict[int, dict[str, Any]]:
    """Figures and targets of the seeds that an earlier ``--json`` has: a seed takes long.

    Raises RefusedError: they are of runs of another length.
    """
    if path is None or not path.exists():
        return {}
    found = json.loads(path.read_text())
    if found["steps"] != steps:
        raise RefusedError(
            str(path), f"runs of {found['steps']} steps", f"of {steps}", "give another --json"
        )
    return {
        int(seed): {
            "figures": figures,
            "targets": [
                {**target, "name": target["name"].removesuffix(f", seed {seed}")}
                for target in found["targets"]
                if target["name"].endswith(f", seed {seed}")
            ],
        }
        for seed, figures in found["seeds"].items()
    }


class _Run:
    """One seed's run.

    Args:
        options: of the command line.
        seed: of problems and training.
        directory: of the run; holds the state of one that was interrupted.
    """

    def __init__(self, options: argparse.Namespace, seed: int, directory: Path) -> None:
        self._options, self._seed, self._directory = options, seed, directory
        self._state = directory / "state.safetensors"
        names = ("policy", "draft", "steps", "prompts", "learning_rate")
        settings: dict[str, object] = {name: str(getattr(options, name)) for name in names}
        self._record = RunRecord(settings, style="solutions with steps")
        self._verdicts: dict[float, dict[str, Any]] = {}
        self._began = time.perf_counter()

    def run(self) -> RunRecord:
        """Start the services, train, measure; return what happened."""
        options, directory = self._options, self._directory
        # One core is the draft trainer's: threads that share theirs have all others wait for them.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
        policy = options.policy or smollm.policy()
        torch.manual_seed(self._seed)
        # States before they are needed: a file that does not fit is named before services start.
        kept = self._kept()
        given = (*smollm.SERVED, "--max-num-seqs", "64")
        server = RolloutServer(
            directory / "rollout-server.log", *given, policy=policy, draft=options.draft
        )
        trainer = draft_trainer(
            directory, server.control, self._settings(policy), draft=options.draft
        )
        with Services(trainer, server.service) as services:
            print(
                f"starting draft-trainer and rollout-server (logs in {directory}) ...", flush=True
            )
            trainer.wait_ready(READY_TIMEOUT)
            server.service.wait_ready(3 * READY_TIMEOUT)
            print(f"ready after {time.perf_counter() - self._began:.0f} s\n", flush=True)
            rollouts = RolloutClient(server, trainer.health)
            try:
                try:
                    self._train(policy, kept, rollouts, services)
                except (grpc.RpcError, RuntimeError):
                    services.check()  # the log of a service that ended says why
                    raise
                seconds, peak = trainer.usage()
                self._record.cost |= {
                    "trainer_cpu_seconds": seconds,
                    "trainer_peak_bytes": float(peak),
                }
            finally:
                rollouts.close()
        self._record.total_seconds += time.perf_counter() - self._began
        self._state.unlink()
        return self._record

    def _train(
        self,
        policy: Path,
        kept: dict[str, torch.Tensor],
        rollouts: RolloutClient,
        services: Services,
    ) -> None:
        options, record = self._options, self._record
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=getattr(torch, cpu_precision()))
        optimizer = MasterAdamW(model, options.learning_rate)
        if kept:
            optimizer.restore(kept)
            kept.clear()
        tokenizer = AutoTokenizer.from_pretrained(policy)
        tasks = Tasks(tokenizer, self._seed)
        config = BridgeConfig(
            rollouts.trainer,
            f"smollm-{self._seed}",
            (rollouts.server.control,),
            states_dtype="bfloat16",
            policy_dtype=cpu_precision(),
        )
        settings = LoopSettings(
            options.prompts,
            SAMPLES,
            options.learning_rate,
            options.steps,
            # A row's float32 log-probs over 49,152 tokens take 50 MB.
            log_prob_batch=4,
            update_batch=4,
        )
        table = LiveTable(options.steps)
        with PolicyBridge(model, config) as bridge:
            loop = GrpoLoop(
                *(model, bridge, rollouts, settings, tasks, optimizer),
                first_step=len(record.steps),
                keep=partial(self._keep, rollouts, optimizer),
            )
            loop.swaps = record.swaps  # of earlier processes too
            loop.announce_initial_policy()
            for index in range(len(record.steps), options.steps):
                services.check()
                table.show(loop.step(index))
            record.bridge = {key: str(value) for key, value in vars(bridge.stats()).items()}
            held_out = Tasks(tokenizer, "held-out")
            prompts = [held_out.prompt_ids(held_out.problem()) for _ in range(GREEDY_PROMPTS)]
            record.trainer["greedy"] = greedy_differences(
                model, rollouts, prompts, held_out.max_tokens
            )

    def _keep(self, rollouts: RolloutClient, optimizer: MasterAdamW, step: StepRecord) -> None:
        """Write the state after a step's update, with the records up to it."""
        for verdict in rollouts.verdicts():
            self._verdicts.setdefault(verdict.judged_at, _verdict(verdict, step.policy_version))
        self._record.trainer["verdicts"] = list(self._verdicts.values())
        self._record.steps.append(step)
        document = asdict(self._record)
        document["total_seconds"] += time.perf_counter() - self._began
        with written_whole(self._state) as path:
            save_file(optimizer.tensors(), path, metadata={"run": json.dumps(document)})

    def _kept(self) -> dict[str, torch.Tensor]:
        """The state of an interrupted run, whose records are taken over; empty if there is none."""
        if not self._state.exists():
            return {}
        with safe_open(self._state, "pt") as file:
            record = record_from(json.loads(file.metadata()["run"]))
            if record.settings != self._record.settings:
                raise RefusedError(
                    str(self._state),
                    f"a run with {record.settings}",
                    f"one with {self._record.settings}",
                    "give the options it began with, or another --out",
                )
            self._record = record
            self._verdicts = {verdict["judged_at"]: verdict for verdict in verdicts_of(record)}
            print(f"{self._state}: goes on after step {len(record.steps)}", flush=True)
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def _settings(self, policy: Path) -> Settings:
        return {
            "draft": {"policy": str(policy.resolve())},
            "training": {
                "compute_dtype": cpu_precision(),
                "ttt_steps": DRAFT_LENGTH,
                "seed": self._seed,
            },
            # The loop itself switches the server between old and new drafts to compare them.
            "publish": {"reconcile_s": 0, "num_speculative_tokens": DRAFT_LENGTH},
            "trial": {"enabled": False},
            # The comparison needs an adapted draft, whether or not it pays.
            "economy": {"mode": "always"},
        }


def _verdict(verdict: release_pb.Verdict, policy_version: int) -> dict[str, Any]:
    """The figures of a verdict of the gate, and the policy version in which it was seen first."""
    return {
        "judged_at": verdict.judged_at,
        "outcome": verdict.outcome,
        "draft_version": verdict.draft_version if verdict.HasField("draft_version") else None,
        "incumbent_version": verdict.incumbent_version,
        "policy_version": policy_version,
        "candidate": verdict.gate.candidate_acceptance_length,
        "incumbent": verdict.gate.incumbent_acceptance_length,
        "half_width": verdict.gate.difference_half_width,
        "per_position": list(verdict.gate.candidate_acceptance_per_position),
        "prompts": verdict.gate.prompts,
    }


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.smollm_grpo.run",
        description="GRPO on SmolLM2-135M-Instruct and tasks of reasoning-gym, on real vLLM, with "
        "a frozen and an adapted draft. 30 steps and three seeds: --steps 30 --seeds 0 1 2.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=12, help="GRPO steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a run for each")
    parser.add_argument(
        "--prompts", type=int, default=8, help=f"of a step, {sum(SAMPLES.values())} samples each"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-5, help="of the policy")
    parser.add_argument("--policy", type=Path, help="checkpoint (default: with supervised start)")
    parser.add_argument("--draft", type=Path, default=HERE / "draft", help="release 0")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/real"), help="folder; an unfinished run goes on"
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="also write all seeds' figures here; a seed that the file has is not run again",
    )
    options = parser.parse_args(argv)
    if options.steps < 2:
        parser.error(
            f"--steps: {options.steps}, expected 2 or more: the first has no draft trained"
        )
    if not (options.draft / "config.json").exists():
        parser.error(f"--draft: {options.draft} holds no config.json")
    return options


if __name__ == "__main__":
    sys.exit(main())
