"""Two tensor parallel ranks change together, and agree on what they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.v1 import rollout_server_pb2 as pb
from tests.rollout_server.checkpoints import load, perturbed
from tests.rollout_server.live import Live, prompts

pytestmark = pytest.mark.vllm


def test_both_ranks_commit_read_back_and_roll_back_the_same_release(  # type: ignore[no-untyped-def]
    serve, draft_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM binds each rank to a core of its own and keeps one for itself: two cores are too few.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    live: Live = serve("--tensor-parallel-size", "2")
    live.speculate(False)
    plain = live.generate(prompts(16))
    live.speculate(True)
    live.stage("draft", "ruined", 7, perturbed(load(draft_dir), scale=5.0, seed=1))
    live.commit("ruined")
    state = live.stub.GetState(pb.GetStateRequest(read_back=True), timeout=60)
    assert (state.draft_version, state.not_ready) == (7, "")
    assert live.generate(prompts(16)) == plain
    live.stub.RollBack(pb.RollBackRequest(), timeout=60)
    state = live.stub.GetState(pb.GetStateRequest(read_back=True), timeout=60)
    assert (state.draft_version, state.not_ready) == (0, "")
    assert live.generate(prompts(16)) == plain
    assert live.drafts()[7] > 0
