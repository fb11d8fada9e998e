"""Our swap: the real publisher over a registry of two releases of different quality."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draft_trainer.config import PublishConfig
from draft_trainer.counters import Counters
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.releases.fleet import Fleet
from draft_trainer.releases.publisher import Publisher
from draft_trainer.releases.registry import Registry, open_pointer
from slipstream.checkpoints import WEIGHTS_FILE
from slipstream.v1 import release_pb2

NOISE = 1.0
"""The noise of the worse draft, in standard deviations of each matrix."""


@dataclass(frozen=True)
class Swap:
    """One fleet-wide swap.

    Args:
        began: monotonic seconds.
        ended: monotonic seconds.
        version: that is live after it.
        commits: seconds from commit call to answer, by server.
    """

    began: float
    ended: float
    version: int
    commits: dict[str, float]


class SwapError(RuntimeError):
    """A fleet-wide swap did not happen on every server."""


class Ours:
    """A registry with a good (0) and a worse (1) release, and the publisher over the servers.

    Args:
        draft: the good one's checkpoint.
        folder: for the registry.
        servers: control addresses.
    """

    def __init__(self, draft: Path, folder: Path, servers: list[str]) -> None:
        self.registry = Registry(folder)
        self.registry.import_initial(draft)
        pointer = open_pointer(self.registry)
        head = Eagle3().read(self.registry.path(0)).draft()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.ndim >= 2:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(NOISE * parameter.std() * noise)
        self.registry.create(head, release_pb2.ReleaseManifest(parent_version=0, run_id="hot-swap"))
        self._fleet = Fleet(
            PublishConfig(
                rollout_servers=tuple(servers),
                state_timeout_s=10.0,
                stage_timeout_s=120.0,
                commit_timeout_s=60.0,
            )
        )
        self._publisher = Publisher(self._fleet, self.registry, pointer, Counters())
        self._next = 1

    @property
    def live(self) -> int:
        """The release that is served."""
        return 1 - self._next

    def swap(self) -> Swap:
        """Swap to the other release, on every server. Raises SwapError."""
        version, self._next = self._next, 1 - self._next
        began = time.monotonic()
        published = self._publisher.promote(version, pin=False)
        ended = time.monotonic()
        missed = [a for a, outcome in published.outcomes.items() if not outcome.draft_committed]
        if missed:
            raise SwapError("; ".join(f"{a}: {published.outcomes[a].error}" for a in missed))
        commits = {a: outcome.commit_seconds for a, outcome in published.outcomes.items()}
        return Swap(began, ended, version, commits)

    def close(self) -> None:
        """Close the connections."""
        self._fleet.close()


def peer_files(registry: Registry, folder: Path) -> list[Path]:
    """The same two releases as vLLM's own path reads them."""
    found = []
    for version in (0, 1):
        path = folder / f"peer-{version}.safetensors"
        tensors = load_file(registry.path(version) / WEIGHTS_FILE)
        save_file({n: t for n, t in tensors.items() if n != "t2d"}, path)
        found.append(path)
    return found
