"""Policies that vLLM cannot load over live ones: a push of them is refused and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
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
from tests.policy_bridge.families import make
from tests.rollout_server.drafts import Drafts, different, load_model

# From 0.33 on, vLLM has a weight loader for the sinks.
LOST = (
    r"model\.layers\.0\.(attn\.sinks and 14|mlp\.experts\.routed_experts\.w13_bias and 11) others: "
    r"found copied by GptOssForCausalLM"
)


class Policy:
    """vLLM's GPT-OSS outside an engine, with the first of two checkpoints."""

    def __init__(self, folder: Path) -> None:
        from vllm.engine.arg_utils import EngineArgs

        model = make("GPT-OSS", torch.bfloat16)
        for seed in range(2):
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    tensor.add_(0.1 * torch.randn(tensor.shape))
            model.save_pretrained(folder / str(seed))
        self.sources = [WeightSource(str(folder / str(seed))) for seed in range(2)]
        self.config: Any = EngineArgs(
            model=self.sources[0].directory,
            dtype="bfloat16",
            max_model_len=32,
            enforce_eager=True,
            skip_tokenizer_init=True,
        ).create_engine_config()
        self.model_config = self.config.model_config
        self.model = load_model(self.config, self.model_config, self.sources[0])

    current = Drafts.current

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, and what every packed matrix gives."""
        found = {n: p.detach().clone() for n, p in self.model.named_parameters() if p.numel()}
        generator = torch.Generator().manual_seed(0)
        for name, module in self.model.named_modules():
            width = getattr(module, "input_size", None)
            if "cpu_linear" in module.__dict__ and width:
                x = torch.randn(3, width, generator=generator).bfloat16()
                found[f"{name}(x)"] = module.cpu_linear(x, module.weight, None)  # type: ignore[operator]
        return found


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as experts

    with pytest.MonkeyPatch.context() as patch:
        # A CPU has no kernel for experts with biases; nothing here computes with them.
        chosen = experts.UnquantizedMoeBackend.OOT, None
        patch.setattr(experts, "select_unquantized_moe_backend", lambda moe_config: chosen)
        yield Policy(tmp_path_factory.mktemp("gpt_oss"))
    cleanup_dist_env_and_memory()


def test_push_losing_tensors_is_refused_and_reverted(
    policy: Policy,
) -> None:
    """Fails on a vLLM that loads all of GPT-OSS: then it is supported, and the docs say so."""
    old, new = policy.sources
    before = policy.tensors()
    live = LiveModel(policy.model, policy.model_config)
    with policy.current():
        result = apply_all([(Change("policy", new, old), live)])
        assert "policy: RefusedError: " in result.error and result.restored
        assert not different(policy.tensors(), before)
        with pytest.raises(RefusedError, match=LOST):
            load(policy.model, policy.model_config, new.weights())
        live.abandon()
        load(policy.model, policy.model_config, old.weights(), restoring=True)
    assert not any(parameter.is_meta for parameter in policy.model.parameters())
    assert not different(policy.tensors(), before)


def test_transfer_losing_tensors_is_refused_and_reverted(policy: Policy) -> None:
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    old, new = policy.sources
    before, calls = policy.tensors(), []

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
    assert not different(policy.tensors(), before)


def test_unknown_names_are_no_lost_tensors() -> None:
    model = nn.Linear(2, 2)
    refuse_lost(model, ["weight", "bias", "absent", "of.another"])
