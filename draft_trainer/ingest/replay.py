"""Which samples to train on, and which to give up: newest first, a share held out.

A priority queue for items most of which come in order.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from draft_trainer.sample import is_held_out
from slipstream.errors import RefusedError

T = TypeVar("T", bound=tuple[object, ...])


class MostlySorted(Generic[T]):
    """Gives back the smallest item. An item that is the largest yet costs nothing but its place.

    Those are in a row, all others in a heap: from a heap of all of them each item was taken by
    a dozen comparisons of tuples, which for small samples was a tenth of their ingest.
    """

    def __init__(self) -> None:
        self._row: deque[T] = deque()
        self._heap: list[T] = []

    def push(self, item: T) -> None:
        """Add an item."""
        if not self._row or item > self._row[-1]:
            self._row.append(item)
        else:
            heapq.heappush(self._heap, item)

    def pop(self) -> T:
        """Remove the smallest item. Raises IndexError where there is none."""
        if self._heap and (not self._row or self._heap[0] < self._row[0]):
            return heapq.heappop(self._heap)
        return self._row.popleft()

    def keep(self, wanted: Callable[[T], bool]) -> None:
        """Remove all others."""
        self._row = deque(filter(wanted, self._row))
        self._heap = list(filter(wanted, self._heap))
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._row) + len(self._heap)

    def __iter__(self) -> Iterator[T]:
        """In no order."""
        yield from self._row
        yield from self._heap


_SLACK = 64


class Replayable(Protocol):
    """What the choice depends on. See ``Sample``."""

    @property
    def sample_id(self) -> str: ...
    @property
    def policy_version(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def group(self) -> str: ...


T_REPLAY = TypeVar("T_REPLAY", bound=Replayable)


@dataclass(slots=True, eq=False)
class _Entry(Generic[T_REPLAY]):
    sample: T_REPLAY
    arrival: int
    held_out: bool
    times_drawn: int
    pushed: int = 0


# In the order of its numbers, then of the push, whose number no other item has.
_ToDraw = tuple[int, bytes, int, int, _Entry[T_REPLAY]]
_ToEvict = tuple[int, int, int, int, _Entry[T_REPLAY]]


class ReplayBuffer(Generic[T_REPLAY]):
    """The samples between arrival and their last epoch. Not thread-safe: its owner has the lock.

    Whether a sample is held out follows from its prompt alone (``Sample.group``), so a restart, a
    second trainer or a replayed stream never moves a sample from the held-out share into training,
    and a candidate is never judged on prompts whose other completions it was trained on: by
    sample, the gate saw gains of 0.4 in acceptance length that live rollouts did not have.

    Samples are drawn by age plus epochs: one policy version of age weighs as much as one epoch.
    Ties are broken by a hash of the seed, the sample and its epoch, so that the order does not
    depend on what was drawn before, and a restart draws as if there had been none.

    Args:
        held_out_fraction: share of prompts that never train, in [0, 1).
        max_epochs: how often one sample is drawn at most; at least 1. A sample leaves the buffer
            when it has been drawn that often.
        seed: of the ties.
    """

    def __init__(self, held_out_fraction: float, max_epochs: int = 2, seed: int = 0) -> None:
        if not 0.0 <= held_out_fraction < 1.0:
            raise RefusedError("held_out_fraction", held_out_fraction, "in [0, 1)", "lower it")
        if max_epochs < 1:
            raise RefusedError("max_epochs", max_epochs, "at least 1", "raise it")
        self.max_epochs = max_epochs
        self._held_out_fraction = held_out_fraction
        self._seed = seed
        self._entries: dict[str, _Entry[T_REPLAY]] = {}
        self._arrivals = 0
        self._pending = 0
        # Only an entry's last push counts: what was pushed before it changed, or left, is passed
        # over when it comes up. 0 is no push's number.
        self._pushes = 0
        # What was pushed since the last draw gets its place in the order with the next one.
        self._fresh: list[tuple[int, _Entry[T_REPLAY]]] = []
        self._to_draw: list[_ToDraw[T_REPLAY]] = []
        self._to_evict: MostlySorted[_ToEvict[T_REPLAY]] = MostlySorted()

    @property
    def held_out_samples(self) -> int:
        """Those that never train."""
        return sum(entry.held_out for entry in self._entries.values())

    def add(self, sample: T_REPLAY, times_drawn: int = 0) -> None:
        """Take a sample whose id is not here. ``times_drawn`` is below ``max_epochs``."""
        self.add_all([sample], times_drawn)

    def add_all(self, samples: Iterable[T_REPLAY], times_drawn: int = 0) -> None:
        """As ``add`` for each."""
        assert times_drawn < self.max_epochs
        entries, fraction = self._entries, self._held_out_fraction
        # The completions of a prompt come one after the other.
        known: dict[str, bool] = {}
        for sample in samples:
            sample_id, group = sample.sample_id, sample.group
            assert sample_id not in entries
            held_out = known.get(group)
            if held_out is None:
                held_out = known[group] = is_held_out(group, fraction)
            entries[sample_id] = entry = _Entry(sample, self._arrivals, held_out, times_drawn)
            self._arrivals += 1
            self._pending += not held_out and times_drawn == 0
            self._push(entry)
        self._clear_stale()

    def draw(self, max_tokens: int) -> list[T_REPLAY]:
        """Samples to train on now, about ``max_tokens`` of them; each counts as trained once.

        Args:
            max_tokens: bound on the sum of the samples' tokens. A first sample is returned even
                where it alone exceeds the bound.

        Returns:
            Empty when nothing is left to train on.
        """
        for pushed, entry in self._fresh:
            if entry.pushed == pushed:
                heapq.heappush(self._to_draw, self._draw_item(entry))
        self._fresh.clear()
        chosen: list[_Entry[T_REPLAY]] = []
        tokens = 0
        while self._to_draw:
            *_, pushed, entry = self._to_draw[0]
            if entry.pushed != pushed:
                heapq.heappop(self._to_draw)
                continue
            size = entry.sample.tokens
            if chosen and tokens + size > max_tokens:
                break
            heapq.heappop(self._to_draw)
            self._pending -= _is_pending(entry)
            entry.times_drawn += 1
            entry.pushed = 0
            chosen.append(entry)
            tokens += size
        # Only now: none is drawn twice for one batch.
        for entry in chosen:
            if entry.times_drawn < self.max_epochs:
                self._push(entry)
            else:
                del self._entries[entry.sample.sample_id]
        self._clear_stale()
        return [entry.sample for entry in chosen]

    def put_back(self, sample: T_REPLAY) -> None:
        """Undo one draw of a sample that is still here, or left with that draw."""
        entry = self._entries.get(sample.sample_id)
        if entry is None:
            self.add(sample, self.max_epochs - 1)
        else:
            entry.times_drawn -= 1
            self._pending += _is_pending(entry)
            self._push(entry)
            self._clear_stale()

    def worst(
        self, spared: Callable[[T_REPLAY], bool] = lambda sample: False
    ) -> Generator[T_REPLAY, None, None]:
        """Samples in the order in which to give them up: of the oldest version first, and of
        those the ones trained on. Until the generator is closed what it yielded may be removed,
        and nothing else may be changed.

        Args:
            spared: which samples are of no use to give up now.
        """
        passed = []
        try:
            while self._to_evict:
                item = self._to_evict.pop()
                entry = item[-1]
                if entry.pushed == item[-2]:
                    passed.append(item)
                    if not spared(entry.sample):
                        yield entry.sample
        finally:
            for item in passed:
                if _counts(item):
                    self._to_evict.push(item)

    def remove(self, sample: T_REPLAY) -> bool:
        """Give up a sample that is here; whether it was to be trained on and never was."""
        entry = self._entries.pop(sample.sample_id)
        entry.pushed = 0
        pending = _is_pending(entry)
        self._pending -= pending
        return pending

    def held_out(self, newest_versions: int | None = None) -> list[T_REPLAY]:
        """Held-out samples, oldest arrival first.

        Args:
            newest_versions: only those of this many newest policy versions that have a held-out
                sample; None for all.
        """
        entries = [e for e in self._entries.values() if e.held_out]
        if newest_versions is not None:
            versions = sorted({e.sample.policy_version for e in entries})
            kept = set(versions[max(len(versions) - newest_versions, 0) :])
            entries = [e for e in entries if e.sample.policy_version in kept]
        return [e.sample for e in entries]

    @property
    def pending(self) -> int:
        """Training samples that were never drawn."""
        return self._pending

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._entries

    def __iter__(self) -> Iterator[T_REPLAY]:
        return iter([entry.sample for entry in self._entries.values()])

    def _push(self, entry: _Entry[T_REPLAY]) -> None:
        self._pushes += 1
        entry.pushed = self._pushes
        if not entry.held_out:
            self._fresh.append((entry.pushed, entry))
        # Oldest version first; within a version what has been trained on goes first.
        version = entry.sample.policy_version
        item = (version, -entry.times_drawn, entry.arrival, entry.pushed, entry)
        self._to_evict.push(item)

    def _clear_stale(self) -> None:
        # Where nothing is drawn, or nothing evicted, old items would pile up for ever.
        bound = 2 * len(self._entries) + _SLACK
        if len(self._fresh) > bound:
            self._fresh = [item for item in self._fresh if _counts(item)]
        if len(self._to_draw) > bound:
            self._to_draw = [item for item in self._to_draw if _counts(item)]
            heapq.heapify(self._to_draw)
        if len(self._to_evict) > bound:
            self._to_evict.keep(_counts)

    def _draw_item(self, entry: _Entry[T_REPLAY]) -> _ToDraw[T_REPLAY]:
        times = entry.times_drawn
        text = f"{self._seed}:{times}:{entry.sample.sample_id}"
        tie = hashlib.blake2b(text.encode(), digest_size=8).digest()
        order = (times - entry.sample.policy_version, tie, entry.arrival)
        return (*order, entry.pushed, entry)


def _counts(item: tuple[Any, ...]) -> bool:
    return bool(item[-1].pushed == item[-2])


def _is_pending(entry: _Entry[T_REPLAY]) -> bool:
    return not entry.held_out and entry.times_drawn == 0
