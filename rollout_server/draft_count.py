"""Counts verified drafts inside the engine, so that a commit knows how many came before it.

vLLM's statistics reach the API server through a queue that a commit's answer can
overtake. The count makes the boundary independent of that: "the first N drafts
belong to the old release".
"""

from __future__ import annotations

from typing import Any


class DraftCount:
    """Counts what the scheduler reports as one draft each.

    Args:
        engine_core: vLLM's ``EngineCore``.
    """

    def __init__(self, engine_core: Any) -> None:
        self._core = engine_core
        self._observed = 0
        self._make = engine_core.scheduler.make_spec_decoding_stats
        engine_core.scheduler.make_spec_decoding_stats = self._count

    def _count(self, *args: Any, **named: Any) -> Any:
        stats = self._make(*args, **named)
        if stats is not None:
            self._observed += 1
        return stats

    def proposed_so_far(self) -> int:
        """Drafts that were verified, plus those proposed already and verified next.

        The latter come from the weights before a commit that happens now. A
        request that ends before its draft is verified makes this too high by
        one; nothing makes it too low.
        """
        queued = sum(
            len(entry[1].scheduled_spec_decode_tokens) for entry in self._core.batch_queue or ()
        )
        waiting = sum(
            1 for request in self._core.scheduler.running if len(request.spec_token_ids) > 0
        )
        return self._observed + queued + waiting
