"""How a real vLLM server accepts the draft that is live, by its own counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from examples.arithmetic_grpo.rollouts import RolloutClient
from examples.local_services import RolloutServer


@dataclass(frozen=True)
class Acceptance:
    """One draft's counters in vLLM.

    Attributes:
        drafts: verification steps.
        accepted: tokens accepted.
        per_position: drafts of which at least 1, 2, ... tokens were accepted.
    """

    drafts: int
    accepted: int
    per_position: tuple[int, ...]

    @property
    def length(self) -> float:
        """Tokens per verification step, bonus token included."""
        return 1 + self.accepted / self.drafts

    @property
    def standard_error(self) -> float:
        """Of ``length``, verification steps taken as independent.

        The counters hold the whole distribution of the accepted tokens a of a step:
        E[a^2] = sum over s of (2 s - 1) P(a >= s).
        """
        mean = self.accepted / self.drafts
        square = sum((2 * s + 1) * n for s, n in enumerate(self.per_position)) / self.drafts
        return float(((square - mean**2) / self.drafts) ** 0.5)


def rollouts(
    server: RolloutServer, version: int, prompts: Sequence[Sequence[int]], samples: int
) -> tuple[Acceptance, list[list[int]]]:
    """Generate at temperature 1 and read the counters of the draft version that is live.

    Returns:
        The counters, and the completions: all of the first prompt, of the second, ...
    """
    # It asks a trainer only for releases, of which there are none.
    client = RolloutClient(server.http, server.control, server.control, "policy")
    try:
        generation, _ = client.generate(prompts, samples)
    finally:
        client.close()
    if generation.failed:
        raise RuntimeError(f"{len(generation.failed)} requests failed: {generation.failed[0]}")
    found = server.counters()[version]
    counts = tuple(found.accepted_per_position)
    return Acceptance(found.drafts, found.accepted_tokens, counts), generation.completions
