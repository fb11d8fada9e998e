"""Times engine steps where they happen: in the engine core, from one step's output to the next.

That interval is what a step costs whoever waits for tokens, and it is the same thing where steps
overlap (asynchronous scheduling) and where they do not. It is taken only while the engine is busy
throughout; a worker call in between (a commit, say) spoils one interval, which is not counted.
"""

from __future__ import annotations

import time
from typing import Any

from rollout_server.speculation_switch import SchedulerSwitch
from rollout_server.step_costs import MIXED, PLAIN, SPECULATIVE


class StepClock:
    """Sums steps and seconds by kind and number of requests.

    Args:
        engine_core: vLLM's ``EngineCore``.
        switch: whether drafts are planned.
    """

    def __init__(self, engine_core: Any, switch: SchedulerSwitch) -> None:
        self._core = engine_core
        self._scheduler = engine_core.scheduler
        self._switch = switch
        self._schedule = self._scheduler.schedule
        self._update = self._scheduler.update_from_output
        self._sums: dict[tuple[str, int], list[float]] = {}
        self._since: float | None = None
        self._measuring = False

    def measure(self, on: bool) -> None:
        """Hook the scheduler, or let go of it."""
        if on == self._measuring:
            return
        self._measuring, self._since = on, None
        self._scheduler.schedule = self._scheduled if on else self._schedule
        self._scheduler.update_from_output = self._updated if on else self._update

    def interrupted(self) -> None:
        """The engine did something else than a step."""
        self._since = None

    def sums(self) -> list[list[Any]]:
        """[kind, requests, steps, seconds] of everything measured so far."""
        return [[*key, int(steps), seconds] for key, (steps, seconds) in self._sums.items()]

    def _scheduled(self, *args: Any, **named: Any) -> Any:
        if self._since is None:
            self._since = time.perf_counter()
        return self._schedule(*args, **named)

    def _updated(self, scheduler_output: Any, *rest: Any, **named: Any) -> Any:
        result = self._update(scheduler_output, *rest, **named)
        since, self._since = self._since, None
        if scheduler_output.total_num_scheduled_tokens:
            now = time.perf_counter()
            if since is not None:
                self._add(scheduler_output, now - since)
            if self._core.batch_queue or self._scheduler.has_requests():
                self._since = now
        return result

    def _add(self, scheduler_output: Any, seconds: float) -> None:
        requests = len(scheduler_output.num_scheduled_tokens)
        key = self._kind(scheduler_output, requests), rounded_up(requests)
        total = self._sums.get(key)
        if total is None:
            total = self._sums[key] = [0, 0.0]
        total[0] += 1
        total[1] += seconds

    def _kind(self, output: Any, requests: int) -> str:
        drafts = output.scheduled_spec_decode_tokens
        decoded = requests + sum(map(len, drafts.values()))
        if output.scheduled_new_reqs or output.total_num_scheduled_tokens != decoded:
            return MIXED
        if self._switch.enabled:
            # Without drafts to verify such a step still makes some: it is not a plain one.
            return SPECULATIVE if len(drafts) == requests else MIXED
        return MIXED if drafts else PLAIN


def rounded_up(requests: int) -> int:
    """To 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on: few enough for labels, close enough to compare."""
    power = 1 << (requests - 1).bit_length()
    return power * 3 // 4 if power >= 4 and requests <= power * 3 // 4 else power
