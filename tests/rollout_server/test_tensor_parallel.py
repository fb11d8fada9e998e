"""Two tensor parallel ranks change together, and agree on what they hold.

Their policy's lm_head is its embedding: a push brings that matrix once, for both uses.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from slipstream.v1 import rollout_server_pb2 as pb
from tests.rollout_server.checkpoints import load, perturbed
from tests.rollout_server.live import Live, prompts

pytestmark = [pytest.mark.vllm, pytest.mark.contract("all or none"), pytest.mark.slow]


@pytest.fixture(scope="module")
def tied_dir(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy without a head of its own: another model, whose accuracy nobody asks for."""
    tied = tmp_path_factory.mktemp("tied") / "policy"
    shutil.copytree(policy_dir, tied)
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load(policy_dir)
    del tensors["lm_head.weight"]
    save_file(tensors, tied / "model.safetensors", metadata={"format": "pt"})
    return tied


@pytest.fixture(scope="module")
def live(serve, tied_dir: Path) -> Iterator[Live]:  # type: ignore[no-untyped-def]
    with pytest.MonkeyPatch.context() as environment:
        # vLLM binds each rank to a core of its own and keeps one for itself: two cores are too few.
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield serve("--tensor-parallel-size", "2", policy=tied_dir)


def test_tensor_parallel_ranks_commit_and_roll_back_together(live: Live, draft_dir: Path) -> None:
    live.speculate(False)
    plain = live.generate(prompts(16))
    live.speculate(True)
    live.stage("draft", "ruined", 7, perturbed(load(draft_dir), scale=5.0, seed=1))
    live.commit("ruined")
    state = live.stub.GetState(pb.GetStateRequest(read_back=True), timeout=60)
    assert (state.draft_version, not state.not_ready) == (7, True)
    assert live.generate(prompts(16)) == plain
    live.stub.RollBack(pb.RollBackRequest(), timeout=60)
    state = live.stub.GetState(pb.GetStateRequest(read_back=True), timeout=60)
    assert (state.draft_version, not state.not_ready) == (0, True)
    assert live.generate(prompts(16)) == plain
    assert live.drafts()[7] > 0


@torch.no_grad()
def check_log_probs(live: Live, tied_dir: Path, weights: dict[str, torch.Tensor]) -> None:
    """Those that the server reports are those of transformers."""
    model = AutoModelForCausalLM.from_pretrained(tied_dir, dtype=torch.float32)
    absent, unknown = model.load_state_dict(weights, strict=False)
    assert (absent, unknown) == (["lm_head.weight"], [])
    for prompt in prompts(4):
        body = {"model": "policy", "prompt": prompt, "max_tokens": 12, "temperature": 0}
        asked = body | {"logprobs": 0, "return_token_ids": True, "ignore_eos": True}
        answer = live.client.post("/v1/completions", json=asked)
        [choice] = answer.raise_for_status().json()["choices"]
        ids = torch.tensor([prompt + choice["token_ids"]])
        expected = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        expected = expected.gather(1, ids[0, len(prompt) :, None])[:, 0]
        reported = torch.tensor(choice["logprobs"]["token_logprobs"])
        torch.testing.assert_close(reported, expected, rtol=0, atol=1e-3)


def test_tied_policy_push_reaches_lm_head(live: Live, tied_dir: Path) -> None:
    first = load(tied_dir)
    check_log_probs(live, tied_dir, first)
    moved = perturbed(first, scale=0.3, seed=2)
    live.stage("policy", "moved", 1, moved)
    live.commit("moved")
    check_log_probs(live, tied_dir, moved)
