"""Tensors that vLLM derives from a draft's parameters at load time.

A swap of the parameters alone keeps the derived tensors of the previous draft. A layer-wise reload
packs each layer before the draft's loader derives such tensors from it: they are then empty, and
the engine fails at its next step. ``RULES`` names those that a swap replaces, because vLLM's own
loader makes them in the standby copy too. A draft with any other is never staged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

# vllm/model_executor/models/qwen3_dflash.py, _build_fused_kv_buffers, which load_weights calls: all
# layers' K/V projections and norms of K in one tensor each, and another name for a norm.
_BLOCK = ("_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights", "_hidden_norm_weight")

RULES: Mapping[str, tuple[str, ...]] = {
    "DFlashQwen3Model": _BLOCK,
    "Qwen3DSparkModel": _BLOCK,
    # vllm/model_executor/layers/fused_moe: a CPU's kernel packs the experts in place, and only when
    # they are first loaded: after a reload they would be multiplied as if they were packed.
    "RoutedExperts": ("w13_weight", "w2_weight"),
}
"""The attributes by the name of the module's class; a subclass may derive more, and needs an entry
of its own."""

_ACCOUNTED = frozenset(("_parameters", "_buffers", "_modules", "kv_cache"))


def rule_of(module: nn.Module) -> tuple[str, ...]:
    """Attributes of a module that its loader derives; empty for most."""
    return RULES.get(type(module).__name__, ())


def is_derived(draft: nn.Module) -> bool:
    """Return whether any module of a draft has a rule: then no reload may touch it."""
    return any(rule_of(module) for module in draft.modules())


def derived(draft: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in the draft, tensor) of what its rules name and its loader made."""
    for path, module in draft.named_modules():
        for name in rule_of(module):
            value = module.__dict__.get(name)
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}".lstrip("."), value


def unaccounted(policy: nn.Module, draft: nn.Module) -> list[str]:
    """Find tensors of floats that a draft keeps beside parameters and buffers without a rule.

    Returns:
        Names in the draft, sorted. Left out are the verifier's modules, KV caches, and other names
        for buffers, which no checkpoint fills.
    """
    theirs = {id(module) for module in policy.modules()}
    buffers = {buffer.untyped_storage().data_ptr() for buffer in draft.buffers() if buffer.numel()}
    return sorted(
        f"{path}.{name}".lstrip(".")
        for path, module in draft.named_modules()
        if id(module) not in theirs
        for name, value in module.__dict__.items()
        if name not in _ACCOUNTED and name not in rule_of(module)
        if any(
            one.untyped_storage().data_ptr() not in buffers
            for one in _weights(value)
            if one.numel()
        )
    )


def _weights(value: object) -> Iterator[torch.Tensor]:
    """The tensors of floats in an attribute, but for single numbers."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.ndim:
            yield value
        return
    held: Iterable[object] = ()
    if isinstance(value, list | tuple):
        held = value
    elif isinstance(value, dict):
        held = value.values()
    for one in held:
        yield from _weights(one)
