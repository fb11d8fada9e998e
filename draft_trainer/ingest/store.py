"""The current run's samples: bytes in an arena file, everything else in ``samples.db``.

SQLite is the only index: replay order, eviction order, de-duplication and the undo of draws are
queries, so there is no second copy of the state to keep in step with it.

Exactly once: a draw is recorded before its batch trains, a training state carries the number of
the last draw it contains, and a restart undoes all later draws (``rewind``). A sample that was
drawn ``max_epochs`` times is exhausted; it keeps its bytes until a saved state contains its last
draw, unless its space is needed before.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draft_trainer.config import HELD_OUT_MOST, ReplayConfig
from draft_trainer.ingest.arena import ALIGNMENT, Arena, aligned
from draft_trainer.ingest.database import (
    EXTENT,
    FILE,
    RESIDENT,
    Database,
    StoreCounts,
    key_of,
    repairing,
    seal_of,
    tie_of,
)
from draft_trainer.ingest.held_out import HeldOut
from slipstream.errors import RefusedError, StatusCode
from slipstream.sample import Sample
from slipstream.tensors import Bytes, checksum_of
from slipstream.v1 import draft_trainer_pb2 as pb

logger = logging.getLogger(__name__)

ARENA = "arena"
_AMONG = "number IN (SELECT value FROM json_each(?))"


class Drawn(NamedTuple):
    """A batch to train on: the number of the draw, which a training state that contains it carries
    (0 for an empty batch), and the samples, whose blocks are views of the arena."""

    number: int
    samples: list[Sample]


class SampleStore:
    """Samples and policy versions of one run at a time, bounded in bytes. Thread-safe.

    Samples are evicted for space: exhausted ones first, then those of the oldest policy version.
    Whether a sample is held out of training is decided when it is accepted (``HeldOut``).

    Args:
        folder: owned by this process (``SampleFolder``).
        config: [replay].
        seed: decides the order of samples that are equally good to draw.
        on_evicted: called with a reason and a number of samples: ``capacity`` (for space,
            untrained), ``stale`` (policy version too old, untrained), ``unsaved`` (for space,
            trained but not in a saved state), ``undone`` (draws of such samples that a restart
            undid), ``damaged`` (their bytes or their rows are not what was accepted).

    Attributes:
        draws: number of the last draw over the life of the index.

    Raises:
        RefusedError: no space (RESOURCE_EXHAUSTED).
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
        self._config = config
        self._seed = seed
        self._on_evicted = on_evicted
        self._lock = threading.RLock()
        self._arena = Arena(folder / ARENA, self.capacity_bytes)
        self._db = Database(folder / FILE)
        self._run: tuple[str, dict[str, Any]] | None = None
        self.draws = 0
        try:
            self._start()
        except RefusedError:
            self._db.close()
            raise

    @repairing
    def reserve(self, nbytes: int) -> Bytes:
        """Return a buffer for one block, uint8 [nbytes], 64-byte aligned; evict others for it.

        It is free again when nothing views it any more, unless it was accepted.

        Raises:
            RefusedError: too large, all space is being read or filled, or the index cannot be
                written (RESOURCE_EXHAUSTED).
        """
        size, busy = aligned(nbytes), self._arena.pinned
        while size <= self.capacity_bytes - busy:
            block = self._arena.reserve(nbytes)
            if block is not None:
                return block
            # Evict more than this one needs: a transaction for each sample would cost more than it.
            if not self._evict_worst(max(size, self.capacity_bytes // 64)):
                break
        raise RefusedError(
            "sample",
            f"{nbytes} bytes",
            f"at most {self.capacity_bytes} bytes (replay.capacity_bytes), {busy} of them read or "
            "received now",
            "send shorter windows, or raise replay.capacity_bytes",
            StatusCode.RESOURCE_EXHAUSTED,
        )

    @repairing
    def accept(self, run_id: str, samples: Sequence[Sample]) -> list[bool]:
        """Record samples in one transaction; what is recorded survives kill -9.

        Args:
            run_id: the run of the samples.
            samples: each with a block that is a whole buffer from ``reserve``, and its checksum in
                the header.

        Returns:
            For each, whether it is new.

        Raises:
            RefusedError: the index cannot be written, or the run is not the current one
                (FAILED_PRECONDITION); nothing was accepted.
        """
        self._check_run(run_id)
        rows = [self._row(sample) for sample in samples]
        with self._db.transaction():
            new = [self._db.insert(row) for row in rows]
            held = self._seen([one for one, fresh in zip(samples, new, strict=True) if fresh])
        self._held = held
        for (*_, start, _, _), fresh in zip(rows, new, strict=True):
            if fresh:
                self._arena.retain(start)
        self._arena.sample_count += sum(new)
        return new

    @repairing
    def seen(self, run_id: str, sample_id: str) -> bool:
        """Return whether a sample was ever accepted, maybe evicted since. Raises as ``accept``."""
        self._check_run(run_id)
        query = "SELECT count(*) FROM samples WHERE key = ?"
        return bool(self._db.one(query, key_of(run_id, sample_id)))

    def credit_bytes(self) -> int:
        """Return the bytes of samples that may be in flight: those not being read or filled."""
        with self._lock:
            return self.capacity_bytes - self._arena.pinned

    @repairing
    def draw(self, run_id: str, max_tokens: int, ahead: bool = False) -> Drawn:
        """Draw the next batch and record it: newest policy version and fewest epochs first.

        Raises RefusedError: the index cannot be written; nothing was drawn.

        Args:
            run_id: the batch is empty where this is not the current run.
            max_tokens: bound on the batch; one sample is drawn even if it is longer.
            ahead: while another one trains; none that is not full, or over half of the space.
        """
        epochs = self._config.max_epochs
        while run_id == self._run_id and (rows := self._db.next_batch(epochs, max_tokens, ahead)):
            samples = self._read(rows)
            if ahead and 2 * self._arena.pinned > self.capacity_bytes:
                break
            # Try again without damaged samples, as if they had never been there.
            if len(samples) == len(rows):
                self._db.record_draw(self.draws + 1, [row[0] for row in rows])
                self.draws += 1
                return Drawn(self.draws, samples)
        return Drawn(0, [])

    @repairing
    def put_back(self, drawn: Drawn) -> None:
        """Undo a draw, and one made after it: their batches were not trained on."""
        self._db.undo_draws(drawn.number or self.draws + 1)

    @repairing
    def held_out(self, run_id: str, newest_versions: int | None = None) -> list[Sample]:
        """Return the held-out samples in the order of arrival.

        Args:
            run_id: there are none where this is not the current run.
            newest_versions: only those of so many newest policy versions that have any.
        """
        if run_id != self._run_id:
            return []
        return self._read(self._db.held_out(-1 if newest_versions is None else newest_versions))

    @repairing
    def saved(self, draw: int) -> None:
        """Note that a training state with the draws up to this one is on disk."""
        with self._db.transaction():
            gone = self._evict("times_drawn >= ? AND last_draw <= ?", self._config.max_epochs, draw)
        self._free(gone)
        with self._db.transaction():
            previous = self._db.get("state_draw", 0)
            if previous < draw:
                # This state's own draws stay: if it is damaged, the previous one is resumed.
                self._db.execute("DELETE FROM draws WHERE draw <= ?", previous)
            self._db.set("state_draw", draw)

    @repairing
    def released(self, version: int) -> None:
        """Note that a release with every draw was written: no older state is resumed."""
        self._db.set("release", [version, self.draws])
        self.saved(self.draws)

    @repairing
    def rewind(self, draw: int | None, release: int) -> None:
        """Undo, at a start, every draw that the resumed weights do not contain.

        Args:
            draw: number of the last draw in the resumed training state; None where none was
                resumed, and the weights are the release's.
            release: draft version of the newest sound release.
        """
        last = self.draws
        with self._db.transaction():
            if draw is None:
                noted, draw = self._db.get("release", [release, 0])
                # A newer release than noted: the process was killed between writing and noting it,
                # and draws nothing in between. An older one: the noted release is damaged, and what
                # it contains is trained on again as far as it is known.
                draw = int(draw) if noted == release else last if release > noted else 0
                self._db.set("release", [release, draw])
            elif self._db.get("release", None) is None:
                # So the next release is known to be newer than this one. Which draws this one
                # contains is not known: a reboot discarded that.
                self._db.set("release", [release, 0])
            gone = self._db.undo_draws(draw + 1)
            # Numbers keep rising, even where the state knows of more draws than this index.
            self._db.set("last_draw", max(last, draw))
        self.draws = max(last, draw)
        self.saved(draw)
        if last > draw:
            logger.info("draws %d to %d undone; %d of their samples gone", draw + 1, last, gone)
        self._count("undone", gone)

    @property
    def held_out_by_completion(self) -> bool:
        """Return whether completions are held out instead of prompts."""
        with self._lock:
            return self._held.by_completion

    @property
    def run(self) -> tuple[str, dict[str, Any]] | None:
        """The id and facts of the current run; None before the first."""
        with self._lock:
            return self._run

    @repairing
    def begin(self, run_id: str, facts: dict[str, Any], first: int | None = None) -> int:
        """Start another run without what the one before has left; return how many samples it had.

        With ``first`` it is another history of the run, and the policy versions before that one
        stay with their samples; the ids of those that are dropped are new again.
        """
        dropped, values = ("1", ()) if first is None else ("policy_version >= ?", (first,))
        with self._db.transaction():
            gone = self._evict(dropped, *values)
            # Remembered ids must not count for a policy version of this run.
            self._db.execute(f"UPDATE samples SET tokens = 0 WHERE {dropped}", *values)
            self._db.set("policies", [row for row in self.policies() if row[0] < (first or 0)])
            if first is None:
                self._db.execute("DELETE FROM draws")
                self._db.set("first_policy", [])
                self._db.set("held_out_fraction", None)
            self._db.set("run", [run_id, facts])
        self._free(gone)
        self._run = (run_id, facts)
        self._held = self._kept()
        logger.info("run %r starts; %d samples from before it are dropped", run_id, len(gone))
        return len(gone)

    @repairing
    def put_policy(self, run_id: str, version: int, names: Sequence[str]) -> None:
        """Record a policy version and the names of its tensors. Raises as ``accept``."""
        self._check_run(run_id)
        with self._db.transaction():
            self._db.set("policies", sorted([*self.policies(), (version, [*names])]))
            self._db.set("first_policy", [self.first_policy()])
            held = self._held.next_version(self._config.max_policy_lag + 1)
            if self._config.held_out_fraction is None:
                held = self._hold_out_less(held)
            self._db.set("held_out_fraction", held.facts)
        self._held = held

    @repairing
    def policies(self) -> list[tuple[int, list[str]]]:
        """Return every policy version with the names of its tensors, oldest first."""
        return [(version, names) for version, names in self._db.get("policies", [])]

    @repairing
    def first_policy(self) -> int | None:
        """Return the run's first policy version, even if dropped; if unknown, the oldest held."""
        return min([*self._db.get("first_policy", []), *dict(self.policies())], default=None)

    @repairing
    def keep_versions(self, run_id: str, versions: Sequence[int], reason: str = "stale") -> bool:
        """Drop all other policy versions, and their samples that are not exhausted.

        Returns:
            False, with nothing dropped, where the run is not the current one.
        """
        if run_id != self._run_id:
            return False
        others = "policy_version NOT IN (SELECT value FROM json_each(?)) AND times_drawn < ?"
        with self._db.transaction():
            gone = self._evict(others, json.dumps(list(versions)), self._config.max_epochs)
            self._db.set("policies", [row for row in self.policies() if row[0] in versions])
        self._free(gone)
        lost = len(gone) if reason == "damaged" else sum(untrained for *_, untrained in gone)
        self._count(reason, lost)
        return True

    @repairing
    def counts(self) -> StoreCounts:
        """Return how much is held now."""
        return self._db.counts(self._config.max_epochs, self._arena.used)

    @repairing
    def tokens_of_a_version(self) -> int:
        """Return the most tokens to train on that one of the newest three policy versions has."""
        return self._db.tokens_of_a_version()

    def close(self) -> None:
        """Close the index, with all that a restart needs. Views stay valid. Idempotent."""
        with self._lock:
            self._db.close()

    @property
    def _run_id(self) -> str:
        return "" if self._run is None else self._run[0]

    def _check_run(self, run_id: str) -> None:
        if run_id != self._run_id:
            expected, advice = f"{self._run_id!r}, which began meanwhile", "open this run again"
            raise RefusedError("run_id", run_id, expected, advice, StatusCode.FAILED_PRECONDITION)

    def _row(self, sample: Sample) -> tuple[Any, ...]:
        columns = (
            sample.policy_version,
            sample.tokens,
            int(self._held.holds(sample)),
            tie_of(self._seed, sample.sample_id),
            sample.header.SerializeToString(),
            self._arena.start_of(sample.block.data_ptr()),
            aligned(sample.block.nbytes),
        )
        return key_of(self._run_id, sample.sample_id), *columns, seal_of(*columns)

    @repairing
    def _start(self) -> None:
        self._db.open()
        self._load()

    def _load(self) -> None:
        """Read the state of the run from the index, at the start and after a repair."""
        run = self._db.get("run", None)
        self._run = None if run is None else (run[0], run[1])
        self.draws = int(self._db.get("last_draw", 0))
        self._held = self._kept()
        with self._db.transaction():
            gone = self._evict("start + size > ?", self.capacity_bytes)
        self._count("capacity", sum(untrained for *_, untrained in gone))
        self._restart_arena()

    def _restart_arena(self) -> None:
        rows = self._db.execute(f"SELECT {EXTENT}, number {RESIDENT}").fetchall()
        impossible = self._arena.restart([(start, size) for start, size, _ in rows])
        self._arena.sample_count = len(rows)
        self._evict_damaged([rows[index][2] for index in impossible])

    def _repair(self, cause: str) -> None:
        self._db.repair(cause)
        left = self._db.one(f"SELECT count(*) {RESIDENT}")
        lost = max(self._arena.sample_count - left, 0)
        text = "%s is damaged (%s) and was rebuilt: %d rows are saved, %d are lost"
        logger.error(text, self._db.path, cause, left, lost)
        self._load()
        self._count("damaged", lost)

    def _kept(self) -> HeldOut:
        held = HeldOut.read(self._db.get("held_out_fraction", None), HELD_OUT_MOST)
        return replace(held, fraction=self._config.held_out_fraction or held.fraction)

    def _seen(self, fresh: Sequence[Sample]) -> HeldOut:
        """Count new samples of the newest policy version, in the caller's transaction."""
        if self._held.many or not fresh:
            return self._held
        newest = max((version for version, _ in self.policies()), default=None)
        held = self._held.seen(one for one in fresh if one.policy_version == newest)
        if held != self._held:
            self._db.set("held_out_fraction", held.facts)
        return held

    def _hold_out_less(self, before: HeldOut) -> HeldOut:
        """Give back to training what the newest versions hold out more than is needed; return the
        choice from now on."""
        held = []
        for number, seal, *columns in self._db.held_out(-1):
            if seal == seal_of(*columns):
                version, *_, header, start, size = columns
                block = torch.from_numpy(self._arena.view(start, size))
                sample = Sample(pb.VerifierStates.FromString(header), block)
                held.append((version, sample, number, columns))
        newest = sorted({version for version, *_ in held})[-2:]
        after = before.less([sample for version, sample, *_ in held if version in newest])
        for _, sample, number, columns in held if after != before else ():
            if not after.holds(sample):
                columns[2] = 0
                query = "UPDATE samples SET held_out = 0, seal = ? WHERE number = ?"
                self._db.execute(query, seal_of(*columns), number)
        return after

    def _read(self, rows: Sequence[tuple[Any, ...]]) -> list[Sample]:
        """Return the samples of rows; damaged ones are dropped instead."""
        found, damaged = [], []
        for number, seal, *columns in rows:
            if seal == seal_of(*columns):
                *_, header, start, size = columns
                block = self._arena.view(start, size)
                sample = Sample(pb.VerifierStates.FromString(header), torch.from_numpy(block))
                if checksum_of(block[: sample.nbytes]) == sample.header.packed.checksum:
                    found.append(sample)
                    continue
            damaged.append(number)
        if damaged:
            self._evict_damaged(damaged)
            # Their rows may be damaged, not their bytes: free what no sound row uses.
            self._restart_arena()
        return found

    def _evict_damaged(self, numbers: Sequence[int]) -> None:
        if numbers:
            with self._db.transaction():
                gone = self._evict(_AMONG, json.dumps(list(numbers)))
            self._arena.sample_count -= len(gone)
            text = "%s: dropped %d damaged samples; the first numbers are %s"
            logger.error(text, self.folder, len(numbers), list(numbers[:20]))
            self._count("damaged", len(numbers))

    def _evict_worst(self, nbytes: int) -> bool:
        """Evict about this many bytes that nothing views; return False where there are none."""
        victims, freed = [], 0
        for condition, order in (
            ("times_drawn >= ?", "last_draw, number"),
            ("times_drawn < ?", "policy_version, times_drawn DESC, number"),
        ):
            query = f"SELECT number, {EXTENT} {RESIDENT} AND {condition} ORDER BY {order}"
            for number, start, size in self._db.execute(query, self._config.max_epochs):
                if freed >= nbytes:
                    break
                if not self._arena.is_viewed(start):
                    victims.append(number)
                    freed += size
        with self._db.transaction():
            gone = self._evict(_AMONG, json.dumps(victims))
        self._free(gone)
        self._count("unsaved", sum(exhausted for *_, exhausted, _ in gone))
        self._count("capacity", sum(untrained for *_, untrained in gone))
        return bool(gone)

    def _evict(self, condition: str, *values: Any) -> list[tuple[int, int, int, int]]:
        """Mark residents as evicted in the caller's transaction; ``_free`` them after it.

        Returns:
            For each, its start and size, whether it is exhausted, and whether it is untrained.
        """
        epochs, entries = self._config.max_epochs, self._config.ledger_entries
        return self._db.evict(epochs, entries, condition, *values)

    def _free(self, gone: Sequence[tuple[int, int, int, int]]) -> None:
        self._arena.sample_count -= len(gone)
        for start, size, *_ in gone:
            self._arena.release(start, size)

    def _count(self, reason: str, samples: int) -> None:
        if samples:
            self._on_evicted(reason, samples)
