"""Policies that vLLM cannot load over live ones: a push of them is refused and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rollout_server.control.changes import Change
from rollout_server.control.stages import WeightSource
from rollout_server.vllm.reload import LiveModel, apply_all, load, refuse_lost
from rollout_server.vllm.worker import _receive
from slipstream.errors import RefusedError
from tests.rollout_server.drafts import Policy, different, tensors_of

# From 0.33 on, vLLM has a weight loader for the sinks.
LOST = (
    r"model\.layers\.0\.(attn\.sinks and 14|mlp\.experts\.routed_experts\.w13_bias and 11) others: "
    r"found copied by GptOssForCausalLM"
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as experts

    with pytest.MonkeyPatch.context() as patch:
        # A CPU has no kernel for experts with biases; nothing here computes with them.
        chosen = experts.UnquantizedMoeBackend.OOT, None
        patch.setattr(experts, "select_unquantized_moe_backend", lambda moe_config: chosen)
        yield Policy("GPT-OSS", tmp_path_factory.mktemp("gpt_oss"))
    cleanup_dist_env_and_memory()


def test_push_losing_tensors_is_refused_and_reverted(
    policy: Policy,
) -> None:
    """Fails on a vLLM that loads all of GPT-OSS: then it is supported, and the docs say so."""
    old, new = policy.sources
    before = tensors_of(policy.model)
    live = LiveModel(policy.model, policy.model_config)
    with policy.current():
        result = apply_all([(Change("policy", new, old), live)])
        assert "policy: RefusedError: " in result.error and result.restored
        assert not different(tensors_of(policy.model), before)
        with pytest.raises(RefusedError, match=LOST):
            load(policy.model, policy.model_config, new.weights())
        live.abandon()
        load(policy.model, policy.model_config, old.weights(), restoring=True)
    assert not any(parameter.is_meta for parameter in policy.model.parameters())
    assert not different(tensors_of(policy.model), before)


def test_transfer_losing_tensors_is_refused_and_reverted(policy: Policy) -> None:
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    old, new = policy.sources
    before, calls = tensors_of(policy.model), []

    def update(info: Any) -> None:
        for name, tensor in new.weights():  # as NCCL's brings them
            policy.model.load_weights([(name, tensor)])  # type: ignore[operator]

    def finish() -> None:
        calls.append("finish")
        finalize_layerwise_reload(policy.model, policy.model_config)

    worker = SimpleNamespace(
        get_model=lambda: policy.model,
        start_weight_update=lambda: initialize_layerwise_reload(policy.model),
        update_weights=update,
        finish_weight_update=finish,
        weight_transfer_engine=SimpleNamespace(
            reset_weight_update_target=lambda: calls.append("reset")
        ),
    )
    live = LiveModel(
        policy.model, policy.model_config, receive=lambda transfer: _receive(worker, transfer)
    )
    with policy.current(), torch.no_grad():
        result = apply_all([(Change("policy", WeightSource(transfer="{}"), old), live)])
    assert "policy: RefusedError: " in result.error and result.restored and result.received
    assert calls == ["reset"] and "load_weights" not in vars(policy.model)
    assert not different(tensors_of(policy.model), before)


def test_unknown_names_are_no_lost_tensors() -> None:
    model = nn.Linear(2, 2)
    refuse_lost(model, ["weight", "bias", "absent", "of.another"])
