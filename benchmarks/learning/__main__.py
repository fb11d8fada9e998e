"""``python -m benchmarks.learning``: what a random head learns, and a good one on a moving policy.

The examples' policies, three seeds; SmolLM2-135M only where it is asked for. From scratch:
acceptance length after so many tokens of the policy's own rollouts, by the replay on held-out ones,
of the weights rounded as they are released. CPU seconds are the training step's own, on one thread,
without the measurement. Both trainers get the same sequences, start from the same weights, and
compute in one type. Online: see ``moving``, with the defaults and with others. MTP: see ``mtp``, on
the arithmetic policy.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.draft_training.case import Case
from benchmarks.draft_training.contestants import default_directory, python_of
from benchmarks.harness import Target, finish, options, say, spread_text, table, write
from benchmarks.learning.moving import Course, Versions, follow, move
from benchmarks.learning.mtp import formulation_targets, formulations
from benchmarks.learning.scratch import HELD_OUT, learned
from benchmarks.learning.states import read_states, write_states
from benchmarks.workers import WorkerProcess
from draft_trainer.checkpoints import read_policy
from draft_trainer.config import ReplayConfig, TrainingConfig
from draft_trainer.drafters import DRAFTERS, Draft
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.drafters.initial import choose_draft_vocabulary, init_draft
from draft_trainer.drafters.ops import cpu_precision
from draft_trainer.kernels.library import use_kernels
from examples.arithmetic_grpo import task as arithmetic
from examples.arithmetic_grpo.rollouts import RolloutClient
from examples.arithmetic_grpo.sampling import solutions
from examples.arithmetic_grpo.states import states_of
from examples.figures import interval
from examples.local_services import RolloutServer
from examples.smollm_grpo import model as smollm
from examples.smollm_grpo.task import Tasks, problems, prompt_ids
from examples.sorting_grpo import task as sorting

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Policy(NamedTuple):
    """A policy to learn from.

    Attributes:
        checkpoint: makes it where it is not there yet, and returns its folder.
        task: of its rollouts; None: ``examples.smollm_grpo.task``.
        draft_vocabulary: tokens.
        marks: tokens after which acceptance is measured.
    """

    checkpoint: Callable[[], Path]
    task: Any
    draft_vocabulary: int
    marks: tuple[int, ...] = (40_000, 70_000, 100_000)


SMOLLM = "smollm"
POLICIES = {
    "arithmetic": Policy(lambda: EXAMPLES / "arithmetic_grpo" / "policy", arithmetic, 96),
    "sorting": Policy(lambda: EXAMPLES / "sorting_grpo" / "policy", sorting, 64),
    SMOLLM: Policy(smollm.policy, None, 8192, (50_000, 200_000, 500_000)),
}
TOYS = [name for name in POLICIES if name != SMOLLM]
PARTS = ("scratch", "online", "mtp")

TTT_STEPS = DRAFT_LENGTH = 3
ROLLOUTS_AT_ONCE = 512
COMPLETIONS = 4
"""The number of rollouts of each prompt of SmolLM2."""
LEARNING_RATE = TrainingConfig().learning_rate

Rollout = tuple[list[int], list[int]]
"""Token ids of a prompt and of its completion."""
OURS, OURS_ONCE = "slipstream", "slipstream, one pass"
NORMS = ("norm_output", "fc_norm", "qk_norm")
ARMS: dict[str, tuple[dict[str, Any], tuple[str, ...], int]] = {
    OURS: ({}, (), ReplayConfig().max_epochs),
    OURS_ONCE: ({}, (), 1),
    "slipstream, norms of EAGLE-3.1": ({}, NORMS, ReplayConfig().max_epochs),
    "slipstream, Muon": ({"optimizer": "muon"}, (), ReplayConfig().max_epochs),
    "slipstream, both": ({"optimizer": "muon"}, NORMS, ReplayConfig().max_epochs),
}
"""[training] beside the defaults, norms of the head, and ``replay.max_epochs``."""
ONLINE: dict[str, tuple[dict[str, Any], int]] = {
    "the defaults": ({}, ReplayConfig().max_epochs),
    "64 tokens a step": ({"batch_tokens": 64}, ReplayConfig().max_epochs),
    "learning rate 3e-4": ({"learning_rate": 3e-4}, ReplayConfig().max_epochs),
    "weights of the last step": ({"weight_averaging": 0.0}, ReplayConfig().max_epochs),
    "target lk": ({"target": "lk"}, ReplayConfig().max_epochs),
    "Muon": ({"optimizer": "muon"}, ReplayConfig().max_epochs),
    "8 passes over a sample": ({}, 8),
}
"""[training] beside the defaults, and ``replay.max_epochs``."""

PEERS = {"speculators, 1 sequence a step": 1, "speculators, 256 tokens a step": 256}
"""Least tokens of a step."""


@dataclass(frozen=True)
class Mark:
    """A trainer after so many tokens."""

    tokens: int
    seconds: float
    acceptance_length: float


@dataclass
class Data:
    """A policy's states on rollouts, in files."""

    name: str
    train: Path
    held: Path

    def __post_init__(self) -> None:
        policy = POLICIES[self.name]
        self.policy, size = policy.checkpoint(), policy.draft_vocabulary
        states = read_states(self.train)
        self.samples = states.samples
        counts = torch.zeros(len(states.head.embed_tokens), dtype=torch.int64)
        for sample in self.samples:
            tokens = sample.token_ids[sample.loss_mask]
            counts += torch.bincount(tokens, minlength=len(counts))
        self.ids = choose_draft_vocabulary(counts, size)
        self.heads = states.heads(self.ids)
        self._held = read_states(self.held)

    def start(self, seed: int, norms: tuple[str, ...] = ()) -> Eagle3Head:
        """A random head."""
        return init_draft(read_policy(self.policy), self.ids, norms=norms, seed=seed)

    def acceptance(self, head: Draft) -> float:
        """Acceptance length on held-out rollouts."""
        return self._held.acceptance_length(head, DRAFT_LENGTH)


def record(name: str, folder: Path) -> Data:
    """States on enough rollouts for the last mark, and on held-out ones; kept if there."""
    policy = POLICIES[name]
    data = folder / f"{name}-train.safetensors", folder / f"{name}-held.safetensors"
    if not all(path.exists() for path in data):
        say(f"rollouts of the {name} policy")
        with ExitStack() as owned:
            dtype = torch.float32 if policy.task else getattr(torch, cpu_precision())
            model = AutoModelForCausalLM.from_pretrained(policy.checkpoint(), dtype=dtype).eval()
            if policy.task is None:
                log = folder / "rollout-server.log"
                given = (*smollm.SERVED, "--max-num-seqs", "64", "--draft-kind", "none")
                server = RolloutServer(log, *given, policy=policy.checkpoint(), draft=None)
                client = RolloutClient(owned.enter_context(server), server.control)
                owned.callback(client.close)
                drawn = partial(_served, client)
            else:
                drawn = partial(_sampled, model, policy.task)
            for seed, (out, tokens) in enumerate(
                zip(data, (int(policy.marks[-1] * 1.1), 0), strict=True)
            ):
                if out.exists():
                    continue
                found: list[Rollout] = []
                for part in drawn(seed, ROLLOUTS_AT_ONCE if tokens else HELD_OUT):
                    found += part
                    if sum(len(one) + len(other) for one, other in found) >= tokens:
                        break
                write_states(out, states_of(model, found))
    return Data(name, *data)


def _sampled(model: PreTrainedModel, task: Any, seed: int, size: int) -> Iterator[list[Rollout]]:
    """Endless prompts of a toy task and the policy's completions at temperature 1."""
    for number in count():
        yield from solutions(model, size, seed * 1_000_003 + number, task)


def _served(client: RolloutClient, seed: int, size: int) -> Iterator[list[Rollout]]:
    """The same of SmolLM2, four completions of each prompt, by vLLM."""
    tokenizer = AutoTokenizer.from_pretrained(smollm.policy())
    drawn = problems(f"learning-{seed}")
    while True:
        some = islice(drawn, size // COMPLETIONS)
        prompts = [prompt_ids(tokenizer, one) for one in some]
        answer, _ = client.generate(prompts, COMPLETIONS, max_tokens=Tasks.max_tokens)
        repeated = (prompt for prompt in prompts for _ in range(COMPLETIONS))
        yield list(zip(repeated, answer.completions, strict=True))


def ours(data: Data, seed: int, order: Sequence[int], arm: str) -> list[Mark]:
    """The trainer's own steps, as it takes them when versions come, in one of ``ARMS``."""
    changed, norms, epochs = ARMS[arm]
    config = TrainingConfig(ttt_steps=TTT_STEPS, compute_dtype=cpu_precision(), **changed)
    samples = [data.samples[i] for i in order]

    def mark(tokens: int, seconds: float, head: Draft) -> Mark:
        found = Mark(tokens, seconds, data.acceptance(head))
        say(f"  {tokens:,} tokens, {seconds:.0f} CPU s: {found.acceptance_length:.3f}")
        return found

    start = partial(data.start, seed, norms)
    marks = POLICIES[data.name].marks
    return learned(start, config, epochs, samples, data.heads, marks, mark)


def peer(
    data: Data, seed: int, order: Sequence[int], batch_tokens: int, folder: Path, python: Path
) -> list[Mark]:
    """speculators' steps, from the same weights."""
    head = data.start(seed)
    shape = head.config
    start = folder / f"{data.name}-{seed}.safetensors"
    weights = {name: value.detach() for name, value in head.named_parameters()}
    save_file(weights | {"draft_vocab_ids": data.ids.long()}, start)
    case = Case(
        data.name,
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.head_dim,
        shape.vocab_size,
        shape.draft_vocab_size,
        rows=0,
        tokens=2048,
        ttt_steps=TTT_STEPS,
        dtype=cpu_precision(),
    )
    trainer = {
        **{"policy": str(data.policy), "states": str(data.train), "start": str(start)},
        **{"case": case.to_dict(), "rope_theta": shape.rope.theta, "eps": shape.rms_norm_eps},
        "learning_rate": LEARNING_RATE,
    }
    module, log = "benchmarks.learning.speculators_process", folder / "speculators.log"
    with WorkerProcess("speculators", module, [], log, python) as process:
        answer = process.ask(
            "run",
            trainer=trainer,
            order=list(order),
            batch_tokens=batch_tokens,
            marks=POLICIES[data.name].marks,
            out=str(folder / f"{data.name}-{seed}-{batch_tokens}"),
        )
    found = []
    for mark in answer["marks"]:
        trained = data.start(seed)
        trained.load_state_dict(load_file(mark["weights"]), strict=False)
        # As a release is rounded.
        rounded = trained.to(torch.bfloat16).float()
        found.append(Mark(mark["tokens"], mark["seconds"], data.acceptance(rounded)))
    return found


def at_seconds(marks: Sequence[Mark], seconds: float) -> float:
    """Acceptance length after so many CPU seconds, on straight lines from 1 at the start."""
    before = Mark(0, 0.0, 1.0)
    for mark in marks:
        if mark.seconds >= seconds:
            share = (seconds - before.seconds) / (mark.seconds - before.seconds)
            gain = mark.acceptance_length - before.acceptance_length
            return before.acceptance_length + share * gain
        before = mark
    return before.acceptance_length


def targets_of(found: Mapping[str, Sequence[Sequence[Mark]]], name: str) -> list[Target]:
    """Gains over one that accepts nothing, against the best peer of each seed."""
    targets = []
    peers = [arm for arm in PEERS if arm in found and OURS in found]
    for place, tokens in enumerate(POLICIES[name].marks if peers else ()):
        by_tokens, by_seconds = [], []
        for seed, marks in enumerate(found[OURS]):
            mine = marks[place]
            of_peers = [found[arm][seed] for arm in peers]
            best = max(run[place].acceptance_length for run in of_peers)
            soonest = max(at_seconds(run, mine.seconds) for run in of_peers)
            by_tokens.append(mine.acceptance_length / best)
            by_seconds.append(mine.acceptance_length / soonest)
        label = f"{name}, {tokens:,} tokens: acceptance length over the best peer's"
        targets.append(Target.at_least(f"{label}, least seed", min(by_tokens), 1.0))
        label += " after as many CPU seconds"
        targets.append(Target.at_least(f"{label}, least seed", min(by_seconds), 1.0))
    return targets


def scratch(
    data: Data,
    arms: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    python: Path | None,
    kept: dict[str, list[list[dict[str, Any]]]],
    keep: Callable[[], None],
) -> dict[str, list[list[Mark]]]:
    """The marks of every seed, by arm.

    Args:
        data: of the policy.
        arms: of ``ARMS``.
        seeds: one run of each arm.
        folder: for the peer's files.
        python: of the peer; None: without it.
        kept: the marks as the JSON has them; what is there is not measured again.
        keep: called after each run.
    """
    at = POLICIES[data.name].marks
    for number, seed in enumerate(seeds):
        order = random.Random(seed).sample(range(len(data.samples)), len(data.samples))
        runs = {arm: partial(ours, data, seed, order, arm) for arm in arms}
        if python is not None:
            for arm, size in PEERS.items():
                runs[arm] = partial(peer, data, seed, order, size, folder, python)
        for arm, run in runs.items():
            measured = kept.setdefault(arm, [])
            if len(measured) > number:
                continue
            say(f"{data.name} from scratch, seed {seed}: {arm}")
            measured.append([asdict(mark) for mark in run()])
            keep()
    found = {arm: [[Mark(**mark) for mark in run] for run in runs] for arm, runs in kept.items()}
    rows = [
        [arm]
        + [spread_text([run[place].acceptance_length for run in runs]) for place in range(len(at))]
        + [f"{statistics.median(run[-1].seconds for run in runs):.1f}"]
        for arm, runs in found.items()
    ]
    columns = ["", *(f"{tokens:,} tokens" for tokens in at), "CPU s"]
    print(table(f"\n{data.name}: acceptance length at k = {DRAFT_LENGTH}", columns, rows))
    return found


def online(name: str, seeds: Sequence[int], folder: Path) -> dict[str, list[Course]]:
    """The course of every seed from the example's draft, by arm."""
    policy, task = POLICIES[name].checkpoint(), POLICIES[name].task
    found: dict[str, list[Course]] = {}
    for seed in seeds:
        path = folder / f"{name}-moving-{seed}"
        if not path.exists():
            move(policy, task, seed, path)
        versions = Versions(path, _draft(policy).target_ids())
        for arm, (changed, epochs) in ONLINE.items():
            say(f"{name} online, seed {seed}: {arm}")
            course = follow(versions, lambda: _draft(policy), TrainingConfig(**changed), epochs)
            found.setdefault(arm, []).append(course)
    rows = []
    for arm, runs in found.items():
        candidates = [one for run in runs for one in run.candidates]
        rows.append(
            [
                arm,
                interval_text([statistics.fmean(run.adapted[1:]) for run in runs]),
                interval_text([run.kept for run in runs]),
                f"{sum(one.worse for one in candidates)} of {len(candidates)}",
                f"{statistics.median(run.seconds for run in runs):.1f}",
            ]
        )
    frozen = interval_text([statistics.fmean(run.frozen[1:]) for run in found["the defaults"]])
    title = f"\n{name}, moving; mean over seeds and 95 % interval; frozen draft {frozen}"
    columns = ["", "acceptance length", "kept of what drift took", "candidates worse", "CPU s"]
    print(table(title, columns, rows))
    return found


def interval_text(values: Sequence[float]) -> str:
    """Mean and half-width over seeds."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    found = interval(values)
    return f"{found['mean']:.2f} ± {found['half_width']:.2f}"


def online_targets(runs: Sequence[Course], name: str) -> list[Target]:
    """The defaults."""
    candidates = [one for run in runs for one in run.candidates]
    worse = sum(one.worse for one in candidates) / len(candidates)
    label = f"{name}, online"
    return [
        # What chance alone makes of candidates that are as good as the draft they began as.
        Target.at_most(f"{label}: share of candidates that are significantly worse", worse, 0.025),
        Target.at_least(
            f"{label}: share kept of what drift took, least seed", min(r.kept for r in runs), 0.5
        ),
    ]


def _draft(policy: Path) -> Draft:
    return DRAFTERS["eagle3"].read(policy.parent / "draft").draft()


def main(argv: list[str] | None = None) -> int:
    """Command line entry; the exit status is 0 only if every target is met."""
    parser = options("learning", __doc__.partition("\n\n")[2])
    parser.add_argument("--policies", nargs="+", default=TOYS, choices=list(POLICIES))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--data", type=Path, help="folder of the states, kept for another run")
    parser.add_argument("--alone", action="store_true", help="without speculators")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    use_kernels("auto")
    python = None if chosen.alone else python_of("speculators", default_directory())
    figures: dict[str, Any] = {}
    if chosen.json is not None and chosen.json.exists():
        # A run on SmolLM2 takes up to 40 minutes.
        figures = json.loads(chosen.json.read_text())
    figures = {name: figures.get(name, {}) for name in chosen.policies}
    targets: list[Target] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.data or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in chosen.policies:
            if "scratch" in chosen.parts:
                data = record(name, folder)
                found = figures[name].setdefault("scratch", {})
                keep = partial(write, chosen.json, figures, targets)
                marks = scratch(data, chosen.arms, chosen.seeds, folder, python, found, keep)
                targets += targets_of(marks, name)
            if "online" in chosen.parts and name in TOYS:
                courses = online(name, chosen.seeds, folder)
                figures[name]["online"] = {
                    arm: [run.figures for run in runs] for arm, runs in courses.items()
                }
                targets += online_targets(courses["the defaults"], name)
            if "mtp" in chosen.parts and name == "arithmetic":
                data = record(name, folder)
                lengths = formulations(
                    *(data.policy, data.train, data.held, POLICIES[name].marks[-1], chosen.seeds)
                )
                figures[name]["mtp"] = lengths
                targets += formulation_targets(lengths)
            write(chosen.json, figures, targets)
    return finish(chosen.json, figures, targets)


if __name__ == "__main__":
    sys.exit(main())
