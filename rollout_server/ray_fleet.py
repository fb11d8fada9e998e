"""A fleet of rollout servers that Ray places and keeps; who serves is written to a file.

The file is what ``publish.rollout_servers = ["file:..."]`` of the draft trainer reads, so the
trainer knows nothing of Ray.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rollout_server.ray_replica import Launch, Replica, Report
from slipstream.credentials import NONE, ClientCredentials
from slipstream.refusal import RefusedError

LOOK_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""Of an actor that runs; one that does not answer is being started again."""


@dataclass(frozen=True)
class FleetPlan:
    """What is placed.

    Attributes:
        command: of every server (``ray_replica.Launch``).
        replicas: how many.
        members: the file that lists the control planes that serve.
        cpus: that Ray reserves for each, and gpus.
        first_port: of the OpenAI API of replica 0; replica i has i more.
        first_control_port: likewise.
        ready_seconds: longest that a start may take.
        stop_seconds: that a server has to end.
        host: that all listen on; empty: each its node's address.
        credentials: to ask for their health with.
    """

    command: tuple[str, ...]
    replicas: int
    members: Path
    cpus: float = 1.0
    gpus: float = 0.0
    first_port: int = 8000
    first_control_port: int = 50061
    ready_seconds: float = 600.0
    stop_seconds: float = 20.0
    host: str = ""
    credentials: ClientCredentials = NONE


class RayFleet:
    """Owns the actors. ``ray.init`` was called before.

    Args:
        plan: what is placed.
        on_change: told the reports of all replicas that answer, by index, when one changed.
    """

    def __init__(
        self, plan: FleetPlan, on_change: Callable[[dict[int, Report]], None] = lambda r: None
    ) -> None:
        self._plan = plan
        self._on_change = on_change
        self._reports: dict[int, Report] = {}
        self._asked: dict[int, Any] = {}
        write_members(plan.members, ())
        actor = ray.remote(Replica).options(
            num_cpus=plan.cpus,
            num_gpus=plan.gpus,
            max_restarts=-1,
            # A node has room for several; two nodes are better than one.
            scheduling_strategy="SPREAD",
        )
        self._replicas = [
            actor.remote(
                Launch(
                    plan.command,
                    plan.first_port + index,
                    plan.first_control_port + index,
                    plan.ready_seconds,
                    plan.host,
                    plan.credentials,
                )
            )
            for index in range(plan.replicas)
        ]

    def keep(self, stop: threading.Event) -> None:
        """Keep the file up to date until ``stop`` is set.

        Raises:
            RefusedError: a server refuses what it was asked for at its first start, or Ray cannot
            start its actor.
        """
        while not stop.is_set():
            self._look()
            stop.wait(LOOK_SECONDS)

    def close(self) -> None:
        """Nobody serves any more; end every server and its actor."""
        write_members(self._plan.members, ())
        ending = [replica.stop.remote(self._plan.stop_seconds) for replica in self._replicas]
        ray.wait(ending, num_returns=len(ending), timeout=self._plan.stop_seconds + 5)
        for replica in self._replicas:
            ray.kill(replica)

    def _look(self) -> None:
        # One question at a time: while Ray starts an actor again, its questions wait.
        for index, replica in enumerate(self._replicas):
            if index not in self._asked:
                self._asked[index] = replica.report.remote()
        places = {ref: index for index, ref in self._asked.items()}
        answered, _ = ray.wait(list(places), num_returns=len(places), timeout=ANSWER_SECONDS)
        now: dict[int, Report] = {}
        for ref in answered:
            index = places[ref]
            del self._asked[index]
            try:
                # Or it died, and is being started again.
                with suppress(ActorUnavailableError):
                    now[index] = ray.get(ref)
            except ActorDiedError as error:
                raise RefusedError(
                    "rollout server",
                    f"replica {index} is gone for good: {error}",
                    "an actor that Ray can start",
                    "mend what it says and start again",
                ) from error
        refused = [index for index, report in now.items() if report.refused]
        if refused:
            raise RefusedError(
                "rollout server",
                f"replica {refused[0]} refused to start",
                "options, files and ports that every node has",
                "read its message above, mend that and start again",
            )
        if now != self._reports:
            self._reports = now
            controls = [report.control for report in now.values() if report.control]
            write_members(self._plan.members, sorted(controls))
            self._on_change(now)


def write_members(path: Path, addresses: Sequence[str]) -> None:
    """Replace the file as a whole: a reader never sees half a fleet. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    part.write_text("".join(f"{address}\n" for address in addresses), encoding="utf-8")
    part.replace(path)
