"""What a step of ours costs over the number of tokens and of TTT steps."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.draft_training.case import SHAPES
from benchmarks.draft_training.process import WorkerProcess
from benchmarks.draft_training.settings import default_setting

TOKENS = (512, 1024, 2048, 4096, 8192)
STEPS = (1, 2, 3, 5, 7)
WINDOW = 512


def sweep(
    device: str, core: int, rounds: int, log: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every T and K at the head of case A (of 8B on a GPU) in bfloat16.

    T tokens come once in windows of 512, as long rollouts are trained on, and once as a single
    sequence, whose attention is quadratic.
    """
    base = dataclasses.replace(SHAPES["8B" if device == "cuda" else "A"], dtype="bfloat16")
    worker = WorkerProcess("ours", Path(sys.executable), core if device == "cpu" else None, log)
    points = []
    try:
        for windowed in (True, False):
            for tokens in TOKENS:
                for steps in STEPS:
                    rows = tokens // WINDOW if windowed else 1
                    case = dataclasses.replace(
                        base, rows=rows, tokens=tokens // rows, ttt_steps=steps, device=device
                    )
                    worker.load(case, default_setting("ours", case))
                    worker.step()
                    answers = [worker.step() for _ in range(rounds)]
                    seconds = statistics.median(answer["wall"] for answer in answers)
                    points.append(
                        {
                            "windowed": windowed,
                            "tokens": tokens,
                            "ttt_steps": steps,
                            "seconds": seconds,
                            "seconds_per_token_step": seconds / (tokens * steps),
                            "peak_memory_bytes": max(answer["memory"] for answer in answers),
                        }
                    )
                    say(f"{rows} x {case.tokens} tokens, K = {steps}: {seconds:.3f} s")
    finally:
        worker.close()
    return points


def sweep_table(points: Sequence[dict[str, Any]]) -> str:
    """Microseconds per token and TTT step, and seconds in brackets."""
    lines = []
    for windowed in (True, False):
        form = f"windows of {WINDOW}" if windowed else "one sequence"
        lines.append(f"\nus per (token * TTT step), and seconds of the step; T tokens in {form}")
        lines.append(f"{'T':>6}" + "".join(f"{f'K = {steps}':>18}" for steps in STEPS))
        for tokens in TOKENS:
            row = [p for p in points if p["windowed"] == windowed and p["tokens"] == tokens]
            cells = [f"{p['seconds_per_token_step'] * 1e6:.1f} ({p['seconds']:.3f})" for p in row]
            lines.append(f"{tokens:>6}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)
