"""The engine as the control plane sees it: a Protocol, and vLLM behind it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from rollout_server.reload import WeightSource
from rollout_server.step_costs import StepSum, StepSums
from rollout_server.swap import READY, SAME, WORKING
from slipstream.errors import RefusedError

APPLY_SECONDS = 120.0
"""Deadline of a weight swap in the workers; far above what the largest model needs."""

PREPARE_SECONDS = 300.0
"""Longest wait for a draft to lie ready in the workers; its commit loads it otherwise."""

CALL_SECONDS = 30.0
"""Deadline of every other worker call."""

# The engine answers between two steps; this is how long one step may take.
_STEP_SECONDS = 60.0


@dataclass(frozen=True)
class Change:
    """One model to be replaced: "draft" or "policy", by what, and what it is now."""

    kind: str
    new: WeightSource
    old: WeightSource


@dataclass(frozen=True)
class Applied:
    """A commit that happened.

    Attributes:
        worker_seconds: that the engine stood still, the slowest worker's.
        drafts_before: see ``AcceptanceTracker.switch``.
    """

    worker_seconds: float
    drafts_before: int


@dataclass(frozen=True)
class Description:
    """What the workers say about the models in memory."""

    has_draft: bool
    shares_embedding: bool
    shared: tuple[str, ...]
    served_dtype: str


class UntrustedEngineError(Exception):
    """The weights in memory are unknown: the server must stop serving."""


class Engine(Protocol):
    """What the control plane needs of an engine. Every call has a deadline."""

    async def start(self) -> Description: ...

    async def describe(self) -> Description: ...

    async def prepare(self, source: WeightSource, keep: WeightSource | None) -> str:
        """Lay a draft ready beside the live one, while the engine generates.

        Args:
            source: the draft.
            keep: another that must stay ready.

        Returns:
            Empty, or why the commit will have to load it.

        Raises:
            RefusedError: the engine did not answer.
        """
        ...

    async def apply(self, changes: Sequence[Change]) -> Applied:
        """Apply all or none.

        Raises:
            RefusedError: nothing was applied.
            UntrustedEngineError: nobody knows what was applied.
        """
        ...

    async def set_speculation(self, enabled: bool) -> float: ...

    async def read_back(self) -> str:
        """Why the draft in the workers' memory is not the one committed; empty if it is."""
        ...

    def is_alive(self) -> bool: ...


class VllmEngine:
    """``Engine`` over vLLM's ``AsyncLLM``.

    Args:
        client: vLLM's engine client in the API server.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    async def start(self) -> Description:
        return _described(await self._call(CALL_SECONDS, "slipstream_start"))

    async def describe(self) -> Description:
        return _described(await self._call(CALL_SECONDS, "slipstream_describe"))

    async def prepare(self, source: WeightSource, keep: WeightSource | None) -> str:
        plan = {
            "source": source.to_message(),
            "keep": None if keep is None else keep.to_message(),
        }
        began, pause = time.monotonic(), 0.002
        while time.monotonic() - began < PREPARE_SECONDS:
            answer = await self._call(CALL_SECONDS, "slipstream_prepare", plan)
            states = set(answer["workers"])
            if WORKING not in states:
                return "; ".join(sorted(states - {READY}))
            await asyncio.sleep(pause)
            # Each question is a call between two engine steps.
            pause = min(2 * pause, 0.1)
        return f"not ready in {PREPARE_SECONDS:.0f} s"

    async def apply(self, changes: Sequence[Change]) -> Applied:
        plan = {
            "changes": [
                {"kind": c.kind, "new": c.new.to_message(), "old": c.old.to_message()}
                for c in changes
            ]
        }
        try:
            answer = await self._call(APPLY_SECONDS, "slipstream_apply", plan, APPLY_SECONDS)
        except RefusedError as error:
            # A call that failed or was late says nothing about which worker did what.
            raise UntrustedEngineError(str(error)) from error
        outcomes = answer["outcomes"]
        if not all(outcome["restored"] for outcome in outcomes):
            raise UntrustedEngineError("; ".join(o["error"] for o in outcomes if o["error"]))
        failed = [outcome["error"] for outcome in outcomes if outcome["error"]]
        if failed:
            raise RefusedError(
                "commit",
                "; ".join(failed),
                "weights that vLLM's loaders take",
                "the old weights are live again; look at the staged release",
                grpc.StatusCode.ABORTED,
            )
        return Applied(
            max(float(outcome["seconds"]) for outcome in outcomes), int(answer["drafts_before"])
        )

    async def set_speculation(self, enabled: bool) -> float:
        answer = await self._call(CALL_SECONDS, "slipstream_set_speculation", enabled, CALL_SECONDS)
        return max(float(seconds) for seconds in answer["seconds"])

    async def read_back(self) -> str:
        answer = await self._call(CALL_SECONDS, "slipstream_read_back")
        wrong = [f"worker {n}: {w}" for n, w in enumerate(answer["workers"]) if w != SAME]
        return f"draft read back from memory: {', '.join(wrong)}" if wrong else ""

    async def step_sums(self, measure: bool) -> StepSums:
        answer = await self._call(CALL_SECONDS, "slipstream_step_sums", measure)
        return {(str(kind), int(n)): StepSum(int(s), float(t)) for kind, n, s, t in answer}

    def is_alive(self) -> bool:
        return bool(self._client.is_running) and not self._client.errored

    async def _call(self, seconds: float, method: str, *args: Any) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        limit = seconds + _STEP_SECONDS
        call = asyncio.ensure_future(self._client.engine_core.call_utility_async(method, *args))
        done, _ = await asyncio.wait({call}, timeout=limit)
        if not done:
            call.cancel()
            raise RefusedError(
                method,
                f"no answer in {limit:.0f} s",
                "an answer",
                "look at the engine's log; restart the server if it hangs",
                grpc.StatusCode.DEADLINE_EXCEEDED,
            )
        # Looked at, not caught: vLLM reports a failed call as a bare Exception.
        error = call.exception()
        if isinstance(error, EngineDeadError):
            raise RefusedError(
                "engine", "dead", "running", "restart the server", grpc.StatusCode.UNAVAILABLE
            ) from error
        if error is not None:
            raise RefusedError(
                method, error, "success", "look at the engine's log", grpc.StatusCode.INTERNAL
            ) from error
        return call.result()


def _described(answer: Any) -> Description:
    workers = answer["workers"]
    return Description(
        has_draft=any(worker["has_draft"] for worker in workers),
        shares_embedding=any(worker["shares_embedding"] for worker in workers),
        shared=tuple(sorted({name for worker in workers for name in worker["shared"]})),
        served_dtype=workers[0]["dtype"],
    )
