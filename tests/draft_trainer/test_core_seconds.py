"""What the economy is told: by the kernel, and by rollout servers."""

from __future__ import annotations

import os
import queue
import threading
import time

from draft_trainer.config import PublishConfig
from draft_trainer.releases.canary import AcceptanceWatch
from draft_trainer.releases.fleet import Fleet
from draft_trainer.training.economy import CoreSeconds, core_seconds
from tests.draft_trainer.fleet_double import RolloutDouble


def test_the_kernel_says_what_this_process_had_of_the_cores() -> None:
    before = core_seconds()
    assert before is not None and before.ran > 0
    after, end = core_seconds(), time.monotonic() + 30.0
    # The kernel adds up when it ticks.
    while after is not None and after.ran <= before.ran and time.monotonic() < end:
        sum(number * number for number in range(100_000))
        after = core_seconds()
    assert after is not None and after.ran > before.ran and after.waited >= before.waited
    assert 0 <= after.taken_since(before) <= after.ran - before.ran


def test_only_threads_that_train_count_where_the_process_does_more() -> None:
    """Those of another nice value are the policy's, where it trains in this process."""
    trainers, ready, over = 7, threading.Event(), threading.Event()

    def train() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), trainers)
        while not over.is_set():
            found = core_seconds(nice=trainers)
            if found is not None and found.ran > 0:
                ready.set()

    idle = core_seconds(nice=trainers)
    assert idle == CoreSeconds(0.0, 0.0)
    thread = threading.Thread(target=train)
    thread.start()
    try:
        assert ready.wait(60)
        training, whole = core_seconds(nice=trainers), core_seconds()
        assert whole is not None and training is not None
        assert 0 < training.ran < whole.ran
    finally:
        over.set()
        thread.join()


def test_servers_that_do_not_draft_report_too() -> None:
    double, reports = RolloutDouble(), queue.SimpleQueue[tuple[str, float]]()
    fleet = Fleet(PublishConfig(rollout_servers=(double.address,)))
    watch = AcceptanceWatch(fleet, on_report=lambda a, s: reports.put((a, s.engine_seconds)))
    try:
        double.state.engine_seconds = 4.0
        watch.follow([double.address])
        assert reports.get(timeout=60) == (double.address, 4.0)
    finally:
        fleet.close()
        double.stop()
        assert watch.stop(60)
