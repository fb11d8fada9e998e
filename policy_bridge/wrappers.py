"""What may stand between the model that a caller holds and its decoder layers.

Recognised by structure and by class name, so that nothing is imported that the
training image may not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from slipstream.refusal import RefusedError

_INNER = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
_INFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")


def unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """``model``, then what is inside each wrapper: DDP, torch.compile, checkpointing, PEFT.

    Raises:
        RefusedError: FSDP1, whose flattened parameters are no matrices.
    """
    inner: nn.Module | None = model
    while inner is not None:
        if type(inner).__name__ == "FullyShardedDataParallel":
            raise RefusedError(
                "model",
                "FullyShardedDataParallel (FSDP1)",
                "FSDP2: torch.distributed.fsdp.fully_shard",
                "shard with fully_shard, which keeps lm_head a matrix",
            )
        yield inner
        inner = _inside(inner)


def _inside(module: nn.Module) -> nn.Module | None:
    children = dict(module.named_children())
    name = _INNER.get(type(module).__name__)
    if name is not None:
        return children.get(name)
    # PEFT: PeftModel.base_model is a tuner whose .model is the policy. Not Hugging Face's
    # own base_model, which is a property and no child.
    tuner = children.get("base_model")
    return dict(tuner.named_children()).get("model") if tuner is not None else None


def refuse_compiled(path: list[nn.Module]) -> None:
    """Raise RefusedError if a module that contains the decoder layers is compiled as a whole.

    A compiled graph runs without calling its inner modules, so nothing can be seen there.
    """
    for module in path:
        whole = (
            type(module).__name__ == "OptimizedModule"
            or module._compiled_call_impl is not None
            or hasattr(module.forward, "_torchdynamo_orig_callable")
        )
        if whole:
            raise RefusedError(
                "model",
                f"{type(module).__name__} compiled as a whole",
                "compiled layer by layer, or not compiled",
                "compile each decoder layer: for layer in model.model.layers: layer.compile()",
            )


def refuse_adapted(name: str, module: nn.Module) -> None:
    """Raise RefusedError if a matrix that the trainer needs is behind an adapter."""
    children = dict(module.named_children())
    if "base_layer" in children or "modules_to_save" in children:
        raise RefusedError(
            f"modules.{name}",
            f"{type(module).__name__}, an adapter around it",
            "a plain module, whose weight is all there is",
            f"leave {name} out of the adapter's target_modules and modules_to_save",
        )


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, of which ranks hold parts (FSDP2, tensor parallelism)."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, detached; a collective call if it is sharded: all ranks alike."""
    tensor = tensor.detach()
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else cast(torch.Tensor, gather())


def plain_name(name: str) -> str:
    """A parameter's name without what compiling and checkpointing put into it."""
    for infix in _INFIXES:
        name = name.replace(infix, "")
    return name
