"""Writes recordings, of samples that ingest accepts or of any others.

Ingest hands a copy of a sample over; one thread writes. Samples beyond what it can write are shed
and counted: training has them either way.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from draft_trainer.config import RecordingConfig
from draft_trainer.counters import Counters
from draft_trainer.drafters import DraftShape
from draft_trainer.drafters.policy import PolicyHead
from draft_trainer.files import SAFETENSORS_PART, written_whole
from draft_trainer.ingest.checks import Expected, check_contents, check_header
from draft_trainer.ingest.run import Run
from draft_trainer.recordings.recording import (
    INDEX_FILE,
    PolicyEntry,
    RecordingFacts,
    RecordingIndex,
    ShardEntry,
    matrix_file,
    read_index,
)
from slipstream.errors import RefusedError
from slipstream.sample import Sample
from slipstream.tensors import digest

logger = logging.getLogger(__name__)
DEFAULT_SHARD_BYTES = 256 << 20
SUM_SECONDS = 60.0
"""At least, between two sums of a directory that is full."""
_NAME = re.compile(r"run-(\d{6,})")
# Names that files have until they are whole.
_PART = re.compile(
    rf"\.({re.escape(INDEX_FILE)}|(states-\d{{6,}}|matrix-[0-9a-f]{{64}})\.safetensors)-\w{{8}}"
    rf"|{SAFETENSORS_PART}"
)
# Of a write. RuntimeError is torch's for too little memory, ValueError pydantic's.
_FAILURES = (OSError, RefusedError, MemoryError, RuntimeError, ValueError)


class RecordingWriter:
    """A new recording. Not thread-safe; a context manager, whose end writes the last shard.

    A kill loses the samples that were not in a shard yet, ``shard_bytes`` at most.

    Args:
        directory: made; refused where it holds anything.
        facts: of the run.
        shard_bytes: samples are written when they would exceed this together.

    Attributes:
        index: what has been written.
        nbytes: bytes written and waiting to be written, matrices included.
        waiting: samples that are in no shard yet.

    Raises:
        RefusedError: the directory is not empty.
        OSError: it cannot be written.
    """

    def __init__(
        self, directory: Path, facts: RecordingFacts, shard_bytes: int = DEFAULT_SHARD_BYTES
    ) -> None:
        # States tell what was in the prompts.
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise RefusedError(
                str(directory), "files in it", "a new or empty folder", "record into another folder"
            )
        # While this writer lives no recorder removes its half-written files. A file system without
        # locks lets none be removed either.
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        weakref.finalize(self, os.close, folder)
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        self.index = RecordingIndex(facts=facts)
        self._expected = Expected(
            facts.hidden_size, facts.vocab_size, facts.aux_layer_ids, max_tokens=1 << 31
        )
        self.nbytes = 0
        self.directory = directory
        self._shard_bytes = shard_bytes
        self.waiting: list[Sample] = []
        self._waiting_bytes = 0
        self._replace_index()

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.flush()

    def add_policy(self, head: PolicyHead, lm_head_ids: Tensor | None) -> None:
        """Write a policy version's tensors; equal ones are written once.

        Args:
            head: of a version that was not added before, with any R rows of lm_head.
            lm_head_ids: int [R], their ascending token ids; None when R is the vocabulary.

        Raises:
            RefusedError: added before, or a shape that does not fit the run.
            OSError: the disk is full.
        """
        facts, version = self.index.facts, head.policy_version
        rows = facts.vocab_size if lm_head_ids is None else len(lm_head_ids)
        shapes = ([rows, facts.hidden_size], [facts.vocab_size, facts.hidden_size], [rows])
        names = ("lm_head", "embed_tokens", "lm_head_bias")
        for name, tensor, wanted in zip(names, head.tensors, shapes, strict=False):
            if list(tensor.shape) != wanted or not tensor.is_floating_point():
                found = f"{tensor.dtype} {list(tensor.shape)}"
                raise RefusedError(name, found, f"floating point {wanted}", "pass the policy's own")
        if version in self.index.policies:
            raise RefusedError(
                "policy_version", version, "a version that was not added", "add each of them once"
            )
        written = dict(zip(names, map(self._write_matrix, head.tensors), strict=False))
        ids = None if lm_head_ids is None else self._write_matrix(lm_head_ids.long())
        entry = PolicyEntry(lm_head_ids=ids, **written)
        self._replace_index(policies={**self.index.policies, version: entry})

    def add(self, sample: Sample) -> None:
        """Take a sample; writes a shard when enough wait.

        Raises:
            RefusedError: the sample does not fit the run, is none that ingest would take, or its
                policy version was not added.
            OSError: the shard could not be written; its samples are lost.
        """
        check_header(sample.header, self._expected)
        check_contents(sample, self._expected)
        if (version := sample.policy_version) not in self.index.policies:
            raise RefusedError(
                "policy_version", version, sorted(self.index.policies), "call add_policy before it"
            )
        if self.waiting and self._waiting_bytes + sample.nbytes > self._shard_bytes:
            self.flush()
        self.waiting.append(sample)
        self._waiting_bytes += sample.nbytes
        self.nbytes += sample.nbytes

    def flush(self) -> None:
        """Write what waits as a shard. Raises OSError: it is lost."""
        samples, self.waiting = self.waiting, []
        nbytes, self._waiting_bytes = self._waiting_bytes, 0
        if not samples:
            return
        # Until they are written: those of a shard that fails are nowhere.
        self.nbytes -= nbytes
        name = f"states-{len(self.index.shards):06d}.safetensors"
        headers = [sample.header.SerializeToString() for sample in samples]
        tensors = {
            "headers": torch.frombuffer(bytearray(b"".join(headers)), dtype=torch.uint8),
            "header_ends": torch.tensor(list(accumulate(map(len, headers)))),
            "blocks": torch.cat([sample.block[: sample.nbytes] for sample in samples]),
            "block_ends": torch.tensor(list(accumulate(sample.nbytes for sample in samples))),
        }
        with written_whole(self.directory / name) as temporary:
            save_file(tensors, temporary)
            with temporary.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            size = temporary.stat().st_size
        entry = ShardEntry(
            file=name,
            bytes=size,
            sha256=sha256,
            samples=len(samples),
            tokens=sum(sample.tokens for sample in samples),
            policy_versions=tuple(sorted({sample.policy_version for sample in samples})),
        )
        self._replace_index(shards=(*self.index.shards, entry))
        self.nbytes += nbytes

    def _write_matrix(self, matrix: Tensor) -> str:
        sha256 = digest(matrix).hex()
        path = self.directory / matrix_file(sha256)
        if not path.exists():
            with written_whole(path) as temporary:
                save_file({"weight": matrix.detach().cpu().contiguous()}, temporary)
            self.nbytes += matrix.nbytes
        return sha256

    def _replace_index(self, **changes: object) -> None:
        index = self.index.model_copy(update=changes)
        with written_whole(self.directory / INDEX_FILE) as temporary:
            temporary.write_text(index.model_dump_json(indent=2) + "\n", encoding="utf-8")
        self.index = index


class Recorder:
    """Writes a recording for every run that is fed, ``run-000000`` and so on. Thread-safe.

    A restarted trainer begins another recording even of a run that continues: it cannot know that a
    policy version still means the same weights.

    Args:
        directory: of the recordings.
        config: [recording].
        draft: whose layers are recorded.
        draft_vocab_ids: int [draft_vocab], the lm_head rows that the bridge sends.
        counters: counts.

    Raises:
        RefusedError: the directory cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        config: RecordingConfig,
        draft: DraftShape,
        draft_vocab_ids: Tensor,
        counters: Counters,
    ) -> None:
        self._directory = directory
        self._config = config
        self._draft = draft
        self._lm_head_ids = None if draft.draft_vocab_size == draft.vocab_size else draft_vocab_ids
        self._counters = counters
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[tuple[Run, Sample]] = deque()
        self._queue_bytes = 0
        self._stopping = False
        self._run: Run | None = None
        self._writer: RecordingWriter | None = None
        self._counted = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in directory.iterdir():
                if _NAME.fullmatch(folder.name):
                    _remove_parts(folder)
            self._sum_older()
        except OSError as error:
            raise RefusedError(
                "recording.directory", error, "a folder that can be written", "set another"
            ) from error
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)

    def start(self) -> None:
        """Begin. Once only."""
        self._thread.start()

    def offer(self, run: Run, sample: Sample) -> None:
        """Hand a sample over, or shed it; without waiting for a write."""
        with self._changed:
            fits = self._queue_bytes + sample.nbytes <= self._config.queue_bytes
            if fits and not self._stopping:
                # A view would keep the sample's memory in the store until its shard is written.
                self._queue.append((run, Sample(sample.header, sample.block.clone())))
                self._queue_bytes += sample.nbytes
                self._changed.notify()
                return
        self._counters.recording_shed.labels("queue_full").inc()

    def stop(self, timeout: float) -> bool:
        """Write what was handed over; True when that was done within ``timeout`` seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping)
                if not self._queue:
                    break
                run, sample = self._queue.popleft()
                self._queue_bytes -= sample.nbytes
            if run is not self._run:
                self._guarded(self._flush)
            self._guarded(partial(self._record, run, sample), 1)
        self._guarded(self._flush)

    def _guarded(self, work: Callable[[], None], samples: int = 0) -> None:
        """Do something that may write; count what became of ``samples`` and of those waiting."""
        before = self._waiting
        try:
            work()
        except _FAILURES as error:
            # The thread goes on: a disk that is full now may have space for what comes later.
            logger.error("recorded states were not written: %s", str(error) or repr(error))
            if self._writer is not None and not self._writer.directory.is_dir():
                # Removed or moved away: the next sample begins another recording.
                self._writer = None
            self._counters.recording_shed.labels("write_failed").inc(
                before + samples - self._waiting
            )
        if self._writer is not None:
            self._counters.samples_recorded.inc(self._writer.index.samples - self._counted)
            self._counted = self._writer.index.samples

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def _record(self, run: Run, sample: Sample) -> None:
        if self._run is not run or self._writer is None:
            self._begin(run)
        writer = self._writer
        assert writer is not None
        head = None
        size = sample.nbytes
        if sample.policy_version not in writer.index.policies:
            try:
                head = run.heads.get(sample.policy_version)
            except RefusedError:
                self._counters.recording_shed.labels("policy_forgotten").inc()
                return
            size += sum(tensor.nbytes for tensor in head.tensors)
        most = self._config.capacity_bytes - writer.nbytes - size
        if self._older_bytes > most and time.monotonic() - self._summed_at >= SUM_SECONDS:
            # Some may have been taken away since.
            self._sum_older()
        if self._older_bytes > most:
            self._counters.recording_shed.labels("capacity").inc()
            return
        if head is not None:
            writer.add_policy(head, self._lm_head_ids)
        writer.add(sample)

    def _sum_older(self) -> None:
        """Of all beside the recording that is being written. Raises OSError: that is gone."""
        own = 0 if self._writer is None else _total(self._writer.directory.iterdir())
        self._older_bytes = _total(self._directory.rglob("*")) - own
        self._summed_at = time.monotonic()

    def _begin(self, run: Run) -> None:
        if self._writer is not None:
            self._older_bytes += self._writer.nbytes
        self._writer, self._counted = None, 0
        found = (_NAME.fullmatch(path.name) for path in self._directory.iterdir())
        number = max((int(match.group(1)) for match in found if match), default=-1) + 1
        facts = RecordingFacts(
            run_id=run.run_id,
            hidden_size=run.policy.hidden_size,
            vocab_size=run.policy.vocab_size,
            num_hidden_layers=run.policy.num_hidden_layers,
            aux_layer_ids=self._draft.aux_layer_ids,
            logit_scale=run.policy.logit_scale,
            logit_soft_cap=run.policy.logit_soft_cap,
        )
        folder = self._directory / f"run-{number:06d}"
        # Another trainer may have taken the number meanwhile: its folder stays its own.
        folder.mkdir(mode=0o700)
        try:
            self._writer = RecordingWriter(folder, facts, self._config.shard_bytes)
        except _FAILURES:
            # The next sample begins another one.
            with suppress(OSError):
                folder.rmdir()
            raise
        self._run = run
        logger.info("recording run %r in %s", run.run_id, folder)

    @property
    def _waiting(self) -> int:
        return 0 if self._writer is None else len(self._writer.waiting)


def _total(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def _remove_parts(folder: Path) -> None:
    """Remove what a killed writer left half-written, where that is a recording and has no writer.

    What cannot be removed stays, and takes space alone.
    """
    with suppress(OSError, RefusedError):
        read_index(folder)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in folder.iterdir():
                if _PART.fullmatch(path.name):
                    path.unlink()
                    logger.warning("removed %s, which a killed recorder left", path)
        finally:
            os.close(descriptor)
