"""``python -m benchmarks.publish_faults``: publishes while something fails."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import end_on_sigterm, options
from benchmarks.publish_faults.drills import Row, drill
from benchmarks.publish_faults.faults import FAULTS, Fault, run
from benchmarks.publish_faults.rig import Rig
from benchmarks.publish_faults.vllm_rig import VLLM_FAULTS, VllmRig

SERVERS = 3
"""Without --vllm."""


def main(argv: list[str] | None = None) -> int:
    """Command line entry; the exit status is 0 only if the fleet recovered every time."""
    chosen = _parse(argv)
    end_on_sigterm()
    faults: Sequence[Fault] = VLLM_FAULTS if chosen.vllm else FAULTS
    with tempfile.TemporaryDirectory() as folder:
        rig = VllmRig(Path(folder)) if chosen.vllm else Rig(Path(folder), SERVERS)

        def inflicted(fault: Fault, turn: int) -> str:
            run(rig, fault, turn)
            return "right"

        try:
            servers = "2, real vLLM" if chosen.vllm else f"{SERVERS}, over an engine in memory"
            rows = {fault.name: Row(partial(inflicted, fault)) for fault in faults}
            return drill(chosen, servers, rows)
        finally:
            rig.stop()


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options(
        "publish_faults",
        "Publishes releases to rollout servers while processes are killed and data is damaged, "
        "each a real process with the product's own control plane over an engine in memory. After "
        "every fault all servers must serve one release, the registry must be readable and the "
        "next publish must succeed.",
    )
    parser.add_argument("--vllm", action="store_true", help="two real vLLM servers under load")
    parser.add_argument("--runs", type=int, help="in all; the rows take turns (150; vLLM: 14)")
    chosen = parser.parse_args(argv)
    chosen.runs = chosen.runs or (2 * len(VLLM_FAULTS) if chosen.vllm else 150)
    return chosen


if __name__ == "__main__":
    sys.exit(main())
