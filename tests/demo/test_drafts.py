"""The drafts that the demo begins with: each is there, small, and one for the policy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import get_args

import pytest

from draft_trainer.config import DraftKind
from draft_trainer.drafters import DRAFTERS
from examples.arithmetic_grpo.demo import _parse
from examples.arithmetic_grpo.make_mtp import policy_with_mtp
from rollout_server.vllm.served import SERVED


# vLLM serves DSpark on Model Runner V2 alone, which needs a GPU or Triton's interpreter.
@pytest.mark.parametrize("kind", sorted({*get_args(DraftKind)} - {"dspark"}))
def test_demo_has_draft_of_every_mechanism(kind: str, tmp_path: Path) -> None:
    options = _parse(["--draft-kind", kind])
    policy = options.policy
    if kind == "mtp":
        policy = policy_with_mtp(policy, tmp_path / "policy")
    assert sum(file.stat().st_size for file in options.draft.iterdir()) < 3_000_000
    checkpoint = DRAFTERS[kind].read(options.draft, policy)
    assert checkpoint.as_stored and checkpoint.draft().kind == kind
    # The path of the checkout may name a mechanism, which the server refuses for others.
    SERVED[kind].check(policy, shutil.copytree(options.draft, tmp_path / "draft"))
