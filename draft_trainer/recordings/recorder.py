"""Keeps accepted samples on disk beside the service, for ``draft-trainer init`` and ``fit``.

Ingest offers a sample in O(1) with a deadline; one thread writes. Samples beyond what it can write
are shed and counted: training has them either way.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from draft_trainer.config import RecordingConfig
from draft_trainer.counters import Counters
from draft_trainer.drafters import DraftShape
from draft_trainer.ingest.run import Run
from draft_trainer.recordings.recording import RecordingFacts, RecordingWriter
from slipstream.errors import RefusedError
from slipstream.sample import Sample

logger = logging.getLogger(__name__)
_NAME = re.compile(r"run-(\d{6,})")


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
            self._older_bytes = sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())
        except OSError as error:
            raise RefusedError(
                "recording.directory", error, "a folder that can be written", "set another"
            ) from error
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)

    def start(self) -> None:
        """Begin. Once only."""
        self._thread.start()

    def offer(self, run: Run, sample: Sample) -> None:
        """Hand a sample over, or shed it; within ``recording.offer_timeout_s`` either way."""
        if not self._changed.acquire(timeout=self._config.offer_timeout_s):
            self._counters.recording_shed.labels("busy").inc()
            return
        try:
            fits = self._queue_bytes + sample.nbytes <= self._config.queue_bytes
            if fits and not self._stopping:
                self._queue.append((run, sample))
                self._queue_bytes += sample.nbytes
                self._changed.notify()
                return
        finally:
            self._changed.release()
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
        except OSError as error:
            # A full disk must not end training; what comes later may fit.
            logger.error("recorded states were not written: %s", error)
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
        if self._older_bytes + writer.nbytes + size > self._config.capacity_bytes:
            self._counters.recording_shed.labels("capacity").inc()
            return
        if head is not None:
            writer.add_policy(head, self._lm_head_ids)
        writer.add(sample)

    def _begin(self, run: Run) -> None:
        if self._writer is not None:
            self._older_bytes += self._writer.nbytes
        self._writer, self._counted = None, 0
        found = (_NAME.fullmatch(path.name) for path in self._directory.iterdir())
        number = max((int(match.group(1)) for match in found if match), default=-1) + 1
        facts = RecordingFacts(
            run_id=run.run_id,
            hidden_size=run.sizes.hidden_size,
            vocab_size=run.sizes.vocab_size,
            num_hidden_layers=run.sizes.num_hidden_layers,
            aux_layer_ids=self._draft.aux_layer_ids,
            logit_scale=run.sizes.logit_scale,
            logit_soft_cap=run.sizes.logit_soft_cap,
        )
        folder = self._directory / f"run-{number:06d}"
        self._writer = RecordingWriter(folder, facts, self._config.shard_bytes)
        self._run = run
        logger.info("recording run %r in %s", run.run_id, folder)

    @property
    def _waiting(self) -> int:
        return 0 if self._writer is None else len(self._writer.waiting)
