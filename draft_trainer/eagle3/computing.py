"""Runs a module's computation on its parameters in another type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.func import functional_call

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


def computing_in(module: M, dtype: torch.dtype, work: Callable[[M], T]) -> T:
    """``work(module)`` with every parameter cast to ``dtype``, once, differentiably.

    Unlike autocast there is one rule: what is multiplied is in ``dtype``, and each parameter is
    cast once however often the work uses it. The parameters themselves stay what they are;
    their gradients arrive in their own type.
    """
    if all(parameter.dtype == dtype for parameter in module.parameters()):
        return work(module)
    cast_to = {f"inner.{name}": p.to(dtype) for name, p in module.named_parameters()}
    return cast(T, functional_call(_Around(module), cast_to, (work,)))


class _Around(nn.Module):
    """What functional_call can call: it swaps the parameters of a module during its forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, work: Callable[[Any], Any]) -> Any:
        return work(self.inner)
