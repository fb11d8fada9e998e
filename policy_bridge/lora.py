"""Reads a policy with LoRA adapters (PEFT) as the tensors of its base model, adapters merged in.

A layer's tensors are copied in float32, and PEFT merges the copy: scalings, transposed weights and
DoRA are PEFT's own. The policy itself is only read, so that its base stays the same bit by bit;
``merge_adapter`` and ``unmerge_adapter`` would round it twice in every sync. Modules are recognised
by structure and by class name, as in ``model``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from policy_bridge.model import active_adapters, full_tensor, plain_name, unwrapped
from slipstream.errors import RefusedError

Merge = Callable[[], torch.Tensor]
_MERGED = {f"peft.tuners.lora.layer.{name}" for name in ("Linear", "Embedding", "ParamWrapper")}
_DORA = {"DoraLinearVariant", "DoraEmbeddingVariant"}
_EXPECTED = "LoRA on linear layers, embeddings or parameters"
_BY_HAND = "merge a copy of the policy, and push its tensors by the base model's names"


def without_adapters(
    model: nn.Module | None, state: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, Merge]]:
    """The tensors of the base model in a state dict, and what the active adapters make of them.

    Args:
        model: the policy, in PEFT's model or not.
        state: its state dict, or that with every tensor gathered. Tensors by other names than a
            policy with adapters has, such as those of one that was merged, are left as they are.

    Returns:
        By the base model's names, in the order of ``state``: its tensors, with the active copies of
        ``modules_to_save``. For each that is below adapters: what computes the merged tensor, in
        float32 or wider; to be called once. Of a sharded ``state`` this is a collective call.

    Raises:
        RefusedError: adapters that are disabled, that no merged tensor can stand for, or without
            all tensors of their layer.
    """
    wrappers = _wrappers(model) if model is not None else {}
    plain: dict[str, torch.Tensor] = {}
    layers: dict[str, _Layer] = {}
    for full_name, tensor in state.items():
        name = full_name
        if wrappers:
            name = plain_name(full_name).removeprefix("base_model.model.")
        path = name
        while path and path not in wrappers:
            path = path.rpartition(".")[0]
        inside = name.removeprefix(f"{path}.")
        if not path or inside.partition(".")[0] not in wrappers[path]._modules:
            plain[name] = tensor
            continue
        if path not in layers:
            layers[path] = _Layer(path, wrappers[path])
        layers[path].tensors[inside] = tensor
        if inside.startswith(prefix := layers[path].prefix):
            plain[f"{path}.{inside.removeprefix(prefix)}"] = tensor
    for layer in layers.values():
        layer.check_whole()
    if model is not None and layers:
        _refuse_tied(model, layers)
    return plain, {
        f"{path}.{name}": partial(layer.take, name)
        for path, layer in layers.items()
        if hasattr(layer.module, "base_layer")
        for name, _ in layer.module.get_base_layer().named_parameters()
    }


def _wrappers(model: nn.Module) -> dict[str, Any]:
    """Find the modules that PEFT has put around the policy's, by path; none inside another."""
    try:
        *_, policy = unwrapped(model)
    except RefusedError:
        return {}  # FSDP1: what was gathered of it is pushed by its own names
    found: dict[str, Any] = {}
    for full_name, module in policy.named_modules():
        name = plain_name(f"{full_name}.")[:-1]
        # A transformers model has a method of this name.
        if isinstance(getattr(module, "disable_adapters", None), bool) and not any(
            name.startswith(f"{outer}.") for outer in found
        ):
            found[name] = module
    return found


class _Layer:
    """A module of the policy with PEFT's around it.

    Attributes:
        module: PEFT's.
        prefix: what the names of the tensors that stand for the policy's begin with in it.
        tensors: by their names in it.
    """

    def __init__(self, path: str, module: Any) -> None:
        self.module, self.prefix = module, _prefix(path, module)
        self.tensors: dict[str, torch.Tensor] = {}
        self._path = path
        self._merged: dict[str, torch.Tensor] = {}

    def check_whole(self) -> None:
        """Raise RefusedError if a tensor is missing, such as the base's beside adapters alone."""
        merges = hasattr(self.module, "base_layer")
        for name, _ in self.module.named_parameters():
            if name not in self.tensors and (merges or name.startswith(self.prefix)):
                found, expected = f"no {self._path}.{name}", "all tensors of the policy"
                raise _refused(found, expected, "pass its whole state dict")

    def take(self, name: str) -> torch.Tensor:
        """A merged parameter, each of them once: memory is then free again."""
        if not self._merged:
            self._merged = self._merge()
        return self._merged.pop(name)

    @torch.no_grad()
    def _merge(self) -> dict[str, torch.Tensor]:
        copied: Any = _copied(self.module, self.tensors)
        base = copied.get_base_layer()
        with torch.autocast(next(base.parameters()).device.type, enabled=False):
            for part in copied.modules():
                # What is merged already is in the base's own weight.
                if hasattr(part, "base_layer") and not part.merged_adapters:
                    part.merge()
        return dict(base.named_parameters())


def _copied(module: nn.Module, tensors: Mapping[str, torch.Tensor], path: str = "") -> nn.Module:
    """A module that may be merged: ``tensors`` copied in float32 or wider.

    Not a deep copy, which FSDP2's modules refuse, and which copies hooks and what they hold.
    """
    made = object.__new__(type(module))
    for name, value in vars(module).items():
        # PEFT keeps what it has merged, and norms of DoRA, in lists and dictionaries.
        vars(made)[name] = copy(value) if isinstance(value, dict | list) else value
    for name, parameter in module._parameters.items():
        if parameter is not None:
            whole = full_tensor(tensors[path + name])
            wide = torch.promote_types(whole.dtype, torch.float32)
            made._parameters[name] = nn.Parameter(whole.to(wide, copy=True), requires_grad=False)
    for name, child in module._modules.items():
        if child is not None:
            made._modules[name] = _copied(child, tensors, f"{path}{name}.")
    return made


def _prefix(path: str, module: Any) -> str:
    kind = _kind(module)
    here, saves = f"{kind} at {path}", kind.endswith(".ModulesToSaveWrapper")
    if module.disable_adapters:
        step = "leave disable_adapter() first"
        raise _refused(f"{here}, its adapters disabled", "the policy as it trains", step)
    if not saves and kind not in _MERGED:
        raise _refused(here, _EXPECTED, _BY_HAND)
    active, base = active_adapters(module), module if saves else module.get_base_layer()
    if any(hasattr(part, "base_layer") for part in base.modules()):
        raise _refused(f"LoRA in {here}", "one or the other", _BY_HAND)
    if saves:
        saved = active[:1] if set(active) <= module.modules_to_save.keys() else []
        return f"modules_to_save.{saved[0]}." if saved else "original_module."
    prefix = ""
    while module is not base:
        if _kind(module) not in _MERGED:  # PEFT's mixed models
            raise _refused(f"{_kind(module)} at {path}", _EXPECTED, _BY_HAND)
        on = [one for one in active if one in module.scaling]
        variants = {type(v).__name__ for one, v in module.lora_variant.items() if one in on}
        if variants and (len(on) > 1 or not variants <= _DORA):
            # A pass adds several up; merged one after the other, each would scale those before.
            raise _refused(f"{on} at {path}, {[*variants]}", "LoRA, or one of DoRA", _BY_HAND)
        if any(map(module.lora_bias.get, on)) and getattr(base, "bias", None) is None:
            raise _refused(f"lora_bias at {path}", "a layer that has a bias", "lora_bias=False")
        prefix, module = f"{prefix}base_layer.", module.base_layer
    for weight in base.parameters():
        if not weight.is_floating_point() or weight.element_size() == 1:
            raise _refused(f"{path} in {weight.dtype}, quantized", "plain numbers", _BY_HAND)
    return prefix


def _kind(module: nn.Module) -> str:
    # FSDP2 makes a class of its own from a module's.
    kinds = [f"{c.__module__}.{c.__name__}" for c in type(module).__mro__]
    return next((one for one in kinds if one.startswith("peft.")), kinds[0])


def _refuse_tied(model: nn.Module, layers: Mapping[str, _Layer]) -> None:
    """Raise RefusedError where a checkpoint has one tensor, and adapters make two of it."""
    *_, policy = unwrapped(model)
    shares = Counter(id(p) for _, p in policy.named_parameters(remove_duplicate=False))
    for path, layer in layers.items():
        own = Counter(id(p) for _, p in layer.module.named_parameters(remove_duplicate=False))
        if any(shares[one] > number for one, number in own.items()):
            step = "leave it out of target_modules and modules_to_save"
            raise _refused(f"an adapter on {path}", "none on a tied weight", step)


def _refused(found: str, expected: str, step: str) -> RefusedError:
    return RefusedError("push_policy", found, expected, step)
