"""The whole loop in one command: policy, sidecar and a real vLLM server, three processes.

``python -m examples.arithmetic_grpo.demo`` (or ``make demo``) runs GRPO on the arithmetic task,
prints a live table and leaves ``runs/<id>/summary.json`` and ``runs/<id>/report.html``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draft_trainer.drafters.ops import cpu_precision
from draft_trainer.training.cores import core_seconds
from examples.arithmetic_grpo.live_table import LiveTable
from examples.arithmetic_grpo.loop import ArithmeticTask, GrpoLoop, LoopSettings
from examples.arithmetic_grpo.make_mtp import policy_with_mtp
from examples.arithmetic_grpo.processes import Service, ServiceError, Services, free_port
from examples.arithmetic_grpo.records import ADAPTED, FROZEN, MIXED, NGRAM, OFF, RunRecord
from examples.arithmetic_grpo.report import write_report
from examples.arithmetic_grpo.rollouts import RolloutClient
from examples.arithmetic_grpo.speed import measure_speed
from examples.arithmetic_grpo.summary import (
    followed_in,
    net_text,
    pooled_seeds,
    targets_of,
    write_summary,
)
from examples.arithmetic_grpo.watch import addresses, prometheus_beside, served
from examples.figures import Target, target_table
from examples.local_services import (
    DRAFT_LENGTH,
    READY_TIMEOUT,
    RolloutServer,
    Settings,
    draft_trainer,
)
from policy_bridge import BridgeConfig, PolicyBridge
from policy_bridge.sync import policy_tensors

HERE = Path(__file__).resolve().parent


def main(argv: list[str] | None = None) -> int:
    """Run the demo; the exit status is 0 only if every target was met."""
    options = _parse(argv)
    folder = options.out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    # The services run in sessions of their own: SIGTERM has to stop them, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    documents = {}
    for seed in options.seeds:
        directory = folder / f"seed-{seed}" if len(options.seeds) > 1 else folder
        directory.mkdir(parents=True, exist_ok=True)
        try:
            run = _run(options, seed, directory, time.perf_counter())
        except ServiceError as error:
            print(f"\n{error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(
                f"\ninterrupted; everything was stopped, logs are in {directory}", file=sys.stderr
            )
            return 130
        documents[seed] = write_summary(run, directory / "summary.json")
        write_report(run, targets_of(run), directory / "report.html")
        for part, found in followed_in(run).items():
            print(f"seed {seed}, {part}: {found.text()}")
        print(f"seed {seed}, net: {net_text(run)}")
        print(f"\n{directory / 'summary.json'}\n{directory / 'report.html'}")
    pooled = pooled_seeds(documents)
    if options.json:
        options.json.write_text(json.dumps(pooled, indent=1) + "\n")
    print("\n" + target_table([Target(**target) for target in pooled["targets"]]))
    return 0 if all(target["ok"] for target in pooled["targets"]) else 1


def _run(options: argparse.Namespace, seed: int, directory: Path, began: float) -> RunRecord:
    if options.draft_kind == "mtp":
        policy = policy_with_mtp(options.policy, directory / "policy")
        options = argparse.Namespace(**{**vars(options), "policy": policy})
    kind = ("--draft-kind", options.draft_kind)
    server = RolloutServer(
        directory / "rollout-server.log", *kind, policy=options.policy, draft=options.draft
    )
    ports = {name: free_port() for name in ("metrics", "bridge")}
    ports["http"] = int(server.http.rpartition(":")[2])
    torch.manual_seed(seed)
    # A core each for the policy and the trainer: with two threads on two cores, one of the two
    # always waits for the core that the trainer uses.
    torch.set_num_threads(2 if len(os.sched_getaffinity(0)) > 2 else 1)
    run = RunRecord(settings={key: str(value) for key, value in vars(options).items()})
    trainer = draft_trainer(
        directory,
        server.control,
        _settings(options, seed),
        draft=options.draft,
        metrics_port=ports["metrics"],
    )
    prometheus = prometheus_beside(directory, ports) if options.watch else None
    watching = [] if prometheus is None else [prometheus.service]
    with Services(trainer, server.service, *watching) as services:
        print("starting draft-trainer and rollout-server (real vLLM; logs in", directory, end=") ")
        print("...", flush=True)
        trainer.wait_ready(READY_TIMEOUT)
        server.service.wait_ready(READY_TIMEOUT)
        run.start_seconds = time.perf_counter() - began
        print(f"ready after {run.start_seconds:.0f} s\n")
        if options.watch:
            if prometheus is not None:
                prometheus.wait_ready(READY_TIMEOUT)
            for what, address in addresses(trainer.log, prometheus).items():
                print(f"{what:<12}{address}")
            print(flush=True)
        rollouts = RolloutClient(server, trainer.health)
        before = core_seconds(trainer.pid)
        table = LiveTable(options.steps)
        watched = ports["bridge"] if options.watch else None
        try:
            model = _train(options, seed, run, rollouts, services, table, watched)
            seconds, peak = trainer.usage()
            run.cost |= {"trainer_cpu_seconds": seconds, "trainer_peak_bytes": float(peak)}
            after = core_seconds(trainer.pid)
            # Where the kernel does not say how much of it others wanted: all of it, at most.
            took = after.taken_since(before) if before and after else seconds
            run.cost["trainer_took_seconds"] = took
            if options.speed_rounds:
                _speed(options, run, rollouts, trainer, table)
                server.stop()
                _ngram_speed(options, run, model, directory / "ngram-server.log", table)
        finally:
            rollouts.close()
    run.total_seconds = time.perf_counter() - began
    return run


def _train(
    options: argparse.Namespace,
    seed: int,
    run: RunRecord,
    rollouts: RolloutClient,
    services: Services,
    table: LiveTable,
    bridge_port: int | None,
) -> PreTrainedModel:
    # On a CPU, and for a policy this small, eager attention is faster than the fused kernel.
    model = AutoModelForCausalLM.from_pretrained(
        options.policy, dtype=torch.float32, attn_implementation="eager"
    )
    base = {}
    if options.lora:
        model = with_lora(model, options.lora)
        base = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    bridge = PolicyBridge(
        model,
        BridgeConfig(
            trainer=rollouts.trainer,
            run_id=f"arithmetic-{seed}",
            rollout_servers=(rollouts.server.control,),
            bytes_per_step=options.bytes_per_step,
            states_dtype="bfloat16",
        ),
    )
    settings = LoopSettings(
        prompts=options.prompts,
        # As many at once in each arm: tokens/s of two arms compare.
        samples=dict.fromkeys((FROZEN, ADAPTED, OFF, MIXED), 4),
        learning_rate=options.learning_rate,
        steps=options.steps,
    )
    with bridge, served(bridge, bridge_port):
        loop = GrpoLoop(model, bridge, rollouts, settings, ArithmeticTask(seed))
        loop.announce_initial_policy()
        for index in range(options.steps):
            services.check()
            record = loop.step(index)
            run.steps.append(record)
            table.show(record)
        run.swaps = loop.swaps
        status, state = rollouts.status(), rollouts.server.state()
        run.trainer = {
            "swaps_made": loop.draft_commits,
            "swaps_counted": state.draft_commits,
            "policy_commits": state.policy_commits,
            "samples_accepted": status.samples_accepted,
            "samples_refused": status.samples_refused,
            "train_steps": status.train_steps,
            "train_steps_skipped": status.train_steps_skipped,
            "train_seconds": status.train_seconds,
            "tokens_trained": status.tokens_trained,
            "last_gate": status.last_verdict.reason,
        }
        if base:
            changed = [n for n, p in model.named_parameters() if n in base and p.ne(base[n]).any()]
            run.trainer["base_tensors_changed"] = len(changed)
        stats = bridge.stats()
        run.bridge = {key: str(value) for key, value in vars(stats).items()}
        run.cost = {"sent_bytes_per_step": stats.sent_bytes / options.steps}
    return model


def with_lora(model: PreTrainedModel, rank: int) -> PreTrainedModel:
    """The policy with adapters of PEFT on its decoder's linear layers; they alone train."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return get_peft_model(model, config)


def _speed(
    options: argparse.Namespace,
    run: RunRecord,
    rollouts: RolloutClient,
    trainer: Service,
    table: LiveTable,
) -> None:
    """Generation alone: on these cores a trainer beside it slows whichever arm it meets.

    What it takes from the loop is in the figures of the loop.
    """
    versions = {ADAPTED: rollouts.server.state().draft_version, FROZEN: 0}
    for version in versions.values():
        rollouts.swap(version)  # keeps the release, which nobody serves once the trainer ends
    trainer.stop()
    run.speed, run.tokens_per_step = measure_speed(
        rollouts, versions, rounds=options.speed_rounds, progress=table.note
    )
    table.note("")


def _ngram_speed(
    options: argparse.Namespace,
    run: RunRecord,
    model: PreTrainedModel,
    log: Path,
    table: LiveTable,
) -> None:
    """The last policy on a server that drafts n-grams, after the other: an idle engine spins."""
    table.note("speed: starting a server that drafts n-grams")
    with RolloutServer(log, "--draft-kind", "ngram", policy=options.policy, draft=None) as server:
        server.stage("policy", "last", 1, policy_tensors(model, "bfloat16"))
        server.commit("last")
        rollouts = RolloutClient(server, server.control)
        try:
            run.ngram_speed, found = measure_speed(
                rollouts, {NGRAM: None}, rounds=options.speed_rounds, progress=table.note
            )
        finally:
            rollouts.close()
    run.tokens_per_step[NGRAM] = found[NGRAM]
    table.note("")


def _settings(options: argparse.Namespace, seed: int) -> Settings:
    return {
        "draft": {"kind": options.draft_kind, "policy": str(options.policy.resolve())},
        "replay": {"capacity_bytes": 512 << 20, "held_out_fraction": 0.2, "max_epochs": 6},
        "training": {
            "threads": 1,
            "compute_dtype": cpu_precision(),
            "ttt_steps": DRAFT_LENGTH,
            "batch_tokens": 1024,
            "learning_rate": 1e-3,
            "weight_averaging": 0.95,
            # About one candidate for each sync: more would be replaced before they are committed.
            "steps_per_candidate": 32,
            "seed": seed,
        },
        # The policy moves fast: a draft that is probably better now is worth more than one that is
        # certainly better three steps later.
        "gate": {"newest_versions": 4, "confidence": 0.6},
        # The demo itself switches the server between old and new drafts to compare them.
        "publish": {"reconcile_s": 0, "num_speculative_tokens": DRAFT_LENGTH},
        "trial": {"enabled": False},
        # The comparison needs an adapted draft, whether or not it pays in a run this short.
        "economy": {"mode": "always"},
    }


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.arithmetic_grpo.demo",
        description="GRPO on real vLLM with a frozen and an adapted draft, side by side.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    # 36: the draft needs some steps to catch up after the policy's fastest change.
    parser.add_argument("--steps", type=int, default=36, help="GRPO steps")
    parser.add_argument(
        "--prompts", type=int, default=12, help="problems per step, 16 samples each"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0],
        help="of problems, selection and training: a run for each, all reported",
    )
    parser.add_argument("--learning-rate", type=float, default=8e-4, help="of the policy")
    parser.add_argument(
        "--bytes-per-step", type=int, default=32 << 20, help="budget of captured states per step"
    )
    parser.add_argument(
        "--speed-rounds",
        type=int,
        # About ten seconds each.
        default=3,
        help="interleaved rounds of the final speed comparison; 0 leaves it out",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="Prometheus beside it, if it is installed, and the addresses to look at",
    )
    parser.add_argument("--policy", type=Path, default=HERE / "policy", help="checkpoint to train")
    parser.add_argument(
        "--lora", type=int, default=0, help="rank of LoRA adapters, which train instead; 0: none"
    )
    parser.add_argument(
        "--draft-kind",
        choices=["eagle3", "mtp", "draft_model", "dflash"],
        default="eagle3",
        help="the draft's mechanism; mtp writes the policy as a model with an MTP head first",
    )
    parser.add_argument("--draft", type=Path, help="release 0 (default: the example's)")
    parser.add_argument("--json", type=Path, help="also write the figures here, without the steps")
    parser.add_argument("--out", type=Path, help="run directory (default: runs/<date-time>)")
    options = parser.parse_args(argv)
    if options.steps < 2:
        parser.error(
            f"--steps: {options.steps}, expected 2 or more: the first has no draft trained"
        )
    named = "draft" if options.draft_kind == "eagle3" else options.draft_kind
    options.draft = options.draft or HERE / named
    for name in ("policy", "draft"):
        folder = getattr(options, name)
        if folder is not None and not (folder / "config.json").exists():
            parser.error(f"--{name}: {getattr(options, name)} holds no config.json")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return options


if __name__ == "__main__":
    sys.exit(main())
