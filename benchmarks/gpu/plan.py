"""``python3 -m benchmarks.gpu.plan``: half an hour on one GPU of a machine without an index.

``plan wheels`` runs where there is an index, beside the wheel of ``make package`` in dist/. Then
each step is one command on one warm machine, in a checkout that has the step's folders of wheels;
without a step, the table is printed. What was measured is in $OUT, or in this folder. Further
arguments go to the benchmark: ``plan smoke --device cpu --tiny``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu import bootstrap, pack

WHEELS = Path(".whl")
LOCK = bootstrap.ROOT / "deploy" / "requirements" / "cpu.lock"
VLLM = "0.32.0"  # For a newer torch; its kernels are named by torch's stable interface.
PART_MIB = 40
START_SECONDS = 20  # Of a step: wheels and imports, before the benchmark begins.

# What an image for training with torch, transformers and gRPC lacks.
TRAINER = (
    "annotated-types docstring-parser googleapis-common-protos grpcio grpcio-health-checking "
    "grpcio-reflection protobuf pydantic pydantic-core sniffio starlette typeguard "
    "typing-inspection tyro uvicorn"
)
SERVER = (
    "agent-detector anthropic apache-tvm-ffi astor blake3 cachetools cbor2 cffi compressed-tensors "
    "cryptography depyf dill dnspython email-validator fastapi httpcore2 httpx2 ijson interegular "
    "jiter jmespath jsonschema jsonschema-specifications lark llguidance lm-format-enforcer loguru "
    "mcp mcp-types mistral-common model-hosting-container-standards msgspec openai "
    "opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions "
    "opentelemetry-semantic-conventions-ai oss-harmony outlines-core partial-json-parser "
    "prometheus-fastapi-instrumentator pybase64 pycparser pydantic-extra-types pydantic-settings "
    "pyjwt python-dotenv python-json-logger python-multipart pyzmq referencing rpds-py "
    "setproctitle sse-starlette supervisor truststore watchfiles xgrammar"
)
# FlashAttention 2, other models' kernels, and the front end in Rust.
DROP = (
    "vllm/vllm_flash_attn/_vllm_fa2*",
    "vllm/_moe_C*",
    "vllm/_flash*",
    "vllm/_qutlass*",
    "vllm/vllm-rs",
    "vllm/third_party/*/include/*",
    "vllm/third_party/deep_gemm/_C_ext*",
)


class Step(NamedTuple):
    """One command: its seconds, the folders it carries, and sections; part 0 keeps parts."""

    seconds: int
    carry: tuple[str, ...] = ()
    part: int = 0
    only: str = ""


STEPS = {
    "smoke": Step(150, ("trainer",), 1, "smoke,parity,waits"),
    "training": Step(220, (), 1, "gate,training,profile,compile"),
    "memory": Step(150, (), 2, "states,memory,filled"),
    "sharing": Step(300, (), 2, "capture,run_ahead,shared"),
    "vllm-0": Step(40, ("vllm/0",)),
    "vllm-1": Step(40, ("vllm/1",)),
    "vllm-2": Step(60, ("vllm/2",)),
    "engine": Step(150, ("server",), 3, "vllm_engine"),
    "server": Step(420, (), 3, "vllm_server"),
    "more": Step(180, (), 3, "vllm_sleep,vllm_fp8"),
}


def run(name: str, more: Sequence[str]) -> int:
    """Run a step; the exit status is the benchmark's, or that of ``bootstrap``."""
    step = STEPS[name]
    if step.carry:
        folders = [str(WHEELS / folder) for folder in step.carry]
        status = bootstrap.main(["--wheels" if step.part else "--parts", *folders])
        if not step.part:
            return 0 if status == bootstrap.INCOMPLETE and name != "vllm-2" else status
    out = Path(os.environ.get("OUT", ".")) / f"{name}.json"
    options = ["--part", str(step.part), "--only", step.only, "--json", str(out)]
    options += ["--seconds", str(step.seconds - START_SECONDS), *more]
    return bootstrap.main(["--", "-m", "benchmarks.gpu", *options])


def wheels() -> None:
    """Download and pack what the steps carry.

    Raises FileNotFoundError: the package's wheel was not made. Raises
    subprocess.CalledProcessError: pip failed.
    """
    own = max(Path("dist").glob("*.whl"), key=lambda path: path.stat().st_mtime, default=None)
    if own is None:
        raise FileNotFoundError("found no dist/*.whl. Next step: make package")
    shutil.rmtree(WHEELS, ignore_errors=True)
    for folder, names in (("trainer", TRAINER), ("server", SERVER)):
        _download(WHEELS / folder, _pinned(names))
    shutil.copy(own, WHEELS / "trainer")
    _download(WHEELS / "whole", [f"vllm=={VLLM}"])
    (whole,) = (WHEELS / "whole").glob("*.whl")
    pack.slim(whole, WHEELS / "slim", DROP)
    count = pack.split(WHEELS / "slim", WHEELS / "vllm", PART_MIB << 20)
    print(f"{count} folders of parts, at most {PART_MIB} MiB each")


def _pinned(names: str) -> list[str]:
    """The names, separated by blanks, with the versions of the lock file."""
    versions = dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", LOCK.read_text(), re.MULTILINE))
    return [f"{name}=={versions[name]}" for name in names.split()]


def _download(folder: Path, requirements: Sequence[str]) -> None:
    options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "-d", str(folder)]
    for glibc in ("1", "2014", "_2_17", "_2_27", "_2_28", "_2_31", "_2_34"):
        options += ["--platform", f"manylinux{glibc}_x86_64"]
    pip = [sys.executable, "-m", "pip", "-q", "download"]
    subprocess.run([*pip, *options, *requirements], check=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu.plan", description=(__doc__ or "").split("\n\n", 1)[1]
    )
    parser.add_argument("step", nargs="?", choices=["wheels", *STEPS], help="none: the table")
    parser.add_argument("more", nargs=argparse.REMAINDER, help="arguments of the benchmark")
    chosen = parser.parse_args(argv)
    if chosen.step == "wheels":
        wheels()
    elif chosen.step:
        return run(chosen.step, chosen.more)
    else:
        minutes = 0.0
        for name, step in STEPS.items():
            carry = " ".join(str(WHEELS / folder) for folder in step.carry) or "-"
            print(f"{minutes:4.1f} min  {name:9} {step.seconds:4} s  carry {carry:14} {step.only}")
            minutes += step.seconds / 60
    return 0


if __name__ == "__main__":
    sys.exit(main())
