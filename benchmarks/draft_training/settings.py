"""Which of its own settings each peer runs with: the fastest that it offers on the device."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.draft_training.case import Case
from benchmarks.draft_training.process import WorkerError, WorkerProcess

# All that is tried, the fastest first. "batched": all rows in one pass; "summed": row after row,
# the gradients summed, which is gradient accumulation with one sequence at a time. Ours: its
# ``max_batch_tokens``.
OFFERED: dict[str, dict[str, tuple[str, ...]]] = {
    "speculators": {
        "cpu": ("sdpa summed", "sdpa packed"),
        "cuda": ("simple_flex_attention packed", "sdpa packed"),
    },
    "specforge": {
        "cpu": ("sdpa full summed", "sdpa full batched", "sdpa compact summed"),
        "cuda": ("flex_attention full batched", "flex_attention compact batched"),
    },
    "modelopt": {
        "cpu": (
            "sdpa plain summed",
            "sdpa plain batched",
            "eager plain summed",
            "sdpa compiled summed",
        ),
        "cuda": ("sdpa compiled batched", "flex_attention compiled batched"),
    },
    "ours": {
        "cpu": (
            "1024 tokens a pass",
            "512 tokens a pass",
            "1024 tokens a pass plain",
            "2048 tokens a pass",
            "4096 tokens a pass",
        ),
        "cuda": ("4096 tokens a pass",),
    },
    "floor": {"cpu": ("best kernel",), "cuda": ("best kernel",)},
}


def default_setting(name: str, case: Case) -> str:
    """The one that was fastest when all were tried."""
    # Two hundredths slower than 1024, and the leanest of all: see docs/benchmarks.md.
    if name == "ours" and case.device == "cpu" and case.dtype == "float32":
        return "512 tokens a pass"
    return OFFERED[name][case.device][0]


def tune(
    name: str, start: Callable[[], WorkerProcess], case: Case, say: Callable[[str], None]
) -> str:
    """Try three steps of every setting (the first may compile); the fastest by its quickest step.

    Args:
        name: of the peer.
        start: makes a worker process of it.
        case: to try on.
        say: told how long each took, or why it does not run.
    """
    took: dict[str, float] = {}
    for setting in OFFERED[name][case.device]:
        worker = start()
        try:
            worker.load(case, setting)
            clock = "cpu" if case.device == "cpu" else "wall"
            took[setting] = min(worker.step()[clock] for _ in range(3))
            say(f"{case.label}: {name} ({setting}) {took[setting]:.3f} s")
        except WorkerError as error:
            say(f"{case.label}: {name} ({setting}) does not run here: {error}")
        finally:
            worker.close()
    return min(took, key=lambda setting: took[setting])
