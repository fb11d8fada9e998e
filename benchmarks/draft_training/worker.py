"""A contestant's process: builds the contestant, then takes steps when it is told to."""

from __future__ import annotations

import ctypes
import gc
import importlib
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.draft_training.case import Case, make_tensors
from benchmarks.draft_training.contestants import MODULES, Contestant, build
from benchmarks.workers import answers, serve


class Worker:
    """A contestant, and the memory that the process had before there was one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.contestant: Contestant | None = None
        self.cuda = False
        importlib.import_module(MODULES[name])
        torch.randn(64, 64) @ torch.randn(64, 64)
        self.idle = _memory("VmRSS")

    def load(self, case: dict[str, Any], setting: str) -> dict[str, Any]:
        """Build the contestant; its inputs and weights count as its memory."""
        self.contestant = None
        gc.collect()
        wanted = Case(**case)
        self.cuda = wanted.device == "cuda"
        self.contestant = build(self.name, wanted, make_tensors(wanted), setting)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return {}

    def step(self) -> dict[str, Any]:
        """Wall and CPU seconds of one step, peak bytes while it ran, the loss."""
        assert self.contestant is not None
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")
        cpu, wall = time.process_time(), time.perf_counter()
        loss = self.contestant.step()
        if self.cuda:
            torch.cuda.synchronize()
        return {
            "wall": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
            "memory": torch.cuda.max_memory_allocated()
            if self.cuda
            else _memory("VmHWM") - self.idle,
            "loss": loss,
        }


def _memory(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, field
    return int(found[1]) * 1024


def main() -> None:
    """``python -m benchmarks.draft_training.worker NAME``."""
    answer = answers()
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    worker = Worker(sys.argv[1])
    greeting = {"torch": torch.__version__}
    serve(answer, greeting, {"load": worker.load, "step": worker.step})


if __name__ == "__main__":
    main()
