"""vLLM's engine as the control plane sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any

from rollout_server.control.changes import (
    Change,
    Description,
    ReceivedError,
    Result,
    UntrustedEngineError,
)
from rollout_server.control.stages import WeightSource
from rollout_server.control.step_costs import StepSum, StepSums
from rollout_server.vllm.standby import ASLEEP, READY, SAME, WORKING
from slipstream.errors import RefusedError, StatusCode
from slipstream.v1 import rollout_server_pb2 as pb

APPLY_SECONDS = 120.0
"""Deadline of a commit in the workers; far above what the largest model needs."""

PREPARE_SECONDS = 300.0
"""Longest wait for a standby copy; the draft's commit loads it otherwise."""

CALL_SECONDS = 30.0
"""Deadline of every other worker call."""

_STEP_SECONDS = 60.0
"""Added to each deadline: the engine answers between two steps, and one step may take this long."""


class VllmEngine:
    """vLLM's ``AsyncLLM``: one engine core, or one for each data-parallel rank.

    Every call goes to all of them. Each takes it between two of its steps, so with several a draft
    is live on one some steps before it is on the next; they hold their steps while a policy is
    replaced, because with expert parallelism they compute one step together.

    Every call has a deadline, and raises RefusedError where the engine does not answer.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        # Requests that had ended before a policy commit that one core refused: said with the next.
        self._ended: dict[str, int] = {}

    @property
    def cores(self) -> int:
        """The number of engine cores."""
        return len(self.client.engine_core.core_engines)

    async def describe(self) -> Description:
        """Ask the workers about the models in memory."""
        workers = await self._call_workers(CALL_SECONDS, "describe")
        return Description(
            any(worker["shares_embedding"] for worker in workers),
            tuple(sorted({name for worker in workers for name in worker["shared"]})),
            workers[0]["dtype"],
            tuple(sorted({name for worker in workers for name in worker["derived"]})),
            workers[0]["runner"],
            tuple(sorted({kind for worker in workers for kind in worker["tied"]})),
        )

    async def prepare(self, source: WeightSource, keep: WeightSource | None) -> str:
        """Make a draft's standby copy while the engine generates.

        Returns:
            Empty, or why the commit will have to load it.
        """
        messages = source.to_message(), None if keep is None else keep.to_message()
        began, pause = time.monotonic(), 0.002
        while time.monotonic() - began < PREPARE_SECONDS:
            states = set(await self._call_workers(CALL_SECONDS, "prepare", *messages))
            if WORKING not in states:
                return "; ".join(sorted(states - {READY}))
            await asyncio.sleep(pause)
            # Each question is a call between two engine steps.
            pause = min(2 * pause, 0.1)
        return f"not ready in {PREPARE_SECONDS:.0f} s"

    async def check_transfer(self, transfer: str) -> str:
        """Say why vLLM's weight transfer could not take an update (JSON); empty if it could."""
        found = await self._call_workers(CALL_SECONDS, "check_transfer", transfer)
        return "; ".join(dict.fromkeys(text for text in found if text))

    async def apply(self, changes: Sequence[Change]) -> Result:
        """Apply all or none.

        Raises:
            RefusedError: nothing was applied; a ReceivedError where a transfer had begun.
            UntrustedEngineError: what was applied is unknown.
        """
        client = self.client
        held = self.cores > 1 and any(change.kind == "policy" for change in changes)
        if held:
            # One that its user paused, or put to sleep, takes no steps and is not ours to resume.
            [paused] = await _answers("is_paused", CALL_SECONDS, [client.is_paused()])
            held = not paused
        try:
            if held:
                pause = client.pause_generation(mode="keep", clear_cache=False)
                await _answers("pause_generation", CALL_SECONDS, [pause])
            result = await self._apply_on_all(changes)
            if held and result.restored:
                await _answers("resume_generation", CALL_SECONDS, [client.resume_generation()])
        except RefusedError as error:
            # A call that failed or was late says nothing about which worker did what.
            raise UntrustedEngineError(str(error)) from error
        if not result.restored:
            raise UntrustedEngineError(result.error)
        if result.error:
            raise (ReceivedError if result.received else RefusedError)(
                "commit",
                result.error,
                "weights that vLLM's loaders take",
                "the old weights are live again; look at the staged release",
                StatusCode.ABORTED,
            )
        return result

    @property
    def always_drafts(self) -> bool:
        """True if drafting cannot be turned off: with experts on data-parallel ranks.

        The ranks compute each step of the draft together, and idle ones always do: vLLM's dummy
        batch runs it. A rank that leaves it out would have the others wait for ever.
        """
        return self.cores > 1 and bool(self.client.vllm_config.model_config.is_moe)

    async def set_speculation(self, enabled: bool) -> float:
        """Propose drafts, or none; answers the seconds that the engine was paused."""
        if not enabled and self.always_drafts:
            raise RefusedError(
                "speculation",
                "off, for experts on data-parallel ranks",
                "on",
                "leave it on, or restart without --draft or without --data-parallel-size",
                StatusCode.FAILED_PRECONDITION,
            )
        return max(await self._call(CALL_SECONDS, "set_speculation", enabled, CALL_SECONDS))

    async def set_draft_lengths(self, lengths: Sequence[int]) -> None:
        """Tokens to draft, by the number of requests in a step, from the next step on."""
        await self._call(CALL_SECONDS, "set_draft_lengths", list(lengths))

    async def read_back(self) -> list[pb.NotReady]:
        """Say why the draft in the workers' memory is not the one committed; nothing if it is."""
        return not_in_memory(await self._call_workers(CALL_SECONDS, "read_back"))

    async def step_sums(self) -> StepSums:
        """Steps and seconds of all engine cores since the start."""
        sums: dict[tuple[str, int, int], StepSum] = {}
        for answer in await self._call(CALL_SECONDS, "step_sums"):
            for kind, n, k, *values in answer:
                key = str(kind), int(n), int(k)
                sums[key] = sums.get(key, StepSum()) + StepSum(*values)
        return sums

    def is_alive(self) -> bool:
        """Return whether the engine runs and has not failed."""
        return bool(self.client.is_running) and not self.client.errored

    async def _apply_on_all(self, changes: Sequence[Change]) -> Result:
        """Apply on all; if engine cores disagree, those that applied it get the old weights again.

        Raises RefusedError: one did not answer.
        """
        results = await self._apply_on_each(changes)
        result, undo = Result.all_of(results, changes)
        if undo:
            undone = await self._apply_on_each(undo)
            for one in (*results, *undone):
                self._ended |= {name: n for name, n in one.requests.items() if n < 0}
            return result.taken_back(results, undone)
        if not result.error and any(change.kind == "policy" for change in changes):
            result = replace(result, requests={**self._ended, **result.requests})
            self._ended = {}
        return result

    async def _apply_on_each(self, changes: Sequence[Change]) -> list[Result]:
        messages = [change.to_message() for change in changes]
        answers = await self._call(APPLY_SECONDS, "apply", messages, APPLY_SECONDS)
        return [
            Result(**answer | {"steps_before": (*answer["steps_before"],)}) for answer in answers
        ]

    async def _call_workers(self, seconds: float, method: str, *args: Any) -> list[Any]:
        """Call every worker of every engine core."""
        return [each for answer in await self._call(seconds, method, *args) for each in answer]

    async def _call(self, seconds: float, method: str, *args: Any) -> list[Any]:
        """Call every engine core. Raises RefusedError as ``_answers``."""
        core = self.client.engine_core
        call, what = core._call_utility_async, ("slipstream_call", method, list(args))
        return await _answers(
            method, seconds, [call(*what, engine=engine) for engine in core.core_engines]
        )


def not_in_memory(found: Sequence[str]) -> list[pb.NotReady]:
    """Turn what workers read back (``SAME``, ``DIFFERS``, ``ASLEEP``) into reasons."""
    asleep = [worker for worker, state in enumerate(found) if state == ASLEEP]
    other = [worker for worker, state in enumerate(found) if state not in (SAME, ASLEEP)]
    reasons = (pb.NOT_READY_REASON_NOT_IN_MEMORY, other), (pb.NOT_READY_REASON_ASLEEP, asleep)
    return [pb.NotReady(reason=reason, workers=workers) for reason, workers in reasons if workers]


async def _answers(method: str, seconds: float, calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """Return what calls of the engine answer.

    Raises RefusedError: one of them did not in ``seconds`` and a step, or failed.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    limit, tasks = seconds + _STEP_SECONDS, [asyncio.ensure_future(call) for call in calls]
    try:
        _, waiting = await asyncio.wait(tasks, timeout=limit)
    finally:
        for task in tasks:
            task.cancel()
    if waiting:
        found, code = f"no answer in {limit:.0f} s", StatusCode.DEADLINE_EXCEEDED
        next_step = "look at the engine's log; restart the server if it hangs"
        raise RefusedError(method, found, "an answer", next_step, code)
    # Looked at, not caught: vLLM reports a failed call as a bare Exception.
    errors = [error for task in tasks if (error := task.exception()) is not None]
    for error in errors:
        if isinstance(error, EngineDeadError):
            code = StatusCode.UNAVAILABLE
            raise RefusedError("engine", "dead", "running", "restart the server", code) from error
    if errors:
        code, next_step = StatusCode.INTERNAL, "look at the engine's log"
        raise RefusedError(method, errors[0], "success", next_step, code) from errors[0]
    return [task.result() for task in tasks]
