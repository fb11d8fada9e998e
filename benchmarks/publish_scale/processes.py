"""Publishes to many real control planes, of which some are killed during each."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.publish_faults.faults import following_on
from benchmarks.publish_faults.rig import Rig
from slipstream.readiness import not_ready_text
from slipstream.v1 import rollout_server_pb2 as pb


class ManyRig(Rig):
    """A fleet that is asked and started many servers at a time."""

    publish: Mapping[str, Any] = {"reconcile_s": 0.5, "stage_timeout_s": 60.0}

    def states(self, indices: list[int]) -> list[pb.ServerState | None]:
        """Return what these servers serve, asked at the same time."""
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(self.state, indices))

    def start(self) -> None:
        with ThreadPoolExecutor(4) as pool:
            dead = [i for i, p in enumerate(self._servers) if p is None or not p.is_alive()]
            list(pool.map(self.start_server, dead))
        if self._trainer is None or not self._trainer.is_alive():
            self.start_trainer()


def measure(servers: int, killed: int, runs: int, folder: Path) -> dict[str, Any]:
    """Publish ``runs`` times; in each ``killed`` servers die at random instants."""
    chance, rig = random.Random(0), ManyRig(folder, servers)
    wrong: list[str] = []
    egress: list[float] = []
    seconds: list[float] = []
    try:
        rig.start()
        version = following_on(rig.settled())
        for run in range(runs):
            if run == 0:
                # No server dies: this is how long a publish takes.
                answer, usual, sent = _publish(rig, version, [], 0.0, chance)
                assert answer == {"version": version, "errors": []}, answer
                figures = {"first_seconds": usual, "first_egress_drafts": sent}
                version = following_on(version)
            victims = chance.sample(range(servers), killed)
            answer, took, sent = _publish(rig, version, victims, usual, chance)
            error = _judge(rig, victims)
            seconds.append(took)
            egress.append(sent)
            if error:
                wrong.append(f"run {run}: {error}")
            rig.start()
            version = following_on(rig.settled())
    finally:
        rig.stop()
    return {
        **figures,
        "servers": servers,
        "killed": killed,
        "runs": len(seconds),
        "right": len(seconds) - len(wrong),
        "wrong": wrong,
        "seconds": seconds,
        "egress_drafts": egress,
    }


def _publish(
    rig: ManyRig, version: int, victims: list[int], within: float, chance: random.Random
) -> tuple[dict[str, Any], float, float]:
    """Return the trainer's answer, its seconds, and what it sent, in drafts."""
    before = rig.ask("sent")["bytes"]
    instants = sorted(chance.uniform(0.0, within) for _ in victims)
    begun = time.monotonic()

    def kill() -> None:
        for victim, instant in zip(victims, instants, strict=True):
            time.sleep(max(0.0, begun + instant - time.monotonic()))
            rig.kill_server(victim)

    killer = threading.Thread(target=kill)
    killer.start()
    answer = rig.ask("promote", version)
    took = time.monotonic() - begun
    killer.join()
    sent = rig.ask("sent")
    return answer, took, (sent["bytes"] - before) / sent["size"]


def _judge(rig: ManyRig, victims: list[int]) -> str:
    """Return what is wrong with the living servers; empty if all serve the wanted release."""
    alive = [index for index in range(len(rig.addresses)) if index not in victims]
    deadline = time.monotonic() + 30
    while True:
        aim = rig.ask("wanted")["wanted"]
        seen = {
            None if state is None else (state.draft_version, not_ready_text(state.not_ready))
            for state in rig.states(alive)
        }
        ready = {version for version, reason in filter(None, seen) if not reason}
        if seen == {(aim, "")}:
            return ""
        if time.monotonic() > deadline:
            return f"wanted {aim}, ready servers serve {sorted(ready)}: {seen}"
        time.sleep(0.05)
