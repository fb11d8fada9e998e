"""Workaround: vLLM lets the draft and the verifier share one lm_head.

If the draft's lm_head equals the verifier's when vLLM loads it, which is the
usual initialisation of a draft, vLLM drops the draft's and points it at the
verifier's. The next draft commit then overwrites the VERIFIER: accuracy fell
from .96 to .81 without an error. Here the draft keeps its own.

embed_tokens is different: a draft checkpoint without it is meant to use the
verifier's and to follow policy pushes, so that sharing stays, and a draft stage
that brings embed_tokens while it is shared is refused (``layout.py``).

Upstream: https://github.com/vllm-project/vllm/pull/28549 brought the sharing of
equal heads; the code is ``_maybe_share_lm_head``
(``v1/spec_decode/llm_base_proposer.py``) and ``_should_share``
(``v1/worker/gpu/spec_decode/eagle/utils.py``, Model Runner V2). The guard is the
storage check in ``shared_parameters``: it runs whatever the vLLM version is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

EMBEDDING = "embed_tokens"


def keep_own_lm_head(proposer_class: type) -> None:
    """Make the V1 runner's proposer leave an lm_head alone that the checkpoint brought.

    Args:
        proposer_class: vLLM's class with ``_maybe_share_lm_head(self, target)``.
    """
    original: Callable[[Any, nn.Module], None] = proposer_class._maybe_share_lm_head  # type: ignore[attr-defined]
    if getattr(original, "_slipstream", False):
        return

    def maybe_share_lm_head(self: Any, target_language_model: nn.Module) -> None:
        own = self.model.lm_head if getattr(self.model, "has_own_lm_head", False) else None
        original(self, target_language_model)
        if own is not None:
            self.model.lm_head = own

    maybe_share_lm_head._slipstream = True  # type: ignore[attr-defined]
    proposer_class._maybe_share_lm_head = maybe_share_lm_head  # type: ignore[attr-defined]


def keep_own_lm_head_v2(module: ModuleType) -> None:
    """The same for Model Runner V2.

    Args:
        module: vLLM's ``v1.worker.gpu.spec_decode.eagle.utils``.
    """
    original: Callable[..., bool] = module._should_share
    if getattr(original, "_slipstream", False):
        return

    def should_share(model: nn.Module, own: str, draft: Any, target: Any) -> bool:
        if own == "has_own_lm_head" and getattr(model, own, False):
            return False
        return original(model, own, draft, target)

    should_share._slipstream = True  # type: ignore[attr-defined]
    module._should_share = should_share  # type: ignore[attr-defined]


def shares_embedding(policy: nn.Module, draft: nn.Module) -> bool:
    """Whether the draft uses the verifier's embedding module."""
    theirs = {id(module) for module in policy.modules()}
    return any(
        name.rpartition(".")[2] == EMBEDDING and id(module) in theirs
        for name, module in draft.named_modules()
    )


def shared_parameters(policy: nn.Module, draft: nn.Module) -> list[str]:
    """Draft parameters that lie in the verifier's memory, the embedding apart.

    Compares storages, not values, so two equal tensors in different memory pass.

    Returns:
        Names in the draft, sorted; empty is what it must be.
    """
    theirs = {
        parameter.untyped_storage().data_ptr()
        for _, parameter in policy.named_parameters(remove_duplicate=False)
        if parameter.numel()
    }
    return sorted(
        name
        for name, parameter in draft.named_parameters(remove_duplicate=False)
        if parameter.numel()
        and parameter.untyped_storage().data_ptr() in theirs
        and EMBEDDING not in name.split(".")
    )
