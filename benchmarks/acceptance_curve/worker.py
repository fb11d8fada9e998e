"""A contestant's process: trains up to a number of tokens when told to, and writes the draft."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.acceptance_curve.contestants import CONTESTANTS, build
from benchmarks.acceptance_curve.data import TrainingData
from benchmarks.workers import answers, serve
from draft_trainer.drafters.eagle3.checkpoint import save_draft


class Worker:
    """A trainer with a clock that runs during its steps only.

    Args:
        name: of the contestant.
        data: what it trains on.
        total_tokens: of the whole run.
    """

    def __init__(self, name: str, data: TrainingData, total_tokens: int) -> None:
        [contestant] = [one for one in CONTESTANTS if one.name == name]
        total_steps = data.steps_to(total_tokens)
        # Thrown away, with what a library does once per process.
        first = build(contestant, data, total_steps)
        first.step(first.prepare(next(data.steps())))
        self._trainer = build(contestant, data, total_steps)
        self._data = data
        self._samples = data.steps()
        self._spent: dict[str, Any] = {"tokens": 0, "steps": 0, "wall": 0.0, "cpu": 0.0}

    def train(self, tokens: int, folder: str) -> dict[str, Any]:
        """Train up to ``tokens`` in all; returns tokens, steps, wall and CPU seconds in all."""
        spent = self._spent
        while spent["tokens"] < tokens:
            samples = next(self._samples)
            batch = self._trainer.prepare(samples)
            cpu, wall = time.process_time(), time.perf_counter()
            self._trainer.step(batch)
            spent["wall"] += time.perf_counter() - wall
            spent["cpu"] += time.process_time() - cpu
            spent["tokens"] += sum(sample.tokens for sample in samples)
            spent["steps"] += 1
        Path(folder).mkdir(parents=True, exist_ok=True)
        head = self._trainer.head()
        save_draft(Path(folder), head)
        return spent


def main() -> None:
    """Argument: JSON with name, states, initial, batch_tokens, seed and total_tokens."""
    answer = answers()
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    data = TrainingData(
        Path(given["states"]), Path(given["initial"]), given["batch_tokens"], given["seed"]
    )
    worker = Worker(given["name"], data, given["total_tokens"])
    serve(answer, {}, {"train": worker.train})


if __name__ == "__main__":
    main()
