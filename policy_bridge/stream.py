"""One StreamStates call: samples up within credits, acknowledgements down."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import grpc

from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc


class StateStream:
    """Open from construction to ``close``, unless the trainer ends it before.

    Owns one thread, which reads answers. The credit bounds what waits in gRPC.

    Args:
        stub: the trainer.
        session_id: of the open run.
        on_ack: called from the reading thread.
    """

    def __init__(
        self,
        stub: pb_grpc.DraftTrainerStub,
        session_id: str,
        on_ack: Callable[[pb.Ack], None],
    ) -> None:
        self._on_ack = on_ack
        self._changed = threading.Condition()
        self._credit = 0
        self._waiting: set[str] = set()
        self._news = time.monotonic()
        self._open = True
        self._closing = False
        self.answered = False
        self.error: grpc.RpcError | None = None
        self._requests: queue.SimpleQueue[pb.StreamStatesRequest | None] = queue.SimpleQueue()
        self._requests.put(pb.StreamStatesRequest(header=pb.StreamHeader(session_id=session_id)))
        self._call = stub.StreamStates(iter(self._requests.get, None))
        self._reader = threading.Thread(target=self._read, name="slipstream-acks", daemon=True)
        self._reader.start()

    @property
    def is_open(self) -> bool:
        """Whether the trainer may still take samples here."""
        with self._changed:
            return self._open

    def wait_credit(self, size: int, timeout: float) -> bool:
        """Wait until ``size`` bytes may be sent. False: not in time, or the stream ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._credit >= size or not self._open, timeout)
            return self._open and self._credit >= size

    def send(self, message: pb.VerifierStates, size: int) -> None:
        """Send a sample of ``size`` serialized bytes for which there is credit."""
        with self._changed:
            if not self._waiting:
                self._news = time.monotonic()
            self._credit -= size
            self._waiting.add(message.sample_id)
        self._requests.put(pb.StreamStatesRequest(sample=message))

    def silent_seconds(self) -> float:
        """Seconds without news while acknowledgements are due; 0 when none is."""
        with self._changed:
            return time.monotonic() - self._news if self._waiting else 0.0

    def nothing_due(self) -> bool:
        """Whether every sample sent here was answered: no credit will come back by itself."""
        with self._changed:
            return not self._waiting

    def close(self, timeout: float) -> None:
        """End the call and its thread."""
        self._closing = True
        self._requests.put(None)
        self._call.cancel()
        self._reader.join(timeout)

    def _read(self) -> None:
        try:
            for response in self._call:
                with self._changed:
                    self.answered = True
                    self._news = time.monotonic()
                    if response.WhichOneof("kind") == "credit":
                        self._credit += response.credit.bytes
                    else:
                        self._waiting.discard(response.ack.sample_id)
                    self._changed.notify_all()
                if response.WhichOneof("kind") == "ack":
                    self._on_ack(response.ack)
        except grpc.RpcError as error:
            if not self._closing:
                self.error = error
        finally:
            with self._changed:
                self._open = False
                self._changed.notify_all()
            # Lets gRPC's request thread end.
            self._requests.put(None)
