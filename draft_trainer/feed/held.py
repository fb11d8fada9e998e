"""The samples in the arena: those to be drawn, and those drawn for the last time."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import closing
from pathlib import Path

from draft_trainer.config import ReplayConfig
from draft_trainer.feed.arena import Arena, Extent
from draft_trainer.feed.ledger import Ledger, Row
from draft_trainer.feed.replay import ReplayBuffer
from draft_trainer.feed.stored import StoredSample
from slipstream.refusal import RefusedError


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

    def add_all(self, samples: Sequence[StoredSample]) -> None:
        """Samples that the ledger has now."""
        for sample in samples:
            sample.extent.owned = True
        self.replay.add_all(samples)

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
        self.arena.disown(*[sample.extent for sample in self.all()])
        self._fill([], [])

    def make_room(self, sizes: Sequence[int]) -> list[Extent | None]:
        """An extent of each size, in bytes, for which samples are given up if need be.

        Those that give way together do so in one transaction: one for each was most of what a
        small sample cost.

        Returns:
            None for those that do not fit beside what is viewed.
        """
        extents: list[Extent | None] = [None] * len(sizes)
        room = self.arena.size - self.arena.leased
        wanted = []
        for index, size in enumerate(sizes):
            if size <= room:
                room -= size
                wanted.append(index)
        try:
            while True:
                found = self.arena.allocate_all([sizes[index] for index in wanted])
                for index, extent in zip(wanted, found, strict=True):
                    extents[index] = extent
                wanted = [index for index in wanted if extents[index] is None]
                if not wanted or not self._give_up(sum(sizes[index] for index in wanted)):
                    return extents
        except RefusedError:
            for extent in extents:
                if extent is not None:
                    self.arena.give_back(extent)
            raise

    def _give_up(self, nbytes: int) -> bool:
        """Give up what is worth least, of about ``nbytes``; False where there is nothing."""
        spent, worst = [], []
        for sample in self.spent:
            if nbytes <= 0:
                break
            if not self._is_viewed(sample):
                spent.append(sample)
                nbytes -= sample.extent.size
        with closing(self.replay.worst(self._is_viewed)) as candidates:
            while nbytes > 0 and (candidate := next(candidates, None)) is not None:
                worst.append(candidate)
                nbytes -= candidate.extent.size
            self._drop([*spent, *worst])
            untrained = sum([self.replay.remove(sample) for sample in worst])
        for sample in spent:
            del self.spent[sample]
        self._count("unsaved", len(spent))
        self._count("capacity", untrained)
        return bool(spent or worst)

    def _drop(self, samples: Sequence[StoredSample]) -> None:
        if samples:
            with self._ledger.transaction():
                self._ledger.drop([sample.number for sample in samples])
        self.arena.disown(*[sample.extent for sample in samples])

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
            sample = StoredSample.from_json(row.layout, extent, row.number)
            if row.times_drawn < config.max_epochs:
                self.replay.add(sample, row.times_drawn)
            else:
                spent.append((last_draws.get(row.number, 0), sample))
        spent.sort(key=lambda pair: pair[0])
        # In which draw each was drawn for the last time, oldest first.
        self.spent = {sample: last for last, sample in spent}
