"""Policies of every family pushed over a live one in vLLM: it becomes what a fresh load gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_server.control.changes import Change
from rollout_server.vllm import patches
from rollout_server.vllm.reload import LiveModel, apply_all
from tests.policy_bridge.families import FAMILIES, NOT_PUSHED
from tests.rollout_server.drafts import Policy, different, tensors_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    """The changes of ``rollout-server`` to a CPU's vLLM so that packed matrices follow a push."""
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod as Experts
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod as Linear
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )

    with pytest.MonkeyPatch.context() as kept:
        kept.setattr(Experts, "_setup_kernel", Experts._setup_kernel)
        kept.setattr(ParallelLMHead, "tie_weights", ParallelLMHead.tie_weights)
        for method in (UnquantizedEmbeddingMethod, Linear):
            process = method.process_weights_after_loading
            kept.setattr(method, "process_weights_after_loading", process)
        patches.pack_experts_again(Experts)
        patches.follow_tied_embedding(ParallelLMHead, UnquantizedEmbeddingMethod)
        patches.keep_convolution(Linear)
        yield


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    """Groups of ranks of the test's own: vLLM makes some of them only for models with experts."""
    from vllm.distributed import cleanup_dist_env_and_memory

    yield
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NOT_PUSHED])
def test_family_push_gives_what_fresh_load_gives(family: str, tmp_path: Path) -> None:
    policy = Policy(family, tmp_path)
    old, new = policy.sources
    before, expected = tensors_of(policy.model), tensors_of(policy.load(1)[1])
    assert not [name for name in before if name not in different(before, expected)]
    with policy.current():
        result = apply_all(
            [(Change("policy", new, old), LiveModel(policy.model, policy.model_config))]
        )
    assert result.error == "" and result.restored
    assert not different(tensors_of(policy.model), expected)
