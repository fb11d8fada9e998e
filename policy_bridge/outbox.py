"""A queue of samples, bounded in bytes, that sheds the oldest policy version first.

Invariant: every sample that was taken leaves in exactly one way: settled by an acknowledgement, or
shed and counted under a reason. Samples stay here until they are acknowledged, so what is in flight
counts against the bound too and is still here to be sent again when a stream is lost.

What is shed to free memory is the least of (policy version, priority), the oldest of equals first,
and only what is less than the sample that needs the memory: swapping equals would only churn.
Finding it takes no search: samples are in one bin per version and priority.

Blocks are in a file of shared memory, written once; a trainer on this host reads them from there,
and for any other they are read into the message. A file that was cut short, or whose memory is
full, costs the blocks in it and nothing else: later ones go into anonymous memory, and with the
next connection into another file.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from policy_bridge.stats import Counters
from slipstream.sample import Sample
from slipstream.shm import HEADER_BYTES, FreeList, MemoryLostError, SharedFile
from slipstream.tensors import Bytes, checksum_of
from slipstream.v1 import draft_trainer_pb2 as pb

logger = logging.getLogger(__name__)

PRIORITIES = 16
"""Priorities are whole numbers from 0 to one less; the highest is shed last."""

LOST = "shared_memory_lost"
"""The reason for shedding samples whose file was cut short, or had no memory left."""


def flight_bytes(capacity_bytes: int) -> int:
    """Bound on what the trainer may be reading out of the file of an outbox of this bound."""
    return capacity_bytes // 4


def file_bytes(capacity_bytes: int) -> int:
    """Size of a file for an outbox of this bound; memory is taken as it is written.

    Beside what is held there is room for what was shed while in flight, whose parts the trainer
    may still read, and for gaps.
    """
    gaps = capacity_bytes // 50 + (1 << 16)
    return HEADER_BYTES + capacity_bytes + flight_bytes(capacity_bytes) + gaps


class BlockFile:
    """A file, anonymous or shared with a trainer, and its free parts; under its outbox's lock.

    Attributes:
        lost: it was cut short, or its memory is full: nothing new is written to it.
    """

    def __init__(self, file: SharedFile) -> None:
        self.file = file
        self.lost = False
        self.free = FreeList()
        self.free.give(HEADER_BYTES, file.nbytes - HEADER_BYTES)


@dataclass(eq=False, slots=True)
class Entry:
    """A sample in the outbox: its header, and where its block is.

    Attributes:
        header: with the span of the block in ``blocks``, and its checksum.
        priority: 0 to ``PRIORITIES`` - 1.
        blocks: the file.
        lent: the trainer may be reading the block out of the file.
    """

    header: pb.VerifierStates
    priority: int
    blocks: BlockFile
    lent: bool = False

    @property
    def sample_id(self) -> str:
        """The sample's id, unique within the run."""
        return self.header.sample_id

    @property
    def version(self) -> int:
        """Its policy version."""
        return self.header.policy_version

    @property
    def key(self) -> tuple[int, int]:
        """Policy version and priority: the least is shed first."""
        return self.version, self.priority

    @property
    def nbytes(self) -> int:
        """Size of the block."""
        return self.header.packed.span.bytes

    def read(self) -> Bytes:
        """A copy of the block. Raises MemoryLostError: the file no longer has it."""
        block = np.empty(self.nbytes, dtype=np.uint8)
        packed = self.header.packed
        self.blocks.file.read_into(packed.span.offset, block)
        if checksum_of(block) != packed.checksum:
            raise MemoryLostError.of("a block with other bytes", "the bytes that were written")
        return block


class Outbox:
    """A bounded queue that the policy's threads fill and the sender drains. Thread-safe.

    The lock is held for moments: blocks are written and read without it.

    Args:
        capacity_bytes: bound on the blocks of all samples held.
        counters: where shed samples are counted.

    Attributes:
        capacity_bytes: the bound; see ``grow``.
    """

    def __init__(self, capacity_bytes: int, counters: Counters) -> None:
        self.capacity_bytes = capacity_bytes
        self._counters = counters
        self._blocks = BlockFile(SharedFile.anonymous(file_bytes(capacity_bytes)))
        self._changed = threading.Condition()
        self._held: dict[str, Entry] = {}
        # The samples held, by (policy version, priority), and their bytes.
        self._bins: dict[tuple[int, int], dict[str, Entry]] = {}
        self._sizes: Counter[tuple[int, int]] = Counter()
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._sent: OrderedDict[str, None] = OrderedDict()
        # Shed while the trainer may still read them: their parts of the file are not free yet.
        self._pinned: dict[str, Entry] = {}
        self._bytes = 0
        self._reserved = 0
        self._in_flight = 0
        self._closed = ""  # The reason, once it is closed.

    def grow(self, capacity_bytes: int) -> None:
        """Raise the bound. A file that the trainer reads has room for it with the next stream."""
        with self._changed:
            self.capacity_bytes = max(self.capacity_bytes, capacity_bytes)
            if self.outgrown and not self._blocks.file.name:
                self._blocks = BlockFile(SharedFile.anonymous(file_bytes(self.capacity_bytes)))

    @property
    def outgrown(self) -> bool:
        """Return whether its file is too small for the bound."""
        with self._changed:
            return self._blocks.file.nbytes < file_bytes(self.capacity_bytes)

    def takes(self, nbytes: int, version: int, priority: int) -> bool:
        """Return whether ``put`` would take a sample not copied yet; False is counted as shed."""
        with self._changed:
            reason = self._shed_reason(nbytes, (version, priority))
            if reason:
                self._counters.shed(reason, 1, nbytes)
            return not reason

    def put(self, sample: Sample, priority: int = 0) -> bool:
        """Take a sample and write its block to the file. False: it is counted as shed."""
        nbytes = sample.nbytes
        block = sample.block[:nbytes].numpy()
        header = pb.VerifierStates()
        header.CopyFrom(sample.header)
        header.packed.checksum = checksum_of(block)
        header.packed.span.bytes = nbytes
        # A second time where the first file is lost.
        for _ in range(2):
            entry = self._reserve(header, priority)
            if entry is None:
                return False
            try:
                entry.blocks.file.write(header.packed.span.offset, block)
            except MemoryLostError as error:
                with self._changed:
                    self._reserved -= nbytes
                    self._free(entry)
                self.lose(entry.blocks, str(error))
                continue
            return self._hold(entry)
        self._counters.shed(LOST, 1, nbytes)
        return False

    def lose(self, blocks: BlockFile, reason: str) -> None:
        """Give up a file that is damaged: later blocks go into an anonymous one."""
        with self._changed:
            known, blocks.lost = blocks.lost, True
            current = self._blocks is blocks
            if current:
                self._blocks = BlockFile(SharedFile.anonymous(file_bytes(self.capacity_bytes)))
            self._changed.notify_all()
        # One of an earlier stream says nothing about how this one sends.
        if current and not known and blocks.file.name:
            self._counters.transport("grpc", reason)
            logger.warning("states go inline until the next connection: %s", reason)

    def move_to(self, file: SharedFile) -> BlockFile:
        """Write to this new file from now on, and move what is held there.

        Nothing may be in flight. What the file has no memory for stays where it is.
        """
        target = BlockFile(file)
        with self._changed:
            self._blocks = target
            held = list(self._held.values())
        for entry in held:
            self._move(entry, target)
        return target

    def leave_file(self) -> bool:
        """Move what is held out of an earlier stream's file, if that is where it is.

        A file keeps the memory of every block that was ever written to it. With what the trainer
        had not let go of, that may be more than leaves room for the next file.
        """
        with self._changed:
            shared = bool(self._blocks.file.name)
        if shared:
            self.move_to(SharedFile.anonymous(file_bytes(self.capacity_bytes)))
        return shared

    def peek(self, timeout: float) -> Entry | None:
        """The next sample to send, which stays held; None if none came in time or closed."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._waiting:
                left = deadline - time.monotonic()
                if self._closed or left <= 0:
                    return None
                self._changed.wait(left)
            return self._held[next(iter(self._waiting))]

    def take(
        self, wanted: Callable[[Entry], bool], most: int, shared: BlockFile | None = None
    ) -> list[Entry]:
        """Move samples from the front to "sent", ``most`` at most, until ``wanted`` says no.

        Blocks in ``shared``, the file that the trainer reads, are lent from now on.
        """
        taken: list[Entry] = []
        with self._changed:
            for sample_id in self._waiting:
                entry = self._held[sample_id]
                if len(taken) == most or not wanted(entry):
                    break
                taken.append(entry)
            for entry in taken:
                del self._waiting[entry.sample_id]
                self._sent[entry.sample_id] = None
                entry.lent = entry.blocks is shared
                if entry.lent:
                    self._in_flight += entry.nbytes
        return taken

    @property
    def flight(self) -> int:
        """Bytes lent to the trainer, those of samples that were shed included."""
        with self._changed:
            return self._in_flight

    def holds(self, entry: Entry) -> bool:
        """Return whether it was neither acknowledged nor shed."""
        with self._changed:
            return entry.sample_id in self._held

    def wait_flight(self, nbytes: int, timeout: float) -> None:
        """Wait until at most ``nbytes`` are in flight."""
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight <= nbytes, timeout)

    def settle(self, sample_id: str, count: Callable[[], object] = lambda: None) -> bool:
        """Forget an acknowledged sample. True if it was held as sent.

        ``count`` is called if it was: a sample that was shed on its way is counted already. It is
        called before waiters are woken: whoever waits for an empty outbox then reads the counters.
        """
        with self._changed:
            held = sample_id in self._sent
            if held:
                self._drop(sample_id)
                count()
            self._unpin(sample_id)
            self._changed.notify_all()
            return held

    def requeue(self, *sample_ids: str) -> None:
        """Put samples that were sent back to the front: the trainer could not read them."""
        with self._changed:
            for sample_id in sample_ids:
                if sample_id in self._sent:
                    self._take_back(self._held[sample_id])
                    self._waiting[sample_id] = None
                    self._waiting.move_to_end(sample_id, last=False)
                self._unpin(sample_id)
            self._changed.notify_all()

    def requeue_sent(self) -> set[str]:
        """Put every unacknowledged sample back to the front, in order; returns their ids."""
        with self._changed:
            again = list(self._sent)
            self.requeue(*reversed(again), *list(self._pinned))
            return set(again)

    def shed(self, reason: str, version: int | None = None) -> None:
        """Give up every sample, or every one of a policy version."""
        with self._changed:
            for entry in list(self._held.values()):
                if version in (None, entry.version):
                    self._give_up(entry, reason)
            self._changed.notify_all()

    def give_up(self, entry: Entry, reason: str) -> None:
        """Shed one sample, if it is still held."""
        with self._changed:
            if entry.sample_id in self._held:
                self._give_up(entry, reason)
                self._changed.notify_all()

    def wait_empty(self, timeout: float) -> bool:
        """Wait until everything was acknowledged or shed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._bytes + self._reserved == 0, timeout)

    def close(self, reason: str = "closed") -> None:
        """Take no more, shed what is left, wake every waiter; the first reason counts."""
        with self._changed:
            self._closed = self._closed or reason
            self.shed(self._closed)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        with self._changed:
            return self._bytes

    def __len__(self) -> int:
        with self._changed:
            return len(self._held)

    def _reserve(self, header: pb.VerifierStates, priority: int) -> Entry | None:
        """Reserve a part of the file for a block; None, counted as shed, where there is none."""
        nbytes, key = header.packed.span.bytes, (header.policy_version, priority)
        with self._changed:
            reason = self._shed_reason(nbytes, key)
            while not reason:
                fits = self.capacity_bytes - self._bytes - self._reserved >= nbytes
                offset = self._blocks.free.take(nbytes) if fits else None
                if offset is not None:
                    header.packed.span.offset = offset
                    self._reserved += nbytes
                    return Entry(header, priority, self._blocks)
                # Also where there is memory enough, but in gaps.
                least = min(self._bins, default=key)
                if least >= key:
                    reason = "outbox_full"
                else:
                    self._give_up(next(iter(self._bins[least].values())), "superseded")
            self._counters.shed(reason, 1, nbytes)
            return None

    def _hold(self, entry: Entry) -> bool:
        """Hold a sample whose block was written."""
        with self._changed:
            self._reserved -= entry.nbytes
            if self._closed:
                self._free(entry)
                self._counters.shed(self._closed, 1, entry.nbytes)
            else:
                self._bins.setdefault(entry.key, {})[entry.sample_id] = entry
                self._sizes[entry.key] += entry.nbytes
                self._held[entry.sample_id] = entry
                self._waiting[entry.sample_id] = None
                self._bytes += entry.nbytes
            self._changed.notify_all()
            return not self._closed

    def _shed_reason(self, nbytes: int, key: tuple[int, int]) -> str:
        """The reason to shed a sample, even if all that is less than it were shed; or empty."""
        if self._closed:
            return self._closed
        if nbytes > self.capacity_bytes:
            return "too_large"
        free = self.capacity_bytes - self._bytes - self._reserved
        if free < nbytes:
            free += sum(size for other, size in self._sizes.items() if other < key)
        return "outbox_full" if free < nbytes else ""

    def _give_up(self, entry: Entry, reason: str) -> None:
        if entry.lent:
            # Its part of the file is not free before the trainer has answered.
            del self._sent[entry.sample_id]
            self._pinned[entry.sample_id] = entry
        self._drop(entry.sample_id)
        self._counters.shed(reason, 1, entry.nbytes)

    def _drop(self, sample_id: str) -> None:
        entry = self._held.pop(sample_id)
        self._waiting.pop(sample_id, None)
        if sample_id in self._sent:
            self._take_back(entry)
        del self._bins[entry.key][sample_id]
        self._sizes[entry.key] -= entry.nbytes
        self._bytes -= entry.nbytes
        if not self._bins[entry.key]:
            del self._bins[entry.key], self._sizes[entry.key]
        if sample_id not in self._pinned:
            self._free(entry)

    def _take_back(self, entry: Entry) -> None:
        del self._sent[entry.sample_id]
        if entry.lent:
            entry.lent = False
            self._in_flight -= entry.nbytes

    def _unpin(self, sample_id: str) -> None:
        entry = self._pinned.pop(sample_id, None)
        if entry is not None:
            self._in_flight -= entry.nbytes
            self._free(entry)

    def _free(self, entry: Entry) -> None:
        entry.blocks.free.give(entry.header.packed.span.offset, entry.nbytes)

    def _move(self, entry: Entry, target: BlockFile) -> None:
        try:
            block = entry.read()
        except MemoryLostError:
            self.give_up(entry, LOST)
            return
        with self._changed:
            offset = None if target.lost else target.free.take(entry.nbytes)
        if offset is None:
            # It stays where it is, and goes inline from there.
            return
        try:
            target.file.write(offset, block)
        except MemoryLostError as error:
            with self._changed:
                target.free.give(offset, entry.nbytes)
            self.lose(target, str(error))
            return
        with self._changed:
            if entry.sample_id in self._held:
                self._free(entry)
                entry.blocks, entry.header.packed.span.offset = target, offset
            else:
                target.free.give(offset, entry.nbytes)
