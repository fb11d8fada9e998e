"""One client's stream of samples: read ahead within its credits, answered in batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import grpc

from draft_trainer.feed.ingest import CreditWindow, Ingest
from draft_trainer.feed.receive import Memories
from draft_trainer.feed.session import Run
from draft_trainer.sidecar.inbox import Arrived, Inbox, samples_in
from draft_trainer.sidecar.refusals import wrong_kind
from slipstream.framing import Framed
from slipstream.refusal import RefusedError
from slipstream.ring import RingFile
from slipstream.v1 import draft_trainer_pb2 as pb

_TICK = 1.0
_MOST_SAMPLES = 4096
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
                if len(framed.request.batch.samples) > _MOST_SAMPLES:
                    raise RefusedError(
                        "batch.samples",
                        len(framed.request.batch.samples),
                        f"at most {_MOST_SAMPLES}",
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
