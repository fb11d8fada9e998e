"""The draft in a worker: its standby copies, and whether it is the committed one.

The copies are made in a thread while the engine generates; ``swap`` swaps and hashes them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from rollout_server.control.stages import WeightSource
from rollout_server.vllm.patches import storages
from rollout_server.vllm.swap import (
    LOAD_FAILURES,
    MAX_COPIES,
    NotSwappableError,
    StandbyCopy,
    hashes_of,
    swap_contents,
)

SAME, DIFFERS, ASLEEP = "same", "differs", "asleep"
READY, WORKING = "ready", "working"
_READ_SECONDS = 10.0
"""The deadline of one pass over a draft that a swap replaced."""

_OVERWRITTEN = "the draft that was live was not the one that had been committed"
_LOG = logging.getLogger(__name__)
GetModel = Callable[[], nn.Module]


class ReadBack:
    """A check that the draft in a worker's memory is the one that was committed.

    It is not after sleep level 2 (the memory comes back empty), after another writer, or after a
    memory fault. ``element_hash`` finds damage, not malice. Left out are parameters in the
    verifier's memory, which a policy push changes, and those that a CPU build packs away at load
    (they are empty).
    """

    def __init__(self, policy: GetModel, draft: GetModel) -> None:
        self._policy, self._draft = policy, draft
        self.lost = False
        self.committed = self._now()

    def record(self, hashes: Mapping[str, int] | None = None) -> None:
        """Take the draft, which was just replaced, as the committed one.

        Args:
            hashes: of the parameters that were swapped in, taken before, so that no pass over the
                draft delays the engine now; None: read the memory.
        """
        self.committed = self._now() if hashes is None else {**self.committed, **hashes}
        self.lost = False

    def check(self) -> str:
        """Return ``SAME`` or ``DIFFERS``. Not for an engine that sleeps: its memory is gone."""
        return DIFFERS if self.lost or self._now() != self.committed else SAME

    @torch.no_grad()
    def _now(self) -> dict[str, int]:
        return hashes_of(self._draft(), storages(self._policy()))


@dataclass
class _CopyEntry:
    copy: StandbyCopy
    state: str = WORKING
    thread: threading.Thread | None = None

    def start(
        self, work: Callable[[], str], evicted: list[_CopyEntry], stream: torch.cuda.Stream | None
    ) -> None:
        """Run ``work`` in a thread, on the stream; its result is the new state."""
        self.state = WORKING
        name, given = "slipstream-prepare", (work, evicted, stream)
        self.thread = threading.Thread(target=self._run, args=given, name=name, daemon=True)
        self.thread.start()

    def _run(
        self, work: Callable[[], str], evicted: list[_CopyEntry], stream: torch.cuda.Stream | None
    ) -> None:
        # Their memory is freed in this thread: the engine has no time for it between two steps.
        evicted.clear()
        began = time.perf_counter()
        state = "the preparation ended; see the worker's log"
        try:
            with _on_stream(stream):
                state = work()
            _LOG.info("standby draft %s after %.3f s", state, time.perf_counter() - began)
        except (NotSwappableError, *LOAD_FAILURES) as error:
            # Kept as text: the error itself would keep the copy's memory.
            state = f"{type(error).__name__}: {error}"
            _LOG.warning("no standby copy of the draft, its commit will load it: %s", state)
        finally:
            self.state = state


class Standby:
    """The standby copies of one worker: at most the staged draft's and the previous one's.

    Called between two engine steps only. Copies are made in one thread, one after the other.
    """

    def __init__(
        self,
        policy: GetModel,
        draft: GetModel,
        read_back: ReadBack,
        owed: Callable[[], int] = lambda: 0,
    ) -> None:
        self._policy, self._draft, self.read_back, self._owed = policy, draft, read_back, owed
        self._entries: dict[WeightSource, _CopyEntry] = {}
        self._stream: torch.cuda.Stream | None = None

    def prepare(self, source: WeightSource, keep: WeightSource | None) -> str:
        """Begin to make these weights ready, or say how far that is.

        Returns:
            ``READY``, ``WORKING``, or why the commit will have to load them instead.
        """
        entry = self._entries.get(source)
        if entry is not None and entry.state != _OVERWRITTEN:
            return entry.state
        if any(other.state == WORKING for other in self._entries.values()):
            return WORKING
        excess = max(0, len(self._entries) + 1 - MAX_COPIES)
        surplus = [other for other in self._entries if other != keep][:excess]
        evicted = [self._entries.pop(other) for other in surplus]
        try:
            copy = StandbyCopy(self._policy(), self._draft(), self._owed)
        except NotSwappableError as error:
            return str(error)

        def load() -> str:
            copy.load(source.weights())
            copy.pairs()
            return READY

        self._entries[source] = _CopyEntry(copy)
        self._start(self._entries[source], load, evicted)
        return WORKING

    def is_ready(self, source: WeightSource) -> bool:
        """Return whether these weights can be swapped in.

        The weights that a swap replaced are read after it: a commit that is undone at once waits.
        """
        entry = self._entries.get(source)
        if entry is None:
            return False
        if entry.thread is not None and entry.copy.hashes:  # It is loaded.
            entry.thread.join(_READ_SECONDS)
        return entry.state == READY

    def load(self, source: WeightSource) -> None:
        """Make these weights ready while the engine waits, where a reload is not possible.

        Raises NotSwappableError: they could not be loaded, or do not correspond to the live draft.
        """
        copy = StandbyCopy(self._policy(), self._draft(), self._owed)
        try:
            copy.load(source.weights())
            copy.pairs()
        except LOAD_FAILURES as error:
            raise NotSwappableError(f"{type(error).__name__}: {error}") from error
        self._entries = {source: _CopyEntry(copy, READY)}

    def swap(self, new: WeightSource, old: WeightSource) -> bool:
        """Make ``new`` live in place of ``old`` if it is ready; False if it is not.

        Raises RuntimeError: the device failed in the middle; nothing is ready any more.
        """
        if not self.is_ready(new):
            return False
        entry = self._entries[new]
        copy = entry.copy
        try:
            pairs = copy.pairs()
        except NotSwappableError as error:
            entry.state = str(error)
            _LOG.warning("draft cannot be swapped: %s", error)
            return False
        dropped = [other for other in self._entries.values() if other is not entry]
        self._entries = {}
        before = self.read_back.committed
        # A draft that was damaged, or lost in a sleep, is not kept.
        keep = new != old and not self.read_back.lost
        swap_contents(pairs)
        self.read_back.record(copy.hashes)
        if keep:
            expected = copy.hashes = {name: before[name] for name in copy.hashes}
            self._entries = {old: entry}
            # The thread finds out whether another writer changed it: a pass here takes too long.
            self._start(entry, lambda: READY if copy.read() == expected else _OVERWRITTEN, dropped)
        return True

    def drop(self) -> None:
        """Forget all copies: their memory is needed, or the live draft is written to."""
        self._entries = {}

    def _start(self, entry: _CopyEntry, work: Callable[[], str], evicted: list[_CopyEntry]) -> None:
        """Start ``work`` in a thread; on a GPU, on a stream that engine steps do not wait for."""
        device = entry.copy.device
        if self._stream is None and device.type == "cuda":
            # One for all: memory that was freed on a stream goes to that stream alone.
            self._stream = torch.cuda.Stream(device)
        entry.start(work, evicted, self._stream)


@contextlib.contextmanager
def _on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
        stream.synchronize()
