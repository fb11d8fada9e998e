"""Asks a trainer that went silent whether it is back, without waiting for its answer.

A hung trainer would otherwise cost every weight sync its whole deadline.
"""

from __future__ import annotations

import grpc

from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc

_SILENT = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


class TrainerProbe:
    """One question at a time. Used from one thread.

    Args:
        trainer: whom to ask.
        deadline_seconds: of one question.
    """

    def __init__(self, trainer: pb_grpc.DraftTrainerStub, deadline_seconds: float) -> None:
        self._trainer = trainer
        self._deadline = deadline_seconds
        self._asked: grpc.Future | None = None

    def send(self) -> None:
        """Ask, after it let a deadline pass; until an answer is here ``answers`` is False."""
        self._asked = self._trainer.GetStatus.future(pb.GetStatusRequest(), timeout=self._deadline)

    def answers(self) -> bool:
        """Whether the trainer may be called: it was not silent, or has answered since."""
        if self._asked is None:
            return True
        if not self._asked.done():
            return False
        # Any answer will do, a refusal too.
        if self._asked.code() in _SILENT:
            self.send()
            return False
        self._asked = None
        return True

    def close(self) -> None:
        """Ask no more."""
        if self._asked is not None:
            self._asked.cancel()
