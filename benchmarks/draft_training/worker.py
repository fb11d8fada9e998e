"""A contestant's process: reads commands, one per line, and answers each with a line of JSON.

    load {"case": {...}, "setting": "..."}   builds the contestant
    step                                     one training step
    profile                                  one more, with the time of its parts
    quit

Between commands it is blocked on a read. Whatever the contestant prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.draft_training.breakdown import profile
from benchmarks.draft_training.case import Case, make_tensors
from benchmarks.draft_training.contestant import MODULES, Contestant, build


class Worker:
    """State of the process: a contestant, and the memory it had before there was one."""

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
        return {"ok": True}

    def step(self) -> dict[str, Any]:
        """Wall and CPU seconds of one step, and the peak of memory while it ran, in bytes."""
        assert self.contestant is not None
        _forget_peak(self.cuda)
        cpu, wall = time.process_time(), time.perf_counter()
        loss = self.contestant.step()
        if self.cuda:
            torch.cuda.synchronize()
        answer = {
            "wall": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
            "memory": torch.cuda.max_memory_allocated()
            if self.cuda
            else _memory("VmHWM") - self.idle,
            "loss": loss,
        }
        detail = getattr(self.contestant, "detail", None)
        return answer | ({"detail": detail} if detail else {})

    def profile(self) -> dict[str, Any]:
        """Where the time of a step goes, see ``breakdown.profile``."""
        assert self.contestant is not None
        return profile(self.contestant.step, self.cuda)


def _memory(field: str) -> int:
    """A field of the kernel's account of this process, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, field
    return int(found[1]) * 1024


def _forget_peak(cuda: bool) -> None:
    """Start the peak anew, from what is resident now."""
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """``python -m benchmarks.draft_training.worker NAME``."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    worker = Worker(sys.argv[1])
    print(json.dumps({"ok": True, "torch": torch.__version__}), file=answers)
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "load": worker.load,
        "step": worker.step,
        "profile": worker.profile,
    }
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "quit":
            return
        print(json.dumps(commands[command](**json.loads(argument or "{}"))), file=answers)


if __name__ == "__main__":
    main()
