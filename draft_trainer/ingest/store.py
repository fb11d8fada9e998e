"""The samples of the current run, in memory that outlives the process.

Their bytes lie in an ``Arena``; the ``Ledger`` has everything else about them, committed before
they are acknowledged; the ``ReplayBuffer`` says which are drawn and which give way.

What training has seen of a sample is part of the learner's weights, and a kill takes the weights
back to their last saved state. So draws are numbered, a state carries the number of its last one,
and a restart takes back every later draw (``rewind``). A sample that was drawn for the last time is
kept until a state contains that draw, unless its room is needed before.

The samples in the arena: those to be drawn, and those drawn for the last time.

Which samples were accepted, where they lie, and which draws a saved state may not contain yet.

SQLite in WAL mode, without fsync: what was committed survives kill -9, because it is in the page
cache. A crash of the machine may lose it, and ``placement`` then begins anew.

A sample's row outlives the sample, so that it is recognised when it is sent again; its ``start``
is NULL then. The keys of all rows are in memory too, and the numbers of those that are dropped: an
index of hashes made every sample change a page of its own, and with indexes of what is held and
what is dropped a row that came and went took 8 us, where it takes 4 without. Rows are numbered as
they come and mostly leave in that order, so that one statement drops a whole range of them. Draws
are numbered over the whole life of the ledger. The draws since the training state that a restart
may resume are kept one by one, so that they can be undone.

Which draws the weights on disk have seen.

The policy versions that a restart finds: matrices in files, versions in the ledger.

The policy versions' matrices as files, so that a restart can train on the samples it finds.

The folder where the samples lie, and whose they are.

Beside the registry, or where ``replay.directory`` says. It stays where it is when the trainer
stops or is killed, and the next start finds it. On a disk too kill -9 loses nothing, because what
was written is in the page cache; a crash or restart of the machine does: files whose pages may not
have reached the disk are not trusted.

A sample as it lies in the arena: what the replay buffer orders, and a restart finds again.

What the sample store refuses.

Room for a sample that is being received, and a batch that was drawn.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import sqlite3
import threading
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from json.encoder import encode_basestring_ascii as _quoted
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draft_trainer.config import ReplayConfig
from draft_trainer.drafters.policy import PolicyHead
from draft_trainer.files import written_whole
from draft_trainer.ingest.arena import ALIGNMENT, Arena, Extent, aligned
from draft_trainer.ingest.replay import ReplayBuffer
from slipstream.checksum import Bytes
from slipstream.errors import RefusedError, StatusCode
from slipstream.sample import Layout, Sample, header_of, layout_of

FORMAT = 1

_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE samples (
    number INTEGER PRIMARY KEY,
    key BLOB NOT NULL,
    start INTEGER,
    size INTEGER NOT NULL,
    layout TEXT,
    times_drawn INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE draws (draw INTEGER NOT NULL, number INTEGER NOT NULL);
CREATE INDEX draws_by_draw ON draws (draw);
CREATE TABLE policies (version INTEGER PRIMARY KEY, lm_head TEXT NOT NULL, embed TEXT NOT NULL);
"""


@dataclass(frozen=True)
class Row:
    """A sample that is held: its number, its extent, how it lies there, how often it was drawn."""

    number: int
    start: int
    size: int
    layout: str
    times_drawn: int


class Ledger:
    """The database. Not thread-safe: its owner has the lock, and makes the transactions.

    Args:
        path: of the database, made if it is missing.
        entries: rows of dropped samples that are kept, the newest.

    Raises:
        RefusedError: it is damaged (DATA_LOSS), or of another format (FAILED_PRECONDITION).
    """

    def __init__(self, path: Path, entries: int) -> None:
        self._path = path
        self._entries = entries
        # SQLite's own mode would let others read it in a folder that they may enter.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=OFF"):
                self._database.execute(f"PRAGMA {pragma}")
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._database.executescript(
                    f"BEGIN; {_SCHEMA} PRAGMA user_version={FORMAT}; COMMIT;"
                )
            elif version != FORMAT:
                raise RefusedError(
                    str(path),
                    f"format {version}",
                    f"format {FORMAT}",
                    "remove its folder: samples that were not trained on yet are lost with it",
                    StatusCode.FAILED_PRECONDITION,
                )
            self._load()
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise RefusedError(
                str(path),
                error,
                "a sound SQLite database",
                "remove its folder: samples that were not trained on yet are lost with it",
                StatusCode.DATA_LOSS,
            ) from error
        except RefusedError:
            self._database.close()
            raise

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the body's changes or none.

        Raises:
            RefusedError: they cannot be written (RESOURCE_EXHAUSTED); nothing was changed.
        """
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                # A fifth of a second for a quarter of a million rows; a full disk is rare.
                self._load()
                raise
        except sqlite3.OperationalError as error:
            raise RefusedError(
                "replay.directory",
                f"{self._path}: {error}",
                "room for the ledger of samples",
                "free some room there",
                StatusCode.RESOURCE_EXHAUSTED,
            ) from error

    def add(self, rows: Iterable[tuple[bytes, int, int, str]]) -> list[int | None]:
        """Record accepted samples: key, start, size and layout of each.

        Returns:
            The number of each, or None where its key was recorded before.
        """
        numbers: list[int | None] = []
        fresh = []
        for row in rows:
            if row[0] in self._known:
                numbers.append(None)
                continue
            self._known.add(row[0])
            fresh.append((self._next, *row))
            numbers.append(self._next)
            self._next += 1
        self._database.executemany(
            "INSERT INTO samples (number, key, start, size, layout) VALUES (?, ?, ?, ?, ?)", fresh
        )
        return numbers

    def knows(self, key: bytes) -> bool:
        """Whether a sample was recorded, and is not forgotten."""
        return key in self._known

    def drop(self, numbers: Sequence[int]) -> None:
        """Their extents may be used again; their keys are remembered for a while."""
        self._database.executemany(
            "UPDATE samples SET start = NULL, layout = NULL WHERE number BETWEEN ? AND ?",
            ranges(numbers),
        )
        for number in numbers:
            heappush(self._dropped, number)
        beyond = len(self._dropped) - self._entries
        if beyond > 0:
            oldest = ranges([heappop(self._dropped) for _ in range(beyond)])
            query = "SELECT key FROM samples WHERE number BETWEEN ? AND ?"
            for span in oldest:
                self._known.difference_update(
                    [key for (key,) in self._database.execute(query, span)]
                )
            self._database.executemany("DELETE FROM samples WHERE number BETWEEN ? AND ?", oldest)

    def held(self) -> list[Row]:
        """Every sample that was not dropped, in the order of arrival."""
        query = (
            "SELECT number, start, size, layout, times_drawn FROM samples "
            "WHERE start IS NOT NULL ORDER BY number"
        )
        return [Row(*row) for row in self._database.execute(query)]

    def record_draw(self, draw: int, numbers: Iterable[int]) -> None:
        """These samples were drawn, together, with that number."""
        rows = [(draw, number) for number in numbers]
        self._database.executemany("INSERT INTO draws VALUES (?, ?)", rows)
        self._database.executemany(
            "UPDATE samples SET times_drawn = times_drawn + 1 WHERE number = ?",
            [(number,) for _, number in rows],
        )

    def undo_draws(self, first: int, last: int | None = None) -> tuple[int, int]:
        """Take back the draws from ``first`` to ``last``, both included; None for all after it.

        Returns:
            How often a sample was drawn in them, and how many of those samples are gone.
        """
        span = (first, 1 << 62 if last is None else last)
        drawn, gone = self._database.execute(
            "SELECT count(*), count(DISTINCT CASE WHEN start IS NULL THEN draws.number END) "
            "FROM draws LEFT JOIN samples USING (number) WHERE draw BETWEEN ? AND ?",
            span,
        ).fetchone()
        self._database.execute(
            "UPDATE samples SET times_drawn = times_drawn - (SELECT count(*) FROM draws "
            "WHERE draws.number = samples.number AND draw BETWEEN ?1 AND ?2) "
            "WHERE number IN (SELECT number FROM draws WHERE draw BETWEEN ?1 AND ?2)",
            span,
        )
        self._database.execute("DELETE FROM draws WHERE draw BETWEEN ? AND ?", span)
        return drawn, gone

    def last_draws(self) -> dict[int, int]:
        """The last draw of every sample whose draws may still be undone, by its number."""
        return dict(self._database.execute("SELECT number, max(draw) FROM draws GROUP BY number"))

    def forget_draws(self, through: int) -> None:
        """The draws up to this one are never undone any more."""
        self._database.execute("DELETE FROM draws WHERE draw <= ?", (through,))

    def clear(self) -> None:
        """Drop every sample, draw and policy version: another run begins."""
        self.drop([row.number for row in self.held()])
        self._database.execute("DELETE FROM draws")
        self._database.execute("DELETE FROM policies")

    def put_policy(self, version: int, lm_head: str, embed: str) -> None:
        """A policy version is known, of matrices with these names."""
        self._database.execute(
            "INSERT OR REPLACE INTO policies VALUES (?, ?, ?)", (version, lm_head, embed)
        )

    def forget_policies(self, versions: Iterable[int]) -> None:
        """These policy versions are known no more."""
        self._database.executemany(
            "DELETE FROM policies WHERE version = ?", [(version,) for version in versions]
        )

    def policies(self) -> list[tuple[int, str, str]]:
        """Version and matrices of every known policy version, oldest first."""
        return list(self._database.execute("SELECT * FROM policies ORDER BY version"))

    def set_fact(self, name: str, value: object) -> None:
        """Keep a JSON-able value under a name."""
        text = json.dumps(value)
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, text))

    def fact(self, name: str, default: Any) -> Any:
        """The value under a name; ``default`` where none was kept yet."""
        row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return default if row is None else json.loads(row[0])

    def rows(self) -> dict[str, int]:
        """Rows of every table that grows."""
        return {
            table: self._database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("samples", "draws", "policies")
        }

    def close(self) -> None:
        """Leave one file."""
        self._database.close()

    def _load(self) -> None:
        query = "SELECT number, key, start IS NULL FROM samples ORDER BY number"
        self._known: set[bytes] = set()
        # A heap, the oldest first; what is sorted is one.
        self._dropped: list[int] = []
        self._next = 1
        for number, key, is_dropped in self._database.execute(query):
            self._known.add(key)
            if is_dropped:
                self._dropped.append(number)
            self._next = number + 1


def ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of every run of neighbours among numbers, ascending."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def keys_of(run_id: str) -> Callable[[str], bytes]:
    """What makes 16 bytes of a sample's id, for the samples of a run."""
    # The length keeps ("a", "bc") and ("ab", "c") apart.
    run = f"{len(run_id)}:{run_id}"

    def key_of(sample_id: str) -> bytes:
        return hashlib.blake2b((run + sample_id).encode(), digest_size=16).digest()

    return key_of


@dataclass(frozen=True)
class Drawn:
    """A batch: what ``draw`` chose.

    Attributes:
        number: of the draw, which a training state that contains it carries; 0 where ``samples``
            is empty.
        samples: views of the arena.
    """

    number: int
    samples: list[Sample]


class Reservation:
    """Room for one sample that is being received. It is given back when nothing views it.

    Args:
        extent: in the arena.
        shared: uint8 [N], a view of the arena, of other reservations' room too.
        at: where this one's room begins in it.
        address: of its first byte.
        nbytes: of the sample.
    """

    __slots__ = ("_shared", "address", "at", "extent", "nbytes")

    def __init__(self, extent: Extent, shared: Bytes, at: int, address: int, nbytes: int) -> None:
        self.extent = extent
        self.at = at
        self.address = address
        self.nbytes = nbytes
        self._shared: Bytes | None = shared

    @property
    def shared(self) -> Bytes:
        """See the class."""
        assert self._shared is not None, "this reservation was released"
        return self._shared

    @property
    def block(self) -> Bytes:
        """uint8 [nbytes], its start aligned to 64 bytes; its content is not defined at first."""
        return self.shared[self.at : self.at + self.nbytes]

    def release(self) -> None:
        """View it no more. What else views it keeps it until then. Idempotent."""
        self._shared = None


_FACTS = ("sample_id", "policy_version", "temperature")


# Not frozen: setting fields past that takes three times as long, for every small sample. And one
# object: each that is made for a sample is half a microsecond.
@dataclass(eq=False, slots=True)
class StoredSample:
    """Everything about a sample but its bytes, which are read when they are needed.

    Attributes:
        sample_id, policy_version, temperature: see ``Sample``.
        tensors: layout of its block.
        tokens: T.
        group: what the samples of its prompt share.
        extent: where its bytes are.
        number: of its row in the ledger; 0 until it has one.
    """

    sample_id: str
    policy_version: int
    temperature: float
    tensors: Layout
    tokens: int
    group: str
    extent: Extent
    number: int = 0

    @classmethod
    def of(cls, sample: Sample, room: Reservation) -> StoredSample:
        """Of a sample whose block is its room."""
        facts = (sample.sample_id, sample.policy_version, sample.temperature)
        # A restart would read other bytes than were validated.
        assert sample.block.data_ptr() == room.block.ctypes.data, "not the reservation's block"
        return cls(*facts, sample.layout, sample.tokens, sample.group, room.extent)

    @classmethod
    def from_json(cls, text: str, extent: Extent, number: int) -> StoredSample:
        """From ``to_json``."""
        facts, (*sizes, kind), tokens, group = json.loads(text)
        tensors = layout_of(*sizes, getattr(torch, kind))
        first: tuple[str, int, float] = tuple(facts[name] for name in _FACTS)  # type: ignore[assignment]
        return cls(*first, tensors, tokens, group, extent, number)

    def to_json(self) -> str:
        """For the ledger."""
        layout = self.tensors
        sizes = f"{layout.tokens},{layout.aux_layers},{layout.hidden_size}"
        tensors = f'[{sizes},"{_name(layout.dtype)}"]'
        # By hand: a third of what the encoder takes, for every small sample.
        return (
            f'[{{"sample_id":{_quoted(self.sample_id)},"policy_version":{self.policy_version},'
            f'"temperature":{self.temperature!r}}},'
            f"{tensors},{self.tokens},{_quoted(self.group)}]"
        )

    def sample(self, block: Bytes) -> Sample:
        """The sample, its tensors views of its bytes: uint8 [N], no copy.

        They are made only when somebody reads them: eleven views of a small sample take longer
        than everything else about it.
        """
        layers = range(self.tensors.aux_layers)
        facts = (self.sample_id, self.policy_version, self.temperature)
        return Sample(header_of(*facts, layers, self.tensors), torch.from_numpy(block))

    def read(self, arena: Arena) -> Sample:
        """The sample, its tensors views of the arena: they keep the extent from being reused."""
        return self.sample(arena.view(self.extent, self.extent.size))


@lru_cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


_LAST = "draws"
_RELEASE = "release"
_STATE = "state_draws"


class DrawLog:
    """Numbers the draws, over the whole life of the ledger. Its owner has the lock.

    Attributes:
        last: number of the last draw.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.last: int = ledger.fact(_LAST, 0)

    def record(self, numbers: Iterable[int]) -> None:
        """These samples were drawn, together; on disk before they are trained on."""
        with self._ledger.transaction():
            self._ledger.record_draw(self.last + 1, numbers)
            self._ledger.set_fact(_LAST, self.last + 1)
        self.last += 1

    def undo_last(self) -> None:
        """The last draw was not trained on."""
        with self._ledger.transaction():
            self._ledger.undo_draws(self.last)

    def saved(self, draws: int) -> None:
        """A training state that contains the draws up to this one is on disk."""
        with self._ledger.transaction():
            before = self._ledger.fact(_STATE, 0)
            if before < draws:
                # Not its own: where this state is damaged, the one before it is resumed.
                self._ledger.forget_draws(before)
            self._ledger.set_fact(_STATE, draws)

    def released(self, version: int) -> None:
        """A release whose weights contain every draw was written; no older state is resumed."""
        with self._ledger.transaction():
            self._ledger.set_fact(_RELEASE, [version, self.last])
            self._ledger.set_fact(_STATE, self.last)
            self._ledger.forget_draws(self.last)

    def rewind(self, draws: int | None, release: int) -> tuple[int, int, int]:
        """Take back what the weights that are resumed have not seen; see ``SampleStore.rewind``.

        Returns:
            The last draw that they have seen, how often a sample was drawn after it, and how many
            of those samples are gone.
        """
        with self._ledger.transaction():
            if draws is None:
                noted, last = self._ledger.fact(_RELEASE, [release, 0])
                # Another than noted: killed between writing it and noting it, and nothing is
                # drawn in between.
                draws = int(last) if noted == release else self.last
                self._ledger.set_fact(_RELEASE, [release, draws])
            undone, gone = self._ledger.undo_draws(draws + 1)
            # Numbers go on upwards, also where the state knows of more than this ledger.
            self.last = max(self.last, draws)
            self._ledger.set_fact(_LAST, self.last)
        return draws, undone, gone


_NAME = "matrix"
_SUFFIX = ".safetensors"


class PolicyFiles:
    """One safetensors file per content. What a killed process left half-written is removed.

    Args:
        folder: its own; made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        for path in folder.iterdir():
            if path.suffix != _SUFFIX:
                path.unlink()

    def keep(self, name: str, matrix: Tensor) -> Tensor:
        """Write a matrix under the name of its content, unless it is there.

        Returns:
            The same, mapped from the file: it is in memory once.

        Raises:
            RefusedError: no room (RESOURCE_EXHAUSTED).
        """
        path = self._path(name)
        if not path.exists():
            temporary = path.with_suffix(".part")
            try:
                save_file({_NAME: matrix.contiguous()}, temporary)
                # No fsync: what the page cache has survives the process.
                temporary.replace(path)
            except (OSError, SafetensorError) as error:
                temporary.unlink(missing_ok=True)
                raise RefusedError(
                    "replay.directory",
                    f"{path}: {error}",
                    f"room for a matrix of {matrix.nbytes} bytes",
                    "free some room there, or set another replay.directory",
                    StatusCode.RESOURCE_EXHAUSTED,
                ) from error
        return self.read(name)

    def read(self, name: str) -> Tensor:
        """A matrix that was kept. Raises RefusedError (DATA_LOSS) where it is missing."""
        path = self._path(name)
        try:
            with safe_open(path, framework="pt") as file:
                matrix: Tensor = file.get_tensor(_NAME)
                return matrix
        except (OSError, SafetensorError) as error:
            raise RefusedError(
                str(path),
                error,
                "the matrix of a policy version that was announced",
                "remove the folder above it: samples that were not trained on yet are lost with it",
                StatusCode.DATA_LOSS,
            ) from error

    def keep_only(self, names: Set[str]) -> None:
        """Remove all others. Matrices that are mapped stay valid."""
        for path in self._folder.iterdir():
            if path.name.removesuffix(_SUFFIX) not in names:
                path.unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"


Digests = tuple[bytes, bytes]


class KeptPolicies:
    """See ``SampleStore``, whose lock guards all but ``write``.

    Args:
        ledger: has the versions.
        folder: of the matrices.
    """

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self._ledger = ledger
        self._files = PolicyFiles(folder)

    def write(self, head: PolicyHead, digests: Digests) -> PolicyHead:
        """The same, its matrices mapped from files. Raises RefusedError: no room."""
        names = (digests[0].hex(), digests[1].hex())
        rows = self._files.keep(names[0], head.lm_head_rows)
        return PolicyHead(head.policy_version, rows, self._files.keep(names[1], head.embed_tokens))

    def record(self, version: int, digests: Digests) -> None:
        """A version whose matrices were written is known."""
        with self._ledger.transaction():
            self._ledger.put_policy(version, digests[0].hex(), digests[1].hex())

    def all(self) -> list[tuple[PolicyHead, Digests]]:
        """Every version, oldest first, with its matrices' digests."""
        return [
            (
                PolicyHead(version, self._files.read(rows), self._files.read(embed)),
                (bytes.fromhex(rows), bytes.fromhex(embed)),
            )
            for version, rows, embed in self._ledger.policies()
        ]

    def forget_others(self, versions: Set[int]) -> None:
        """Keep these versions only."""
        known = self._ledger.policies()
        with self._ledger.transaction():
            self._ledger.forget_policies({version for version, *_ in known} - versions)
        self._files.keep_only(
            {name for version, *names in known if version in versions for name in names}
        )


def too_large(nbytes: int, expected: str) -> RefusedError:
    """A sample for which there is no room."""
    return RefusedError(
        "sample",
        f"{nbytes} bytes",
        f"{expected} (replay.capacity_bytes)",
        "send shorter windows, or raise replay.capacity_bytes",
        StatusCode.RESOURCE_EXHAUSTED,
    )


def another_run(run_id: str, current: str) -> RefusedError:
    """A call for a run that is not the current one any more."""
    return RefusedError(
        "run_id",
        run_id,
        f"{current!r}, which began meanwhile",
        "end that run first, or start another draft-trainer for this one",
        StatusCode.FAILED_PRECONDITION,
    )


logger = logging.getLogger(__name__)

ARENA = "samples"
LEDGER = "ledger.sqlite"
POLICIES = "policies"

_RUN = "run"


class SampleStore:
    """Keeps the samples of one run at a time, bounded in bytes. Thread-safe.

    Args:
        folder: its own, there already; see ``placement``. One process has it at a time.
        config: [replay].
        seed: breaks ties between samples that are as good to draw.
        on_evicted: told how many samples were given up and why: ``capacity`` (to make room,
            untrained), ``stale`` (policy version too old, untrained), ``unsaved`` (to make room,
            trained on but not in a saved state), ``undone`` (of such, draws that a restart undid).

    Raises:
        RefusedError: no room, or a damaged or foreign ledger.
    """

    def __init__(
        self,
        folder: Path,
        config: ReplayConfig,
        seed: int = 0,
        on_evicted: Callable[[str, int], None] = lambda reason, samples: None,
    ) -> None:
        self.folder = folder
        self.capacity_bytes = max(config.capacity_bytes // ALIGNMENT, 1) * ALIGNMENT
        self._on_evicted = on_evicted
        self._lock = threading.RLock()
        self._ledger = Ledger(folder / LEDGER, config.ledger_entries)
        self._batch: list[StoredSample] = []
        try:
            self._policies = KeptPolicies(self._ledger, folder / POLICIES)
            self._log = DrawLog(self._ledger)
            run = self.run
            self._run_id = "" if run is None else run[0]
            self._held = HeldSamples(
                *(self._ledger, folder / ARENA, self.capacity_bytes, config, seed, self._count)
            )
        except RefusedError:
            self._ledger.close()
            raise

    def reserve(self, nbytes: int) -> Reservation:
        """Room for one sample; see ``reserve_all``. Raises RefusedError where there is none."""
        (room,) = self.reserve_all([nbytes])
        if isinstance(room, RefusedError):
            raise room
        return room

    def reserve_all(self, sizes: Sequence[int]) -> list[Reservation | RefusedError]:
        """Room for samples of so many bytes each, for which older ones give way.

        Returns:
            The refusal of those that are larger than the whole arena, or than what no batch
            reads, and no sample is received into, just now.

        Raises:
            RefusedError: the ledger cannot be written; nothing was reserved.
        """
        with self._lock:
            arena = self._held.arena
            extents = self._held.make_room([aligned(size) for size in sizes])
            views = iter(arena.view_all([extent for extent in extents if extent is not None]))
            address = arena.address
            rooms: list[Reservation | RefusedError] = []
            for size, extent in zip(sizes, extents, strict=True):
                if extent is not None:
                    at = address + extent.start
                    rooms.append(Reservation(extent, *next(views), at, size))
                elif aligned(size) > self.capacity_bytes:
                    rooms.append(too_large(size, f"at most {self.capacity_bytes} bytes"))
                else:
                    busy = f"{arena.leased} of them read or received now"
                    rooms.append(too_large(size, f"room in {self.capacity_bytes} bytes, {busy}"))
            return rooms

    def accept(self, samples: Sequence[tuple[Reservation, Sample | StoredSample]]) -> list[bool]:
        """Record samples, all in one transaction; what is recorded survives kill -9.

        Args:
            samples: each with the reservation that its tensors are views of, or that it describes.

        Returns:
            For each, whether it is new. A duplicate's reservation is released.

        Raises:
            RefusedError: the ledger cannot be written; nothing was accepted.
        """
        stored = [
            sample if isinstance(sample, StoredSample) else StoredSample.of(sample, room)
            for room, sample in samples
        ]
        texts = [sample.to_json() for sample in stored]
        with self._lock:
            key_of = keys_of(self._run_id)
            rows = [
                (key_of(sample.sample_id), sample.extent.start, sample.extent.size, text)
                for sample, text in zip(stored, texts, strict=True)
            ]
            with self._ledger.transaction():
                numbers = self._ledger.add(rows)
            fresh = []
            for sample, number in zip(stored, numbers, strict=True):
                if number is not None:
                    sample.number = number
                    fresh.append(sample)
            self._held.add_all(fresh)
            for room, _ in samples:
                room.release()
            return [number is not None for number in numbers]

    def seen(self, sample_id: str) -> bool:
        """Whether a sample of this run was accepted before."""
        with self._lock:
            return self._ledger.knows(keys_of(self._run_id)(sample_id))

    def credit_bytes(self) -> int:
        """Bytes of samples that may be in flight: all that is not being read or received."""
        with self._lock:
            return self.capacity_bytes - self._held.arena.leased

    @property
    def run(self) -> tuple[str, dict[str, Any]] | None:
        """Id and facts of the run that the samples are of; None before the first."""
        with self._lock:
            found = self._ledger.fact(_RUN, None)
            return None if found is None else (found["run_id"], found["facts"])

    def begin(self, run_id: str, facts: dict[str, Any]) -> None:
        """Another run: the samples and policy versions of the one before are gone."""
        with self._lock:
            gone = len(self._held.all())
            with self._ledger.transaction():
                self._ledger.clear()
                self._ledger.set_fact(_RUN, {"run_id": run_id, "facts": facts})
            self._held.clear()
            self._batch = []
            self._run_id = run_id
            self._policies.forget_others(set())
        logger.info("run %r begins; %d samples of the one before are gone", run_id, gone)

    def keep_policy(
        self, run_id: str, head: PolicyHead, digests: tuple[bytes, bytes]
    ) -> PolicyHead:
        """Have a policy version of a run survive the process.

        Returns:
            The same, its matrices mapped from the files, so that they are in memory once.

        Raises:
            RefusedError: no room for it (RESOURCE_EXHAUSTED), or the run is not the current one
                (FAILED_PRECONDITION).
        """
        # Not under the lock: it may be a gigabyte.
        kept = self._policies.write(head, digests)
        with self._lock:
            if run_id != self._run_id:
                raise another_run(run_id, self._run_id)
            self._policies.record(head.policy_version, digests)
        return kept

    def policies(self) -> list[tuple[PolicyHead, tuple[bytes, bytes]]]:
        """The policy versions that were kept, oldest first, each with its matrices' digests."""
        with self._lock:
            return self._policies.all()

    def keep_versions(self, run_id: str, versions: Sequence[int]) -> None:
        """Give up all other policy versions of a run, and their samples."""
        with self._lock:
            if run_id != self._run_id:
                return
            self._held.drop_versions(versions)
            self._policies.forget_others(set(versions))

    def draw(self, run_id: str, max_tokens: int) -> Drawn:
        """A batch of a run, recorded as drawn; see ``ReplayBuffer.draw``.

        Empty where there is nothing to train on, or where the run is not the current one.

        Raises:
            RefusedError: the ledger cannot be written.
        """
        with self._lock:
            if run_id != self._run_id:
                return Drawn(0, [])
            chosen = self._held.replay.draw(max_tokens)
            if not chosen:
                return Drawn(0, [])
            self._log.record([sample.number for sample in chosen])
            self._batch = chosen
            for sample in chosen:
                if sample.sample_id not in self._held.replay:
                    self._held.spent[sample] = self._log.last
            return Drawn(self._log.last, [sample.read(self._held.arena) for sample in chosen])

    def put_back(self, drawn: Drawn) -> None:
        """The batch that was drawn last was not trained on: its draw is undone."""
        with self._lock:
            if drawn.number != self._log.last:
                return
            self._log.undo_last()
            for sample in self._batch:
                last_time = self._held.spent.pop(sample, None) is not None
                if last_time or sample.sample_id in self._held.replay:
                    self._held.replay.put_back(sample)
            self._batch = []

    def held_out(self, run_id: str, newest_versions: int | None = None) -> list[Sample]:
        """See ``ReplayBuffer.held_out``. Empty where the run is not the current one."""
        with self._lock:
            if run_id != self._run_id:
                return []
            found = self._held.replay.held_out(newest_versions)
            return [sample.read(self._held.arena) for sample in found]

    @property
    def draws(self) -> int:
        """Number of the last draw."""
        with self._lock:
            return self._log.last

    def saved(self, draws: int) -> None:
        """A training state that contains the draws up to this one is on disk."""
        with self._lock:
            self._held.free_spent(draws)
            self._log.saved(draws)

    def released(self, version: int) -> None:
        """A release whose weights contain every draw was written; no older state is resumed."""
        with self._lock:
            self._held.free_spent(self._log.last)
            self._log.released(version)

    def rewind(self, draws: int | None, release: int) -> None:
        """At a start: take back what the weights that are resumed have not seen.

        Args:
            draws: number of the last draw that the resumed training state contains; None where
                none was resumed, and the weights are the release's.
            release: draft version of the newest release.
        """
        with self._lock:
            seen, undone, gone = self._log.rewind(draws, release)
            self._held.reload()
            self.saved(seen)
        text = "%d draws of samples after draw %d are undone; %d of those samples are gone"
        logger.info(text, undone, seen, gone)
        self._count("undone", gone)

    @property
    def pending(self) -> int:
        """Training samples that were never drawn."""
        with self._lock:
            return self._held.replay.pending

    @property
    def held_out_samples(self) -> int:
        """Samples that never train and feed the gate."""
        with self._lock:
            return self._held.replay.held_out_samples

    @property
    def unsaved(self) -> int:
        """Samples drawn for the last time that are kept until a state contains that."""
        with self._lock:
            return len(self._held.spent)

    @property
    def nbytes(self) -> int:
        """Bytes of the arena in use."""
        with self._lock:
            return self._held.arena.used

    def __len__(self) -> int:
        with self._lock:
            return len(self._held.replay)

    def close(self) -> None:
        """Leave what a restart needs. Views stay valid. Idempotent."""
        with self._lock:
            self._ledger.close()

    def _count(self, reason: str, samples: int) -> None:
        if samples:
            self._on_evicted(reason, samples)


_AT_REST = "samples"
_IDENTITY = "samples.json"
_OWNER = "owner.json"
_LOCK = "lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SampleFolder:
    """The folder of a trainer's samples, locked. What was in it is adopted, or removed if foreign.

    Args:
        configured: replay.directory; None for ``samples`` in the registry.
        registry: folder of the releases that the samples train.

    Raises:
        RefusedError: another process has it (FAILED_PRECONDITION), or it cannot be written.
    """

    def __init__(self, configured: Path | None, registry: Path) -> None:
        self.path = configured or registry / _AT_REST
        try:
            self._lock = _locked(self.path)
            try:
                owner = {"id": _identity(registry), "boot": _boot()}
                if _read(self.path / _OWNER) != owner:
                    # Of a registry that was removed, or from before the machine started.
                    _clear(self.path)
                    (self.path / _OWNER).write_text(json.dumps(owner))
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise RefusedError(
                "replay.directory",
                f"{error.filename or self.path} ({error.strerror})",
                "a folder of its own that can be made and written",
                "check its owner, its mode and the free space, or set another replay.directory",
                StatusCode.RESOURCE_EXHAUSTED,
            ) from error
        logger.info("samples are kept in %s", self.path)

    def close(self, keep: bool) -> None:
        """Release the folder, with what is in it; or remove it where there is no run to continue.

        Args:
            keep: whether there is one.
        """
        if not keep:
            _clear(self.path)
            (self.path / _LOCK).unlink()
            if not any(self.path.iterdir()):
                self.path.rmdir()
        os.close(self._lock)


def _identity(registry: Path) -> str:
    """What tells this registry from another that was at the same path, or uses the same folder."""
    path = registry / _IDENTITY
    found = _read(path).get("id")
    if found is None:
        found = uuid.uuid4().hex
        with written_whole(path) as temporary:
            temporary.write_text(json.dumps({"id": found}))
    return found


def _boot() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def _locked(folder: Path) -> int:
    """An open file whose lock says that this process has the folder, which is made if need be."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        # In a directory that is everybody's: who made it could read, and write, the samples.
        raise PermissionError(1, "the folder of another user", str(folder))
    number = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(number)
        raise RefusedError(
            "replay.directory",
            f"{folder}, which another draft-trainer uses",
            "a folder that no other process uses",
            "stop the other one, or give each its own draft.registry and replay.directory",
            StatusCode.FAILED_PRECONDITION,
        ) from error
    return number


def _clear(folder: Path) -> None:
    """Remove what is ours there, but for the lock. Nothing else is touched."""
    ours = [folder / name for name in (ARENA, POLICIES, _OWNER)] + list(folder.glob(f"{LEDGER}*"))
    for path in ours:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    return found if isinstance(found, dict) else {}
