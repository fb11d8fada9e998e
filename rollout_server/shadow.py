"""A second set of a draft's weights in a worker's memory, in the form that its kernels use.

The draft's modules are copied without their memory, get parameters in the form in which
vLLM loads them (vLLM keeps that form's metadata for its own reloads), and are loaded and
post-processed by vLLM's own code: names, fused and sharded matrices, padding, packing for
CPUs. All of that happens beside the live draft, in a thread, while the engine generates;
what is left for the commit is ``exchange``.

Not every draft can be shadowed. ``ShadowError`` says why, and the commit then reloads it
layer by layer (``reload``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import MethodType

import torch
from torch import nn

from rollout_server.read_back import element_hash

_HEADROOM = 1.25  # of a device's free memory: engines allocate while they run
_CALLED = "_already_called_process_weights_after_loading"


class ShadowError(Exception):
    """This draft cannot be prepared beside the live one; the text says why."""


class Shadow:
    """One draft's weights beside the live ones.

    Made between two engine steps, because it reads the live modules; filled in a thread.

    Args:
        policy: whose modules the draft may share; those are left alone.
        draft: the live module.

    Raises:
        ShadowError: the two share more than modules, or vLLM kept no metadata.
    """

    def __init__(self, policy: nn.Module, draft: nn.Module) -> None:
        self._theirs = {id(module) for module in policy.modules()}
        self._storages = {p.untyped_storage().data_ptr() for p in policy.parameters() if p.numel()}
        self._made: dict[int, nn.Module | None] = {}
        self._live: list[nn.Module] = []
        self._forms: list[tuple[nn.Module, _Form]] = []
        root = self._copy(draft)
        if root is None:
            raise ShadowError("the draft has no parameters of its own")
        self._root = root
        self.fingerprint: dict[str, int] = {}

    @property
    def modules(self) -> list[tuple[nn.Module, nn.Module]]:
        """(live, shadow) of every module that has parameters of its own."""
        pairs = ((live, self._made[id(live)]) for live in self._live)
        return [(live, shadow) for live, shadow in pairs if shadow is not None]

    @property
    def device(self) -> torch.device:
        """Where the live draft's kernels run."""
        return self._forms[0][1].device

    @torch.no_grad()
    def fill(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the weights and bring them into the kernels' form. May run in a thread.

        Args:
            weights: (name in the checkpoint, tensor of any float type on the CPU).

        Raises:
            ShadowError: a parameter was loaded in part.
            OSError, RuntimeError, ValueError, KeyError, TypeError, AssertionError: vLLM's
                loaders did not take them.
        """
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        self._materialize()
        for _, shadow in self.modules:
            for parameter in shadow._parameters.values():
                if parameter is not None and parameter.is_floating_point():
                    # What no loader touches stays what the checks of a stage never let in.
                    parameter.fill_(float("nan"))
        self._root.load_weights(weights)  # type: ignore[operator]
        for _, shadow in self.modules:
            _drop_unloaded(shadow)
            method = getattr(shadow, "quant_method", None)
            if isinstance(method, QuantizeMethodBase) and _loaded(shadow):
                method.process_weights_after_loading(shadow)
        if not any(_loaded(shadow) for _, shadow in self.modules):
            raise ShadowError("no tensor of the checkpoint is a parameter of the draft")
        self.fingerprint = self.hashes()

    def hashes(self) -> dict[str, int]:
        """Of every parameter that packing leaves, by the draft's names; one pass over them."""
        return {
            name: element_hash(parameter)
            for name, parameter in self._root.named_parameters()
            if parameter.numel()
        }

    def _copy(self, live: nn.Module) -> nn.Module | None:
        """A copy of the module tree; None for what has nothing to load."""
        if id(live) in self._theirs:
            return None
        if id(live) in self._made:
            return self._made[id(live)]
        children = {
            name: self._copy(child) for name, child in live._modules.items() if child is not None
        }
        kept = {name: child for name, child in children.items() if child is not None}
        made: nn.Module | None = None
        own = any(parameter is not None for parameter in live._parameters.values())
        if own or kept:
            if live._buffers:
                # What a loader copies into them would be live at once.
                raise ShadowError(f"{type(live).__name__} has buffers")
            made = live.__class__.__new__(live.__class__)
            made.__dict__.update(
                {name: value for name, value in live.__dict__.items() if name != _CALLED}
            )
            made.__dict__["_modules"] = kept
            made.__dict__["_parameters"] = dict.fromkeys(live._parameters)
            if own:
                if any(
                    p is not None and p.numel() and p.untyped_storage().data_ptr() in self._storages
                    for p in live._parameters.values()
                ):
                    raise ShadowError(f"{type(live).__name__} lies in the verifier's memory")
                self._forms.append((made, _form(live)))
                self._live.append(live)
        self._made[id(live)] = made
        return made

    def _materialize(self) -> None:
        """Memory for every parameter: the live ones' device, or pinned where that is full."""
        device = self.device
        needed = sum(p.nbytes for _, form in self._forms for p in form.parameters.values())
        pinned = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < needed * _HEADROOM
        for shadow, form in self._forms:
            for name, meta in form.parameters.items():
                tensor = torch.empty_strided(
                    tuple(meta.size()),
                    meta.stride(),
                    dtype=meta.dtype,
                    device="cpu" if pinned else device,
                    pin_memory=pinned,
                )
                tensor.__class__ = meta.__class__
                tensor.__dict__ = meta.__dict__.copy()
                bound = _rebound(tensor, form.live, shadow)
                shadow._parameters[name] = bound  # type: ignore[assignment]


@dataclass(frozen=True)
class _Form:
    """What a module's parameters are before they are loaded: on the meta device."""

    live: nn.Module
    parameters: dict[str, torch.Tensor]
    device: torch.device


def _form(live: nn.Module) -> _Form:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

    info = get_layerwise_info(live)
    if info.can_load():
        raise ShadowError("a reload of the draft is under way")
    parameters = {
        # vLLM keeps no metadata of some (biases): they are loaded as they lie there.
        name: info.restore_metadata[0].get(name, to_meta_tensor(parameter))
        for name, parameter in live._parameters.items()
        if parameter is not None
    }
    return _Form(live, parameters, torch.device(info.restore_device))


def _rebound(tensor: torch.Tensor, live: nn.Module, shadow: nn.Module) -> torch.Tensor:
    """Have the loaders that hang on a parameter load into the copied module."""
    from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

    for name, value in tensor.__dict__.items():
        # A reload leaves its wrappers on the metadata; outside of one they load nothing.
        while getattr(value, "__name__", "") == "online_process_loader":
            value = value.__wrapped__
        if isinstance(value, MethodType) and value.__self__ in (live, layer_ref_sentinel):
            value = value.__func__.__get__(shadow)
        tensor.__dict__[name] = value
    return tensor


def _loaded(shadow: nn.Module) -> bool:
    return any(parameter is not None for parameter in shadow._parameters.values())


def _drop_unloaded(shadow: nn.Module) -> None:
    """Parameters that no tensor of the checkpoint is for stay as they live.

    Whole numbers do so too: the draft vocabulary cannot change live.

    Raises:
        ShadowError: some of a parameter was loaded.
    """
    for name, parameter in list(shadow._parameters.items()):
        if parameter is None:
            continue
        if not parameter.is_floating_point():
            del shadow._parameters[name]
            continue
        missing = int(torch.isnan(parameter).sum())
        if missing == parameter.numel():
            del shadow._parameters[name]
        elif missing:
            raise ShadowError(
                f"{type(shadow).__name__}.{name}: {missing} of {parameter.numel()} elements "
                "are in no tensor of the checkpoint"
            )
