"""One rank of a service without its server: ``python -m tests.draft_trainer.serving_process``.

Rank 0 does what the training loop does with samples of two policy versions and of a second run, and
writes losses and its last state; the others follow it. With ``--hang`` it stops before it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from draft_trainer.config import TrainingConfig
from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from draft_trainer.training.followers import Followers, follow
from draft_trainer.training.learner import Learner
from draft_trainer.training.ranks import Ranks
from draft_trainer.training.state import StateStore
from slipstream.errors import RefusedError
from slipstream.sample import Sample
from tests.draft_trainer.synthetic import Policy, draft_vocab_ids, head

# Waited out in full, and the deadline of joining and of every exchange before it too.
SILENCE_S = 20.0
CONFIG = TrainingConfig(learning_rate=5e-3, warmup_steps=2, weight_averaging=0.5, ttt_steps=3)


def announced(heads: PolicyHeads, version: int, policy: Policy) -> list[Sample]:
    """Make a version known and give some of its samples."""
    heads.add(PolicyHead(version, policy.lm_head[draft_vocab_ids()], policy.embed))
    samples = policy.samples(6, seed=version)
    return [
        sample.repacked(policy_version=version, sample_id=f"{version}-{i}")
        for i, sample in enumerate(samples)
    ]


def lead(learner: Learner, followers: Followers) -> list[float]:
    """The losses of ten steps, three of them of another run."""
    followers.begin(learner.head, learner.config)
    learner.take_rank_0()
    heads, losses = PolicyHeads(2), []

    def step(samples: list[Sample]) -> None:
        losses.append(learner.step(followers.give(samples, heads), heads).loss)

    first, moved = Policy(0, 4.0), Policy(0, 4.0)
    moved.lm_head = moved.lm_head.roll(5, dims=0)
    old = announced(heads, 1, first)
    step(old)
    new = announced(heads, 2, moved)
    for samples in (new, old + new, old[:1], new):
        step(samples)
    newest = announced(heads, 3, moved)
    step(newest + new)
    try:
        step(old)
    except RefusedError as error:
        assert error.field == "policy_version"
    followers.keep_alive()
    step(newest)
    # Another run: version 1 is another policy now.
    heads = PolicyHeads(2)
    samples = announced(heads, 1, Policy(3, 4.0))
    learner.restart_optimizer()
    followers.take_rank_0()
    learner.take_rank_0()
    for _ in range(3):
        step(samples)
    return losses


def await_all(folder: Path) -> None:
    """Until every rank's process is here: on busy cores they start many seconds apart."""
    (folder / f"up-{os.environ['RANK']}").touch()
    deadline = time.monotonic() + 300
    while len(list(folder.glob("up-*"))) < int(os.environ["WORLD_SIZE"]):
        assert time.monotonic() < deadline, "another rank did not start"
        time.sleep(0.05)


def main() -> None:
    """Command line entry: the folder for the results."""
    torch.set_num_threads(1)
    hang = "--hang" in sys.argv
    if hang:
        await_all(Path(sys.argv[1]))
    ranks = Ranks.join(SILENCE_S if hang else 60.0)
    if ranks.rank > 0:
        follow(ranks, CONFIG)
        return
    followers, learner = Followers(ranks), Learner(head(0), CONFIG, ranks)
    losses = lead(learner, followers)
    StateStore(Path(sys.argv[1]), {}).save(learner.state_dict(), learner.steps, {"losses": losses})
    if hang:
        os.kill(os.getpid(), signal.SIGSTOP)
    followers.end()


if __name__ == "__main__":
    main()
