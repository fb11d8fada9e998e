"""vLLM's stat logger plug-in: hands each engine step's speculative counts to the tracker."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from rollout_server.activation import is_active
from rollout_server.process import API


class AcceptanceStatLogger(StatLoggerBase):  # type: ignore[misc]
    """Loaded by every vLLM of the environment; does nothing where Slipstream did not start it.

    Args:
        vllm_config: not looked at.
        engine_index: not looked at; the launcher refuses more than one engine.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._tracker = API.tracker if is_active() else None

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """One engine step. Called in the API server's event loop."""
        if self._tracker is None or scheduler_stats is None:
            return
        stats = scheduler_stats.spec_decoding_stats
        if stats is not None:
            self._tracker.record(
                stats.num_drafts,
                stats.num_draft_tokens,
                stats.num_accepted_tokens,
                stats.num_accepted_tokens_per_pos,
            )
        if iteration_stats is not None:
            self._tracker.generated(iteration_stats.num_generation_tokens)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
