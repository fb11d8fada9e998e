"""One StreamStates call: samples up within credits, acknowledgements down."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import grpc

from slipstream.client import MAX_MESSAGE_BYTES
from slipstream.tensors import Bytes, Parts, frame, frames
from slipstream.v1 import draft_trainer_pb2 as pb

_METHOD = pb.DESCRIPTOR.services_by_name["DraftTrainer"].methods_by_name["StreamStates"]


class StateStream:
    """A call that is open from construction to ``close``, unless the trainer ends it before.

    Owns one thread, which reads answers. The credit bounds what waits in gRPC, and where a trainer
    grants more than a message's worth without reading, ``MAX_MESSAGE_BYTES``.

    That thread calls ``on_open``, before the first credit can be used, with the reason why the
    trainer reads no file (empty where it reads it), and ``on_acks`` with acknowledgements, or with
    none and a number of wanted tokens.

    Attributes:
        credit: bytes that may be sent now.
        is_open: whether the trainer may still take samples here.
        answered: the first credit came.
        acknowledged: samples that were answered here.
        error: the error with which the trainer ended the call; None if there was none.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        header: pb.StreamHeader,
        on_open: Callable[[str], None],
        on_acks: Callable[[pb.AckBatch], None],
    ) -> None:
        self._on_open = on_open
        self._on_acks = on_acks
        self._changed = threading.Condition()
        self.credit = 0
        self._waiting: set[str] = set()
        self._last_news = time.monotonic()
        self.is_open = True
        self._closing = False
        self.answered = False
        self.acknowledged = 0
        self.error: grpc.RpcError | None = None
        self._requests: queue.SimpleQueue[Parts | None] = queue.SimpleQueue()
        first: Parts = [frame(pb.StreamStatesRequest(header=header))]
        self._queued = _size(first)
        self._requests.put(first)
        # Not through the stub, which would copy each payload into a message and out of it.
        call = channel.stream_stream(
            f"/{_METHOD.containing_service.full_name}/{_METHOD.name}",
            response_deserializer=pb.StreamStatesResponse.FromString,
        )
        self._call = call(map(self._join_parts, iter(self._requests.get, None)))
        self._reader = threading.Thread(target=self._read, name="slipstream-acks", daemon=True)
        self._reader.start()

    def wait_credit(self, size: int, timeout: float) -> bool:
        """Wait until ``size`` bytes may be sent. False: not in time, or the stream ended."""

        def granted() -> bool:
            free = self._queued == 0 or self._queued + size <= MAX_MESSAGE_BYTES
            return self.credit >= size and free

        with self._changed:
            self._changed.wait_for(lambda: granted() or not self.is_open, timeout)
            return self.is_open and granted()

    def send(self, request: pb.StreamStatesRequest, payload: Sequence[Bytes]) -> int:
        """Send a batch for which there is credit; returns the bytes of its messages."""
        with self._changed:
            if not self._waiting:
                self._last_news = time.monotonic()
            self._waiting.update([sample.sample_id for sample in request.batch.samples])
        sent = 0
        for parts in frames(request, payload):
            size = _size(parts)
            with self._changed:
                self.credit -= size
                self._queued += size
            self._requests.put(parts)
            sent += size
        return sent

    def silent_seconds(self) -> float:
        """Seconds in which nothing was sent or heard while the first credit, or an acknowledgement,
        is due; else 0."""
        with self._changed:
            due = self._waiting or not self.answered
            return time.monotonic() - self._last_news if due else 0.0

    def nothing_due(self) -> bool:
        """Return whether every sample sent here was answered: no credit comes back by itself."""
        with self._changed:
            return not self._waiting

    def close(self, timeout: float) -> None:
        """End the call and its thread."""
        self._closing = True
        self._requests.put(None)
        self._call.cancel()
        self._reader.join(timeout)

    def _join_parts(self, parts: Parts) -> bytes:
        """Join a message's parts, in gRPC's thread, which asks for it once the last was sent."""
        with self._changed:
            self._queued -= _size(parts)
            # A long sample takes its time on the wire.
            self._last_news = time.monotonic()
            self._changed.notify_all()
        return b"".join(parts)  # type: ignore[arg-type]

    def _read(self) -> None:
        try:
            for response in self._call:
                acks = response.acks.acks
                # Before the credit wakes the sender: settling lowers what is in flight, too.
                if response.HasField("acks"):
                    self._on_acks(response.acks)
                if not self.answered:
                    self._on_open(response.credit.inline_because)
                with self._changed:
                    self.answered = True
                    self.acknowledged += len(acks)
                    self._last_news = time.monotonic()
                    self.credit += response.acks.credit_bytes + response.credit.bytes
                    self._waiting.difference_update([ack.sample_id for ack in acks])
                    self._changed.notify_all()
        except grpc.RpcError as error:
            if not self._closing:
                self.error = error
        except ValueError:
            # gRPC's answer to a call on a closed channel: the bridge is stopping.
            pass
        finally:
            with self._changed:
                self.is_open = False
                self._changed.notify_all()
            # Lets gRPC's request thread end.
            self._requests.put(None)


def _size(parts: Parts) -> int:
    return sum(map(len, parts))
