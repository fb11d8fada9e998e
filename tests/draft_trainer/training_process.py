"""A whole offline training as a process: ``python -m tests.draft_trainer.training_process``.

It trains the synthetic head from where the folder's newest state says, saves after every step, and
appends one line per step to ``losses.txt`` once that step is saved. ``--die-at EVENT:N`` has it
kill itself at the N-th audit event of that name about a state, which Python raises just before the
system call. Under torchrun it is one rank of several, of which rank 0 saves and writes;
``--at-step N`` with ``--behaviour`` has the last rank misbehave in that step.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from draft_trainer.data_order import DataOrder, Position
from draft_trainer.learner import Learner, LearnerConfig
from draft_trainer.ranks import RankLostError, Ranks, shares
from draft_trainer.training_state import StateStore, head_facts
from tests.draft_trainer.synthetic import Policy, config, head

CONFIG = LearnerConfig(
    learning_rate=5e-3, warmup_steps=5, decay_steps=60, weight_averaging=0.9, ttt_steps=3
)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--die-at", default="")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--at-step", type=int, default=-1)
    parser.add_argument("--behaviour", choices=("die", "hang", "nan"), default="die")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.die_at:
        die_at(options.die_at)
    ranks = Ranks.join(options.timeout)
    try:
        train(options, ranks)
    except RankLostError as error:
        sys.exit(f"lost: {error}")


def train(options: argparse.Namespace, ranks: Ranks) -> None:
    """From the newest state to the end of the last epoch."""
    samples = Policy(0, 4.0).samples(32)
    heads = Policy(0, 4.0).heads()
    lengths = [sample.num_tokens for sample in samples]
    order = DataOrder(lengths, 80, seed=7)
    # Not rank 0's weights: it must give them to the others.
    learner = Learner(head(ranks.rank), CONFIG, ranks)
    position, store = Position(), None
    if ranks.rank == 0:
        store = StateStore(options.folder / "states", head_facts(config()))
        state = store.load()
        if state is not None:
            learner.load_state_dict(state.tensors)
            position = Position(**state.position)
    learner.take_rank_0()
    with (options.folder / "losses.txt").open("a") as log:
        if ranks.rank == 0:
            print(f"begins {learner.steps}", file=log, flush=True)
            print("ready", flush=True)
        while position.epoch < options.epochs:
            if learner.steps == options.at_step and ranks.rank == ranks.size - 1:
                misbehave(options, learner)
            chosen, position = order.next_step(position)
            mine = shares([lengths[i] for i in chosen], ranks.size)[ranks.rank]
            metrics = learner.step([samples[chosen[i]] for i in mine], heads)
            if store is not None:
                store.save(learner.state_dict(), learner.steps, asdict(position))
                line = f"step {learner.steps} {metrics.loss.hex()} {metrics.anchors}"
                print(line, file=log, flush=True)
            if metrics.skipped:
                print(f"rank {ranks.rank} skipped {learner.steps_skipped}", flush=True)
                break
    if store is not None:
        store.save(learner.state_dict(), learner.steps, asdict(position))
    ranks.leave()
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    print(f"rank {ranks.rank} leaves {sum('gloo' in name for name in names)} threads", flush=True)


def misbehave(options: argparse.Namespace, learner: Learner) -> None:
    """As the command line says."""
    if options.behaviour == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif options.behaviour == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        with torch.no_grad():
            learner.head.fc.weight[0, 0] = float("nan")


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
