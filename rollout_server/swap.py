"""A second set of a draft's weights in a worker's memory, in the form that its kernels use.

The draft's modules are copied without their memory, get parameters in the form in which
vLLM loads them (vLLM keeps that form's metadata for its own reloads), and are loaded and
post-processed by vLLM's own code: names, fused and sharded matrices, padding, packing for
CPUs. All of that happens beside the live draft, in a thread, while the engine generates;
what is left for the commit is ``exchange``.

Not every draft can be shadowed. ``ShadowError`` says why, and the commit then reloads it
layer by layer (``reload``).

Exchanges a draft's live weights with those of a shadow, between two engine steps.

Everything is compared before the first byte moves, so an exchange happens or is refused.
What was live lies in the shadow afterwards: going back is another exchange.

On an accelerator contents are copied in place, which keeps the addresses that CUDA graphs
hold. On a CPU there are no such graphs, and large tensors exchange their memory instead of
copying it. There vLLM packs the matrices of linear layers into objects that it reaches
through the closure of ``cpu_linear``; the pointer to such an object lies in a tensor of one
element, whose content is exchanged like any other.

The drafts that lie ready in a worker beside the live one.

At most two: the one that is staged and the one that was live before. Each is the size of
the draft. They are made in one thread, one after the other.

Whether the draft in a worker's memory is still the one that was committed.

A fingerprint of the draft's parameters is kept at every commit; a read-back takes
it again between two steps. It differs after sleep level 2 (the memory comes back
empty), after somebody else wrote into the draft, after a fault in the memory.

An XOR over the raw elements, one pass at the memory's speed. It tells damage, not
malice; the bytes that were staged are proved by their SHA-256 before. Parameters
that lie in the verifier's memory are left out: a policy push changes them. So are
those that a CPU build packs away at load (their parameters are empty).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from rollout_server.reload import FAILURES, WeightSource

SAME, DIFFERS, ASLEEP = "same", "differs", "asleep"


@torch.no_grad()
def fingerprint(policy: nn.Module, draft: nn.Module) -> tuple[tuple[str, int], ...]:
    """(name, XOR of its elements) of every parameter that is the draft's own, sorted."""
    theirs = {
        parameter.untyped_storage().data_ptr()
        for parameter in policy.parameters()
        if parameter.numel()
    }
    return tuple(
        sorted(
            (name, element_hash(parameter))
            for name, parameter in draft.named_parameters()
            if parameter.numel() and parameter.untyped_storage().data_ptr() not in theirs
        )
    )


def element_hash(parameter: torch.Tensor) -> int:
    """XOR of a tensor's raw elements."""
    return int(torch.hash_tensor(parameter.detach()).item())


class ReadBack:
    """One worker's memory of what was committed.

    Args:
        worker: vLLM's ``Worker`` with a draft.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.asleep = False
        self.lost = False
        self._committed = self._now()

    def committed(self) -> None:
        """The draft was just replaced; what is there now is right."""
        self._committed = self._now()
        self.lost = False

    def exchanged(self, hashes: Mapping[str, int]) -> None:
        """These parameters were just replaced by others, whose hashes were taken before.

        Nothing is read now: a pass over the draft would hold up the engine. The next
        ``check`` tells whether they arrived.
        """
        self._committed = tuple(sorted((dict(self._committed) | dict(hashes)).items()))
        self.lost = False

    @property
    def hashes(self) -> dict[str, int]:
        """Of every parameter, as it was committed."""
        return dict(self._committed)

    def check(self) -> str:
        """``SAME``, ``DIFFERS``, or ``ASLEEP`` while the memory must not be touched."""
        if self.asleep:
            return ASLEEP
        return DIFFERS if self.lost or self._now() != self._committed else SAME

    def _now(self) -> tuple[tuple[str, int], ...]:
        return fingerprint(self._worker.get_model(), self._worker.get_draft_model())


def watch_sleep(worker_class: type) -> None:
    """Make vLLM's ``Worker`` note that it sleeps, and that level 2 loses the draft."""
    sleep, wake_up = worker_class.sleep, worker_class.wake_up  # type: ignore[attr-defined]
    if getattr(sleep, "_slipstream", False):
        return

    def noted_sleep(self: Any, level: int = 1) -> None:
        read_back: ReadBack | None = getattr(self, "slipstream_read_back_state", None)
        if read_back is not None:
            read_back.asleep = True
            read_back.lost = read_back.lost or level >= 2
            # Sleep is there to free memory.
            if hasattr(self, "slipstream_spares"):
                self.slipstream_spares.drop()
        sleep(self, level)

    def noted_wake_up(self: Any, tags: list[str] | None = None) -> None:
        wake_up(self, tags)
        read_back: ReadBack | None = getattr(self, "slipstream_read_back_state", None)
        if read_back is not None and (tags is None or "weights" in tags):
            read_back.asleep = False

    noted_sleep._slipstream = True  # type: ignore[attr-defined]
    worker_class.sleep = noted_sleep  # type: ignore[attr-defined]
    worker_class.wake_up = noted_wake_up  # type: ignore[attr-defined]


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


READY, WORKING = "ready", "working"
_FOREIGN = "what was live was not what had been committed"
_MOST = 2
_LOG = logging.getLogger(__name__)


@dataclass
class _Spare:
    shadow: Shadow
    state: str = WORKING

    def begin(self, work: Callable[..., None], gone: list[_Spare], *arguments: object) -> None:
        """Do it in a thread, which leaves a state behind.

        Args:
            work: called with this, ``gone`` and the arguments.
            gone: what it forgets first. A gigabyte takes longer to give back to the kernel than
                there is between two engine steps.
            arguments: more of them.
        """
        self.state = WORKING
        threading.Thread(
            target=work, args=(self, gone, *arguments), name="slipstream-prepare", daemon=True
        ).start()


class Spares:
    """See the module. Called between two engine steps only; ``_fill`` is the thread.

    Args:
        policy: answers the live policy's module.
        draft: answers the live draft's.
        read_back: told what is in memory after an exchange.
    """

    def __init__(
        self,
        policy: Callable[[], nn.Module],
        draft: Callable[[], nn.Module],
        read_back: ReadBack,
    ) -> None:
        self._policy, self._draft, self._read_back = policy, draft, read_back
        self._spares: dict[WeightSource, _Spare] = {}

    def prepare(self, source: WeightSource, keep: WeightSource | None) -> str:
        """Begin to lay these weights ready, or say how far that is.

        Args:
            source: the weights.
            keep: others that must stay ready, if they are.

        Returns:
            ``READY``, ``WORKING``, or why the commit will have to load them instead.
        """
        spare = self._spares.get(source)
        if spare is not None and spare.state != _FOREIGN:
            return spare.state
        if any(other.state == WORKING for other in self._spares.values()):
            return WORKING
        room = max(0, len(self._spares) + 1 - _MOST)
        evicted = [self._spares.pop(s) for s in [s for s in self._spares if s != keep][:room]]
        try:
            shadow = Shadow(self._policy(), self._draft())
        except ShadowError as error:
            return str(error)
        spare = self._spares[source] = _Spare(shadow)
        spare.begin(_fill, evicted, source)
        return WORKING

    def put(self, new: WeightSource, old: WeightSource) -> bool:
        """Make ``new`` live in place of ``old`` if it lies ready; False if it does not.

        Raises:
            RuntimeError: the device failed in the middle; nothing lies ready any more.
        """
        spare = self._spares.get(new)
        if spare is None or spare.state != READY:
            return False
        try:
            pairs = pairs_of(spare.shadow.modules)
        except ShadowError as error:
            spare.state = str(error)
            _LOG.warning("draft cannot be exchanged: %s", error)
            return False
        dropped = [other for other in self._spares.values() if other is not spare]
        self._spares = {}
        before = self._read_back.hashes
        # What is damaged, or lost in a sleep, is not worth keeping.
        worth = new != old and not self._read_back.lost
        exchange(pairs)
        self._read_back.exchanged(spare.shadow.fingerprint)
        if worth:
            names = spare.shadow.fingerprint
            spare.shadow.fingerprint = {name: before[name] for name in names}
            self._spares = {old: spare}
            # Nobody else has written into it? A look takes too long for the time between steps.
            spare.begin(_check, dropped)
        return True

    def drop(self) -> None:
        """Forget all of them: their memory is wanted, or the live draft is written to."""
        self._spares = {}

    def loaded(self) -> None:
        """The live draft was loaded in another way."""
        self._read_back.committed()


def _fill(spare: _Spare, gone: list[_Spare], source: WeightSource) -> None:
    gone.clear()
    began = time.perf_counter()
    state = "the preparation ended; see the worker's log"
    try:
        with _aside(spare.shadow.device):
            spare.shadow.fill(source.weights())
        pairs_of(spare.shadow.modules)
    except (ShadowError, *FAILURES) as error:
        _LOG.warning("draft cannot be prepared, its commit will load it: %s", error)
        state = f"{type(error).__name__}: {error}"
    else:
        _LOG.info("draft prepared in %.3f s", time.perf_counter() - began)
        state = READY
    finally:
        spare.state = state


def _check(spare: _Spare, gone: list[_Spare]) -> None:
    gone.clear()
    with _aside(spare.shadow.device):
        same = spare.shadow.hashes() == spare.shadow.fingerprint
    spare.state = READY if same else _FOREIGN


@contextlib.contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """On an accelerator: a stream of its own, so that the engine's steps do not wait for it."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
