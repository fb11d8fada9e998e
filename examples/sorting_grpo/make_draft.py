"""Makes the sorting example's draft: ``python -m examples.sorting_grpo.make_draft --out DIR``."""

from __future__ import annotations

from pathlib import Path

from examples.arithmetic_grpo.make_draft import main
from examples.sorting_grpo import task

if __name__ == "__main__":
    main(task, Path(__file__).parent / "policy", None, vocabulary=64)
