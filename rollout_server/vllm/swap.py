"""Standby weights: loads a draft beside the live one and swaps the two between two steps.

``StandbyCopy`` is a second set of the draft's weights in the worker's memory, in the
form that its kernels use: the modules are copied without their memory, get parameters in the form
in which vLLM loads them, and are loaded and post-processed by vLLM's own code (names, fused and
sharded matrices, padding, packing for CPUs), in a thread while the engine generates.
``swap_contents`` exchanges the two sets; everything is compared before the first byte moves.

On an accelerator contents are copied in place, which keeps the addresses that CUDA graphs hold.
On a CPU there are no such graphs, and large tensors exchange their memory instead. vLLM packs the
matrices of linear layers there into objects that it reaches through the closure of ``cpu_linear``;
the pointer to such an object is in a tensor of one element, which is swapped like any other.

Not every draft has a standby copy. ``NotSwappableError`` says why, and its commit then reloads it
layer by layer (``reload``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from copy import copy as shallow_copy
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from rollout_server.vllm.patches import storages
from rollout_server.vllm.served.derived import derived, is_derived, rule_of

_WRONG_VALUES = (ValueError, LookupError, TypeError, AttributeError, AssertionError)
LOAD_FAILURES = (OSError, RuntimeError, *_WRONG_VALUES)
"""The errors of vLLM's loaders on weights that passed every check of a stage: a file that vanished,
a shape that only the sharded layer knows, memory."""

MAX_COPIES = 2
"""The most standby copies of one worker."""

_HEADROOM = 1.25  # of a device's free memory: engines allocate while they run
_PROCESSED = "_already_called_process_weights_after_loading"
_SMALL_BYTES = 1 << 16
"""The most bytes of tensors that are copied rather than exchanged, and hashed by the element."""

_EXPERTS = "RoutedExperts"
"""vLLM's class whose buffers no loader fills: with expert parallelism, the rank of each expert."""

_DEFAULT_POOL = (0, 0)
"""The id of torch's pool of memory for any tensor."""

_PIECE_ELEMENTS = 16 << 20
"""The elements that are copied at a time on an accelerator."""

_HASH_BLOCK = 31
"""The elements of a larger tensor that are hashed without their order; odd, or equal ones
cancel."""

_LOG = logging.getLogger(__name__)
Pair = tuple[torch.Tensor, torch.Tensor]


class NotSwappableError(Exception):
    """The reason why a draft cannot have a standby copy."""


@dataclass(frozen=True)
class _CopiedModule:
    """A module with parameters of its own, its copy, and the parameters before they are loaded."""

    live: nn.Module
    copy: nn.Module
    meta: Mapping[str, torch.Tensor]
    device: torch.device


class StandbyCopy:
    """One draft's weights beside the live ones.

    Made between two engine steps, because it reads the live modules; loaded in a thread.

    Args:
        policy: the verifier.
        draft: the live draft.
        owed: bytes of the device's free memory that the engine may still ask for.

    Raises:
        NotSwappableError: the two share more than modules, or vLLM kept no metadata.
    """

    def __init__(
        self, policy: nn.Module, draft: nn.Module, owed: Callable[[], int] = lambda: 0
    ) -> None:
        self._owed = owed
        self._shared = {id(module) for module in policy.modules()}
        self._storages = storages(policy)
        self._copies: dict[int, nn.Module | None] = {}
        self._copied: list[_CopiedModule] = []
        self._deriving: list[tuple[nn.Module, nn.Module]] = []
        # Derived tensors may depend on modules that have nothing to load, such as rotary tables.
        self._keeps_all = is_derived(draft)
        root = self._copy(draft)
        if root is None:
            raise NotSwappableError("the draft has no parameters of its own")
        self._root = root
        self.hashes: dict[str, int] = {}

    @property
    def modules(self) -> list[tuple[nn.Module, nn.Module]]:
        """(live, copy) of every module that has parameters of its own."""
        return [(each.live, each.copy) for each in self._copied]

    @property
    def device(self) -> torch.device:
        """The device of the live draft's kernels."""
        return self._copied[0].device

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the weights and bring them into the kernels' form. May run in a thread.

        Args:
            weights: (name in the checkpoint, tensor of any float type on the CPU).

        Raises:
            NotSwappableError: a parameter was loaded in part, or none was.
            OSError, RuntimeError, ...: one of ``LOAD_FAILURES``, from vLLM's loaders.
        """
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        try:
            self._allocate()
            self._root.load_weights(weights)  # type: ignore[operator]
            for live, copy in self.modules:
                _drop_unloaded(copy)
                method = getattr(live, "quant_method", None)
                if isinstance(method, QuantizeMethodBase) and _is_loaded(copy):
                    _as_first_loaded(method).process_weights_after_loading(copy)
        finally:
            # Loaders are bound to the modules: such a cycle would keep the memory of a dropped copy
            # until Python's collector runs.
            for _, copy in self.modules:
                for parameter in copy._parameters.values():
                    if parameter is not None:
                        parameter.__dict__.clear()
        if not any(_is_loaded(copy) for _, copy in self.modules):
            raise NotSwappableError("no tensor of the checkpoint is a parameter of the draft")
        self.hashes = self.read()

    def read(self) -> dict[str, int]:
        """``hashes_of`` the copy, by the draft's names; one pass."""
        return hashes_of(self._root)

    def pairs(self) -> list[Pair]:
        """Pair (live, standby) all tensors that kernels read.

        Raises NotSwappableError: live draft and copy do not correspond.
        """
        return pairs_of(self.modules) + [p for both in self._deriving for p in _derived(*both)]

    def _copy(self, live: nn.Module) -> nn.Module | None:
        """Copy the module tree; None for a module without anything to load."""
        if id(live) in self._shared:
            return None
        if id(live) not in self._copies:
            self._copies[id(live)] = self._copy_once(live)
        return self._copies[id(live)]

    def _copy_once(self, live: nn.Module) -> nn.Module | None:
        named = [
            (name, self._copy(child)) for name, child in live._modules.items() if child is not None
        ]
        children = {name: copy for name, copy in named if copy is not None}
        if self._keeps_all:
            kept = live._modules.items()
            children |= {
                name: child
                for name, child in kept
                if child is not None and name not in children and id(child) not in self._shared
            }
        own = [parameter for parameter in live._parameters.values() if parameter is not None]
        if not own and not any(copy is not None for _, copy in named):
            return None
        kind = type(live).__name__
        if kind != _EXPERTS and any(buffer is not None for buffer in live._buffers.values()):
            # A loader would write into the live ones.
            raise NotSwappableError(f"{kind} has buffers")
        copy = live.__class__.__new__(live.__class__)
        copy.__dict__.update({n: value for n, value in live.__dict__.items() if n != _PROCESSED})
        copy.__dict__["_modules"] = children
        copy.__dict__["_parameters"] = dict.fromkeys(live._parameters)
        if any(p.numel() and p.untyped_storage().data_ptr() in self._storages for p in own):
            raise NotSwappableError(f"{kind} is in the verifier's memory")
        if own:
            self._copied.append(_copied_module(live, copy))
        if rule_of(live):
            self._deriving.append((live, copy))
        return copy

    def _allocate(self) -> None:
        """Allocate every parameter on the live ones' device, or pinned if that is full."""
        device = self.device
        needed = sum(p.nbytes for each in self._copied for p in each.meta.values())
        pinned = must_pin(device, needed, self._owed)
        for each in self._copied:
            for name, meta in each.meta.items():
                tensor = torch.empty_strided(
                    tuple(meta.size()),
                    meta.stride(),
                    dtype=meta.dtype,
                    device="cpu" if pinned else device,
                    pin_memory=pinned,
                )
                # Marks what no loader writes.
                tensor.fill_(_unloaded_mark(tensor.dtype))
                tensor.__class__ = meta.__class__
                tensor.__dict__ = meta.__dict__.copy()
                _rebind_loaders(tensor, each)
                each.copy._parameters[name] = tensor  # type: ignore[assignment]


def must_pin(device: torch.device, needed: int, owed: Callable[[], int]) -> bool:
    """Return whether a standby copy goes to pinned host memory, as the engine needs the device's.

    Memory that torch keeps unused belongs to the engine's streams, which need it again.
    """
    if device.type != "cuda":
        return False
    return torch.cuda.mem_get_info(device)[0] - owed() < needed * _HEADROOM


def free_bytes(device: torch.device) -> int:
    """Free bytes of a CUDA device: those of the driver, and those that torch keeps unused.

    Memory that torch keeps for CUDA graphs, or in another private pool, is for that pool alone, and
    an allocator other than torch's own gives no account of what it keeps: neither counts.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return torch.cuda.mem_get_info(device)[0]
    index = torch.cuda.current_device() if device.index is None else device.index
    kept = sum(
        segment["total_size"] - segment["active_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and segment["segment_pool_id"] == _DEFAULT_POOL
    )
    return torch.cuda.mem_get_info(device)[0] + kept


def _copied_module(live: nn.Module, copy: nn.Module) -> _CopiedModule:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

    info = get_layerwise_info(live)
    if info.can_load():
        raise NotSwappableError("a reload of the draft is under way")
    meta = {
        # vLLM keeps no metadata of some parameters (biases): they are loaded in their live form.
        name: info.restore_metadata[0].get(name, to_meta_tensor(parameter))
        for name, parameter in live._parameters.items()
        if parameter is not None
    }
    return _CopiedModule(live, copy, meta, torch.device(info.restore_device))


def _rebind_loaders(tensor: torch.Tensor, module: _CopiedModule) -> None:
    """Have the weight loaders that are attributes of a parameter load into the copied module."""
    from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

    for name, value in tensor.__dict__.items():
        # A reload leaves its wrappers on the metadata; outside a reload they load nothing.
        while getattr(value, "__name__", "") == "online_process_loader":
            value = value.__wrapped__
        if isinstance(value, MethodType) and value.__self__ in (module.live, layer_ref_sentinel):
            value = value.__func__.__get__(module.copy)
        tensor.__dict__[name] = value


def _as_first_loaded(method: Any) -> Any:
    """Return a method as it is before its first load: on a CPU, experts are packed only then.

    The live method stays as it is, because the engine computes with it meanwhile. On GPUs
    ``UnquantizedFusedMoEMethod._setup_kernel`` converts experts every time. See ``vllm_patches``.
    """
    from vllm.platforms import current_platform

    if getattr(method, "moe_kernel", None) is None or not current_platform.is_cpu():
        return method
    fresh = shallow_copy(method)
    fresh.moe_kernel = None
    return fresh


def _is_loaded(copy: nn.Module) -> bool:
    return any(parameter is not None for parameter in copy._parameters.values())


def _unloaded_mark(dtype: torch.dtype) -> float:
    """A value that no draft has: a stage with NaN is refused, and no offset of d2t is as low."""
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def _drop_unloaded(copy: nn.Module) -> None:
    """Remove parameters that the checkpoint lacks, so that the live ones stay; zero padding.

    Raises:
        NotSwappableError: part of a parameter was loaded.
    """
    for name, parameter in list(copy._parameters.items()):
        if parameter is None:
            continue
        floating, mark = parameter.is_floating_point(), _unloaded_mark(parameter.dtype)
        marked = torch.isnan(parameter) if floating else parameter == mark
        missing = int(marked.sum())
        if missing == parameter.numel():
            del copy._parameters[name]
        elif missing:
            # vLLM pads experts for some kernels, and says how much its loaders fill.
            loaded = getattr(parameter, "weight_loader_numel", parameter.numel())
            if missing != parameter.numel() - loaded:
                raise NotSwappableError(
                    f"{type(copy).__name__}.{name}: {missing} of {parameter.numel()} elements are "
                    "in no tensor of the checkpoint"
                )
            parameter.masked_fill_(marked, 0)


def standby_bytes(policy: nn.Module, draft: nn.Module) -> int:
    """The most bytes of a draft's standby copies: the previous release and the staged one."""
    return MAX_COPIES * sum(tensor.nbytes for tensor in own_tensors(policy, draft))


def own_tensors(policy: nn.Module, draft: nn.Module) -> list[torch.Tensor]:
    """A draft's parameters and the tensors derived from them, without those in the verifier's
    memory. Those that a CPU packs away are empty.
    """
    shared = storages(policy)
    tensors = [*draft.parameters(), *(tensor for _, tensor in derived(draft))]
    return [t for t in tensors if t.untyped_storage().data_ptr() not in shared]


def pairs_of(modules: Iterable[tuple[nn.Module, nn.Module]]) -> list[Pair]:
    """Pair (live, standby) all tensors of (live, copy) modules that kernels read.

    Raises NotSwappableError: they do not correspond.
    """
    return [pair for live, copy in modules for pair in _pairs(live, copy)]


def _pairs(live: nn.Module, copy: nn.Module) -> Iterator[Pair]:
    if not _is_loaded(copy):
        return
    kind = type(live).__name__
    for name, standby in copy._parameters.items():
        mine = live._parameters.get(name)
        if standby is None:
            continue
        if mine is None:
            raise NotSwappableError(f"{kind} has no {name}")
        if mine.numel() or standby.numel():
            yield _same_form(mine, standby, f"{kind}.{name}")
    # The packed matrix of a CPU's linear layer.
    ours, theirs = live.__dict__.get("cpu_linear"), copy.__dict__.get("cpu_linear")
    if getattr(ours, "__code__", ours) is not getattr(theirs, "__code__", theirs):
        raise NotSwappableError(f"{kind} is packed in another way now")
    for one, other in zip(_closure(ours), _closure(theirs), strict=True):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            yield _same_form(one, other, f"{kind}'s packed matrix")
        elif one != other:
            raise NotSwappableError(f"{kind} keeps a {type(one).__name__} that cannot be swapped")


def _derived(live: nn.Module, copy: nn.Module) -> Iterator[Pair]:
    """Pair (live, standby) the tensors that the modules' loader derives (``served.derived``)."""
    for name in rule_of(live):
        mine, standby = live.__dict__.get(name), copy.__dict__.get(name)
        if mine is None and standby is None:
            continue
        what = f"{type(live).__name__}.{name}"
        if mine is standby or not isinstance(mine, torch.Tensor) or standby is None:
            raise NotSwappableError(f"{what} was not derived from the new weights")
        yield _same_form(mine, standby, what)


def _closure(function: Any) -> list[Any]:
    """The values in a function's closure; for vLLM's handle of a oneDNN matrix, its tensor."""
    contents = (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    return [getattr(value, "handler_tensor", value) for value in contents]


def _same_form(live: torch.Tensor, standby: torch.Tensor, name: str) -> Pair:
    for what in ("shape", "dtype"):
        one, other = getattr(live, what), getattr(standby, what)
        if one != other:
            raise NotSwappableError(f"{name}: {what} {other}, live {one}")
    if live.stride() != standby.stride():
        raise NotSwappableError(f"{name}: strides {standby.stride()}, live {live.stride()}")
    return live, standby


@torch.no_grad()
def swap_contents(pairs: Iterable[Pair]) -> None:
    """Give each tensor the other's content; the engine may step when this returns."""
    pairs = list(pairs)
    accelerated = any(live.device.type != "cpu" for live, _ in pairs)
    if accelerated:
        # Another of vLLM's streams may still read the draft.
        torch.cuda.synchronize()
    copied: set[int] = set()
    for live, standby in pairs:
        by_content = live.device.type != "cpu" or live.nbytes <= _SMALL_BYTES
        if by_content and live.data_ptr() in copied:
            continue  # another name for a tensor that was copied
        if live.data_ptr():
            copied.add(live.data_ptr())
        if live.device.type != "cpu":
            _copy_both_ways(live, standby)
        elif live.nbytes <= _SMALL_BYTES:
            kept = live.clone()
            live.copy_(standby)
            standby.copy_(kept)
        else:
            live.data, standby.data = standby.data, live.data
    if accelerated:
        torch.cuda.synchronize()


def _copy_both_ways(live: torch.Tensor, standby: torch.Tensor) -> None:
    """Exchange contents in pieces, so that little of the device's memory is needed."""
    flat = live.is_contiguous() and standby.is_contiguous()
    lives = live.view(-1).split(_PIECE_ELEMENTS) if flat else (live,)
    standbys = standby.view(-1).split(_PIECE_ELEMENTS) if flat else (standby,)
    for one, other in zip(lives, standbys, strict=True):
        kept = one.clone()
        one.copy_(other, non_blocking=True)
        other.copy_(kept, non_blocking=True)


def element_hash(parameter: torch.Tensor) -> int:
    """Hash a tensor's elements and their order, except the order within 31 neighbours.

    XORs of 31 elements each, weighted by their place: one pass at the memory's speed, where an XOR
    of all would be blind to swapped rows or shards. A small tensor is hashed by the element. Bits
    and integers alone: a copy in pinned memory has the hash that it has on a GPU.
    """
    values = parameter.detach().reshape(-1)
    if values.dtype.itemsize == 1:
        # torch.hash_tensor has no kernel for the 8-bit floats.
        values = values.view(torch.int8)
    block = _HASH_BLOCK if values.nbytes > _SMALL_BYTES else 1
    whole = values.numel() // block * block
    hashes = torch.hash_tensor(values[:whole].view(-1, block), 1).view(torch.int64)
    if whole < values.numel():
        rest = torch.hash_tensor(values[whole:]).view(torch.int64)
        hashes = torch.cat([hashes, rest.view(1)])
    # Odd weights, modulo 2^64: a change of one block always changes the sum.
    return int((hashes * (2 * torch.arange(hashes.numel(), device=hashes.device) + 1)).sum())


def hashes_of(draft: nn.Module, without: Container[int] = ()) -> dict[str, int]:
    """Hash the parameters that packing leaves, and the derived tensors (``element_hash``), by name.

    Args:
        draft: the draft, or a copy of it.
        without: addresses of memory that is left out.
    """
    tensors = [*draft.named_parameters(), *derived(draft)]
    return {
        name: element_hash(tensor)
        for name, tensor in tensors
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in without
    }
