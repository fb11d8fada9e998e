"""Actors that Ray places all at once and starts again where it lost them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from slipstream.errors import RefusedError

ANSWER_SECONDS = 5.0
"""The state of an actor that runs; one that does not answer is being started again."""


class Places:
    """One placement group. For the places of a lost node Ray finds others, or waits for a node.

    The places are spread over the nodes: replicas on two survive the loss of one.

    Args:
        count: how many there are.
        cpus, gpus: what each one has; not both 0.
        seconds: within which the cluster must have all of them.
    """

    def __init__(self, count: int, cpus: float, gpus: float, seconds: float) -> None:
        from ray.util.placement_group import placement_group

        bundle = {name: n for name, n in (("CPU", cpus), ("GPU", gpus)) if n}
        self.group = placement_group([bundle] * count, strategy="SPREAD")
        self.count, self.cpus, self.gpus = count, cpus, gpus
        self._ready = self.group.ready()
        self._seconds, self._deadline = seconds, time.monotonic() + seconds

    def check(self) -> None:
        """Raise RefusedError where the cluster did not have all places in time."""
        import ray

        if self._ready is None:
            return
        if ray.wait([self._ready], timeout=0)[0]:
            self._ready = None
        elif time.monotonic() > self._deadline:
            free = ray.available_resources()
            raise RefusedError(
                "--replicas",
                f"{self.count} of {self.cpus:g} CPUs and {self.gpus:g} GPUs each, on a cluster "
                f"with {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs free",
                f"a place for each in {self._seconds:.0f} s",
                "ask for fewer, or add nodes",
            )

    def give_back(self) -> None:
        """Free them."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


class Actors:
    """Actors of one kind, which answer ``report()`` at any time and end with ``stop()``.

    Args:
        kind: their class.
        arguments: its arguments, for each actor.
        places: where they run, as many.
    """

    def __init__(self, kind: type, arguments: Sequence[tuple[Any, ...]], places: Places) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._asked: dict[int, Any] = {}
        self.handles = [
            ray.remote(kind)
            .options(
                num_cpus=places.cpus,
                num_gpus=places.gpus,
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(places.group, index),
            )
            .remote(*each)
            for index, each in enumerate(arguments)
        ]

    def ask(self) -> dict[int, Any]:
        """The reports of those that answer; the others are being started, or started again.

        Raises:
            RefusedError: Ray cannot start one of them.
        """
        import ray
        from ray.exceptions import ActorDiedError, ActorUnavailableError

        # One question at a time: while Ray starts an actor again, its questions wait.
        for index, actor in enumerate(self.handles):
            if index not in self._asked:
                self._asked[index] = actor.report.remote()
        places = {ref: index for index, ref in self._asked.items()}
        answered, _ = ray.wait(list(places), num_returns=len(places), timeout=ANSWER_SECONDS)
        reports = {}
        for ref in answered:
            index = places[ref]
            del self._asked[index]
            try:
                # Unavailable: it died, and is being started again.
                with suppress(ActorUnavailableError):
                    reports[index] = ray.get(ref)
            except ActorDiedError as error:
                raise RefusedError(
                    "rollout server",
                    f"number {index}: {error}",
                    "an actor that starts",
                    "fix what it says",
                ) from error
        return reports

    def stop(self, seconds: float) -> None:
        """End them all, and their processes first."""
        import ray

        ending = [handle.stop.remote() for handle in self.handles]
        ray.wait(ending, num_returns=len(ending), timeout=seconds + 5)
        for handle in self.handles:
            ray.kill(handle)
