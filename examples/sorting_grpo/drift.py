"""A policy drifts; does its draft follow with the trainer's default settings?

``python -m examples.sorting_grpo.drift`` runs GRPO on the sorting task for 20 policy versions of 24
prompts. The draft trainer's TOML names the draft and the servers, and has it train whether or not
that pays. Two real vLLM servers get every policy version: one is the trainer's fleet, the other
keeps the draft that both started with. Acceptance is vLLM's own count on each. Needs about 6 GB and
two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.arithmetic_grpo.grpo import group_advantages, old_log_probs, pad_batch, update
from examples.arithmetic_grpo.processes import Services
from examples.arithmetic_grpo.rollouts import RolloutClient, SpecCounters
from examples.arithmetic_grpo.sampling import completion_text, prompt_ids
from examples.arithmetic_grpo.summary import followed, pooled_seeds
from examples.arithmetic_grpo.tokenizer import PAD_ID
from examples.figures import Target, interval, machine, target_table
from examples.local_services import READY_TIMEOUT, RolloutServer, Settings, draft_trainer
from examples.sorting_grpo import task
from examples.task import reward
from policy_bridge import BridgeConfig, PolicyBridge

HERE = Path(__file__).resolve().parent
LOG_PROB_BATCH = 48
VERSIONS = 20
"""The policy's versions after the first."""
UPDATES = 3
"""The optimizer steps of each."""
SETTINGS: Settings = {"economy": {"mode": "always"}}


@dataclass(frozen=True)
class Version:
    """One policy version's rollouts.

    Attributes:
        draft_version: that the trainer's server served.
        adapted: vLLM's counters there.
        frozen: on the other server.
        style_share: ornate lines over all lines.
        correct: share of completions with the right answer.
    """

    draft_version: int
    adapted: SpecCounters
    frozen: SpecCounters
    style_share: float
    correct: float


def drift(options: argparse.Namespace, seed: int, folder: Path) -> list[Version]:
    """One run; returns what each policy version met."""
    torch.manual_seed(seed)
    servers = [
        RolloutServer(folder / f"{name}.log", policy=options.policy, draft=options.draft)
        for name in ("adapted", "frozen")
    ]
    trainer = draft_trainer(folder, servers[0].control, SETTINGS, draft=options.draft)
    services = [trainer, *(server.service for server in servers)]
    with Services(*services) as running:
        for service in services:
            service.wait_ready(2 * READY_TIMEOUT)
        model = AutoModelForCausalLM.from_pretrained(
            options.policy, dtype=torch.float32, attn_implementation="eager"
        )
        controls = tuple(server.control for server in servers)
        clients = [RolloutClient(server, trainer.health) for server in servers]
        try:
            with PolicyBridge(model, BridgeConfig(trainer.health, "sorting", controls)) as bridge:
                return _versions(options, seed, model, bridge, clients, running)
        finally:
            for client in clients:
                client.close()


def _versions(
    options: argparse.Namespace,
    seed: int,
    model: PreTrainedModel,
    bridge: PolicyBridge,
    clients: list[RolloutClient],
    running: Services,
) -> list[Version]:
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, (0.9, 0.95))
    rng, found = random.Random(seed), []
    for number in range(VERSIONS + 1):
        running.check()
        with bridge.sync(number) as window:
            window.push_policy()
        problems = [task.sample_problem(rng) for _ in range(options.prompts)]
        prompts = [prompt_ids(problem, task) for problem in problems]
        draft_version = clients[0].server.state().draft_version
        parts = [client.generate(prompts, options.samples)[0] for client in clients]
        for part in parts:
            if part.failed:
                raise RuntimeError(f"requests failed: {part.failed[:3]}")
        # A prompt's completions of both servers form one group.
        asked = [problem for problem in problems for _ in range(options.samples * len(parts))]
        rows = [
            row
            for index in range(len(problems))
            for part in parts
            for row in part.completions[index * options.samples :][: options.samples]
        ]
        pairs = zip(asked, rows, strict=True)
        grades = [task.grade(problem, completion_text(row, task)) for problem, row in pairs]
        found.append(
            Version(
                draft_version,
                parts[0].counters,
                parts[1].counters,
                style_share=sum(graded.style_share for graded in grades) / len(grades),
                correct=sum(graded.correct for graded in grades) / len(grades),
            )
        )
        _show(number, found[-1])
        rewards = torch.tensor([reward(graded) for graded in grades])
        batch = pad_batch(
            [prompt_ids(problem, task) for problem in asked],
            rows,
            group_advantages(rewards, options.samples * len(parts)),
            PAD_ID,
        )
        with bridge.capture() as captured:
            old = old_log_probs(model, batch, LOG_PROB_BATCH, captured)
        batch = replace(batch, old_log_probs=old)
        # Mini-batches of whole groups, as GRPO trainers make them.
        for chosen in torch.arange(len(rows)).chunk(UPDATES):
            update(model, optimizer, batch.rows(chosen))
    return found


def _show(number: int, version: Version) -> None:
    adapted, frozen = (
        counters.acceptance_length or float("nan") for counters in (version.adapted, version.frozen)
    )
    print(
        f"policy {number:3}  draft {version.draft_version:3}  adapted {adapted:.2f}  "
        f"frozen {frozen:.2f}  ornate {version.style_share:.2f}  correct {version.correct:.2f}",
        flush=True,
    )


def document_of(versions: list[Version]) -> dict[str, Any]:
    """Machine, figures and targets of a run: how the draft followed."""
    styles = [version.style_share for version in versions]
    adapted = [version.adapted for version in versions]
    found = followed(styles, adapted, [version.frozen for version in versions])
    moving, name = found["moving part"], "adapted acceptance length over"
    # Of a draft that accepts as at the start however the policy moves.
    ceiling = moving.over_frozen / moving.over_start
    targets = [
        Target.at_least(
            f"{name} the frozen one's, moving part (at most {ceiling:.2f})",
            moving.over_frozen,
            1.3,
        ),
        Target.at_least(f"{name} its start, moving part", moving.over_start, 0.85),
        Target.at_least("share kept of what drift took from the frozen one", moving.kept, 0.5),
    ]
    return {
        "machine": machine(),
        "figures": {
            **{part: asdict(figures) for part, figures in found.items()},
            "versions": [asdict(version) for version in versions],
        },
        "targets": [asdict(target) for target in targets],
    }


def over_seeds(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and 95 % interval of how the draft followed, for each part of the runs."""
    return {
        part: {
            name: interval([run[part][name] for run in figures])
            for name in ("mean", "minimum", "over_start", "over_frozen", "kept")
            if all(run[part][name] is not None for run in figures)
        }
        for part in ("whole run", "moving part")
    }


def main(argv: list[str] | None = None) -> int:
    """Command line entry; the exit status is 0 only if every target is met."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.sorting_grpo.drift",
        description="A drifting policy, its draft adapted with default settings, and a frozen one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--policy", type=Path, default=HERE / "policy", help="that is trained")
    parser.add_argument("--draft", type=Path, default=HERE / "draft", help="that both start with")
    parser.add_argument("--prompts", type=int, default=24, help="of each version")
    parser.add_argument("--samples", type=int, default=4, help="of each prompt and server")
    parser.add_argument("--learning-rate", type=float, default=8e-4, help="of the policy")
    parser.add_argument("--seeds", "--seed", type=int, nargs="+", default=[0], help="one run each")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--keep", type=Path, help="folder of logs and releases")
    options = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    documents = {}
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.keep or Path(temporary)) / f"seed-{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            documents[seed] = document_of(drift(options, seed, folder))
    pooled = pooled_seeds(documents)
    if len(documents) > 1:
        pooled["over seeds"] = over_seeds([one["figures"] for one in documents.values()])
    print(target_table([Target(**target) for target in pooled["targets"]]))
    if options.json:
        options.json.write_text(json.dumps(pooled, indent=1) + "\n")
    return 0 if all(target["ok"] for target in pooled["targets"]) else 1


if __name__ == "__main__":
    sys.exit(main())
