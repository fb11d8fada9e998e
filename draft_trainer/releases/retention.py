"""Which releases stay: those in use, those that are pinned, and the newest within the bounds."""

from __future__ import annotations

import logging
from collections.abc import Callable

from draft_trainer.releases.promotions import Promotion
from draft_trainer.releases.registry import Registry
from slipstream.refusal import RefusedError
from slipstream.v1 import release_pb2

logger = logging.getLogger(__name__)

Uses = Callable[[], list[tuple[int, str]]]
"""Releases in use, each with a word that says for what; may name one several times."""


def uses_of(promotion: Promotion) -> list[tuple[int, str]]:
    """What the fleet may ask for at any time."""
    uses = [(promotion.promoted, "promoted"), (promotion.last_good, "served")]
    if promotion.previous is not None:
        uses.append((promotion.previous, "previous"))
    staged = promotion.in_use - {version for version, _ in uses}
    return uses + [(version, "staged") for version in sorted(staged)]


class Retention:
    """Removes old releases of a registry. Thread-safe.

    Args:
        registry: theirs.
        keep_releases: those beyond the newest so many go.
        keep_bytes: while all take more than this together, the oldest go.
        in_use: these stay whatever the bounds. Asked right before anything is removed.
    """

    def __init__(
        self, registry: Registry, keep_releases: int, keep_bytes: int, in_use: Uses
    ) -> None:
        self._registry = registry
        self._keep_releases = keep_releases
        self._keep_bytes = keep_bytes
        self._in_use = in_use

    def apply(self) -> None:
        """Remove what is beyond the bounds; what cannot be removed is logged and tried again."""
        try:
            # Release 0 is what a restart compares the initial draft with.
            spared = {0, *(version for version, _ in self._in_use())}
            self._registry.prune(self._keep_releases, spared, self._keep_bytes)
        except (OSError, RefusedError) as error:
            logger.error("old releases were not removed: %s", error)

    def uses(self) -> list[release_pb2.ReleaseUse]:
        """Every release, oldest first, with why it stays."""
        return list_uses(self._registry, self._in_use())


def list_uses(registry: Registry, in_use: list[tuple[int, str]]) -> list[release_pb2.ReleaseUse]:
    """Every release of a registry, oldest first: bytes, damage, and why retention spares it."""
    versions, pins, busy = registry.versions(), registry.pins(), registry.busy()
    uses = []
    for version in versions:
        kept_as = [word for number, word in in_use if number == version]
        kept_as += [
            word
            for word, applies in (
                ("initial", version == 0),
                ("newest", version == versions[-1]),
                ("pinned", version in pins),
                ("busy", version in busy),
            )
            if applies
        ]
        uses.append(
            release_pb2.ReleaseUse(
                draft_version=version,
                kept_as=kept_as,
                bytes=registry.nbytes(version),
                damage=_damage(registry, version),
            )
        )
    return uses


def _damage(registry: Registry, version: int) -> str:
    try:
        registry.get(version)
    except RefusedError as error:
        return str(error)
    return ""
