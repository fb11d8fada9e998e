"""A release that a fleet can be told to serve, and what a server serves."""

from __future__ import annotations

from pathlib import Path

import grpc
import torch

from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.releases.registry import Registry
from slipstream.client import open_channel
from slipstream.tensors import digest_of_specs
from slipstream.v1 import release_pb2
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc


def served(address: str) -> tuple[int, bytes] | None:
    """Version and digest of the draft that a server has live; None while it does not answer."""
    with open_channel(address) as channel:
        try:
            state = pb_grpc.RolloutServerStub(channel).GetState(pb.GetStateRequest(), timeout=2)
        except grpc.RpcError:
            return None
    return state.draft_version, state.draft_sha256


def second_release(registry: Registry, draft: Path) -> tuple[int, bytes]:
    """Release 1, unlike the draft that the servers start with: its version and digest."""
    registry.import_initial(draft)
    head = Eagle3().read(registry.path(0)).draft()
    with torch.no_grad():
        next(iter(head.parameters())).add_(0.01)
    release = registry.create(
        head,
        release_pb2.ReleaseManifest(
            parent_version=0, trained_against_policy_version=1, run_id="ray", ttt_steps=3
        ),
    )
    return release.draft_version, digest_of_specs(registry.get(release.draft_version).tensors)
