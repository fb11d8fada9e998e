"""A warm-up of the trained tiny policy: its rollouts, its command line, what it reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.sample import is_held_out, prompt_hash

EPOCHS, COUNT = 2, 96
CONFIG = """
[training]
learning_rate = 3e-3
ttt_steps = 3
threads = 1
batch_tokens = 256
state_every_steps = 5
steps_per_candidate = 15
candidate_seconds = 600.0
[replay]
capacity_bytes = 8388608
"""
Rollout = tuple[list[int], list[int]]


def write_rollouts(path: Path, rollouts: Sequence[Rollout]) -> Path:
    lines = [json.dumps({"prompt": prompt, "completion": answer}) for prompt, answer in rollouts]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def command(folder: Path, policy: Path, *options: object) -> list[str]:
    """The options of a warm-up to ``folder``/draft."""
    (folder / "warmup.toml").write_text(CONFIG)
    given = ["warmup", "--policy", policy, "--config", folder / "warmup.toml"]
    out = () if "--out" in options else ("--out", folder / "draft")
    size = () if {"--draft", "--draft-vocab"} & set(options) else ("--draft-vocab", 96)
    return [*map(str, (*given, *out, *size, *options))]


def expected_tokens(rollouts: Sequence[Rollout]) -> int:
    """Completion tokens of every pass over what is not held out."""
    groups = {prompt_hash(torch.tensor(prompt)).hex() for prompt, _ in rollouts}
    share = min(max(0.05, 32 / len(groups)), 0.25)
    trained = [
        answer
        for prompt, answer in rollouts
        if not is_held_out(prompt_hash(torch.tensor(prompt)).hex(), share)
    ]
    # The first one of a completion is never drafted.
    return EPOCHS * sum(len(answer) - 1 for answer in trained)


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "draft" / "acceptance.json").read_text())  # type: ignore[no-any-return]
