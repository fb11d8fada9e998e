"""Decides the fate of samples: accepted once, recognised, or refused by name."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draft_trainer.feed.filling import fill_rooms
from draft_trainer.feed.receive import Memories
from draft_trainer.feed.session import Run
from draft_trainer.feed.store import Reservation, SampleStore
from draft_trainer.feed.stored import StoredSample
from draft_trainer.feed.validate import Expected, check_sample_id, declared, kept_layout
from draft_trainer.recordings.recorder import Recorder
from draft_trainer.sidecar.board import Board
from slipstream.packed import Layout
from slipstream.refusal import RefusedError, StatusCode
from slipstream.v1 import draft_trainer_pb2 as pb

_LEAST_CREDIT = 1 << 16
_SMALL_BYTES = 1 << 16


class Ingest:
    """Validates, de-duplicates and stores samples. Thread-safe.

    Args:
        expected: what every sample must look like.
        store: keeps them.
        board: counts fates.
        arrived: set whenever there may be something new to train on.
        recorder: is offered every sample that was taken.
    """

    def __init__(
        self,
        expected: Expected,
        store: SampleStore,
        board: Board,
        arrived: threading.Event,
        recorder: Recorder | None = None,
    ) -> None:
        self.expected = expected
        self._store = store
        self._board = board
        self._arrived = arrived
        self._recorder = recorder

    def credit_bytes(self, most: int) -> int:
        """What a stream may have in flight: ``most``, or less where the store is small.

        Enough for a sample even where the store has room for none: it is refused by name then.
        """
        return min(most, max(self._store.credit_bytes(), _LEAST_CREDIT))

    def take(self, run: Run, samples: Sequence[tuple[pb.VerifierStates, Memories]]) -> list[pb.Ack]:
        """Answer samples, in their order. They are recorded before they are acknowledged.

        A bad sample is refused in its own answer and costs the others nothing.

        Raises:
            RingTruncatedError: the stream's ring was truncated; nothing was taken.
        """
        for ring in {memories.ring for _, memories in samples if memories.ring is not None}:
            ring.check()
        acks = [pb.Ack(sample_id=message.sample_id[: 1 << 10]) for message, _ in samples]
        wanted = self._wanted(run, samples, acks)
        kept = [kept_layout(layout) for _, layout in wanted]
        try:
            rooms = self._store.reserve_all([layout.nbytes for layout in kept])
        except RefusedError as error:
            for at, _ in wanted:
                self._refuse(acks[at], error)
            return acks
        outcomes = fill_rooms(samples, wanted, kept, rooms, self.expected)
        taken: list[tuple[int, Reservation, StoredSample]] = []
        for (at, _), layout, room in zip(wanted, kept, rooms, strict=True):
            message, outcome = samples[at][0], outcomes[at]
            sample_id = message.sample_id
            if isinstance(outcome, RefusedError):
                if isinstance(room, Reservation):
                    room.release()
                if self._store.seen(sample_id):
                    self._duplicate(acks[at])
                else:
                    self._refuse(acks[at], outcome)
                continue
            assert isinstance(room, Reservation), "without a room nothing can be right"
            sample = StoredSample(
                sample_id,
                message.policy_version,
                message.temperature,
                layout,
                layout.tokens,
                outcome or sample_id,
                room.extent,
            )
            taken.append((at, room, sample))
        if taken:
            self._accept(run, acks, taken)
        return acks

    def answered(self, nbytes: Mapping[str, int], waited: Sequence[tuple[float, int]]) -> None:
        """Samples are acknowledged now.

        Args:
            nbytes: that they took, by transport.
            waited: seconds since they arrived, and how many of them, by message.
        """
        self._board.received(nbytes, waited)

    def _wanted(
        self,
        run: Run,
        samples: Sequence[tuple[pb.VerifierStates, Memories]],
        acks: Sequence[pb.Ack],
    ) -> list[tuple[int, Layout]]:
        """Index and layout of those whose declarations are right; the others are answered."""
        wanted = []
        known: set[int] = set()
        for at, (message, _) in enumerate(samples):
            # A retry after a lost acknowledgement is recognised before its states are looked at,
            # unless looking at them costs no more than asking.
            small = message.HasField("packed") and message.packed.span.bytes <= _SMALL_BYTES
            try:
                check_sample_id(message.sample_id)
                if not small and self._store.seen(message.sample_id):
                    self._duplicate(acks[at])
                    continue
                if message.policy_version not in known:
                    run.check_policy_version(message.policy_version)
                    known.add(message.policy_version)
                wanted.append((at, declared(message, self.expected)))
            except RefusedError as error:
                if small and self._store.seen(message.sample_id):
                    self._duplicate(acks[at])
                else:
                    self._refuse(acks[at], error)
        return wanted

    def _accept(
        self, run: Run, acks: list[pb.Ack], taken: Sequence[tuple[int, Reservation, StoredSample]]
    ) -> None:
        recorder = self._recorder
        # Only the recorder reads them now; the room is given up by ``accept``.
        samples = [sample.sample(room.block) for _, room, sample in taken] if recorder else []
        try:
            fresh = self._store.accept([(room, sample) for _, room, sample in taken])
        except RefusedError as error:
            for at, room, _ in taken:
                room.release()
                self._refuse(acks[at], error)
            return
        accepted = 0
        for number, ((at, _, _), new) in enumerate(zip(taken, fresh, strict=True)):
            if not new:
                self._duplicate(acks[at])
                continue
            acks[at].status = pb.ACK_STATUS_ACCEPTED
            accepted += 1
            if recorder is not None:
                recorder.offer(run, samples[number])
        if accepted:
            self._board.accepted(accepted)
            self._arrived.set()

    def _duplicate(self, ack: pb.Ack) -> None:
        ack.status = pb.ACK_STATUS_DUPLICATE
        self._board.duplicate()

    def _refuse(self, ack: pb.Ack, error: RefusedError) -> None:
        ack.status = pb.ACK_STATUS_REFUSED
        ack.refusal.CopyFrom(error.to_proto())
        # The first word is a field of VerifierStates: a bounded set of metric labels.
        self._board.refused(error.field.partition(".")[0])


@dataclass
class CreditWindow:
    """What one stream may still send, in serialized bytes. One thread spends, another gives back.

    The window bounds what the trainer holds of a stream before a sample's fate
    is decided; it is handed back with the acknowledgement. It does not wait for
    training: where the trainer lags, the replay buffer drops the oldest states,
    and the newest, which are worth most, are not kept waiting behind them.
    """

    left: int

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def spend(self, size: int) -> None:
        """Raise RefusedError (RESOURCE_EXHAUSTED) when more is sent than was credited."""
        with self._lock:
            if size > self.left:
                raise overrun(size, self.left)
            self.left -= size

    def give_back(self, size: int) -> None:
        """The bytes are free again."""
        with self._lock:
            self.left += size


def overrun(size: int, left: int) -> RefusedError:
    """The refusal of a client that sends more than it may."""
    return RefusedError(
        "credit",
        f"a message of {size} bytes with {left} bytes of credit left",
        "samples within the credit that was granted",
        "wait for credit before sending, and open the stream again",
        StatusCode.RESOURCE_EXHAUSTED,
    )
