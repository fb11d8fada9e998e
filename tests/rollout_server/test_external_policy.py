"""A policy that vLLM's own weight-transfer engine brings, inside the draft's commit.

The engine reads a file (``benchmarks.hot_swap.file_engine``): what NCCL and CUDA IPC do once the
bytes have arrived, through vLLM's factory and its worker's session.
"""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.hot_swap import PEER_BACKEND
from examples.arithmetic_grpo.processes import ServiceError
from examples.local_services import CALL_SECONDS
from slipstream.client import stage
from slipstream.errors import RefusedError
from slipstream.v1 import rollout_server_pb2 as pb
from tests.rollout_server.checkpoints import load, perturbed
from tests.rollout_server.live import Live, lasting, prompts, refused, until

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def live(serve) -> Live:  # type: ignore[no-untyped-def]
    return serve(
        *("--weight-transfer-config", json.dumps({"backend": PEER_BACKEND})),
        *("--worker-extension-cls", "benchmarks.hot_swap.file_engine.WorkerExtension"),
    )


def stage_external(live: Live, stage_id: str, version: int, update: str) -> None:
    header = pb.StageHeader(
        stage_id=stage_id,
        kind=pb.STAGE_KIND_POLICY_EXTERNAL,
        version=version,
        transfer_update=update,
    )
    refused(lambda: stage(live.stub, header, {}, timeout=CALL_SECONDS))


def test_external_policy_and_draft_commit_in_one_call(
    live: Live, policy_dir: Path, draft_dir: Path, tmp_path: Path
) -> None:
    # Longer than a block of the prefix cache, so that a hit on the old policy's would show.
    long = [prompt * 11 for prompt in prompts(8)]
    first = live.generate(long)
    policy = perturbed(load(policy_dir), scale=0.3, seed=1)
    draft = perturbed(load(draft_dir), scale=0.05, seed=2)
    save_file(policy, tmp_path / "policy.safetensors")
    live.stage("draft", "draft-4", 4, draft)
    stage_external(live, "policy-9", 9, json.dumps({"path": str(tmp_path / "policy.safetensors")}))
    kinds = {stage.stage_id: stage.kind for stage in live.state().staged}
    assert kinds == {
        "draft-4": pb.STAGE_KIND_DRAFT,
        "policy-9": pb.STAGE_KIND_POLICY_EXTERNAL,
    }
    assert live.generate(long) == first, "nothing of it before the commit"
    live.commit("draft-4", "policy-9")
    state = live.state()
    assert (state.draft_version, state.policy_version) == (4, 9)
    assert (state.draft_commits, state.policy_commits, list(state.staged)) == (1, 1, [])
    live.commit("policy-9")  # The answer was lost: asked again, done once.
    assert live.state().policy_commits == 1
    moved = live.generate(long)
    assert moved != first

    # The same weights through gRPC give the same rollouts.
    live.stage("policy", "policy-10", 10, policy)
    live.commit("policy-10")
    assert live.generate(long) == moved
    live.stage("policy", "back", 11, load(policy_dir))
    live.commit("back")
    assert live.generate(long) == first


def test_external_update_engine_cannot_take_is_refused(live: Live) -> None:
    before = lasting(live.state())
    for update, text in (
        ('{"names": []}', "FileEngine.*names"),
        ("[]", "FileEngine.*IndexError"),
        ("7", "a JSON object, or a list"),
        ("", "a JSON object, or a list"),
    ):
        with pytest.raises(RefusedError, match=f"transfer_update.*{text}"):
            stage_external(live, "wrong", 12, update)
    assert lasting(live.state()) == before


def save_torn(policy: dict[str, torch.Tensor], path: Path) -> None:
    """A policy whose last layer has a matrix of another shape, and nothing else."""
    torn = {name: t for name, t in policy.items() if "layers.3" not in name}
    torn["model.layers.3.self_attn.q_proj.weight"] = torn["lm_head.weight"]
    save_file(perturbed(torn, scale=1.0, seed=3), path)


def test_failed_transfer_keeps_old_policy(
    live: Live, policy_dir: Path, draft_dir: Path, tmp_path: Path
) -> None:
    batch = prompts(16)
    before, state = live.generate(batch), live.state()
    save_torn(load(policy_dir), tmp_path / "torn.safetensors")
    for path in (tmp_path / "absent.safetensors", tmp_path / "torn.safetensors"):
        live.stage("draft", "with-it", 20, perturbed(load(draft_dir), scale=0.05, seed=5))
        stage_external(live, "failing", 20, json.dumps({"path": str(path)}))
        with pytest.raises(
            RefusedError, match=r"commit.*policy: .*the old weights are live"
        ) as why:
            live.commit("with-it", "failing")
        assert why.value.code == grpc.StatusCode.ABORTED
        live.stub.Abort(pb.AbortRequest(stage_ids=["with-it", "failing"]))
        now = live.state()
        assert (now.draft_version, now.policy_version) == (state.draft_version, 11)
        assert live.generate(batch) == before
    # The session of the engine is over: the next one works.
    save_file(load(policy_dir), tmp_path / "again.safetensors")
    stage_external(live, "again", 21, json.dumps({"path": str(tmp_path / "again.safetensors")}))
    live.commit("again")
    assert live.state().policy_version == 21 and live.generate(batch) == before


def test_transfer_failing_half_way_ends_server(
    live: Live, policy_dir: Path, tmp_path: Path
) -> None:
    """The earlier one's source has other weights by now, as a trainer's memory would."""
    policy, held, torn = load(policy_dir), tmp_path / "held", tmp_path / "torn"
    save_file(policy, held)
    stage_external(live, "earlier", 30, json.dumps({"path": str(held)}))
    live.commit("earlier")
    save_file(perturbed(policy, scale=0.3, seed=6), held)
    save_torn(policy, torn)
    stage_external(live, "failing", 31, json.dumps({"path": str(torn)}))
    with pytest.raises(RefusedError, match=r"commit.*policy: .*none are held here") as why:
        live.commit("failing")
    assert why.value.code == grpc.StatusCode.DATA_LOSS

    def ended() -> bool:
        try:
            live.service.check()
        except ServiceError:
            return True
        return False

    until(ended, what="the server stops itself")
