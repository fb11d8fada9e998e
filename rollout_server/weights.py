"""Weights that the server knows: what is staged, live, and was live before."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_server.content_store import Key
from rollout_server.weight_source import WeightSource

DRAFT, POLICY = "draft", "policy"


@dataclass(frozen=True)
class Weights:
    """One version of one model, complete and verified.

    Attributes:
        kind: ``DRAFT`` or ``POLICY``.
        version: draft version, or policy version; None for the policy that the
            server was started with, whose version nobody has named.
        source: where a worker reads it.
        keys: its content in the store; empty for a checkpoint on disk.
        stage_id: the id it was staged under; empty for a checkpoint on disk.
        trained_against: for a draft: the policy version it was trained against.
        digests: {name: SHA-256 hex}, to recognise the same stage again.
    """

    kind: str
    version: int | None
    source: WeightSource
    keys: tuple[Key, ...] = ()
    stage_id: str = ""
    trained_against: int | None = None
    digests: tuple[tuple[str, str], ...] = ()

    def same_content(self, other: Weights) -> bool:
        """Whether both would be indistinguishable once live."""
        return (self.kind, self.version, self.trained_against, self.digests) == (
            other.kind,
            other.version,
            other.trained_against,
            other.digests,
        )
