"""The samples of the current run, in memory that outlives the process.

Their bytes lie in an ``Arena``; the ``Ledger`` has everything else about them, committed before
they are acknowledged; the ``ReplayBuffer`` says which are drawn and which give way.

What training has seen of a sample is part of the learner's weights, and a kill takes the weights
back to their last saved state. So draws are numbered, a state carries the number of its last one,
and a restart takes back every later draw (``rewind``). A sample that was drawn for the last time is
kept until a state contains that draw, unless its room is needed before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draft_trainer.config import ReplayConfig
from draft_trainer.eagle3.policy_head import PolicyHead
from draft_trainer.feed.arena import ALIGNMENT, aligned
from draft_trainer.feed.draw_log import DrawLog
from draft_trainer.feed.held import HeldSamples
from draft_trainer.feed.kept_policies import KeptPolicies
from draft_trainer.feed.ledger import Ledger, keys_of
from draft_trainer.feed.refusals import another_run, too_large
from draft_trainer.feed.reservation import Drawn, Reservation
from draft_trainer.feed.sample import Sample
from draft_trainer.feed.stored import StoredSample
from slipstream.refusal import RefusedError

__all__ = ["Drawn", "Reservation", "SampleStore"]

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
