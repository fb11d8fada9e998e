"""What this machine lacks for a part of the tests, by name and with what to type."""

from __future__ import annotations

import ctypes
import shutil
from functools import cache
from pathlib import Path

from tests.rollout_server.live import TRITON

VLLM_GIB = 8
"""Memory for two vLLM servers of the tests and what runs beside them."""


@cache
def lacking() -> dict[str, str]:
    """What is missing and the next step, by what it is missing for: "vllm", "kernels", "V2"."""
    found = {}
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        found["vllm"] = "vLLM needs libnuma. Next step: apt-get install libnuma1"
    available = _available_gib()
    if available < VLLM_GIB:
        found["vllm"] = (
            f"vLLM needs {VLLM_GIB} GiB of free memory, found {available:.1f}. Next step: end what "
            "takes the rest"
        )
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        found["kernels"] = "the trainer's kernels need a C compiler. Next step: apt-get install g++"
    if not TRITON.is_dir():
        found["V2"] = "Model Runner V2 needs Triton's interpreter. Next step: make test installs it"
    return found


def _available_gib() -> float:
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kib / 1024**2
