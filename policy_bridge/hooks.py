"""Forward hooks that keep detached references to the states of the last forward pass.

Correctness, in three sentences. The residual stream after L decoder layers is
the input of decoder layer L, so one kind of hook serves every L, 0 (the
embeddings) included. A pass begins with the decoder's own call, so that layers
which gradient checkpointing runs again inside backward are not mistaken for a
new pass. Hooks return nothing, raise nothing and keep ``detach()``-ed aliases, so
autograd sees the same graph with and without them.

Looks at a module's calls while they happen, whether they are compiled or not.

A module compiled in place (``module.compile()``) runs a traced copy of its own call
that knows only the hooks it had when it was traced: later ones are skipped without
a word. So for such a module the entry to the compiled call is wrapped instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from policy_bridge.model import PolicyModules
from slipstream.errors import RefusedError

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


@dataclass(frozen=True)
class ForwardStates:
    """One forward pass over a batch of B rows of S columns, padding included.

    Attributes:
        aux: one [B, S, H] per captured layer, in the layers' order.
        final: [B, S, H], the input of lm_head.
        logits: [B, S, V], the output of lm_head, where it was asked for.
        logits_dtype: the precision in which the policy itself had its logits.
        versions: in-place version counters of ``(*aux, final)`` when they were seen.
        logits_version: the same of ``logits``; 0 where they are not kept.
    """

    aux: tuple[torch.Tensor, ...]
    final: torch.Tensor
    logits: torch.Tensor | None
    logits_dtype: torch.dtype
    versions: tuple[int, ...]
    logits_version: int = 0

    def check_unwritten(self) -> None:
        """Raise RefusedError if the model wrote into a state after it was captured."""
        if tuple(version_of(state) for state in (*self.aux, self.final)) != self.versions:
            raise RefusedError(
                "hidden_states",
                "written in place after the capture",
                "a model that leaves its residual stream alone",
                "disable in-place activations in the policy",
            )

    @property
    def logits_unwritten(self) -> bool:
        """Whether logits were kept and the loop has left them alone since the pass."""
        return self.logits is not None and version_of(self.logits) == self.logits_version

    def unwritten_logits(self) -> torch.Tensor:
        """The kept logits. Raises RefusedError if the loop wrote into them since the pass.

        A temperature divided into them in place would go out as logits before temperature.
        """
        if self.logits is None:
            raise RefusedError("logits", "none", "a pass whose logits were kept", "keep_logits")
        if not self.logits_unwritten:
            raise RefusedError(
                "logits",
                "written in place between the forward pass and ship",
                "the output of lm_head as the pass left it",
                "divide by the temperature out of place, or pass sampled_logits and "
                "sampled_logprobs",
            )
        return self.logits


def version_of(tensor: torch.Tensor) -> int:
    """In-place version counter, shared by aliases; inference tensors keep none and count as 0."""
    return 0 if tensor.is_inference() else tensor._version


class ForwardTap:
    """Hooks on one policy, in place from ``__enter__`` to ``__exit__``.

    Args:
        modules: the policy.
        layers: "after L layers" numbers, ascending, each below the number of layers.
        keep_logits: keep the output of lm_head too, until the pass is taken.
    """

    def __init__(
        self, modules: PolicyModules, layers: Sequence[int], *, keep_logits: bool = False
    ) -> None:
        self._modules = modules
        self._layers = tuple(layers)
        self._keep_logits = keep_logits
        self._handles: list[Handle] = []
        self._open: dict[int, tuple[torch.Tensor, int]] | None = None
        self._last: ForwardStates | None = None
        self.passes = 0

    def __enter__(self) -> ForwardTap:
        modules = self._modules
        self._handles.append(before_call(modules.decoder, self._begin))
        for layer in self._layers:
            self._handles.append(before_call(modules.layers[layer], self._hook_for(layer)))
        if modules.final_norm is not None:
            self._handles.append(after_call(modules.final_norm, self._end_at_norm))
        else:
            self._handles.append(after_call(modules.lm_head, self._end_at_head))
        return self

    def __exit__(self, *_: object) -> None:
        # Last first: two on one compiled module put back what each of them found.
        for handle in reversed(self._handles):
            handle.remove()
        self._handles.clear()
        self._open = self._last = None

    def take(self) -> ForwardStates | None:
        """The last complete forward pass, once; earlier ones that nobody took are gone."""
        states, self._last = self._last, None
        return states

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._open = {}

    def _hook_for(self, layer: int) -> Before:
        def keep(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            state = first_tensor(args, kwargs)
            if self._open is not None and state is not None:
                state = state.detach()
                self._open[layer] = (state, version_of(state))

        return keep

    def _end_at_head(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: torch.Tensor
    ) -> None:
        final = first_tensor(args, kwargs)
        if final is not None:
            self._end(final, output.dtype, output.detach() if self._keep_logits else None)

    def _end_at_norm(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: torch.Tensor
    ) -> None:
        self._end(output, output.dtype, None)

    def _end(
        self, final: torch.Tensor, logits_dtype: torch.dtype, logits: torch.Tensor | None
    ) -> None:
        if self._open is None or len(self._open) != len(self._layers):
            return
        kept = [self._open[layer] for layer in self._layers] + [(final.detach(), version_of(final))]
        self._open = None
        *aux, final = (state for state, _ in kept)
        versions = tuple(version for _, version in kept)
        self._last = ForwardStates(
            tuple(aux),
            final,
            logits,
            logits_dtype,
            versions,
            0 if logits is None else version_of(logits),
        )
        self.passes += 1


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The hidden states of a call: its first argument, ``hidden_states``, or its first tensor."""
    found = (*args[:1], kwargs.get("hidden_states"), *kwargs.values())
    return next((value for value in found if isinstance(value, torch.Tensor)), None)
