"""A ruined draft that is forced on the fleet, and a server that is read back, on real vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_trainer.config import PublishConfig, TrialConfig
from draft_trainer.counters import Counters
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.releases.fleet import Fleet
from draft_trainer.releases.publisher import Publisher
from draft_trainer.releases.reconcile import Reconciler
from draft_trainer.releases.registry import Registry, open_pointer
from draft_trainer.releases.trial import Trials
from draft_trainer.releases.watch import AcceptanceWatch
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids
from slipstream.client import open_channel
from slipstream.v1 import release_pb2
from slipstream.v1 import rollout_server_pb2 as pb
from tests.draft_trainer.fleet_rig import fleet_events
from tests.rollout_server.live import Live, until

pytestmark = [pytest.mark.vllm, pytest.mark.contract("trial")]


class Guarded:
    """A publisher and its reconciler over the one server; release 1 is ruined."""

    def __init__(self, server: Live, draft: Path, folder: Path) -> None:
        registry = Registry(folder)
        registry.import_initial(draft)
        self.pointer = open_pointer(registry)
        head = Eagle3().read(registry.path(0)).draft()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        registry.create(
            head, release_pb2.ReleaseManifest(parent_version=0, run_id="ruined", ttt_steps=3)
        )
        self.address = server.control
        self.fleet = Fleet(
            PublishConfig(
                rollout_servers=(server.control,),
                state_timeout_s=10.0,
                stage_timeout_s=60.0,
                commit_timeout_s=60.0,
                reconcile_s=0.5,
            )
        )
        self.watch = AcceptanceWatch(self.fleet)
        trials = Trials(TrialConfig(), lambda: 3, self.watch)
        self.counters = Counters()
        self.publisher = Publisher(self.fleet, registry, self.pointer, self.counters, trials)
        self.reconciler = Reconciler(self.publisher, self.watch)
        self.reconciler.start()

    def seen(self, version: int) -> int:
        """Drafts of a version that the watch knows of."""
        return sum(batch.drafts for batch in self.watch.since(version, [self.address], 0.0))

    def close(self) -> None:
        assert self.reconciler.stop(30)
        self.fleet.close()
        assert self.watch.stop(30)


@pytest.fixture
def guarded(server: Live, draft_dir: Path, tmp_path: Path) -> Iterator[Guarded]:
    guarded = Guarded(server, draft_dir, tmp_path / "registry")
    yield guarded
    guarded.close()


def test_forced_ruined_draft_is_rolled_back_under_load(server: Live, guarded: Guarded) -> None:
    live = server
    batch = [prompt_ids(problem) for problem in held_out_problems(32)]
    live.speculate(False)
    plain = live.generate(batch)
    live.speculate(True)
    before = live.drafts().get(1, 0)
    with live.generating(batch) as rounds:
        until(lambda: guarded.seen(0) >= 2000, 480)
        assert guarded.publisher.promote(1, pin=True).draft_version == 1
        until(lambda: guarded.pointer.now.live == 0 and live.state().draft_version == 0, 240)
    assert live.drafts()[1] > before
    assert fleet_events(guarded.counters)["trial_rolled_back"] == 1
    assert not guarded.pointer.now.pinned
    assert all(done == plain for done in rounds), "no request failed and no token differs"


def test_read_back_matches_committed_draft(server: Live, guarded: Guarded) -> None:
    live = server
    guarded.publisher.promote(1, pin=False)
    state = live.stub.GetState(pb.GetStateRequest(read_back=True), timeout=60)
    assert not state.not_ready
    assert state.draft_sha256 == guarded.publisher.payloads.get(1).sha256
    with open_channel(server.control) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="slipstream.v1.RolloutServer/ready"), timeout=10
        )
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    # Somebody else puts release 0's draft there; within a round or two it is release 1 again.
    live.stage("draft", "foreign", 77, dict(guarded.publisher.payloads.get(0).tensors))
    live.commit("foreign")
    until(lambda: live.state().draft_version == 1, 240)
    guarded.publisher.promote(0, pin=False)
    assert live.state().draft_version == 0
