"""A whole offline training as a process: ``python -m tests.draft_trainer.training_process``.

It trains a synthetic draft of a mechanism (``--kind``) from where the folder's newest state says,
saves after every step, and appends one line per step to ``losses.txt`` once that step is saved.
``--die-at EVENT:N`` has it kill itself at the N-th audit event of that name about a state, which
Python raises just before the system call; ``--die-after SECONDS``, so long after its first line.
Under torchrun it is one rank of several, of which rank 0 saves and writes; ``--ruin N`` has the
last rank compute NaN in that step, ``--lose N`` kill itself before it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from draft_trainer.config import TrainingConfig
from draft_trainer.drafters import Draft
from draft_trainer.training.learner import Learner
from draft_trainer.training.ranks import RankLostError, Ranks, shares
from draft_trainer.training.state import StateStore, head_facts
from tests.draft_trainer.synthetic import Policy, dflash_head, draft_model_head, head, mtp_head

CONFIG = TrainingConfig(learning_rate=5e-3, warmup_steps=5, weight_averaging=0.9, ttt_steps=3)

HEADS: dict[str, Callable[[int], Draft]] = {
    "eagle3": head,
    "mtp": mtp_head,
    "draft_model": draft_model_head,
    "dflash": dflash_head,
}
"""By mechanism, of a seed."""


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--kind", choices=HEADS, default="eagle3")
    parser.add_argument("--die-at", default="")
    parser.add_argument("--die-after", type=float)
    parser.add_argument("--ruin", type=int)
    parser.add_argument("--lose", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.die_at:
        die_at(options.die_at)
    ranks = Ranks.join(60.0)
    try:
        train(options, ranks)
    except RankLostError as error:
        # A group that outlives its last exchange can abort the process when the interpreter ends.
        sys.exit(f"lost: {error}; group left: {not dist.is_initialized()}")


def train_here(folder: Path, epochs: int, kind: str = "eagle3") -> None:
    """The same in the calling process, alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        unset = dict.fromkeys(("die_after", "ruin", "lose"))
        train(argparse.Namespace(folder=folder, epochs=epochs, kind=kind, **unset), Ranks())
    finally:
        torch.set_num_threads(threads)


def train(options: argparse.Namespace, ranks: Ranks) -> None:
    """From the newest state to the end of the last epoch."""
    samples = Policy(0, 4.0).samples(32)
    head = HEADS[options.kind](ranks.rank)
    heads = Policy(0, 4.0).heads(rows=head.target_ids())
    lengths = [sample.tokens for sample in samples]
    steps = steps_of(lengths, options.epochs)
    # Not rank 0's weights: it must give them to the others.
    learner = Learner(head, CONFIG, ranks)
    done, store = 0, None
    # Not the test kills it: a test that is held up would find that the training has ended.
    dying = threading.Timer(options.die_after or 0.0, os.kill, (os.getpid(), signal.SIGKILL))
    if ranks.rank == 0:
        store = StateStore(options.folder / "states", head_facts(head.config))
        state = store.load()
        if state is not None:
            learner.load_state_dict(state.tensors)
            done = int(state.position["done"])
    learner.take_rank_0()
    with (options.folder / "losses.txt").open("a") as log:
        if ranks.rank == 0:
            print(f"begins {learner.steps}", file=log, flush=True)
            if options.die_after is not None:
                dying.start()
        while done < len(steps):
            last = ranks.rank == ranks.size - 1
            if last and learner.steps == options.lose:
                os.kill(os.getpid(), signal.SIGKILL)
            chosen, done = steps[done], done + 1
            mine = shares([lengths[i] for i in chosen], ranks.size)[ranks.rank]
            batch = [samples[chosen[i]] for i in mine]
            if last and learner.steps == options.ruin and not learner.steps_skipped:
                batch = [sample.repacked(aux=sample.aux * float("nan")) for sample in batch]
            metrics = learner.step(batch, heads)
            if metrics.skipped:
                print(f"rank {ranks.rank} skipped {learner.steps_skipped}", flush=True)
                continue
            if store is not None:
                store.save(learner.state_dict(), learner.steps, {"done": done})
                line = f"step {learner.steps} {metrics.loss.hex()} {metrics.anchors}"
                print(line, file=log, flush=True)
    dying.cancel()
    if store is not None:
        store.save(learner.state_dict(), learner.steps, {"done": done})
    ranks.leave()
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    print(f"rank {ranks.rank} leaves {sum('gloo' in name for name in names)} threads", flush=True)


def steps_of(lengths: Sequence[int], epochs: int) -> list[list[int]]:
    """The samples of every step, 80 tokens at most; each sample once an epoch."""
    rng, steps = random.Random(7), []
    for _ in range(epochs):
        tokens = 80
        for sample in rng.sample(range(len(lengths)), len(lengths)):
            tokens += lengths[sample]
            if tokens > 80:
                steps.append([])
                tokens = lengths[sample]
            steps[-1].append(sample)
    return steps


def die_at(text: str) -> None:
    """kill -9 at the N-th audit event of a name."""
    event, _, number = text.partition(":")
    left = int(number)

    def hook(name: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if name == event and any("state" in str(argument) for argument in arguments):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    main()
