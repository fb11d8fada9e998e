"""Checks of the set-up that give a sentence instead of a stack trace.

``python deploy/check_env.py python`` checks the interpreter,
``python deploy/check_env.py torch`` whether torch imports. Standard library only:
the first runs before anything is installed.
"""

import platform
import subprocess
import sys


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


if __name__ == "__main__":
    checks = {"python": check_python, "torch": check_torch}
    complaint = checks[sys.argv[1]]()
    if complaint:
        sys.exit(complaint)
