"""Exchanges a draft's live weights with those of a shadow, between two engine steps.

Everything is compared before the first byte moves, so an exchange happens or is refused.
What was live lies in the shadow afterwards: going back is another exchange.

On an accelerator contents are copied in place, which keeps the addresses that CUDA graphs
hold. On a CPU there are no such graphs, and large tensors exchange their memory instead of
copying it. There vLLM packs the matrices of linear layers into objects that it reaches
through the closure of ``cpu_linear``; the pointer to such an object lies in a tensor of one
element, whose content is exchanged like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from rollout_server.shadow import ShadowError

_SMALL = 1 << 16
"""Bytes up to which contents are copied rather than memory exchanged."""

_PIECE = 16 << 20
"""Elements that are set aside at a time on an accelerator."""

Pair = tuple[torch.Tensor, torch.Tensor]


def pairs_of(modules: Iterable[tuple[nn.Module, nn.Module]]) -> list[Pair]:
    """(live, spare) of every tensor that a kernel reads.

    Args:
        modules: (live, shadow) modules.

    Raises:
        ShadowError: they do not correspond.
    """
    return [pair for live, shadow in modules for pair in _pairs(live, shadow)]


@torch.no_grad()
def exchange(pairs: Iterable[Pair]) -> None:
    """Give each tensor the other's content; the engine may step when this returns."""
    accelerated = False
    for live, spare in pairs:
        if live.device.type != "cpu":
            _copy_both_ways(live, spare)
            accelerated = True
        elif live.nbytes <= _SMALL:
            kept = live.clone()
            live.copy_(spare)
            spare.copy_(kept)
        else:
            live.data, spare.data = spare.data, live.data
    if accelerated:
        torch.cuda.synchronize()


def _copy_both_ways(live: torch.Tensor, spare: torch.Tensor) -> None:
    """In pieces, so that little of the device's memory is needed."""
    flat = live.is_contiguous() and spare.is_contiguous()
    lives = live.view(-1).split(_PIECE) if flat else (live,)
    spares = spare.view(-1).split(_PIECE) if flat else (spare,)
    for one, other in zip(lives, spares, strict=True):
        kept = one.clone()
        one.copy_(other, non_blocking=True)
        other.copy_(kept, non_blocking=True)


def _pairs(live: nn.Module, shadow: nn.Module) -> Iterator[Pair]:
    if not any(spare is not None for spare in shadow._parameters.values()):
        return
    for name, spare in shadow._parameters.items():
        mine = live._parameters.get(name)
        if spare is None:
            continue
        if mine is None:
            raise ShadowError(f"{type(live).__name__} has no {name}")
        if mine.numel() or spare.numel():
            yield _same_form(mine, spare, f"{type(live).__name__}.{name}")
    yield from _packed(live, shadow)


def _packed(live: nn.Module, shadow: nn.Module) -> Iterator[Pair]:
    """What a CPU's linear layer keeps of its matrix."""
    ours, theirs = live.__dict__.get("cpu_linear"), shadow.__dict__.get("cpu_linear")
    if ours is None and theirs is None:
        return
    kind = type(live).__name__
    if getattr(ours, "__code__", ours) is not getattr(theirs, "__code__", theirs):
        raise ShadowError(f"{kind} is packed in another way now")
    for mine, spare in zip(_cells(ours), _cells(theirs), strict=True):
        mine, spare = _held(mine), _held(spare)
        if isinstance(mine, torch.Tensor) and isinstance(spare, torch.Tensor):
            yield _same_form(mine, spare, f"{kind}'s packed matrix")
        elif mine != spare:
            raise ShadowError(f"{kind} keeps a {type(mine).__name__} that cannot be exchanged")


def _cells(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _held(value: Any) -> Any:
    """The tensor in which vLLM's handle of a oneDNN matrix keeps its pointer."""
    return getattr(value, "handler_tensor", value)


def _same_form(live: torch.Tensor, spare: torch.Tensor, name: str) -> Pair:
    for what in ("shape", "dtype"):
        if getattr(live, what) != getattr(spare, what):
            raise ShadowError(f"{name}: {what} {getattr(spare, what)}, live {getattr(live, what)}")
    if live.stride() != spare.stride():
        raise ShadowError(f"{name}: strides {spare.stride()}, live {live.stride()}")
    return live, spare
