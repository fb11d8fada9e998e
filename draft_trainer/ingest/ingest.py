"""Accepts samples once, recognises duplicates, and refuses the rest by name.

One path for every sample: its header is validated, a duplicate is answered, an extent of the store
is reserved, the block is read into it (``preadv`` from the client's file, or a copy out of the
payload), and what was read is checked: checksum, finite states, tokens, positions, masks and
log-probs, and the teacher that follows from them. Only then is it accepted. What is checked is the
trainer's own copy, which no client can change any more.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draft_trainer.counters import Counters
from draft_trainer.ingest.checks import (
    Expected,
    check_contents,
    check_header,
    check_sample_id,
)
from draft_trainer.ingest.run import Run
from draft_trainer.ingest.store import SampleStore
from draft_trainer.ingest.teacher import TeacherCheck
from slipstream.errors import RefusedError
from slipstream.sample import Layout, Sample
from slipstream.shm import HEADER_BYTES, SharedFile
from slipstream.tensors import Bytes, checksum_of
from slipstream.v1 import draft_trainer_pb2 as pb

_LEAST_CREDIT = 1 << 16
# The largest mass that the histogram is given; those of accepted samples are about 1.
_LARGEST_MASS = 10.0


@dataclass(frozen=True)
class Memories:
    """The memory that the spans of one request may point into.

    Attributes:
        payload: the request's, uint8 [n], in consecutive pieces.
        file: the stream's file of shared memory, if it has one.
    """

    payload: Sequence[Bytes]
    file: SharedFile | None = None

    def read(self, span: pb.Span, block: Bytes) -> None:
        """Fill ``block``, uint8 [span.bytes]. Raises RefusedError: out of bounds or cut short."""
        if span.memory == pb.MEMORY_FILE:
            if self.file is None:
                raise RefusedError(
                    "packed.span.memory", "MEMORY_FILE", "PAYLOAD: no file is open", "name one"
                )
            _check_span(span, HEADER_BYTES, self.file.nbytes)
            self.file.read_into(span.offset, block)
        elif span.memory == pb.MEMORY_PAYLOAD:
            _check_span(span, 0, sum(map(len, self.payload)))
            self._copy(span.offset, block)
        else:
            raise RefusedError(
                "packed.span.memory", span.memory, "MEMORY_PAYLOAD or MEMORY_FILE", "set one"
            )

    def _copy(self, start: int, block: Bytes) -> None:
        at, end = 0, start + len(block)
        for piece in self.payload:
            first, last = max(start, at), min(end, at + len(piece))
            if first < last:
                block[first - start : last - start] = piece[first - at : last - at]
            at += len(piece)


class Ingest:
    """Validates, de-duplicates and stores samples. Thread-safe.

    Args:
        expected: what every sample must look like.
        store: keeps them.
        counters: counts them.
        teacher: checks the teacher of every sample.
        arrived: set whenever there may be new samples to train on.
        directory: where clients' files of shared memory are; None: every block comes inline.
        wanted: returns the tokens wanted of each policy version, from all clients together, given
            how many fill half of the store.

    Attributes:
        streams: open streams by transport; changed on the server's event loop.
    """

    def __init__(
        self,
        expected: Expected,
        store: SampleStore,
        counters: Counters,
        teacher: TeacherCheck,
        arrived: threading.Event,
        directory: Path | None = None,
        wanted: Callable[[int], int] = lambda held: held,
    ) -> None:
        self.expected = expected
        self._wanted = wanted
        self._longest = 0
        # Of the last sample; before the first, of the longest.
        self._layout = expected.longest
        self._store = store
        self.counters = counters
        self._teacher = teacher
        self._arrived = arrived
        self._directory = directory
        self.streams = {"grpc": 0, "shared_memory": 0}

    def wanted_tokens(self) -> int:
        """Return the tokens wanted of each policy version from each client: an equal share.

        They are at least those of the longest sample so far: of a share without room for a sample
        a client could send nothing.
        """
        held = self._store.capacity_bytes // 2 * self._layout.tokens // self._layout.nbytes
        return max(self._wanted(held) // max(sum(self.streams.values()), 1), self._longest, 1)

    def credit_bytes(self, most: int) -> int:
        """Return the bytes a stream may have in flight: ``most``, or less if the store is small.

        They suffice for a sample even if the store has no room for one now: a stream keeps its
        credit, and a sample without room is refused by name.
        """
        return min(
            most, max(self._store.credit_bytes(), self.expected.longest.nbytes + _LEAST_CREDIT)
        )

    def open_file(self, header: pb.StreamHeader) -> tuple[SharedFile | None, str]:
        """Open the client's file of a stream, or return None and why blocks come inline.

        The reason is the text of ``Credit.inline_because``, empty where the client named no file.
        """
        if not header.HasField("shared_memory"):
            return None, ""
        offered = header.shared_memory
        try:
            if self._directory is None:
                advice = "set it in the trainer"
                raise RefusedError("server.shared_memory", "nothing", "a directory", advice)
            file = SharedFile.open(self._directory, offered.name, offered.bytes, offered.nonce)
        except RefusedError as error:
            return None, str(error)
        return file, ""

    def take(self, run: Run, samples: Sequence[tuple[pb.VerifierStates, Memories]]) -> list[pb.Ack]:
        """Answer samples of one stream in their order, after recording those that are accepted.

        Blocks on reading, checksums and the store's transaction: call it in an executor. A bad
        sample is refused in its own answer and does not affect the others.

        Args:
            run: the run of the stream's session.
            samples: headers, each with the memory that its span may point into.
        """
        try:
            return self._answer(run, samples)
        except BaseException as error:
            # Whoever keeps the error keeps its frames, and what they view cannot be freed.
            kept: BaseException | None = error
            while kept is not None:
                traceback.clear_frames(kept.__traceback__)
                kept = kept.__context__
            raise

    def _answer(
        self, run: Run, samples: Sequence[tuple[pb.VerifierStates, Memories]]
    ) -> list[pb.Ack]:
        acks = [pb.Ack(sample_id=header.sample_id[: 1 << 10]) for header, _ in samples]
        read: list[tuple[pb.Ack, Sample]] = []
        for (header, memories), ack in zip(samples, acks, strict=True):
            try:
                check_sample_id(header.sample_id)
                run.check_current()
                # A retry after a lost acknowledgement is recognised before its block is read.
                if self._store.seen(run.key, header.sample_id):
                    self._duplicate(ack)
                    continue
                run.check_policy_version(header.policy_version)
                sample = self._read(header, memories, check_header(header, self.expected))
                self._longest, self._layout = max(self._longest, sample.tokens), sample.layout
                read.append((ack, sample))
            except RefusedError as error:
                self._refuse(ack, error)
        if taken := self._check_teachers(run, read):
            self._accept(run, taken)
        return acks

    def _check_teachers(
        self, run: Run, read: Sequence[tuple[pb.Ack, Sample]]
    ) -> list[tuple[pb.Ack, Sample]]:
        """Return the samples whose teacher is a distribution; refuse the others."""
        alike = defaultdict(list)
        for ack, sample in read:
            alike[sample.policy_version, sample.layout.dtype, sample.logits_dtype].append(
                (ack, sample)
            )
        taken = []
        for (version, *_), group in alike.items():
            try:
                head = run.heads.get(version)
            except RefusedError as error:
                for ack, _ in group:
                    self._refuse(ack, error)
                continue
            label = "draft" if self._teacher.whole_lm_head(head) is None else "whole"
            masses = self.counters.teacher_mass.labels(label)
            checked = self._teacher.check([sample for _, sample in group], head)
            for (ack, sample), found in zip(group, checked, strict=True):
                # A NaN would make the histogram's sum useless until the next start.
                if not math.isnan(found.mass):
                    masses.observe(min(found.mass, _LARGEST_MASS))
                if found.refusal is not None:
                    self._refuse(ack, found.refusal)
                else:
                    taken.append((ack, sample))
        return taken

    def _read(self, header: pb.VerifierStates, memories: Memories, layout: Layout) -> Sample:
        """Read a sample into the store's memory and check it. Raises RefusedError if it is bad."""
        packed = header.packed
        kept = pb.VerifierStates()
        kept.CopyFrom(header)
        kept.DiscardUnknownFields()
        kept.packed.ClearField("span")
        sample = Sample(kept, torch.from_numpy(self._store.reserve(layout.nbytes)))
        block = sample.block.numpy()
        if packed.span.bytes != layout.nbytes:
            sizes = f"{layout.tokens} tokens of {layout.aux_layers + 1} states"
            wanted = f"{layout.nbytes} for {sizes} of {layout.hidden_size}"
            advice = "lay the block out as docs/wire.md says"
            raise RefusedError("packed.span.bytes", packed.span.bytes, wanted, advice)
        memories.read(packed.span, block)
        checksum = checksum_of(block)
        if checksum != packed.checksum:
            found, advice = f"{packed.checksum:#x}", "send it again"
            raise RefusedError("packed.checksum", found, f"{checksum:#x}", advice)
        check_contents(sample, self.expected)
        return sample

    def _accept(self, run: Run, taken: Sequence[tuple[pb.Ack, Sample]]) -> None:
        try:
            fresh = self._store.accept(run.key, [sample for _, sample in taken])
        except RefusedError as error:
            for ack, _ in taken:
                self._refuse(ack, error)
            return
        for (ack, _), new in zip(taken, fresh, strict=True):
            if new:
                ack.status = pb.ACK_STATUS_ACCEPTED
            else:
                self._duplicate(ack)
        if accepted := sum(fresh):
            self.counters.samples.labels("accepted").inc(accepted)
            self._arrived.set()

    def _duplicate(self, ack: pb.Ack) -> None:
        ack.status = pb.ACK_STATUS_DUPLICATE
        self.counters.samples.labels("duplicate").inc()

    def _refuse(self, ack: pb.Ack, error: RefusedError) -> None:
        ack.status = pb.ACK_STATUS_REFUSED
        ack.refusal.CopyFrom(error.to_proto())
        # A bounded set of labels: the first word is a field of VerifierStates, "teacher", "run_id",
        # "history", or the resource that was full or gone: "sample", "replay", "shared_memory".
        self.counters.refused(error.field.partition(".")[0])


def _check_span(span: pb.Span, first: int, end: int) -> None:
    found = f"{span.bytes} bytes from {span.offset} on"
    if span.offset < first or span.offset + span.bytes > end:
        raise RefusedError(
            "packed.span", found, f"within [{first}, {end})", "write bytes before they are named"
        )
