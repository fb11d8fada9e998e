"""The figures that the economy is told: by the kernel, and by rollout servers."""

from __future__ import annotations

import math
import os
import queue
import threading
from itertools import islice

import pytest

from benchmarks.publish_faults.memory_server import MemoryServer
from draft_trainer.config import PublishConfig
from draft_trainer.releases.fleet import Fleet
from draft_trainer.releases.rollout_client import RolloutClient
from draft_trainer.releases.watch import AcceptanceWatch
from draft_trainer.training.cores import CoreSeconds, core_seconds
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


def test_figure_that_is_not_finite_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """That figure of that server alone is refused: it would stay in a mean for ever."""
    loop, double = Loop(), MemoryServer()
    client = RolloutClient(double.address, PublishConfig())
    economy = loop.economy
    loop.judge(3.0, 2.0, released=True)

    def report(engine_seconds: float) -> ServerState:
        double.tracker.engine_seconds = engine_seconds
        state = client.state()
        assert isinstance(state, ServerState) and state.draft_sample_method
        economy.served(double.address, state)
        return state

    try:
        assert report(4.0).engine_seconds == 4.0
        for wrong in (math.nan, math.inf, -1.0):
            double.tracker.speed_up = wrong
            state = report(wrong)
            assert not state.HasField("engine_seconds") and not state.HasField("speed_up")
        told = [record.message for record in caplog.records]
        assert len(told) == 2, "once each until a usable one has come"
        assert told[0].startswith(f"{double.address}: engine_seconds: found nan, expected a finite")
        double.tracker.speed_up = 1.5
        assert report(6.0).speed_up == 1.5
        report(math.nan)
        assert len(caplog.records) == 3
        (seen,) = islice(client.watch(100, 60.0), 1)
        assert not seen.state.HasField("engine_seconds") and len(caplog.records) == 3
    finally:
        client.close()
        double.stop()
    # Of the double two seconds counted; the others are the slowest.
    assert loop.step(10.0, training=1.0)
    assert loop.last.figures.generation_seconds_per_version == 10.0
