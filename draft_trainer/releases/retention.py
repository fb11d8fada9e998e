"""Retention: which releases of a registry stay on disk, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from draft_trainer.config import DraftConfig
from draft_trainer.releases.promotions import read_promotion
from draft_trainer.releases.registry import Registry
from slipstream.errors import RefusedError
from slipstream.v1 import release_pb2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """Removes old releases of a registry. Thread-safe."""

    registry: Registry
    config: DraftConfig
    parent: Callable[[], int]

    def apply(self) -> None:
        """Remove what is beyond the bounds; what cannot be removed is logged and tried again."""
        try:
            # Release 0 is what a restart compares the initial draft with.
            spared = lambda: {0, self.parent()}  # noqa: E731
            self.registry.prune(self.config.keep_releases, spared, self.config.keep_bytes)
        except (OSError, RefusedError) as error:
            logger.error("old releases were not removed: %s", error)


def list_uses(registry: Registry, parent: int | None = None) -> list[release_pb2.ReleaseUse]:
    """Every release of a registry, oldest first: bytes, damage, and why retention spares it.

    Args:
        registry: whose.
        parent: the release that training goes on from, if one runs.
    """
    with registry.reading() as state:
        now = read_promotion(state)
    versions = registry.versions()
    reasons: dict[str, Collection[int | None]] = {}
    if now is not None:
        on_trial = None if now.trial is None else now.trial.version
        reasons = {
            "promoted": {now.promoted},
            "served": {now.live},
            "previous": {*now.good, now.incumbent} - {now.live},
            "staged": {now.intent, on_trial} - {now.live},
        }
    reasons |= {
        "parent": {parent},
        "initial": {0},
        "newest": {*versions[-1:]},
        "busy": {*registry.busy()},
    }
    uses = []
    for version in versions:
        use = release_pb2.ReleaseUse(draft_version=version, bytes=registry.nbytes(version))
        use.kept_as.extend(word for word, known in reasons.items() if version in known)
        try:
            registry.get(version)
        except RefusedError as error:
            use.damage = str(error)
        uses.append(use)
    return uses
