"""Looks at a module's calls while they happen, whether they are compiled or not.

A module compiled in place (``module.compile()``) runs a traced copy of its own call
that knows only the hooks it had when it was traced: later ones are skipped without
a word. So for such a module the entry to the compiled call is wrapped instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn

Before = Callable[[tuple[Any, ...], Mapping[str, Any]], None]
"""Told a call's positional and named arguments; returns nothing."""
After = Callable[[tuple[Any, ...], Mapping[str, Any], Any], None]
"""Told the same and the result."""


class Handle(Protocol):
    """What ends a hook."""

    def remove(self) -> None:
        """Leave the module as it was."""


def before_call(module: nn.Module, look: Before) -> Handle:
    """Have ``look`` called before each call of ``module``, until the handle is removed."""
    if module._compiled_call_impl is not None:
        return _CompiledEntry(module, look, None)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        look(args, kwargs)

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def after_call(module: nn.Module, look: After) -> Handle:
    """Have ``look`` called after each call of ``module``, until the handle is removed."""
    if module._compiled_call_impl is not None:
        return _CompiledEntry(module, None, look)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        look(args, kwargs, output)

    return module.register_forward_hook(hook, with_kwargs=True)


class _CompiledEntry:
    def __init__(self, module: nn.Module, before: Before | None, after: After | None) -> None:
        compiled = module._compiled_call_impl
        assert compiled is not None

        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(args, kwargs)
            output = compiled(*args, **kwargs)
            if after is not None:
                after(args, kwargs, output)
            return output

        self._module, self._compiled = module, compiled
        module._compiled_call_impl = call

    def remove(self) -> None:
        self._module._compiled_call_impl = self._compiled
