"""A whole offline training as a process: ``python -m tests.draft_trainer.training_process``.

It trains a synthetic draft of a mechanism (``--kind``) from where the folder's newest state says,
saves after every step, and appends one line per step to ``losses.txt`` once that step is saved.
``--die-at EVENT:N`` has it kill itself at the N-th audit event of that name about a state, which
Python raises just before the system call; ``--die-after SECONDS``, so long after its first line.
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

from draft_trainer.config import TrainingConfig
from draft_trainer.drafters import Draft
from draft_trainer.training.learner import Learner
from draft_trainer.training.training_state import StateStore, head_facts
from tests.draft_trainer.synthetic import (
    Policy,
    dflash_head,
    draft_model_head,
    dspark_head,
    head,
    mtp_head,
)

CONFIG = TrainingConfig(learning_rate=5e-3, warmup_steps=5, weight_averaging=0.9, ttt_steps=3)

HEADS: dict[str, Callable[[int], Draft]] = {
    "eagle3": head,
    "mtp": mtp_head,
    "draft_model": draft_model_head,
    "dflash": dflash_head,
    "dspark": dspark_head,
}
"""The heads of a seed, by mechanism."""

MUON = "eagle3 by Muon"
"""A kind of training beside one for each of ``HEADS``, whose optimizer is AdamW."""


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--kind", choices=(*HEADS, MUON), default="eagle3")
    parser.add_argument("--die-at", default="")
    parser.add_argument("--die-after", type=float)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.die_at:
        die_at(options.die_at)
    train(options.folder, options.epochs, options.kind, options.die_after)


def train_here(folder: Path, epochs: int, kind: str = "eagle3") -> None:
    """The same in the calling process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(folder, epochs, kind)
    finally:
        torch.set_num_threads(threads)


def train(folder: Path, epochs: int, kind: str, die_after: float | None = None) -> None:
    """Train from the newest state to the end of the last epoch."""
    samples = Policy(0, 4.0).samples(32)
    head = HEADS["eagle3" if kind == MUON else kind](0)
    heads = Policy(0, 4.0).heads(rows=head.target_ids())
    steps = steps_of([sample.tokens for sample in samples], epochs)
    optimizer = "muon" if kind == MUON else "adamw"
    learner = Learner(head, CONFIG.model_copy(update={"optimizer": optimizer}))
    # Not the test kills it: a test that is held up would find that the training has ended.
    dying = threading.Timer(die_after or 0.0, os.kill, (os.getpid(), signal.SIGKILL))
    store = StateStore(folder / "states", head_facts(head.config))
    state, done = store.load(), 0
    if state is not None:
        learner.load_state_dict(state.tensors)
        done = int(state.position["done"])
    with (folder / "losses.txt").open("a") as log:
        print(f"begins {learner.steps}", file=log, flush=True)
        if die_after is not None:
            dying.start()
        while done < len(steps):
            batch, done = [samples[i] for i in steps[done]], done + 1
            metrics = learner.step(batch, heads)
            store.save(learner.state_dict(), learner.steps, {"done": done})
            line = f"step {learner.steps} {metrics.loss.hex()} {metrics.anchors}"
            print(line, file=log, flush=True)
    dying.cancel()
    store.save(learner.state_dict(), learner.steps, {"done": done})


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
