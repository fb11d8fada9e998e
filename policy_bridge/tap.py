"""Forward hooks that keep detached references to the states of the last forward pass.

Correctness, in three sentences. The residual stream after L decoder layers is
the input of decoder layer L, so one kind of hook serves every L, 0 (the
embeddings) included. A pass begins with the decoder's own call, so that layers
which gradient checkpointing runs again inside backward are not mistaken for a
new pass. Hooks return nothing and keep ``detach()``-ed aliases, so autograd sees
the same graph with and without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from policy_bridge.modules import PolicyModules
from slipstream.refusal import RefusedError

Forward = Callable[..., None]


@dataclass(frozen=True)
class ForwardStates:
    """One forward pass over a batch of B rows of S columns, padding included.

    Attributes:
        aux: one [B, S, H] per captured layer, in the layers' order.
        final: [B, S, H], the input of lm_head.
        logits_dtype: the precision in which the policy itself had its logits.
        versions: in-place version counters of ``(*aux, final)`` when they were seen.
    """

    aux: tuple[torch.Tensor, ...]
    final: torch.Tensor
    logits_dtype: torch.dtype
    versions: tuple[int, ...]

    def check_unwritten(self) -> None:
        """Raise RefusedError if the model wrote into a state after it was captured."""
        if tuple(version_of(state) for state in (*self.aux, self.final)) != self.versions:
            raise RefusedError(
                "hidden_states",
                "written in place after the capture",
                "a model that leaves its residual stream alone",
                "disable in-place activations in the policy",
            )


def version_of(tensor: torch.Tensor) -> int:
    """In-place version counter, shared by aliases; inference tensors keep none and count as 0."""
    return 0 if tensor.is_inference() else tensor._version


class ForwardTap:
    """Hooks on one policy, in place from ``__enter__`` to ``__exit__``.

    Args:
        modules: the policy.
        layers: "after L layers" numbers, ascending, each below the number of layers.
    """

    def __init__(self, modules: PolicyModules, layers: Sequence[int]) -> None:
        self._modules = modules
        self._layers = tuple(layers)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._open: dict[int, tuple[torch.Tensor, int]] | None = None
        self._last: ForwardStates | None = None
        self.passes = 0

    def __enter__(self) -> ForwardTap:
        modules = self._modules
        self._handles.append(modules.decoder.register_forward_pre_hook(self._begin))
        for layer in self._layers:
            self._handles.append(
                modules.layers[layer].register_forward_pre_hook(
                    self._hook_for(layer), with_kwargs=True
                )
            )
        if modules.final_norm is not None:
            self._handles.append(modules.final_norm.register_forward_hook(self._end_at_norm))
        else:
            self._handles.append(modules.lm_head.register_forward_hook(self._end_at_head))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open = self._last = None

    def take(self) -> ForwardStates | None:
        """The last complete forward pass, once; earlier ones that nobody took are gone."""
        states, self._last = self._last, None
        return states

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._open = {}

    def _hook_for(self, layer: int) -> Forward:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._open is not None:
                state = (args[0] if args else kwargs["hidden_states"]).detach()
                self._open[layer] = (state, version_of(state))

        return keep

    def _end_at_head(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        self._end(args[0], output.dtype)

    def _end_at_norm(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        self._end(output, output.dtype)

    def _end(self, final: torch.Tensor, logits_dtype: torch.dtype) -> None:
        if self._open is None or len(self._open) != len(self._layers):
            return
        kept = [self._open[layer] for layer in self._layers] + [(final.detach(), version_of(final))]
        self._open = None
        *aux, final = (state for state, _ in kept)
        versions = tuple(version for _, version in kept)
        self._last = ForwardStates(tuple(aux), final, logits_dtype, versions)
        self.passes += 1
