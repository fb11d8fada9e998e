"""``python3 -m benchmarks.gpu.bootstrap``: packages of a machine without an index, and a command.

    python3 -m benchmarks.gpu.bootstrap --wheels .whl/a -- -m benchmarks.gpu --part 1

Needs Python's standard library and pip alone. Wheels are installed outside of the checkout, where
they stay for later calls on the same machine. The checkout comes first on PYTHONPATH; the wheel of
``make package`` has ``slipstream`` with its generated gRPC code, and the entry points by which vLLM
finds the rollout server.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.pack import join

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(tempfile.gettempdir()) / "slipstream-site"
INCOMPLETE = 3
GENERATED = "slipstream/v1/release_pb2.py"
_FACTS = """import importlib.metadata as m
names = "torch triton grpcio protobuf transformers slipstream-rl vllm".split()
print(*(f"{d.name} {d.version}" for d in m.distributions() if d.name in names), sep=", ")
"""


def install(wheels: Path, target: Path) -> None:
    """Install a folder's wheels, without what they need, in place of what was in ``target``.

    Raises FileNotFoundError: the folder holds no wheel. Raises subprocess.CalledProcessError: pip
    failed, and said why; ``target`` is as before.
    """
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise FileNotFoundError(
            f"found no *.whl in {wheels.resolve()}. Next step: fill it where there is an index "
            "(`python -m benchmarks.gpu.plan wheels`), and carry it here"
        )
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target"]
    subprocess.run([*pip, *options, str(partial), *files], check=True)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def collect(parts: Path, site: Path) -> dict[str, str]:
    """Keep the parts of ``pack split`` that are here; with the last of them, install the wheels.

    Returns:
        Why a wheel is not complete yet, by its name.
    """
    kept = site / "parts"
    kept.mkdir(parents=True, exist_ok=True)
    for path in parts.rglob("*"):
        if path.is_file():
            shutil.copy(path, kept)
    skipped = join(kept, kept / "wheels")
    if not skipped:
        install(kept / "wheels", site / "joined")
        shutil.rmtree(kept)
    return skipped


def environment(site: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Make the variables of a command in the checkout.

    Raises FileNotFoundError: no gRPC code was generated here or came in a wheel.
    """
    folders = sorted(each for each in site.glob("*") if any(each.glob("*.dist-info")))
    paths = [ROOT, *((ROOT / "proto",) if (ROOT / "proto" / GENERATED).exists() else ()), *folders]
    if not any((path / GENERATED).exists() for path in paths):
        raise FileNotFoundError(
            f"found no {GENERATED} in {site}, expected the wheel of `make package`. "
            "Next step: carry it in a folder of --wheels"
        )

    def first(name: str, values: Sequence[Path]) -> str:
        return os.pathsep.join([*map(str, values), *filter(None, [given.get(name)])])

    return {
        **given,
        "PYTHONPATH": first("PYTHONPATH", paths),
        "PATH": first("PATH", [folder / "bin" for folder in folders]),
        "PIP_NO_INDEX": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; the exit status is the command's, or 3 while a part is missing."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu.bootstrap")
    add = parser.add_argument
    add("--site", type=Path, default=SITE, help="where packages are installed (%(default)s)")
    add("--wheels", type=Path, nargs="+", default=[], help="folders of wheels")
    add("--parts", type=Path, help="folder with some of the folders of `pack split`")
    add("command", nargs="*", help="arguments of the interpreter, after --; none: versions")
    chosen = parser.parse_args(argv)
    chosen.site.mkdir(parents=True, exist_ok=True)
    for folder in chosen.wheels:
        install(folder, chosen.site / folder.name)
    missing = collect(chosen.parts, chosen.site) if chosen.parts else {}
    for name, reason in missing.items():
        print(f"not installed yet: {name}: {reason}")
    if missing:
        return INCOMPLETE
    command = [sys.executable, *(chosen.command or ["-c", _FACTS])]
    sys.stdout.flush()
    return subprocess.run(command, env=environment(chosen.site, os.environ), cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
