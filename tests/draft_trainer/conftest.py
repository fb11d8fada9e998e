"""What several tests of the trainer share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from draft_trainer.kernels.library import using_kernels
from tests.draft_trainer.recordings import record_tiny


@pytest.fixture(scope="session")
def tiny_states(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of the trained tiny policy: 160 solutions. Not to be written to."""
    return record_tiny(tmp_path_factory.mktemp("tiny") / "states", policy_dir, 160)


@pytest.fixture(autouse=True)
def plain_torch() -> Iterator[None]:
    """A command that ran in this process leaves its choice of kernels behind, and with it bits."""
    with using_kernels("off"):
        yield
