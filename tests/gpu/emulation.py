"""Counts what a GPU would launch, move and hold, on meta tensors: nothing is computed.

A tensor that is not on the CPU takes the branches of a GPU, so the code under test is what runs
there. Counted is what torch dispatches: an operator that is not a view is one launch, and it moves
the bytes of its arguments and of its results once. What lies on the CPU is not counted but where it
is copied to the device. What CUDA refuses and meta tensors allow is refused here too, where it is
known: a soft-max that widens anything but float16 as it reads.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode

_NO_LAUNCH = {"detach", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
_NO_LAUNCH |= {"alias", "_unsafe_view"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_PRODUCTS |= {"_flash_attention_forward", "_flash_attention_backward"}
_ONLY_WRITTEN = {"copy_", "fill_", "zero_"}
_WIDENING = {"_softmax", "_log_softmax"}
_PICKS = {"gather", "index", "index_select"}
# An argument beyond this, the second-level cache of an H100, is read anew for every result that it
# is broadcast to.
_CACHE_BYTES = 50 << 20


class Counts(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        launches: kernels.
        waits: times that the host waits for the device: numbers read back, shapes that depend on
            data, and copies from or to pageable memory.
        product_bytes: moved by matrix products and flash attention.
        other_bytes: moved by everything else.
        peak_bytes: of the tensors that were made, alive at one time.
        by_operator: launches and bytes by operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.waits = self.product_bytes = self.other_bytes = self.peak_bytes = 0
        self.by_operator: dict[str, Counter[str]] = {}
        self._alive: dict[int, int] = {}
        self._library: Library | None = None

    def __enter__(self) -> Counts:
        # torch has no meta kernel of it and would take it apart, which CUDA's own kernel does not.
        # ``Library.impl`` refuses that; what is below it does not.
        self._library = Library("aten", "IMPL", "Meta")
        self._library.m.impl("_fused_rms_norm", "Meta", _fused_rms_norm)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        assert self._library is not None
        self._library._destroy()

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = operator.overloadpacket.__name__
        given = list({id(x): x for x in _tensors([*args, *kwargs.values()])}.values())
        if name == "_local_scalar_dense" and given[0].is_meta:
            self.waits += 1
            return 0
        if name == "nonzero" and given[0].is_meta:
            self.waits += 1
            shape = given[0].shape
            return torch.empty(shape.numel(), len(shape), dtype=torch.int64, device="meta")
        if name == "_to_copy" and given[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            self.waits += 1
            return torch.zeros(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
        if name in _WIDENING and args[2] and given[0].is_meta and given[0].dtype != torch.float16:
            # ATen/native/cuda/SoftMax.cu, host_softmax.
            raise RuntimeError("conversion is supported for Half type only")
        made = operator(*args, **kwargs)
        results = list(_tensors([made]))
        if not any(x.is_meta for x in given + results):
            return made
        self._waits_for_a_copy(name, given, results, args, kwargs)
        for tensor in results:
            self._hold(tensor)
        if name in _NO_LAUNCH or _is_view(operator):
            return made
        written = {id(x) for x in results}
        read = [x for x in given if not (name in _ONLY_WRITTEN and id(x) in written)]
        moved = sum(x.nbytes for x in results)
        most = max((x.numel() for x in results), default=0)
        for x in read:
            if name in _PICKS:
                moved += min(x.nbytes, most * x.element_size())
            elif torch.Tag.pointwise in operator.tags and x.nbytes > _CACHE_BYTES:
                moved += max(x.numel(), most) * x.element_size()
            else:
                moved += x.nbytes
        self.launches += 1
        if name in _PRODUCTS:
            self.product_bytes += moved
        else:
            self.other_bytes += moved
        self.by_operator.setdefault(name, Counter()).update(launches=1, bytes=moved)
        return made

    def _waits_for_a_copy(
        self,
        name: str,
        given: Sequence[Tensor],
        results: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        if name not in ("_to_copy", "copy_") or len({x.device for x in [*given, *results]}) < 2:
            return
        asynchronous = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        self.waits += not asynchronous

    def _hold(self, tensor: Tensor) -> None:
        if not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))
            weakref.finalize(storage, self._alive.pop, key, None)


def _fused_rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    scales = (*x.shape[: x.ndim - len(shape)], *[1] * len(shape))
    return torch.empty_like(x), torch.empty(scales, dtype=wide, device=x.device)


def _is_view(operator: Any) -> bool:
    returns = operator._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
