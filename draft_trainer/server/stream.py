"""One client's stream of samples: read ahead within its credits, answered in batches.

Requests that one thread has read and another one takes, several together.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import grpc

from draft_trainer.ingest.ingest import CreditWindow, Ingest, Memories
from draft_trainer.ingest.run import Run
from draft_trainer.server.calls import wrong_kind
from slipstream.errors import RefusedError
from slipstream.shm import RingFile
from slipstream.tensors import Framed
from slipstream.v1 import draft_trainer_pb2 as pb

# What one transaction of the store takes: more would only keep the first ones waiting.
_MOST_SAMPLES = 512
_MOST_BYTES = 16 << 20
# Of messages. Credit counts bytes, and 64 MiB are 32 million empty samples.
_MOST_WAITING = 1024
# A transaction, an answer and the switches between threads take as long as checking some MiB does.
# What arrives within the pause is taken with what came first. With half of both, inline samples of
# a MiB took a tenth longer; with half as much again they took as long.
_ENOUGH_SAMPLES = 256
_ENOUGH_BYTES = 8 << 20
_PAUSE = 0.004

Arrived = tuple[Framed, float]
"""A request, and when it came (monotonic seconds)."""


class Inbox:
    """Bounded, in the order of arrival. One thread puts, one takes.

    Args:
        flight_bytes: what a client may have in flight. It waits for an answer when that is spent,
            so a quarter of it is enough.
    """

    def __init__(self, flight_bytes: int) -> None:
        self._enough_bytes = min(_ENOUGH_BYTES, flight_bytes // 4)
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Arrived, int, int]] = deque()
        self._samples = self._nbytes = 0
        self._ended = False
        self._error: RefusedError | None = None

    def put(self, framed: Framed, at: float, timeout: float) -> bool:
        """Append a request; False when there was no room for ``timeout`` s, or it ended."""
        messages = samples_in(framed.request)
        nbytes = sum([message.packed.span.bytes for message in messages]) or framed.nbytes
        with self._changed:
            if not self._changed.wait_for(self._has_room, timeout) or self._ended:
                return False
            self._waiting.append(((framed, at), len(messages), nbytes))
            self._samples += len(messages)
            self._nbytes += nbytes
            if len(self._waiting) == 1 or self._is_enough():
                self._changed.notify_all()
            return True

    def end(self, error: RefusedError | None = None) -> None:
        """Nothing is put any more. What waits is still taken; then ``take`` raises ``error``."""
        with self._changed:
            self._ended = True
            self._error = self._error or error
            self._changed.notify_all()

    @property
    def ended(self) -> bool:
        """Whether nothing more is put."""
        with self._changed:
            return self._ended

    @property
    def done(self) -> bool:
        """Whether nothing waits either, and ``take`` has nothing to raise."""
        with self._changed:
            return self._ended and not self._waiting and self._error is None

    def take(self, timeout: float) -> list[Arrived]:
        """What waits, at least one request; none when ``timeout`` s passed or the inbox ended.

        Raises:
            RefusedError: what ``end`` was given.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended, timeout)
            if self._waiting and not self._is_enough():
                self._changed.wait_for(self._is_enough, _PAUSE)
            together: list[Arrived] = []
            samples = nbytes = 0
            while self._waiting and samples < _MOST_SAMPLES and nbytes < _MOST_BYTES:
                arrived, some, size = self._waiting.popleft()
                together.append(arrived)
                samples += some
                nbytes += size
            self._samples -= samples
            self._nbytes -= nbytes
            self._changed.notify_all()
            if not together and self._error is not None:
                raise self._error
            return together

    def _has_room(self) -> bool:
        return len(self._waiting) < _MOST_WAITING or self._ended

    def _is_enough(self) -> bool:
        many = self._samples >= _ENOUGH_SAMPLES or len(self._waiting) >= _MOST_WAITING
        return many or self._nbytes >= self._enough_bytes or self._ended


def samples_in(request: pb.StreamStatesRequest) -> Sequence[pb.VerifierStates]:
    """The samples that a request describes."""
    return [request.sample] if request.WhichOneof("kind") == "sample" else request.batch.samples


_TICK = 1.0
_MOST_SAMPLES_STATE_STREAM = 4096
_MOST_PIECES = 1024


class StateStream:
    """Answers the samples of one stream until the client or the server ends it.

    Owns one thread, which reads: gRPC begins to receive a message only when it is asked for the
    next one, and would stand still while this one is checked. The thread ends with the call.

    Args:
        requests: after the header.
        window: what the client may have in flight; it bounds what is read ahead.
        ingest: decides.
        run: that is fed.
        ring: the stream's, if its states are in shared memory.
        idle_seconds: without a message, after which the stream ends; its client, if it lives,
            opens another one.
    """

    def __init__(
        self,
        requests: Iterator[Framed],
        window: CreditWindow,
        ingest: Ingest,
        run: Run,
        ring: RingFile | None,
        idle_seconds: float,
    ) -> None:
        self._requests = requests
        self._window = window
        self._ingest = ingest
        self._run = run
        self._ring = ring
        flight = window.left if ring is None else min(window.left, ring.nbytes)
        self._inbox = Inbox(flight)
        self._idle_seconds = idle_seconds
        threading.Thread(target=self._read, name="state-stream", daemon=True).start()

    def responses(self) -> Iterator[pb.StreamStatesResponse]:
        """The answers.

        Raises:
            RefusedError: a message that may not come, more than was credited, or a truncated
                ring: the stream ends.
        """
        try:
            yield pb.StreamStatesResponse(credit=pb.Credit(bytes=self._window.left))
            yield from self._answers()
        finally:
            self._inbox.end()

    def _answers(self) -> Iterator[pb.StreamStatesResponse]:
        heard = time.monotonic()
        while not self._inbox.done:
            together = self._inbox.take(_TICK)
            if not together:
                if time.monotonic() - heard > self._idle_seconds:
                    return
                continue
            heard = time.monotonic()
            samples = []
            for framed, _ in together:
                memories = Memories((*framed.ahead, framed.payload), self._ring)
                samples += [(message, memories) for message in samples_in(framed.request)]
            acks = self._ingest.take(self._run, samples)
            self._count(together, [message for message, _ in samples], acks)
            yield from self._answer([framed for framed, _ in together], acks)

    def _count(
        self,
        together: Sequence[Arrived],
        messages: Sequence[pb.VerifierStates],
        acks: Sequence[pb.Ack],
    ) -> None:
        nbytes = {"grpc": sum(framed.nbytes for framed, _ in together)}
        if self._ring is not None:
            # Of a refused one nobody knows whether the span that it names was ever written.
            taken = [
                message.packed.span
                for message, ack in zip(messages, acks, strict=True)
                if ack.status != pb.ACK_STATUS_REFUSED
            ]
            nbytes["shared_memory"] = sum(
                [span.bytes for span in taken if span.memory == pb.MEMORY_RING]
            )
        now = time.monotonic()
        waited = [(now - at, len(samples_in(framed.request))) for framed, at in together]
        self._ingest.answered(nbytes, waited)

    def _answer(
        self, together: Sequence[Framed], acks: list[pb.Ack]
    ) -> Iterator[pb.StreamStatesResponse]:
        batched, credit, at = [], 0, 0
        for framed in together:
            count = len(samples_in(framed.request))
            self._window.give_back(framed.nbytes)
            if framed.request.WhichOneof("kind") == "sample":
                yield pb.StreamStatesResponse(ack=acks[at])
                yield pb.StreamStatesResponse(credit=pb.Credit(bytes=framed.nbytes))
            else:
                batched += acks[at : at + count]
                credit += framed.nbytes
            at += count
        if batched:
            response = pb.StreamStatesResponse()
            response.acks.acks.extend(batched)
            response.acks.credit_bytes = credit
            yield response

    def _read(self) -> None:
        ahead: list[Framed] = []
        try:
            for framed in self._requests:
                arrived = time.monotonic()
                kind = framed.request.WhichOneof("kind")
                piece = kind is None and len(framed.payload) > 0
                if not piece and kind not in ("sample", "batch"):
                    raise wrong_kind("sample, batch or a piece of their payload", kind)
                if len(framed.request.batch.samples) > _MOST_SAMPLES_STATE_STREAM:
                    raise RefusedError(
                        "batch.samples",
                        len(framed.request.batch.samples),
                        f"at most {_MOST_SAMPLES_STATE_STREAM}",
                        "send smaller batches",
                    )
                self._window.spend(framed.nbytes)
                if piece:
                    # Of one byte each they would cost a hundred times what credits count.
                    if len(ahead) == _MOST_PIECES:
                        raise RefusedError(
                            "payload",
                            f"more than {_MOST_PIECES} pieces",
                            "pieces of about a MiB",
                            "send larger pieces",
                        )
                    ahead.append(framed)
                    continue
                while not self._inbox.put(framed.behind(ahead), arrived, _TICK):
                    if self._inbox.ended:
                        return
                ahead = []
        except RefusedError as error:
            self._inbox.end(error)
        except grpc.RpcError:
            # The call was cancelled.
            pass
        finally:
            self._inbox.end()
