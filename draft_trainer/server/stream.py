"""One client's stream of samples: read ahead within its credit, answered in batches."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

from draft_trainer.ingest.ingest import Ingest, Memories
from draft_trainer.ingest.run import Session
from slipstream.errors import RefusedError, StatusCode
from slipstream.serving.server import Workers
from slipstream.shm import SharedFile
from slipstream.tensors import PIECE_BYTES, Framed
from slipstream.v1 import draft_trainer_pb2 as pb

MAX_WAITING = 1024
"""The most messages read ahead: credit counts bytes, and 64 MiB are 32 million empty samples."""

MAX_BATCH = 4096
"""The most samples in one message."""

MAX_PIECES = 1024
"""The most pieces of a message's payload, where its stream's credit takes no more in pieces of half
the usual size: one of a single byte costs 100 times its credit."""

# Bounds on one transaction of the store: with more, its first samples would wait longer.
_MOST_SAMPLES = 512
_MOST_BYTES = 16 << 20

_LOOK_SECONDS = 1.0
"""Between two looks, on a stream without samples, at how many are wanted."""


@dataclass(frozen=True)
class Arrived:
    """A message with samples.

    Attributes:
        framed: the message, its payload whole.
        at: when its last piece came, monotonic seconds.
    """

    framed: Framed
    at: float

    @property
    def samples(self) -> Sequence[pb.VerifierStates]:
        """The samples that it describes."""
        return self.framed.request.batch.samples

    @property
    def nbytes(self) -> int:
        """The bytes of the states, wherever they are."""
        return sum(sample.packed.span.bytes for sample in self.samples) or self.framed.nbytes


@dataclass(eq=False)
class StateStream:
    """Answers the samples of one stream until the client or the server ends it.

    One task reads while another one stores samples, so that gRPC receives during a transaction; the
    samples that arrive meanwhile are the next transaction. Reading ahead is bounded by ``credit``,
    the serialized bytes that the client may still send; it gets them back with the answers. Nothing
    waits for training: if that lags, the store evicts the oldest states. So a client is told how
    many tokens are wanted, with every answer, and without one at the start and when that changes.
    """

    requests: AsyncIterator[Framed]
    credit: int
    ingest: Ingest
    session: Session
    file: SharedFile | None
    inline_because: str
    idle_seconds: float
    workers: Workers
    _waiting: deque[Arrived] = field(default_factory=deque)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _has_room: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: bool = False
    _told: int = 0
    _heard: float = field(default_factory=time.monotonic)

    @property
    def transport(self) -> str:
        """The place of its samples' blocks: "grpc" (inline) or "shared_memory"."""
        return "grpc" if self.file is None else "shared_memory"

    def end(self) -> None:
        """End the stream after the batch that is being stored: the server is about to stop."""
        self._ended = True
        self._arrived.set()

    async def responses(self) -> AsyncGenerator[pb.StreamStatesResponse, None]:
        """Yield the answers.

        Raises:
            RefusedError: a message of the wrong kind, or more than was credited: the stream ends.
        """
        first = pb.Credit(bytes=self.credit, inline_because=self.inline_because)
        yield pb.StreamStatesResponse(credit=first)
        self.ingest.streams[self.transport] += 1
        reader = asyncio.create_task(self._read())
        try:
            yield await self.workers.run(self._store, [])
            while await self._has_more(reader):
                batch = self._next_batch()
                response = await self.workers.run(self._store, batch)
                self.credit += response.acks.credit_bytes
                yield response
                if batch:
                    self._heard = time.monotonic()
            if reader.done():
                reader.result()
        finally:
            self.ingest.streams[self.transport] -= 1
            reader.cancel()
            await asyncio.wait({reader})

    async def _has_more(self, reader: asyncio.Task[None]) -> bool:
        """Wait for a message, or until other tokens are wanted than the client was told.

        Return False once the stream ended or was idle for too long.
        """
        until = self._heard + self.idle_seconds
        while not self._waiting and not reader.done() and not self._ended:
            self._arrived.clear()
            try:
                left = max(until - time.monotonic(), 0.0)
                await asyncio.wait_for(self._arrived.wait(), min(left, _LOOK_SECONDS))
            except TimeoutError:
                if time.monotonic() >= until:
                    return False
                if self._told != await self.workers.run(self.ingest.wanted_tokens):
                    return True
        return bool(self._waiting) and not self._ended

    def _next_batch(self) -> list[Arrived]:
        batch: list[Arrived] = []
        samples = nbytes = 0
        while self._waiting and samples < _MOST_SAMPLES and nbytes < _MOST_BYTES:
            batch.append(self._waiting.popleft())
            samples += len(batch[-1].samples)
            nbytes += batch[-1].nbytes
        self._has_room.set()
        return batch

    async def _read(self) -> None:
        most = max(MAX_PIECES, 2 * self.credit // PIECE_BYTES)
        try:
            pieces: list[Framed] = []
            async for framed in self.requests:
                is_piece = self._check(framed)
                self._spend(framed.nbytes)
                if is_piece:
                    pieces.append(framed)
                    if len(pieces) > most:
                        found, expected = f"more than {most} pieces", "pieces of about a MiB"
                        raise RefusedError("payload", found, expected, "send larger pieces")
                    continue
                while len(self._waiting) >= MAX_WAITING:
                    self._has_room.clear()
                    await self._has_room.wait()
                self._waiting.append(Arrived(framed.behind(pieces), time.monotonic()))
                self._arrived.set()
                pieces = []
        finally:
            self._arrived.set()

    def _spend(self, size: int) -> None:
        """Deduct credit. Raises RefusedError (RESOURCE_EXHAUSTED): more is sent than credited."""
        if size > self.credit:
            found = f"a message of {size} bytes with {self.credit} bytes of credit left"
            advice = "wait for credit before sending, and open the stream again"
            code = StatusCode.RESOURCE_EXHAUSTED
            raise RefusedError("credit", found, "at most the credit granted", advice, code)
        self.credit -= size

    @staticmethod
    def _check(framed: Framed) -> bool:
        """Return whether a message is a piece of the next one's payload. Raises RefusedError."""
        kind, samples = framed.request.WhichOneof("kind"), len(framed.request.batch.samples)
        if kind is None and len(framed.payload):
            return True
        if kind != "batch":
            raise RefusedError(
                "kind",
                kind or "nothing",
                "batch, or a piece of its payload",
                "send the header first, and only once",
            )
        if samples > MAX_BATCH:
            raise RefusedError(
                "batch.samples", samples, f"at most {MAX_BATCH}", "send smaller batches"
            )
        return False

    def _store(self, batch: Sequence[Arrived]) -> pb.StreamStatesResponse:
        """Store a batch and answer it; runs on a worker's thread."""
        samples = []
        for arrived in batch:
            memories = Memories((*arrived.framed.ahead, arrived.framed.payload), self.file)
            samples += [(message, memories) for message in arrived.samples]
        acks = self.ingest.take(self.session.run, samples)
        size = sum(arrived.framed.nbytes for arrived in batch)
        nbytes = {"grpc": size}
        if self.file is not None:
            # Without refused ones: the span that they name may never have been written.
            nbytes["shared_memory"] = sum(
                message.packed.span.bytes
                for (message, _), ack in zip(samples, acks, strict=True)
                if ack.status != pb.ACK_STATUS_REFUSED
                and message.packed.span.memory == pb.MEMORY_FILE
            )
        now = time.monotonic()
        counters = self.ingest.counters
        for transport, received in nbytes.items():
            counters.received_bytes.labels(transport).inc(received)
        for each in batch:
            for _ in each.samples:
                counters.acknowledgement_seconds.observe(now - each.at)
        self._told = self.ingest.wanted_tokens()
        answer = pb.AckBatch(acks=acks, credit_bytes=size, wanted_tokens=self._told)
        return pb.StreamStatesResponse(acks=answer)
