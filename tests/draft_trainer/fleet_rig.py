"""A publisher, its releases and its fleet of rollout servers, all in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import torch

from benchmarks.publish_faults.memory_server import MemoryServer
from draft_trainer.config import PublishConfig, TrialConfig
from draft_trainer.counters import _FLEET_EVENTS, Counters, by_label
from draft_trainer.releases.fleet import Fleet
from draft_trainer.releases.publisher import Publisher
from draft_trainer.releases.reconcile import Reconciler
from draft_trainer.releases.registry import Registry, open_pointer
from draft_trainer.releases.trial import Trials
from draft_trainer.releases.watch import AcceptanceWatch
from slipstream.v1 import release_pb2
from tests.draft_trainer.rig import write_draft
from tests.draft_trainer.synthetic import head

RELEASES = 4

# Seconds that nothing takes on a busy machine either.
LONG = 25.0


def fleet_events(counters: Counters) -> dict[str, int]:
    """Return the count of each event of ``published``, ``healed`` and ``not_healed`` too."""
    found = {
        event: by_label(getattr(counters, name)).get(label, 0)
        for event, (name, label) in _FLEET_EVENTS.items()
    }
    found["healed"] = sum(by_label(counters.heals).values())
    found["not_healed"] = sum(by_label(counters.heals_failed).values())
    return {event: count for event, count in found.items() if count}


class Rig:
    """Three rollout servers, four releases, a publisher."""

    def __init__(
        self,
        tmp_path: Path,
        servers: int = 3,
        trial: TrialConfig | None = None,
        **publish: Any,
    ) -> None:
        self.initial = write_draft(tmp_path / "initial")
        self.servers = [MemoryServer(self.initial) for _ in range(servers)]
        self.registry = Registry(tmp_path / "registry")
        self.registry.import_initial(self.initial)
        open_pointer(self.registry)
        for seed in range(1, RELEASES):
            model = head(seed)
            self.registry.create(
                model,
                release_pb2.ReleaseManifest(
                    parent_version=seed - 1,
                    trained_against_policy_version=10 + seed,
                    run_id="run",
                    ttt_steps=3,
                ),
            )
        self.root = tmp_path / "registry"
        self.counters = Counters()
        self.fleet = Fleet(
            PublishConfig(
                rollout_servers=tuple(server.address for server in self.servers),
                **{
                    # No test waits one of these out: each server answers, or its port is closed.
                    **dict.fromkeys(
                        ("state_timeout_s", "stage_timeout_s", "commit_timeout_s"), LONG
                    ),
                    "reconcile_s": 0.2,
                    **publish,
                },
            )
        )
        self.watch = AcceptanceWatch(self.fleet)
        self.trial_config = trial or TrialConfig(enabled=False)
        self.run: Any = None
        self.restart()

    def restart(self) -> None:
        """A trainer that starts: what is on disk is read again."""
        self.registry.close()
        run_id = lambda: "" if self.run is None else self.run.run_id  # noqa: E731
        self.pointer = open_pointer(self.registry, run_id)
        self.trials = Trials(self.trial_config, lambda: 3, self.watch, lambda: self.run)
        trials = self.trials if self.trial_config.enabled else None
        self.publisher = Publisher(self.fleet, self.registry, self.pointer, self.counters, trials)
        self.reconciler = Reconciler(self.publisher, self.watch)

    def forget(self) -> None:
        """A trainer that starts in another process: nothing in memory is left."""
        self.fleet.close()
        assert self.watch.stop(LONG)
        self.fleet = Fleet(self.fleet.config)
        self.watch = AcceptanceWatch(self.fleet)
        for server in self.servers:
            server.watched.clear()
        self.restart()

    def watching(self) -> None:
        """Until every server's counters are followed: what is drafted from now on is seen."""
        self.watch.follow(server.address for server in self.servers)
        for server in self.servers:
            assert server.watched.wait(LONG)

    def draft(self, version: int, accepted: Sequence[int], steps: int) -> None:
        """So many steps on every server that serves ``version``, until the watch has seen them.

        Args:
            version: of the draft.
            accepted: at each position, of 100 steps.
            steps: a multiple of 100.
        """
        before, servers = self.seen(version), self.served.count(version)
        for _ in range(steps // 100):
            for server in self.servers:
                if server.state.draft_version == version:
                    server.draft(100, accepted)
        revision, deadline = 0, time.monotonic() + LONG
        while self.seen(version) < before + servers * steps:
            assert time.monotonic() < deadline, "not seen"
            revision = self.watch.wait_beyond(revision, 1.0)

    def seen(self, version: int) -> int:
        """Verification steps of a release that the watch knows of."""
        addresses = [server.address for server in self.servers]
        return sum(batch.drafts for batch in self.watch.since(version, addresses, 0.0))

    def put(self, index: int, version: int, tensors_of: int | None = None) -> None:
        """Have a server serve a release, or this number with the bytes of another one, as if
        somebody else had committed it there."""
        tensors = self.registry.tensors(version if tensors_of is None else tensors_of)
        self.servers[index].put(version, tensors)

    def heal(self) -> None:
        """One round of the reconciler."""
        self.reconciler.round()

    def events(self) -> list[tuple[str, int]]:
        """Name and release of every event."""
        events = self.pointer.state.events.since(0)
        return [(event.kind, event.draft_version) for event in events]

    def reachable(self, index: int) -> None:
        """Until the channel to a server that was started again is up."""
        channel = self.fleet.client(self.servers[index].address)._channel
        grpc.channel_ready_future(channel).result(timeout=20)

    @property
    def served(self) -> list[int]:
        return [server.state.draft_version for server in self.servers]

    @property
    def policies(self) -> list[int]:
        return [server.state.policy_version for server in self.servers]

    def stage_policy(self, version: int) -> str:
        for server in self.servers:
            server.stage_policy(f"policy-{version}", version)
        return f"policy-{version}"

    def assert_live(self, version: int) -> None:
        """Every server holds exactly the release's bytes."""
        tensors = self.registry.tensors(version)
        for server in self.servers:
            assert server.live.keys() == tensors.keys()
            assert all(torch.equal(server.live[n], t) for n, t in tensors.items())

    def close(self) -> None:
        self.fleet.close()
        assert self.watch.stop(LONG)
        self.registry.close()
        for server in self.servers:
            server.stop()
