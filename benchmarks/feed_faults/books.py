"""Compares what was acknowledged with what the trainer's sample index and its weights have."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from benchmarks.feed_faults.processes import ANSWERED, CAPTURED, STEPS
from draft_trainer.ingest.database import FILE, key_of
from slipstream.v1 import draft_trainer_pb2 as pb

ACCEPTED, DUPLICATE = str(pb.ACK_STATUS_ACCEPTED), str(pb.ACK_STATUS_DUPLICATE)


class Records:
    """The files that the policy processes write, read on from where they were read last.

    Attributes:
        anchors: of every sample that was captured, by its id.
        accepted: how often each sample was answered with "accepted".
        acknowledged: samples that the trainer said it has.
        recognised: answers that said that a sample was there before.
        refused: refusals, by field.
        repeated: answers that were delivered a second time.
        steps: seconds of each step, of the bridge's calls in it, and of its weight sync.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: Counter[str] = Counter()
        self.anchors: dict[str, int] = {}
        self.accepted: Counter[str] = Counter()
        self.acknowledged: dict[str, None] = {}
        self.recognised = 0
        self.refused: Counter[str] = Counter()
        self.repeated = 0
        self.steps: list[tuple[float, float, float]] = []

    def refresh(self) -> None:
        """Take in what was written meanwhile."""
        for name, status, field in self._lines(ANSWERED):
            self.answer(name, status, field)
        for name, anchors in self._lines(CAPTURED):
            self.anchors[name] = int(anchors)
        for whole, own, synced in self._lines(STEPS):
            self.steps.append((float(whole), float(own), float(synced)))

    def answer(self, name: str, status: str, field: str) -> None:
        """One answer of the trainer."""
        if status == "again":
            self.repeated += 1
        elif status in (ACCEPTED, DUPLICATE):
            self.accepted[name] += status == ACCEPTED
            self.recognised += status == DUPLICATE
            self.acknowledged[name] = None
        else:
            self.refused[field] += 1

    def _lines(self, name: str) -> Iterator[list[str]]:
        path = self._folder / name
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read[name])
            for line in file:
                if line.endswith(b"\n"):
                    self._read[name] += len(line)
                    yield line.decode().split()


@dataclass(frozen=True)
class _Row:
    held_out: bool
    times_drawn: int


@dataclass(frozen=True)
class Audit:
    """The errors that were found.

    Attributes:
        lost: acknowledged samples that the trainer does not have; where it drained, those that were
            not trained on in every epoch too.
        twice: samples that were accepted twice, or trained on too often.
        held: rows of the sample index.
    """

    lost: list[str]
    twice: list[str]
    held: int


class Books:
    """Compares. One for a whole table.

    Args:
        records: of the policy.
        run_id: of the run.
        epochs: replay.max_epochs.
        scratch: folder for copies of it.
    """

    def __init__(self, records: Records, run_id: str, epochs: int, scratch: Path) -> None:
        self._records = records
        self._run_id = run_id
        self._epochs = epochs
        self._scratch = scratch
        self._keys: dict[str, bytes] = {}

    def audit(self, folder: Path, drained: bool = False) -> Audit:
        """Look into the sample index of a trainer that is stopped, was killed or has ended.

        Args:
            folder: of its samples.
            drained: everything was trained on as often as it ever is, and saved.

        Raises:
            AssertionError: SQLite finds it damaged, or a row is of no captured sample.
        """
        self._records.refresh()
        rows = self._rows(folder)
        lost, twice = [], [n for n, times in self._records.accepted.items() if times > 1]
        for name in self._records.acknowledged:
            row = rows.get(self._key(name))
            if row is None or (drained and row.times_drawn < self._epochs and not row.held_out):
                lost.append(name)
        names = {self._key(name): name for name in self._records.anchors}
        assert rows.keys() <= names.keys(), "samples are indexed that were not captured"
        twice += [names[key] for key, row in rows.items() if row.times_drawn > self._epochs]
        return Audit(lost, twice, len(rows))

    def weights(self, registry: Path, folder: Path) -> tuple[int, int]:
        """Anchors that the weights were trained on, by their own count, and by the index.

        Of a trainer that drained and ended: all but the held-out samples were trained on, in
        every epoch.
        """
        newest = max((registry / "training-state").glob("state-*.safetensors"))
        seen = int(load_file(newest)["counter.anchors_trained"])
        names = {self._key(name): name for name in self._records.anchors}
        expected = sum(
            self._epochs * self._records.anchors[names[key]]
            for key, row in self._rows(folder).items()
            if not row.held_out
        )
        return seen, expected

    def _rows(self, folder: Path) -> dict[bytes, _Row]:
        """The index's rows, by key."""
        # A copy: reading in place would change the files that the next trainer finds.
        for path in folder.glob(f"{FILE}*"):
            shutil.copyfile(path, self._scratch / path.name)
        try:
            with closing(sqlite3.connect(self._scratch / FILE)) as database:
                (verdict,) = database.execute("PRAGMA quick_check").fetchone()
                assert verdict == "ok", f"damaged index: {verdict}"
                query = "SELECT key, held_out, times_drawn FROM samples"
                return {
                    key: _Row(bool(held_out), times_drawn)
                    for key, held_out, times_drawn in database.execute(query)
                }
        finally:
            for path in self._scratch.glob(f"{FILE}*"):
                path.unlink()

    def _key(self, name: str) -> bytes:
        if name not in self._keys:
            self._keys[name] = key_of(self._run_id, name)
        return self._keys[name]


def sample_folder(registry: Path) -> Path:
    """Return the folder in which the trainer of this registry keeps its samples."""
    return registry / "samples"
