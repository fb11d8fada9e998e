"""A look at what this machine lacks for a part of the tests, with what to type."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from pathlib import Path

from tests.rollout_server.live import TRITON

VLLM_GIB = 12
"""Memory for three vLLM servers of the tests and what runs beside them."""
_FOUND = "SLIPSTREAM_TESTS_LACK"


def lacking() -> dict[str, str]:
    """Return what is missing with the next step: "libnuma", "memory", "compiler", "triton".

    Workers are told what was found at the start: later, tests themselves take memory.
    """
    if _FOUND not in os.environ:
        os.environ[_FOUND] = json.dumps(_look())
    found: dict[str, str] = json.loads(os.environ[_FOUND])
    return found


def _look() -> dict[str, str]:
    found = {}
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        found["libnuma"] = "vLLM needs libnuma. Next step: apt-get install libnuma1"
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    if kib < VLLM_GIB << 20:
        found["memory"] = (
            f"vLLM needs {VLLM_GIB} GiB of free memory, found {kib / 1024**2:.1f}. Next step: end "
            "what takes the rest"
        )
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        found["compiler"] = "the kernels need a C compiler. Next step: apt-get install g++"
    if not (TRITON / ".installed").is_file():
        found["triton"] = "Model Runner V2 needs Triton. Next step: make test, with an index"
    return found
