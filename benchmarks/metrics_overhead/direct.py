"""What Slipstream's measuring takes of a step, added up from its own pieces.

Throughput on a shared machine varies by much more than half a percent from slice to slice, and it
takes hundreds of them to see that little. The pieces can be timed one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.metrics_overhead.figures import BOUND
from rollout_server.engine_core import SchedulerSwitch, StepClock


@dataclass(frozen=True)
class Pieces:
    """Seconds of one core.

    Attributes:
        step: between two engine steps of the windows in which it was measured.
        clock: of a step, in the engine: the step clock's hooks.
        record: of a step, in the API process: counting by draft version.
        exposition: of a scrape: Slipstream's part of /metrics, written out.
        scrape_every: seconds between scrapes.
    """

    step: float
    clock: float
    record: float
    exposition: float
    scrape_every: float

    @property
    def share(self) -> float:
        """Of the throughput, at most: as if engine and API process never worked side by side."""
        return (self.clock + self.record) / self.step + self.exposition / self.scrape_every


def clock_seconds(
    requests: int,
    draft_length: int,
    steps: int = 2_000,
    rounds: int = 15,
    timer: Callable[[], float] = time.thread_time,
) -> float:
    """What the step clock adds to a step with so many requests, over a scheduler that does nothing.

    Args:
        requests: that draft in every step.
        draft_length: tokens drafted of each.
        steps: in a row with the clock off, then with it on.
        rounds: of which the quickest with and the quickest without count, as ``timeit`` has it:
            a pause of the machine that falls into one row alone once made the difference negative.
        timer: seconds; the thread's own CPU time, so that what else runs does not count.
    """
    output = SimpleNamespace(
        num_scheduled_tokens={str(n): 1 + draft_length for n in range(requests)},
        scheduled_spec_decode_tokens={str(n): [0] * draft_length for n in range(requests)},
        scheduled_new_reqs=[],
        total_num_scheduled_tokens=requests * (1 + draft_length),
    )
    core = SimpleNamespace(
        batch_queue=None,
        scheduler=SimpleNamespace(
            schedule=lambda: output,
            update_from_output=lambda output: {},
            has_requests=lambda: True,
        ),
    )
    clock = StepClock(core, cast(SchedulerSwitch, SimpleNamespace(enabled=True)))
    took: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for measured, rows in took.items():
            clock.measure(measured)
            began = timer()
            for _ in range(steps):
                core.scheduler.update_from_output(core.scheduler.schedule())
            rows.append(timer() - began)
    return (min(took[True]) - min(took[False])) / steps


def direct_figures(pieces: Pieces) -> dict[str, Any]:
    """For JSON, the target included."""
    target = {
        "name": "share of a core that metrics take, timed piece by piece",
        "value": pieces.share,
        "bound": f"<= {BOUND}",
        "ok": pieces.share <= BOUND,
    }
    return {"seconds": asdict(pieces), "share": pieces.share, "targets": [target]}


def direct_table(found: Mapping[str, Any]) -> str:
    """For people."""
    seconds = found["seconds"]
    return (
        f"a step {1e3 * seconds['step']:.2f} ms; of it the step clock {1e6 * seconds['clock']:.1f} "
        f"us, counting {1e6 * seconds['record']:.1f} us; a scrape's part of Slipstream "
        f"{1e3 * seconds['exposition']:.2f} ms every {seconds['scrape_every']:g} s: "
        f"{100 * found['share']:.3f} % of a core"
    )
