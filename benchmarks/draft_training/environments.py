"""A virtual environment per peer, beside this project's own and never inside it.

A peer must run on the torch that ours runs on, or the comparison would be one of torch builds. So
its environment holds the peer and the packages whose versions it needs, installed without their
dependencies, and a .pth file that adds this interpreter's packages behind them: torch, numpy and
the rest come from there.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import torch

# Pinned, so that a figure can be repeated. The first of each is the peer. SpecForge asks for torch
# 2.11 and runs unchanged on later ones; it and ModelOpt need a transformers older than ours.
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "speculators": (
        "speculators==0.9.0",
        "hs-connectors==0.9.0",
        "datasets==5.1.0",
        "dill==0.4.1",
        "multiprocess==0.70.19",
        "pandas==3.1.1",
        "pyarrow==26.0.1",
        "python-dateutil==4.0.0",
        "six==1.17.0",
        "xxhash==4.1.0",
    ),
    "specforge": (
        "specforge==0.2.0",
        "transformers==5.8.1",
        "tokenizers==0.22.2",
        "huggingface-hub==1.33.0",
        "triton==3.9.0",
    ),
    "modelopt": (
        "nvidia-modelopt==0.47.0",
        "transformers==5.14.1",
        "tokenizers==0.22.2",
        "huggingface-hub==1.33.0",
        "omegaconf==2.4.0",
        "antlr4-python3-runtime==4.9.3",
        "pulp==3.3.2",
        "nvidia-ml-py==13.615.71",
    ),
}


def default_directory() -> Path:
    """Under the user's cache."""
    return Path.home() / ".cache" / "slipstream" / "benchmark-peers"


def python_of(peer: str, directory: Path, say: Callable[[str], None]) -> Path:
    """The interpreter of the peer's environment, which is made if it is missing or out of date.

    Args:
        peer: a key of ``REQUIREMENTS``.
        directory: where environments are kept.
        say: told what is going on.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    home = directory / peer
    python = home / "bin" / "python"
    stamp = home / "installed"
    wanted = _fingerprint(peer)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    say(f"{peer}: installing {', '.join(REQUIREMENTS[peer])} into {home}")
    venv.create(home, clear=True, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq"]
    subprocess.run(
        [*pip, "--disable-pip-version-check", "--no-deps", *REQUIREMENTS[peer]],
        check=True,
        stdout=sys.stderr,
    )
    # Last, so that pip took nothing of ours for the peer's.
    [packages] = home.glob("lib/python*/site-packages")
    (packages / "this_project.pth").write_text(f"{_our_packages()}\n")
    stamp.write_text(wanted)
    return python


def _our_packages() -> Path:
    return Path(torch.__file__).resolve().parents[1]


def _fingerprint(peer: str) -> str:
    parts = (*REQUIREMENTS[peer], sys.version, torch.__version__, str(_our_packages()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
