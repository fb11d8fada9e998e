"""``python -m benchmarks.architectures``: policies of several architectures with an adapted draft.

For each a trained tiny policy (``policies``) is sampled, and a draft is made and trained on its
rollouts by ``draft-trainer warmup``. A real vLLM server then serves the policy with the untrained
draft, and the trained one is swapped in live. Acceptance is vLLM's own count; beside it is the
replay's estimate on states of the very rollouts that were counted.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.architectures.policies import POLICIES, policy_of
from benchmarks.harness import Target, end_on_sigterm, finish, options, say, table, write
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.warmup.report import PLOT_FILE
from examples.arithmetic_grpo.make_draft import DRAFT_LENGTH, configuration, run, write_rollouts
from examples.arithmetic_grpo.rollouts import RolloutClient, SpecCounters
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids
from examples.arithmetic_grpo.states import states_of
from examples.local_services import RolloutServer
from examples.task import Task
from slipstream.checkpoints import WEIGHTS_FILE

MINUTES = 2.0
"""The time of pretraining, for the policy that is not a converted one."""
ROLLOUTS = 1024
"""The rollouts that a draft is trained on."""
EPOCHS = 3
PROMPTS = 128
PROMPTS_AT_ONCE = 64
SAMPLES = 4
SEED = 0


@dataclass(frozen=True)
class Served:
    """A draft in the server.

    Attributes:
        measured: acceptance length by vLLM's counters, tokens per verification step.
        replayed: the gate's estimate, on states of the rollouts that were counted.
        greedy_equal: greedy completions that are those without speculation.
    """

    measured: float
    replayed: float
    greedy_equal: int


@dataclass(frozen=True)
class Outcome:
    """An architecture.

    Attributes:
        name: of ``policies.POLICIES``.
        model_class: as config.json has it.
        prompts: completed greedily, and ``SAMPLES`` times at temperature 1.
        untrained: as ``draft-trainer warmup`` begins.
        adapted: after it, swapped in live.
    """

    name: str
    model_class: str
    prompts: int
    untrained: Served
    adapted: Served


def rollouts(
    server: RolloutServer, prompts: Sequence[list[int]], samples: int, temperature: float = 1.0
) -> list[list[int]]:
    """Completions: all of the first prompt, of the second, ... Raises RuntimeError: one failed."""
    # It asks a trainer only for releases, of which there are none.
    client = RolloutClient(server, server.control)
    completions: list[list[int]] = []
    try:
        # Some at a time: a starved server drops some of 500 connections.
        for start in range(0, len(prompts), PROMPTS_AT_ONCE):
            some = prompts[start : start + PROMPTS_AT_ONCE]
            generation, _ = client.generate(some, samples, temperature=temperature)
            if generation.failed:
                raise RuntimeError(f"{len(generation.failed)} failed: {generation.failed[0]}")
            completions += generation.completions
    finally:
        client.close()
    return completions


def counters_of(server: RolloutServer, version: int) -> SpecCounters:
    """vLLM's counters of a draft version."""
    return SpecCounters.between({}, {version: server.counters()[version]})


class Greedy:
    """Greedy completions of a server, compared with those that it makes without a draft."""

    def __init__(self, server: RolloutServer, prompts: Sequence[list[int]]) -> None:
        self._server, self._prompts = server, prompts
        server.speculate(False)
        self._expected = rollouts(server, prompts, 1, temperature=0.0)
        server.speculate(True)

    def equal(self) -> int:
        """Count the completions that are equal now."""
        now = rollouts(self._server, self._prompts, 1, temperature=0.0)
        pairs = zip(now, self._expected, strict=True)
        return sum(found == expected for found, expected in pairs)


def drafts_of(task: Task[Any], policy: Path, folder: Path) -> tuple[Path, Path]:
    """The untrained and the trained draft of a policy, as the commands make them, once."""
    untrained, trained = folder / "untrained", folder / "trained"
    if not (trained / PLOT_FILE).exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        file = write_rollouts(task, policy, folder / "rollouts.jsonl", ROLLOUTS, SEED)
        config = configuration(folder, EPOCHS, threads=1, block=False)
        common = ("--policy", policy, "--seed", SEED)
        run("init", *common, "--out", untrained)
        given = ("--draft", untrained, "--config", config)
        run("warmup", *common, "--rollouts", file, *given, "--out", trained)
    return untrained, trained


def served(
    server: RolloutServer,
    version: int,
    draft: Path,
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    greedy: Greedy,
) -> Served:
    """Swap a draft in, count, and replay what was counted.

    Raises RuntimeError: a request failed.
    """
    server.swap(version, load_file(draft / WEIGHTS_FILE))
    completions = rollouts(server, prompts, SAMPLES)
    counted = counters_of(server, version)
    equal = greedy.equal()
    rows = [prompts[number // SAMPLES] for number in range(len(completions))]
    states = states_of(model, list(zip(rows, completions, strict=True)))
    replayed = states.acceptance_length(Eagle3().read(draft).draft(), DRAFT_LENGTH)
    return Served(counted.acceptance_length or 1.0, replayed, equal)


def outcome(name: str, chosen: argparse.Namespace, folder: Path) -> Outcome:
    """Everything of one architecture."""
    task = POLICIES[name].task
    policy = policy_of(name, chosen.work / "policies", MINUTES)
    untrained, trained = drafts_of(task, policy, chosen.work / "drafts" / name)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    problems = held_out_problems(PROMPTS, task)
    prompts = [prompt_ids(problem, task) for problem in problems]
    random.Random(SEED).shuffle(prompts)
    say(f"{name}: starting rollout-server (real vLLM)")
    # float32: of two equally probable tokens rounding would choose by the batch's shape.
    log, how = folder / "rollout-server.log", ("--dtype", "float32")
    with RolloutServer(log, *how, policy=policy, draft=untrained) as server:
        greedy = Greedy(server, prompts)
        # Version 0 has drafted while the server warmed up.
        first, second = (
            served(server, version, draft, model, prompts, greedy)
            for version, draft in ((1, untrained), (2, trained))
        )
    return Outcome(
        name=name,
        model_class=model.config.architectures[0],
        prompts=len(prompts),
        untrained=first,
        adapted=second,
    )


def targets(found: Sequence[Outcome]) -> list[Target]:
    """Return the targets that every architecture is held to."""
    listed = [Target.at_least("architectures served with an adapted draft", len(found), 6)]
    for one in found:
        both = (one.untrained, one.adapted)
        gain = one.adapted.measured / one.untrained.measured
        off_by = max(abs(draft.replayed / draft.measured - 1) for draft in both)
        differ = sum(one.prompts - draft.greedy_equal for draft in both)
        listed += [
            Target.at_least(f"{one.name}: acceptance length, adapted / untrained", gain, 1.5),
            Target.at_most(f"{one.name}: greatest |replayed / measured - 1|", off_by, 0.03),
            Target.at_most(f"{one.name}: greedy completions that differ", differ, 0),
        ]
    return listed


COLUMNS = ["policy", "class", "untrained", "replayed", "adapted", "replayed", "greedy"]


def row(one: Outcome) -> list[str]:
    """An architecture's line of the table."""
    before, after = one.untrained, one.adapted
    equal = f"{before.greedy_equal}, {after.greedy_equal} of {one.prompts}"
    return [
        *(one.name, one.model_class),
        *(f"{before.measured:.2f}", f"{before.replayed:.2f}"),
        *(f"{after.measured:.2f}", f"{after.replayed:.2f}", equal),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; the exit status is 0 only if every target is met."""
    parser = options("architectures", (__doc__ or "").split("\n\n")[1])
    add = parser.add_argument
    add("--only", nargs="+", choices=list(POLICIES), default=list(POLICIES),
        help="architectures")  # fmt: skip
    add("--work", type=Path, default=Path("runs/architectures"),
        help="policies and drafts, made where they are not there")  # fmt: skip
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    end_on_sigterm()
    found = _measured_before(chosen)
    for name in chosen.only:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = outcome(name, chosen, Path(folder))
        say("  ".join(row(found[name])))
        write(chosen.json, _figures(found), targets(list(found.values())))
    print(table("Acceptance length", COLUMNS, [row(one) for one in found.values()]))
    return finish(chosen.json, _figures(found), targets(list(found.values())))


def _measured_before(chosen: argparse.Namespace) -> dict[str, Outcome]:
    """Read what ``--json`` has of architectures not in ``--only``: a run can be made in parts."""
    if chosen.json is None or not chosen.json.exists():
        return {}
    found = {}
    for one in json.loads(chosen.json.read_text(encoding="utf-8"))["architectures"]:
        if one["name"] not in chosen.only:
            drafts = {name: Served(**one[name]) for name in ("untrained", "adapted")}
            found[one["name"]] = Outcome(**one | drafts)
    return found


def _figures(found: Mapping[str, Outcome]) -> dict[str, Any]:
    return {
        "settings": {
            "pretraining_minutes": MINUTES,
            "rollouts": ROLLOUTS,
            "epochs": EPOCHS,
            "draft_length": DRAFT_LENGTH,
            "temperature": 1.0,
            "samples": SAMPLES,
        },
        "architectures": [asdict(found[name]) for name in POLICIES if name in found],
    }


if __name__ == "__main__":
    sys.exit(main())
