"""Forward hooks that keep detached references to the states of the last forward pass.

The residual stream after L decoder layers is the input of decoder layer L, so one kind of hook
serves every L, 0 (the embeddings) included. A pass begins with the decoder's own call, so that
layers which gradient checkpointing runs again inside backward are not mistaken for a new pass.
Hooks return nothing, raise nothing and keep ``detach()``-ed aliases, so autograd sees the same
graph with and without them.

A module compiled in place (``module.compile()``) runs a traced copy of its own call that knows only
the hooks it had when it was traced. For such a module the entry to the compiled call is wrapped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from policy_bridge.logits import ReturnedLogits, is_sharded
from policy_bridge.model import PolicyModules, active_adapters, refuse_cuda_graphs
from policy_bridge.selection import PassInputs
from slipstream.errors import RefusedError
from slipstream.shortage import raise_unless_shortage

Look = Callable[[tuple[Any, ...], Mapping[str, Any], Any], None]
"""A function of a call's positional and named arguments and its result (None before the call)."""

_BOUNDARIES = (
    *("cu_seqlens_q_padded", "cu_seqlens_padded"),
    *("cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens", "cu_seq_lens"),
)
"""Names under which varlen attention takes where sequences begin, padding counted first."""


class _Hook:
    """A torch hook that calls ``look``. In a copy of the module, pickled or not, it is inert."""

    def __init__(self, look: Look | None, after: bool) -> None:
        self._look, self._after = look, after

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if self._look is None:
            return
        if self._after:
            # torch leaves the named arguments out where another hook of this call removed this one.
            self._look(args, rest[0] if len(rest) > 1 else {}, rest[-1])
        else:
            self._look(args, rest[0], None)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None, bool]]:
        return _Hook, (None, self._after)


def watch(
    module: nn.Module, look: Look, *, after: bool = False, first: bool = False
) -> Callable[[], None]:
    """Have ``look`` called before (or after) each call of ``module``; returns a function to stop.

    ``first``: before the hooks that are on the module already, which may change its result.
    """
    compiled = module._compiled_call_impl
    if compiled is None:
        hook = _Hook(look, after)
        if after:
            return module.register_forward_hook(hook, with_kwargs=True, prepend=first).remove
        return module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first).remove

    def call(*args: Any, **kwargs: Any) -> Any:
        if not after:
            look(args, kwargs, None)
        output = compiled(*args, **kwargs)
        if after:
            look(args, kwargs, output)
        return output

    module._compiled_call_impl = call
    return lambda: setattr(module, "_compiled_call_impl", compiled)


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
        returned, head: some of the logits that the model and its lm_head returned, where they were
            asked for; copied before the loop can write into them.
        picked: float32 [B, S], the logits of the pass's own tokens, where they were asked for.
        inputs: copies of what the decoder was given.
    """

    aux: tuple[torch.Tensor, ...]
    final: torch.Tensor
    logits: torch.Tensor | None
    logits_dtype: torch.dtype
    versions: tuple[int, ...]
    logits_version: int = 0
    returned: ReturnedLogits | None = None
    head: ReturnedLogits | None = None
    picked: torch.Tensor | None = None
    inputs: PassInputs = field(default_factory=PassInputs)

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
        """True if logits were kept and the loop has left them alone since the pass.

        A temperature divided into them in place would go out as logits before temperature.
        """
        return self.logits is not None and version_of(self.logits) == self.logits_version


def version_of(tensor: torch.Tensor) -> int:
    """In-place version counter, shared by aliases; inference tensors keep none and count as 0."""
    return 0 if tensor.is_inference() else tensor._version


class ForwardTap:
    """Hooks on one policy, in place from ``__enter__`` to ``__exit__``.

    Keeps the states after each of ``layers``, of passes with the policy's adapters on.

    Args:
        modules: the policy.
        layers: "after L layers" numbers.
        returned: keep some of the logits too.
        training: only passes that build a graph for backward.
        pick: makes the logits of the pass's tokens from lm_head's output [B, S, V] and token ids
            [B, S], before the loop can write into that output, or None where they are not needed.

    Attributes:
        traced: the policy is compiled as a whole, and the hooks are in its graph.
    """

    def __init__(
        self,
        modules: PolicyModules,
        layers: Sequence[int],
        returned: bool = False,
        training: bool = False,
        pick: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None] | None = None,
    ) -> None:
        self._modules = modules
        self._returned = returned
        self._training = training
        self._pick = pick
        self._given: dict[str, Any] = {}
        self._cached = self._continues = self._unnamed = False
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(modules.decoder.forward).parameters.values()
        self._names = [parameter.name for parameter in parameters if parameter.kind in kinds]
        self._layers = tuple(layers)
        # Removes the hooks in reverse: two on one compiled module each put back what they found.
        self._hooks = ExitStack()
        self._pass: dict[int, tuple[torch.Tensor, int]] | None = None
        self._last: ForwardStates | None = None
        self._just_ended = False
        self.traced = False

    def __enter__(self) -> ForwardTap:
        """Raise RefusedError for layers compiled with CUDA graphs since they were found."""
        modules = self._modules
        refuse_cuda_graphs([*modules.layers, modules.lm_head])
        self._hooks.callback(watch(modules.decoder, self._begin_pass))
        count = len(modules.layers)
        # The first one tells whether there is a cache.
        for layer in sorted({0, *self._layers}):
            after = layer == count
            module = modules.layers[layer - after]
            self._hooks.callback(watch(module, self._keeper_of(layer), after=after))
        if modules.final_norm is not None:
            self._hooks.callback(watch(modules.final_norm, self._end_at_norm, after=True))
        else:
            # FSDP2 with an output_dtype casts lm_head's result in a hook: see it before that cast.
            self._hooks.callback(watch(modules.lm_head, self._end_at_head, after=True, first=True))
        if self._returned:
            self._hooks.callback(watch(modules.policy, self._keep_returned, after=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        # ``pick`` is a method of the window that has this tap.
        self._pass = self._last = self._pick = None
        self._given = {}

    def take(self) -> ForwardStates | None:
        """Return the last complete forward pass, once; earlier ones not taken are gone."""
        states, self._last = self._last, None
        return states

    def _begin_pass(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], _: Any) -> None:
        self._just_ended = False
        if torch.compiler.is_dynamo_compiling():
            # The graph keeps what it traces here, also after the hooks are gone.
            self.traced, self._pass = True, None
            return
        # With its adapters off, or others on, the policy runs as a reference model.
        other = any(active_adapters(module) != on for module, on in self._modules.adapters)
        other = other or (self._training and not torch.is_grad_enabled())
        self._pass = None if other else {}
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if args:
            given["input_ids"] = args[0]
        # Positions without a name: something may have said which tokens belong together.
        self._unnamed = len(args) > max(len(self._names), 1)
        parts = ("input_ids", "attention_mask", "position", "seq")
        self._given = {
            n: v for n, v in given.items() if v is not None and any(part in n for part in parts)
        }
        self._cached = False
        cache = given.get("past_key_values")
        # How much a static cache holds is on the device; it is not waited for.
        layer = next(iter(getattr(cache, "layers", ())), None)
        static = isinstance(getattr(layer, "cumulative_length", None), torch.Tensor)
        self._continues = bool(getattr(cache, "is_initialized", False)) and not static

    def _keeper_of(self, layer: int) -> Look:
        def keep(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
            if self._pass is None:
                return
            self._cached = self._cached or kwargs.get("past_key_values") is not None
            if output is not None:
                args, kwargs = output if isinstance(output, tuple) else (output,), {}
            state = first_tensor(args, kwargs)
            if layer in self._layers and state is not None:
                self._pass[layer] = (state.detach(), version_of(state))

        return keep

    def _end_at_head(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        final = first_tensor(args, kwargs)
        # prime-rl's lm_head returns a dict, with log-probs instead of logits where it is fused.
        logits = output.get("logits") if isinstance(output, Mapping) else output
        if final is None:
            return
        if not isinstance(logits, torch.Tensor):
            self._end_pass(final, final.dtype, None)
            return
        self._end_pass(final, logits.dtype, logits.detach())

    def _inputs(self, shape: torch.Size) -> PassInputs:
        # Copies: the loop may write the next pass's inputs into the same memory.
        given, self._given = self._given, {}
        config = getattr(self._modules.decoder, "config", None)
        tensors = ((n, v) for n, v in given.items() if isinstance(v, torch.Tensor))
        plain = {name: value for name, value in tensors if not is_sharded(value)}
        attention = getattr(config, "_attn_implementation", None) or ""
        ids, mask = plain.get("input_ids"), plain.get("attention_mask")
        positions = plain.get("position_ids", plain.get("positions"))
        begins = next((plain[name] for name in _BOUNDARIES if name in plain), None)
        follows, one_row = {}, torch.Size((1, shape[1]))
        try:
            if mask is not None and mask.shape == shape:
                real = mask.bool()
                follows["attention_mask"] = real[:, 1:] & real[:, :-1]
            elif mask is not None and attention and mask.shape[2:] == (shape[1], shape[1]):
                # One that transformers takes as it is: of each token, whether it sees the last.
                seen = mask[:, 0].diagonal(-1, 1, 2)
                follows["attention_mask"] = seen.clone() if seen.dtype == torch.bool else seen > -1
            if positions is not None and positions.shape in (shape, one_row):
                follows["position_ids"] = positions[:, 1:] == positions[:, :-1] + 1
            if ids is not None and (ids.is_floating_point() or ids.shape != shape):
                ids = None
            return PassInputs(
                None if ids is None else ids.clone(),
                follows,
                None if begins is None else begins.clone(),
                attention,
                self._cached,
                self._continues,
                unread=not (given.keys() & {"attention_mask", "position_ids"} <= follows.keys())
                or (begins is None and any("seq" in name for name in given))
                or self._unnamed,
            )
        except RuntimeError as error:
            raise_unless_shortage(error)
            # As in ``_copy_some``: this pass is not compared.
            return PassInputs()

    def _picked(self, logits: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor | None:
        if self._pick is None or ids is None:
            return None
        if is_sharded(logits) or ids.shape != logits.shape[:2]:
            return None
        try:
            return self._pick(logits, ids)
        except RuntimeError as error:
            raise_unless_shortage(error)
            # As in ``_copy_some``: ``ship`` then reads the logits, if they are as they were.
            return None

    def _end_at_norm(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object
    ) -> None:
        if not isinstance(output, torch.Tensor):
            return
        # A fused loss multiplies in autocast's dtype where that is on, else in its input's.
        kind, dtype = output.device.type, output.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        self._end_pass(output, dtype, None)

    def _keep_returned(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if self._last is not None and self._just_ended:
            self._last = replace(self._last, returned=_copy_some(output, self._last.final))

    def _end_pass(
        self, final: torch.Tensor, logits_dtype: torch.dtype, logits: torch.Tensor | None
    ) -> None:
        if self._pass is None or len(self._pass) != len(self._layers):
            return
        kept = [self._pass[layer] for layer in self._layers] + [(final.detach(), version_of(final))]
        self._pass = None
        states, versions = zip(*kept, strict=True)
        logits_version = 0 if logits is None else version_of(logits)
        inputs = self._inputs(final.shape[:2])
        head = picked = None
        if logits is not None:
            head = _copy_some(logits, final) if self._returned else None
            picked = self._picked(logits, inputs.ids)
        self._last = ForwardStates(
            states[:-1],
            states[-1],
            logits,
            logits_dtype,
            versions,
            logits_version,
            head=head,
            picked=picked,
            inputs=inputs,
        )
        self._just_ended = True


def _copy_some(output: object, final: torch.Tensor) -> ReturnedLogits | None:
    try:
        return ReturnedLogits.of(output, final.shape[:2])
    except RuntimeError as error:
        raise_unless_shortage(error)
        # Raised here it would end the policy's pass; the next one is compared instead.
        return None


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The hidden states of a call: its first argument, ``hidden_states``, or its first tensor."""
    found = (*args[:1], kwargs.get("hidden_states"), *kwargs.values())
    return next((value for value in found if isinstance(value, torch.Tensor)), None)
