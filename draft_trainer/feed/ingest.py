"""Decides the fate of one sample: accepted once, recognised, or refused by name."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from draft_trainer.feed.ledger import Ledger
from draft_trainer.feed.session import Run
from draft_trainer.feed.validate import Expected, check_sample_id, sample_of
from draft_trainer.recordings.recorder import Recorder
from draft_trainer.sidecar.board import Board
from slipstream.refusal import RefusedError, StatusCode
from slipstream.v1 import draft_trainer_pb2 as pb


class Ingest:
    """Validates, de-duplicates and stores samples. Thread-safe.

    Args:
        expected: what every sample must look like.
        ledger: remembers what was accepted.
        board: counts fates.
        arrived: set whenever there may be something new to train on.
        recorder: is offered every sample that was taken.
    """

    def __init__(
        self,
        expected: Expected,
        ledger: Ledger,
        board: Board,
        arrived: threading.Event,
        recorder: Recorder | None = None,
    ) -> None:
        self.expected = expected
        self._ledger = ledger
        self._board = board
        self._arrived = arrived
        self._recorder = recorder

    def take(self, run: Run, message: pb.VerifierStates) -> pb.Ack:
        """Answer one sample. A refusal is an answer too; nothing is raised."""
        try:
            fresh = self._store(run, message)
        except RefusedError as error:
            # The first word is a field of VerifierStates: a bounded set of metric labels.
            self._board.refused(error.field.partition(".")[0])
            return pb.Ack(
                sample_id=message.sample_id[: 1 << 10],
                status=pb.ACK_STATUS_REFUSED,
                refusal=error.to_proto(),
            )
        if not fresh:
            self._board.duplicate()
            return pb.Ack(sample_id=message.sample_id, status=pb.ACK_STATUS_DUPLICATE)
        self._board.accepted()
        self._board.evicted(run.newly_evicted())
        self._arrived.set()
        return pb.Ack(sample_id=message.sample_id, status=pb.ACK_STATUS_ACCEPTED)

    def _store(self, run: Run, message: pb.VerifierStates) -> bool:
        check_sample_id(message.sample_id)
        # Before the tensors are looked at: a retry after a lost acknowledgement is cheap.
        if self._ledger.knows(run.run_id, message.sample_id):
            return False
        run.check_policy_version(message.policy_version)
        sample = sample_of(message, self.expected)
        # Claimed before it is stored: of two streams with the same sample one wins.
        if not self._ledger.claim(run.run_id, message.sample_id):
            return False
        try:
            run.replay.add(sample)
        except RefusedError as error:
            self._ledger.withdraw(run.run_id, message.sample_id)
            raise RefusedError(
                "sample", error.found, error.expected, error.next_step, error.code
            ) from error
        if self._recorder is not None:
            self._recorder.offer(run, sample)
        return True


@dataclass
class CreditWindow:
    """What one stream may still send. Bytes are those of serialized VerifierStates messages.

    The window bounds what the trainer holds of a stream before a sample's fate
    is decided; it is handed back with the acknowledgement. It does not wait for
    training: where the trainer lags, the replay buffer drops the oldest states,
    and the newest, which are worth most, are not kept waiting behind them.
    """

    left: int

    def spend(self, size: int) -> None:
        """Raise RefusedError (RESOURCE_EXHAUSTED) when more is sent than was credited."""
        if size > self.left:
            raise overrun(size, self.left)
        self.left -= size

    def give_back(self, size: int) -> None:
        """The bytes are free again."""
        self.left += size


def overrun(size: int, left: int) -> RefusedError:
    """The refusal of a client that sends more than it may."""
    return RefusedError(
        "credit",
        f"a sample of {size} bytes with {left} bytes of credit left",
        "samples within the credit that was granted",
        "wait for Credit messages before sending, and open the stream again",
        StatusCode.RESOURCE_EXHAUSTED,
    )
