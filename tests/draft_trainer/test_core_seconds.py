"""What the economy is told: by the kernel, and by rollout servers."""

from __future__ import annotations

import os
import queue
import threading

import pytest

from benchmarks.publish_faults.memory_server import MemoryServer
from draft_trainer.config import PublishConfig
from draft_trainer.releases.fleet import Fleet
from draft_trainer.releases.watch import AcceptanceWatch
from draft_trainer.training.economy import CoreSeconds, core_seconds
from slipstream.v1.rollout_server_pb2 import ServerState
from tests.draft_trainer.test_economy import Loop


def test_core_seconds_count_training_threads_only() -> None:
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
    double, reports = MemoryServer(), queue.SimpleQueue[tuple[str, float]]()
    fleet = Fleet(PublishConfig(rollout_servers=(double.address,)))
    watch = AcceptanceWatch(fleet, on_report=lambda a, s: reports.put((a, s.engine_seconds)))
    try:
        double.tracker.engine_seconds = 4.0
        watch.follow([double.address])
        assert reports.get(timeout=60) == (double.address, 4.0)
    finally:
        fleet.close()
        double.stop()
        assert watch.stop(60)


def test_servers_switched_off_by_hand_are_not_counted() -> None:
    loop = Loop()
    loop.judge(3.0, 3.0, released=True)
    loop.step(10.0, training=5.0, speed_up=1.5)
    for wanted in (False, True):
        off = ServerState(engine_seconds=1e3, speculation_wanted=wanted)
        for address in loop.seconds:
            loop.economy.served(address, off)
        # Of two servers that draft a share of 1.1 / 3; where none pays, what lies beyond 2.
        share = 1 - 2.0 / 3.0 if wanted else 1.1 / 3.0
        assert loop.economy._saved_share(1.9, 1.1, 3.0) == pytest.approx(share)
