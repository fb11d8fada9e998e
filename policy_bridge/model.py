"""Finds the parts of a causal language model that the bridge needs, through its wrappers.

Models are recognised by structure and by class name, so that nothing is imported that the training
image may not have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from policy_bridge.config import ModulePaths
from policy_bridge.logits import form_of, is_sharded, unfit
from slipstream.errors import RefusedError
from slipstream.sampling import LogitForm
from slipstream.v1 import draft_trainer_pb2 as pb

_INNER = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


def unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """``model``, then what is inside each wrapper: DDP, torch.compile, checkpointing, PEFT.

    Raises:
        RefusedError: FSDP1, whose flattened parameters are no matrices.
    """
    inner: nn.Module | None = model
    while inner is not None:
        if type(inner).__name__ == "FullyShardedDataParallel":
            step = "shard with fully_shard, which keeps lm_head a matrix"
            raise unfit("FullyShardedDataParallel (FSDP1)", "FSDP2", step)
        yield inner
        children = dict(inner.named_children())
        name = _INNER.get(type(inner).__name__)
        # PEFT: PeftModel.base_model is a tuner whose .model is the policy. Not Hugging Face's
        # own base_model, which is a property and no child.
        tuner = children.get("base_model") if name is None else None
        inside = children if tuner is None else dict(tuner.named_children())
        inner = inside.get((name or "") if tuner is None else "model")


def compiled_whole(name: str) -> RefusedError:
    """The refusal of a policy that is compiled together with its layers.

    A compiled graph runs without calling its inner modules, so nothing can be seen there.
    """
    step = "compile each decoder layer: for layer in model.model.layers: layer.compile()"
    found = f"{name} compiled as a whole"
    return unfit(found, "compiled layer by layer, or not compiled", step)


def _refuse_compiled(path: list[nn.Module]) -> None:
    for module in path:
        if (
            type(module).__name__ == "OptimizedModule"
            or module._compiled_call_impl is not None
            or hasattr(module.forward, "_torchdynamo_orig_callable")
        ):
            raise compiled_whole(type(module).__name__)


def refuse_cuda_graphs(modules: Sequence[nn.Module]) -> None:
    """Raise RefusedError for compiled modules that replay CUDA graphs.

    Their outputs are in memory that the next replay overwrites, long before they are copied.
    """
    for module in modules:
        compiled = module._compiled_call_impl or module
        get_config = getattr(compiled, "get_compiler_config", None)
        config = get_config() if get_config is not None else None
        if config and config.get("triton.cudagraphs"):
            found = f"{type(module).__name__} compiled with CUDA graphs"
            expected = "a mode without them"
            step = 'compile with mode="max-autotune-no-cudagraphs", or with no mode'
            raise unfit(found, expected, step)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, detached; a collective call if it is sharded: all ranks alike."""
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor
    shard = cast(Any, tensor)
    groups = [shard.device_mesh.get_group(number) for number in range(shard.device_mesh.ndim)]
    if any(shard.device.type not in dist.get_backend_config(group) for group in groups):
        # Offloaded to the CPU, on ranks that have only NCCL.
        shard = shard.to(shard.device_mesh.device_type)
    return cast(torch.Tensor, shard.full_tensor())


def plain_name(name: str) -> str:
    """A parameter's name without what compiling and checkpointing put into it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def as_stored(model: nn.Module | None, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by a transformers model's own names, as an unquantized checkpoint of it has them.

    From version 5 on a model has a layer's experts in one tensor, and its checkpoint each by
    itself: until this returns they are held twice. Tensors that need no change are the given ones.
    So are all of another model's, by other names, or of a model in FSDP1, which is only pushed.
    """
    # Not imported: where there is a transformers model, its module is loaded. Version 4 has no such
    # function.
    modeling = sys.modules.get("transformers.modeling_utils")
    revert = getattr(modeling, "revert_weight_conversion", None)
    if model is None or modeling is None or revert is None:
        return tensors
    try:
        *_, inner = unwrapped(model)
    except RefusedError:
        return tensors
    if not isinstance(inner, modeling.PreTrainedModel):
        return tensors
    # Not by state_dict(): FSDP2's hooks change the state of this rank alone.
    names = [name for name, _ in inner.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in inner.named_buffers(remove_duplicate=False)]
    # A policy that adapters were merged into has the names that they have changed in the model.
    own = {
        plain_name(name).replace("base_layer.", "").replace("original_module.", "")
        for name in names
    }
    if not tensors.keys() <= own:
        return tensors
    loaded: Any = getattr(inner, "_weight_conversions", None)
    operations = [op for one in loaded or () for op in getattr(one, "operations", ())]
    if not any(hasattr(op, "hf_quantizer") for op in operations):
        return cast(dict[str, torch.Tensor], revert(inner, tensors))
    # Its weights were dequantized as they were loaded: reverted, they would be quantized again.
    # Without these conversions transformers reverts those of the class.
    inner.__dict__["_weight_conversions"] = None
    try:
        return cast(dict[str, torch.Tensor], revert(inner, tensors))
    finally:
        inner.__dict__["_weight_conversions"] = loaded


_ROUTER_BIASES = {"e_score_correction_bias", "expert_bias"}


def kept_wide(model: nn.Module | None, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of float32 tensors that stay float32 where the policy's weights are narrower.

    All of them if most of the floating values are narrower already; otherwise routers' biases,
    which vLLM keeps in float32, and those that a transformers model keeps in float32 whatever type
    it is loaded in.
    """
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    narrow = sum(tensor.numel() for tensor in floats if tensor.dtype.itemsize < 4)
    parts = {""}
    if 2 * narrow <= sum(tensor.numel() for tensor in floats):
        modules = model.modules() if model is not None else ()
        named = (getattr(module, "_keep_in_fp32_modules_strict", None) for module in modules)
        parts = {part for some in named for part in some or ()} | _ROUTER_BIASES
    return {
        name
        for name, tensor in tensors.items()
        if tensor.dtype == torch.float32 and any(part in name for part in parts)
    }


_LAYER_PATHS = (
    "model.layers",
    "model.language_model.layers",
    "layers",
    "transformer.h",
    "transformer.layers",
    "gpt_neox.layers",
    "model.decoder.layers",
)


@dataclass(frozen=True)
class PolicyModules:
    """The parts of one policy.

    Attributes:
        root: the whole model.
        policy: the same without wrappers.
        decoder: owner of the decoder layers; its call marks the start of a forward pass.
        layers: the decoder layers.
        lm_head: the output projection.
        embed_tokens: the input embeddings.
        head_shape: of lm_head's weight, [vocab, hidden], as found.
        embed_shape: of the embeddings' weight, [vocab, hidden], as found.
        final_norm: when set, its output is the final hidden state.
        form: what the policy does to lm_head's output.
        shards: every parameter of a policy that is spread over ranks (FSDP2), as this rank
            holds it between steps; empty if it is not spread.
        noise: modules, and the attribute that says how random they are in train mode.
        adapters: modules with adapters that were on, and what ``active_adapters`` said of them.
        find_matrices: looks for lm_head and the embeddings again.

    ``shards``, ``noise`` and ``adapters`` are as of the last ``look_again``.
    """

    root: nn.Module
    policy: nn.Module
    decoder: nn.Module
    layers: tuple[nn.Module, ...]
    lm_head: nn.Module
    embed_tokens: nn.Module
    head_shape: torch.Size
    embed_shape: torch.Size
    final_norm: nn.Module | None
    form: LogitForm
    shards: list[torch.Tensor]
    noise: list[tuple[nn.Module, str]]
    adapters: list[tuple[Any, list[str]]]
    find_matrices: Callable[[], list[nn.Module]]

    @property
    def head_weight(self) -> torch.Tensor:
        """lm_head's weight, [vocab, hidden]."""
        return cast(torch.Tensor, self.lm_head.weight)

    @property
    def head_bias(self) -> torch.Tensor | None:
        """lm_head's bias, [vocab], if it has one."""
        return cast("torch.Tensor | None", getattr(self.lm_head, "bias", None))

    @property
    def embed_weight(self) -> torch.Tensor:
        """The embedding table, [vocab, hidden]."""
        return cast(torch.Tensor, self.embed_tokens.weight)

    @property
    def hidden_size(self) -> int:
        """H, columns of lm_head."""
        return self.head_shape[1]

    @property
    def vocab_size(self) -> int:
        """Rows of lm_head."""
        return self.head_shape[0]

    def look_again(self) -> None:
        """Find what was put into the policy since. Takes milliseconds: not for use in a step."""
        found = list(self.root.parameters())
        # During a step some of the shards are not in their places: see ``weights``.
        if self.shards and sum(map(is_sharded, found)) >= sum(map(is_sharded, self.shards)):
            self.shards[:] = found
        self.noise[:], self.adapters[:] = _noise_sources(self.policy), _adapters(self.policy)

    def check_exact(self) -> None:
        """Raise RefusedError if a pass that runs now draws a dropout or a router's jitter."""
        for module, name in self.noise:
            if module.training and (size := getattr(module, name)) > 0:
                found = f"{name} {size} of {type(module).__name__}, in train mode"
                expected = "passes of the policy that the rollout servers sample from"
                step = "set it to 0 (TRL: disable_dropout=True; PEFT: lora_dropout=0)"
                raise unfit(found, expected, step)

    def check_unsharded(self) -> None:
        """Raise RefusedError unless lm_head and the embeddings are those found, and whole."""
        for name, weight, shape in (
            ("lm_head", self.head_weight, self.head_shape),
            ("embed_tokens", self.embed_weight, self.embed_shape),
        ):
            # ZeRO-3 and FSDP1 leave other shapes behind, or the shape without its memory.
            gone = weight.is_meta or not weight.untyped_storage().nbytes()
            if gone or is_sharded(weight) or weight.shape != shape:
                how = "sharded or resized after the bridge was built, or offloaded"
                found, expected = f"{name} {list(weight.shape)}, {how}", f"the whole {list(shape)}"
                step = "resize or fully_shard before that; ZeRO-3 and FSDP1 cannot be captured"
                raise unfit(found, expected, step)
        if self.find_matrices() != [self.lm_head, self.embed_tokens]:
            found = "another lm_head or other embeddings than when the bridge was built"
            raise unfit(found, "the same modules", "replace them before that")

    def spec(self, model_name: str) -> pb.PolicySpec:
        """The description of this policy for OpenRun."""
        return pb.PolicySpec(
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            num_hidden_layers=len(self.layers),
            logit_scale=self.form.scale,
            logit_soft_cap=self.form.soft_cap,
            lm_head_bias=self.head_bias is not None,
            model_name=model_name or type(self.root).__name__,
        )

    def weights(self) -> list[torch.Tensor]:
        """Every parameter, or this rank's shard of it, that has a version counter."""
        # FSDP2 puts gathered parameters into the places of the shards during a step.
        found = self.shards or self.root.parameters()
        return [p for p in found if not p.is_inference()]


class Matrix(nn.Module):
    """A weight (and bias) under the name where the bridge looks for it, sharing its memory."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()


def find_modules(
    model: nn.Module,
    paths: ModulePaths,
    logit_scale: float | None = None,
    logit_soft_cap: float | None = None,
) -> PolicyModules:
    """The parts of ``model``, from ``paths`` where given, otherwise by structure.

    Wrappers (DDP, PEFT, torch.compile) are looked into; a path may name a module of
    the wrapper or of what it wraps. With FSDP2, call it after ``fully_shard``. For the last two
    arguments see ``logits.form_of``.

    Raises:
        RefusedError: a part was not found, does not fit, is behind an adapter or compiled
            together with what contains it.
    """
    inside = list(unwrapped(model))
    owner, layers_path = _layers(inside, paths.decoder_layers)
    layers = tuple(owner.get_submodule(layers_path).children())
    if not layers:
        found = f"{layers_path}, empty"
        raise RefusedError("modules.decoder_layers", found, "decoder layers", "fix the path")
    lm_head, embed_tokens = _matrices(inside, paths)
    parents = layers_path.split(".")[:-1]
    around = [owner.get_submodule(".".join(parents[:depth])) for depth in range(len(parents) + 1)]
    _refuse_compiled([*inside[: inside.index(owner)], *around])
    refuse_cuda_graphs([*layers, lm_head])
    norm = _submodule(inside, paths.final_norm, "modules.final_norm") if paths.final_norm else None
    sharded = any(is_sharded(parameter) for parameter in model.parameters())
    return PolicyModules(
        root=model,
        policy=inside[-1],
        decoder=around[-1],
        layers=layers,
        lm_head=lm_head,
        embed_tokens=embed_tokens,
        head_shape=cast(torch.Tensor, lm_head.weight).shape,
        embed_shape=cast(torch.Tensor, embed_tokens.weight).shape,
        final_norm=norm,
        form=form_of(inside[-1], logit_scale, logit_soft_cap),
        shards=list(model.parameters()) if sharded else [],
        noise=list(_noise_sources(inside[-1])),
        adapters=_adapters(inside[-1]),
        find_matrices=partial(_matrices, inside, paths),
    )


def _adapters(policy: nn.Module) -> list[tuple[Any, list[str]]]:
    # Those of PEFT. A transformers model has a method of this name.
    found = [m for m in policy.modules() if getattr(m, "disable_adapters", None) is False]
    return [(module, active_adapters(module)) for module in found]


def active_adapters(module: Any) -> list[str]:
    """The names of the adapters that are on in a module of ``PolicyModules.adapters``."""
    # Older PEFT's ModulesToSaveWrapper has no attribute ``active_adapters``.
    names = [] if module.disable_adapters else module.active_adapter
    return [names] if isinstance(names, str) else list(names)


def _noise_sources(policy: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in policy.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            yield module, "p"
        for name, value in vars(module).items():
            # What modules pass to functions, by the names that transformers gives it.
            if name.endswith(("dropout", "pdrop", "jitter_noise")) and isinstance(value, float):
                yield module, name


def _layers(inside: list[nn.Module], path: str) -> tuple[nn.Module, str]:
    """The module that holds the decoder layers, and their path in it."""
    for owner in inside:
        modules = dict(owner.named_modules())
        if path and path in modules:
            return owner, path
        for known in () if path else _LAYER_PATHS:
            # NeMo Automodel's own models have a ModuleDict.
            if isinstance(modules.get(known), nn.ModuleList | nn.ModuleDict):
                return owner, known
    model = type(inside[-1]).__name__
    found = path or f"none of {', '.join(_LAYER_PATHS)}"
    expected = f"the path of a ModuleList of decoder layers in {model}"
    raise RefusedError("modules.decoder_layers", found, expected, "see model.named_modules()")


def _matrices(inside: list[nn.Module], paths: ModulePaths) -> list[nn.Module]:
    """lm_head and the embeddings."""
    lm_head = _part(inside, paths.lm_head, "get_output_embeddings", "lm_head")
    embed_tokens = _part(inside, paths.embed_tokens, "get_input_embeddings", "embed_tokens")
    for name, part in (("lm_head", lm_head), ("embed_tokens", embed_tokens)):
        if {"base_layer", "modules_to_save"} & dict(part.named_children()).keys():
            step = f"leave {name} out of the adapter's target_modules and modules_to_save"
            found = f"{type(part).__name__}, an adapter"
            raise RefusedError(f"modules.{name}", found, "a plain module", step)
        weight = getattr(part, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            expected, step = "a weight [vocab, hidden]", "fix the path; ZeRO-3 cannot be captured"
            raise RefusedError(f"modules.{name}", type(part).__name__, expected, step)
        if not weight.is_floating_point() or weight.element_size() == 1:
            # Numbers that mean nothing without the scales, which are kept elsewhere.
            step = f"leave {name} out of the policy's quantization"
            raise unfit(f"{name} in {weight.dtype}, quantized", "weights as plain numbers", step)
    return [lm_head, embed_tokens]


def _submodule(inside: list[nn.Module], path: str, field: str) -> nn.Module:
    for owner in inside:
        found = dict(owner.named_modules()).get(path)
        if found is not None:
            return found
    expected = f"a module of {type(inside[-1]).__name__}"
    raise RefusedError(field, path, expected, "see model.named_modules()")


def _part(inside: list[nn.Module], path: str, getter: str, name: str) -> nn.Module:
    if path:
        return _submodule(inside, path, f"modules.{name}")
    model = inside[-1]
    get = cast("Callable[[], object] | None", getattr(model, getter, None))
    found = get() if get is not None else None
    if not isinstance(found, nn.Module):
        model_found = f"{type(model).__name__} without {getter}()"
        step = f"set modules.{name} to its path"
        raise RefusedError(f"modules.{name}", model_found, "a Hugging Face causal model", step)
    return found
