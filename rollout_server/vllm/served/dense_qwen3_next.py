"""Qwen3-Next models without experts, which vLLM builds and then refuses.

``set_moe_parameters`` raises where no layer has experts, although the layers before it were built
dense as the configuration says. https://github.com/vllm-project/vllm/pull/41087 was closed
unmerged; 0.32 has it. These classes replace vLLM's by its plug-in point for models.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM as TheirPolicy
from vllm.model_executor.models.qwen3_next import Qwen3NextSparseMoeBlock
from vllm.model_executor.models.qwen3_next_mtp import Qwen3NextMTP as TheirHead


class _DenseAllowed:
    """A base that comes before vLLM's class."""

    def set_moe_parameters(self: Any) -> None:
        """Call vLLM's own if there are experts."""
        if any(isinstance(layer.mlp, Qwen3NextSparseMoeBlock) for layer in self.model.layers):
            super().set_moe_parameters()  # type: ignore[misc]
            return
        self.moe_layers = ()
        self.num_moe_layers = self.num_expert_groups = self.num_shared_experts = 0


class Qwen3NextForCausalLM(_DenseAllowed, TheirPolicy):  # type: ignore[misc]
    """The policy."""


class Qwen3NextMTP(_DenseAllowed, TheirHead):  # type: ignore[misc]
    """Its MTP head."""
