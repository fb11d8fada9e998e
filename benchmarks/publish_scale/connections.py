"""The trainer's own part with many servers: real gRPC connections to one process with many ports.

Measures what the trainer's process spends on calls, watch streams and its status; the servers
answer at once and hold nothing.
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import generate_latest

from benchmarks.publish_faults.rig import write_releases
from draft_trainer.config import PublishConfig
from draft_trainer.counters import Counters
from draft_trainer.releases.commits import Payloads, stage_on
from draft_trainer.releases.fleet import Fleet
from draft_trainer.releases.rollout_client import RolloutClient
from draft_trainer.releases.watch import AcceptanceWatch
from draft_trainer.server.status import FleetView
from slipstream.serving.server import SERVER_OPTIONS
from slipstream.v1 import draft_trainer_pb2 as trainer
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc

# ruff: noqa: N802

WATCH_SECONDS = 10.0


class Quick(pb_grpc.RolloutServerServicer):
    """A server that has everything."""

    def __init__(self) -> None:
        self.state = pb.ServerState(num_speculative_tokens=3, draft_sample_method="probabilistic")
        self.state.speculation_enabled = True
        self.moved = 0

    async def GetState(self, request: pb.GetStateRequest, context: Any) -> pb.ServerState:
        return self.state

    async def Stage(
        self, requests: AsyncIterator[pb.StageRequest], context: Any
    ) -> AsyncIterator[pb.StageResponse]:
        first = await anext(requests)
        yield pb.StageResponse(needed=pb.StageNeeded())
        yield pb.StageResponse(staged=pb.StageResult(stage_id=first.header.stage_id))

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:
        return pb.CommitResponse(state=self.state)

    async def WatchAcceptance(
        self, request: pb.WatchAcceptanceRequest, context: Any
    ) -> AsyncIterator[pb.AcceptanceReport]:
        drafts = 0
        while True:
            drafts += 100
            counters = pb.AcceptanceCounters(
                drafts=drafts,
                tried_per_position=[drafts] * 3,
                accepted_per_position=[drafts * 7 // 10, drafts // 2, drafts // 3],
            )
            yield pb.AcceptanceReport(state=self.state, counters=[counters])
            await asyncio.sleep(request.min_interval_ms / 1000)


async def serve(count: int) -> None:
    """Listen on ``count`` ports, print them, and end with standard input."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    pb_grpc.add_RolloutServerServicer_to_server(Quick(), server)
    ports = [server.add_insecure_port("127.0.0.1:0") for _ in range(count)]
    await server.start()
    print(*ports, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)


def measure(count: int, folder: Path) -> dict[str, float]:
    """Measure what ``count`` servers cost the process of their trainer."""
    command = [sys.executable, "-m", __name__, str(count)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ports = process.stdout.readline().split()
        return _measured(tuple(f"127.0.0.1:{port}" for port in ports), folder)
    finally:
        process.kill()
        process.communicate()


def _measured(addresses: tuple[str, ...], folder: Path) -> dict[str, float]:
    count = len(addresses)
    registry = write_releases(folder, 2)
    counters, view = Counters(), FleetView(registry.hold().events)
    fleet = Fleet(PublishConfig(rollout_servers=addresses, state_timeout_s=60.0), view.looked)
    draft = Payloads(registry).get(1)
    before = _series(counters)
    figures = {"servers": float(count), "connect_seconds": _seconds(fleet.states)[0]}
    rounds: dict[str, Callable[[], Any]] = {
        "state": fleet.states,
        "stage": lambda: fleet.each(
            lambda client: stage_on(client, draft, "draft-1", fleet, counters)
        ),
        "commit": lambda: fleet.each(_commit),
    }
    for name, ask in rounds.items():
        took = [_seconds(ask) for _ in range(3)]
        figures[f"{name}_seconds"] = min(wall for wall, _ in took)
        figures[f"{name}_processor_milliseconds_a_call"] = 1e3 * min(c for _, c in took) / count
    figures["threads"] = float(threading.active_count())
    watch = AcceptanceWatch(fleet)
    watch.follow(fleet.addresses)
    deadline = time.monotonic() + 60
    while len(watch.since(0, addresses, 0.0)) < count and time.monotonic() < deadline:
        time.sleep(0.1)
    figures["watched"] = float(len({a for a in addresses if watch.since(0, [a], 0.0)}))
    began = time.process_time()
    time.sleep(WATCH_SECONDS)
    figures["watch_processor_share"] = (time.process_time() - began) / WATCH_SECONDS
    figures["watch_threads"] = float(threading.active_count()) - figures["threads"]
    message = trainer.TrainerStatus(servers=view.servers())
    wall, _ = _seconds(lambda: trainer.TrainerStatus(servers=view.servers()).SerializeToString())
    figures["status_bytes"] = float(message.ByteSize())
    figures["status_seconds"] = wall
    figures["metric_series"] = float(_series(counters))
    figures["metric_series_more_than_without_servers"] = float(_series(counters) - before)
    figures["resident_bytes"] = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fleet.close()
    watch.stop(30)
    registry.close()
    return figures


def _commit(client: RolloutClient) -> object:
    return client.commit(["draft-1"])


def _series(counters: Counters) -> int:
    text = generate_latest(counters.registry).decode()
    return sum(not line.startswith("#") for line in text.splitlines())


def _seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of the clock and of the processor that the work takes."""
    wall, used = time.monotonic(), time.process_time()
    work()
    return time.monotonic() - wall, time.process_time() - used


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
