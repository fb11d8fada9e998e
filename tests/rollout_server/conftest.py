"""A draft as vLLM holds it, for tests that change it in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rollout_server import checkpoints
from tests.rollout_server.test_swap import Drafts


@pytest.fixture(scope="module")
def drafts(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafts]:
    """An EAGLE-3 draft and three releases of one configuration for it."""
    from vllm.distributed import cleanup_dist_env_and_memory

    folder = tmp_path_factory.mktemp("drafts")
    releases = [
        checkpoints.write_draft(folder / str(seed), policy_dir, draft_vocab_size=96, seed=seed)
        for seed in range(3)
    ]
    yield Drafts(policy_dir, releases)
    cleanup_dist_env_and_memory()
