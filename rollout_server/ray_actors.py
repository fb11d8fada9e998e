"""Actors that Ray places all at once and starts again where it lost them.

Of ``rollout-server fleet``: its rollout servers (``ray_fleet``) and trainer ranks (``ray_ranks``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from slipstream.errors import RefusedError

REFUSED = 2
"""Exit status of a process that refuses its options."""

HEALTH_SECONDS = 2.0
SILENT_SECONDS = 60.0
"""Without any answer to a health check after which a service hangs."""

ANSWER_SECONDS = 5.0
"""Of an actor that runs; one that does not answer is being started again."""


class Places:
    """One placement group. For the places of a lost node Ray finds others, or waits for a node.

    Args:
        bundles: what each actor needs of "CPU" and "GPU".
        here: how many of them, from the first one on, must be on this process's node. The others
            are spread over the nodes: replicas on two survive the loss of one.
        seconds: within which the cluster must have all of them.
    """

    def __init__(self, bundles: Sequence[dict[str, float]], here: int, seconds: float) -> None:
        import ray
        from ray.util.placement_group import placement_group

        wanted = [{name: n for name, n in bundle.items() if n} for bundle in bundles]
        node = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        labels = [node if index < here else {} for index in range(len(wanted))]
        self.group = placement_group(wanted, strategy="SPREAD", bundle_label_selector=labels)
        self.bundles = bundles
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
            kinds = [f"{b['CPU']:g} CPUs and {b['GPU']:g} GPUs" for b in self.bundles]
            wanted = ", ".join(
                f"{kinds.count(kind)} of {kind} each" for kind in dict.fromkeys(kinds)
            )
            free = ray.available_resources()
            raise RefusedError(
                "--replicas",
                f"{wanted}, on a cluster "
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
        name: of one of them, in errors.
        kind: their class.
        arguments: its arguments, for each actor.
        places: where they run, in the bundles from ``first`` on.
    """

    def __init__(
        self,
        name: str,
        kind: type,
        arguments: Sequence[tuple[Any, ...]],
        places: Places,
        first: int,
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._name = name
        self._asked: dict[int, Any] = {}
        self.handles = [
            ray.remote(kind)
            .options(
                num_cpus=places.bundles[first + index]["CPU"],
                num_gpus=places.bundles[first + index]["GPU"],
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(places.group, first + index),
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
                    self._name,
                    f"number {index}: {error}",
                    "an actor that starts",
                    "fix what it says",
                ) from error
        return reports


def stop_all(actors: Iterable[Actors], seconds: float) -> None:
    """End them all, and their processes first."""
    import ray

    handles = [handle for each in actors for handle in each.handles]
    ending = [handle.stop.remote() for handle in handles]
    ray.wait(ending, num_returns=len(ending), timeout=seconds + 5)
    for handle in handles:
        ray.kill(handle)
