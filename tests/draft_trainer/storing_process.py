"""Kills a trainer's store over and over: ``python -m tests.draft_trainer.storing_process``.

A worker does what ingest, training and the state writer do, in one thread: it accepts samples,
tells when they are acknowledged, draws batches that the "weights" count, saves the weights every
now and then. It is killed with SIGKILL at any instant, and a new one goes on with what it finds.
The figures at the end are printed as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from draft_trainer.ingest.store import SampleStore
from tests.draft_trainer.samples import is_intact, open_store, put, received, rows_of, times_drawn

EPOCHS = 2


class Weights:
    """The record of training: the last draw, how often it saw each sample. Saved by a rename."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "weights.json"
        found: list[Any] = json.loads(self._path.read_text()) if self._path.exists() else [0, {}]
        self.draws: int = found[0]
        self.seen: Counter[str] = Counter(found[1])

    def train(self, store: SampleStore, tokens: int) -> bool:
        drawn = store.draw("run", tokens)
        for sample in drawn.samples:
            assert is_intact(sample), sample.sample_id
            self.seen[sample.sample_id] += 1
        self.draws = drawn.number or self.draws
        return bool(drawn.samples)

    def save(self, store: SampleStore) -> None:
        temporary = self._path.with_suffix(".part")
        temporary.write_text(json.dumps([self.draws, self.seen]))
        temporary.rename(self._path)
        store.saved(self.draws)


def opened(folder: Path, capacity: int, weights: Weights) -> SampleStore:
    store = open_store(folder / "store", capacity, max_epochs=EPOCHS)
    store.rewind(weights.draws, 0)
    if store.run is None:
        store.begin("run", {})
    return store


def work(folder: Path, capacity: int, number: int, acknowledged: list[str], pipe: int) -> None:
    """Until it is killed. A line is an acknowledged id, after ``accept`` has returned."""
    rng = random.Random(number)
    weights = Weights(folder)
    store = opened(folder, capacity, weights)
    for name in rng.sample(acknowledged, min(5, len(acknowledged))):
        assert not put(store, name), f"{name} was accepted again"
    count = 0
    while True:
        action = rng.random()
        if action < 0.6:
            names = [f"{number}-{count + i}" for i in range(rng.randrange(1, 4))]
            count += len(names)
            samples = [received(store, name, tokens=rng.randrange(4, 32)) for name in names]
            assert all(store.accept("run", samples))
            del samples
            os.write(pipe, "".join(f"{name}\n" for name in names).encode())
        elif action < 0.9:
            weights.train(store, rng.randrange(1, 100))
        else:
            weights.save(store)


def killed(folder: Path, capacity: int, number: int, acknowledged: list[str]) -> list[str]:
    """Start a worker, kill it at a random instant; what it acknowledged."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        try:
            work(folder, capacity, number, acknowledged, write)
        finally:
            # Only an error gets here.
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    os.close(write)
    lines = _lines(read)
    found = [
        line for _, line in zip(range(random.Random(number).randrange(60)), lines, strict=False)
    ]
    os.kill(process, signal.SIGKILL)
    found += lines
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status), "the worker ended with an error"
    return found


def _lines(pipe: int) -> Iterator[str]:
    with os.fdopen(pipe) as file:
        for line in file:
            if line.endswith("\n"):
                yield line.strip()


def main() -> None:
    """Command line entry: folder, number of kills, capacity in bytes."""
    torch.set_num_threads(1)
    folder, kills, capacity = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    acknowledged: list[str] = []
    for number in range(kills):
        acknowledged += killed(folder, capacity, number, acknowledged)
    weights = Weights(folder)
    store = opened(folder, capacity, weights)
    times = times_drawn(store, acknowledged)
    held = {name: drawn for name, drawn in times.items() if drawn < EPOCHS}
    counts = store.counts()
    figures = {
        "kills": kills,
        "acknowledged": len(acknowledged),
        "forgotten": sum(not store.seen("run", name) for name in acknowledged),
        # Held or done with, as the weights say.
        "lost": sum(name not in held and weights.seen[name] < EPOCHS for name in acknowledged),
        "miscounted": sum(weights.seen[name] != drawn for name, drawn in held.items()),
        "unsaved": counts.unsaved,
        "nbytes": counts.nbytes,
        "files": sum(p.stat().st_size for p in (folder / "store").rglob("*") if p.is_file()),
        "rows": rows_of(store),
    }
    while weights.train(store, 1000):
        pass
    weights.save(store)
    figures["trained_too_often"] = sum(times > EPOCHS for times in weights.seen.values())
    figures["trained_too_little"] = sum(weights.seen[name] < EPOCHS for name in acknowledged)
    figures["left"] = store.counts().nbytes
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
