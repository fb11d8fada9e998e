"""The samples in the arena: those to be drawn, and those drawn for the last time."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path

from draft_trainer.config import ReplayConfig
from draft_trainer.feed.arena import Arena, Extent
from draft_trainer.feed.ledger import Ledger, Row
from draft_trainer.feed.replay import ReplayBuffer
from draft_trainer.feed.stored import StoredSample, stored


class HeldSamples:
    """Arena, replay buffer and the ledger's rows of held samples, which always say the same.

    A row is dropped, and that committed, before its extent can be written to again. Not
    thread-safe: its owner has the lock.

    Args:
        ledger: says what is held at first.
        path: of the arena.
        capacity_bytes: of the arena.
        config: [replay].
        seed: see ``ReplayBuffer``.
        count: told how many samples were given up and why; see ``SampleStore``.

    Raises:
        RefusedError: no room for the arena.
    """

    def __init__(
        self,
        ledger: Ledger,
        path: Path,
        capacity_bytes: int,
        config: ReplayConfig,
        seed: int,
        count: Callable[[str, int], None],
    ) -> None:
        self._ledger = ledger
        self._config = config
        self._seed = seed
        self._count = count
        rows = ledger.held()
        # The arena may be smaller than it was.
        beyond = [row for row in rows if row.start + row.size > capacity_bytes]
        with ledger.transaction():
            ledger.drop([row.number for row in beyond])
        count("capacity", sum(row.times_drawn == 0 for row in beyond))
        rows = [row for row in rows if row.start + row.size <= capacity_bytes]
        self.arena = Arena(path, capacity_bytes, [(row.start, row.size) for row in rows])
        self._fill(rows, self.arena.extents)

    def add(self, number: int, extent: Extent, layout: str) -> None:
        """A sample that the ledger has now."""
        extent.owned = True
        self.replay.add(stored(number, extent, layout))

    def reload(self) -> None:
        """The ledger's draws were changed."""
        extents = {sample.number: sample.extent for sample in self.all()}
        rows = self._ledger.held()
        self._fill(rows, [extents[row.number] for row in rows])

    def all(self) -> list[StoredSample]:
        """Everything."""
        return [*self.replay, *self.spent]

    def free_spent(self, draws: int) -> None:
        """Drop what was drawn for the last time up to this draw."""
        done = [sample for sample, last in self.spent.items() if last <= draws]
        self._drop(done)
        for sample in done:
            del self.spent[sample]

    def drop_versions(self, kept: Container[int]) -> None:
        """Drop what is still to be drawn of any other policy version."""
        gone = [sample for sample in self.replay if sample.policy_version not in kept]
        self._drop(gone)
        self._count("stale", sum([self.replay.remove(sample) for sample in gone]))

    def clear(self) -> None:
        """Forget everything, after the ledger did."""
        for sample in self.all():
            self.arena.disown(sample.extent)
        self._fill([], [])

    def make_room(self, size: int) -> Extent | None:
        """An extent of ``size`` bytes, for which samples are given up if there is none.

        Returns:
            None where too much of the arena is viewed.
        """
        extent = self.arena.allocate(size)
        while extent is None and self.arena.size - self.arena.leased >= size:
            sample = next((s for s in self.spent if not self._is_viewed(s)), None)
            if sample is not None:
                self._drop([sample])
                del self.spent[sample]
                self._count("unsaved", 1)
            else:
                sample = self.replay.worst(self._is_viewed)
                if sample is None:
                    break
                self._drop([sample])
                if self.replay.remove(sample):
                    self._count("capacity", 1)
            extent = self.arena.allocate(size)
        return extent

    def _drop(self, samples: Sequence[StoredSample]) -> None:
        if samples:
            with self._ledger.transaction():
                self._ledger.drop([sample.number for sample in samples])
        for sample in samples:
            self.arena.disown(sample.extent)

    def _is_viewed(self, sample: StoredSample) -> bool:
        return self.arena.is_viewed(sample.extent)

    def _fill(self, rows: Iterable[Row], extents: Iterable[Extent]) -> None:
        config = self._config
        self.replay = ReplayBuffer[StoredSample](
            config.held_out_fraction, config.max_epochs, self._seed
        )
        last_draws = self._ledger.last_draws()
        spent = []
        for row, extent in zip(rows, extents, strict=True):
            sample = stored(row.number, extent, row.layout)
            if row.times_drawn < config.max_epochs:
                self.replay.add(sample, row.times_drawn)
            else:
                spent.append((last_draws.get(row.number, 0), sample))
        spent.sort(key=lambda pair: pair[0])
        # In which draw each was drawn for the last time, oldest first.
        self.spent = {sample: last for last, sample in spent}
