"""The drafts that lie ready in a worker beside the live one.

At most two: the one that is staged and the one that was live before. Each is the size of
the draft. They are made in one thread, one after the other.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from rollout_server.exchange import exchange, pairs_of
from rollout_server.read_back import ReadBack
from rollout_server.reload import FAILURES
from rollout_server.shadow import Shadow, ShadowError
from rollout_server.weight_source import WeightSource

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
