"""The contestants: modules, settings, and an environment for each peer.

A peer runs on the torch that ours runs on, or torch builds would be compared. Its environment
holds the peer, the packages whose versions it needs and those that an interpreter with torch and
transformers may lack, installed without their dependencies, and a .pth file that adds the folders
of this interpreter's packages behind them: torch, numpy and the rest come from there.
"""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
import venv
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.draft_training.case import Case, CaseTensors


class Contestant(Protocol):
    """A trainer that holds the case's inputs, a head and an optimizer."""

    def step(self) -> float:
        """One training step: unroll with the teacher, loss, metrics, backward, clip, optimizer.

        Returns:
            The loss.
        """
        ...


# Name: module with ``build(case, tensors, setting) -> Contestant``. A peer's module imports only in
# the peer's own environment.
MODULES = {
    "ours": "benchmarks.draft_training.ours",
    "speculators": "benchmarks.draft_training.peer_speculators",
    "specforge": "benchmarks.draft_training.peer_specforge",
}
PEERS = ("speculators", "specforge")

# The fastest setting of each on the device. "batched": all rows in one pass; "summed": row by row
# with the gradients summed, which is gradient accumulation.
DEFAULT_SETTINGS: dict[str, dict[str, str]] = {
    "speculators": {"cpu": "sdpa summed", "cuda": "simple_flex_attention packed"},
    "specforge": {"cpu": "sdpa full summed", "cuda": "flex_attention full batched"},
    "ours": {"cpu": "1024 tokens a pass", "cuda": "8192 tokens a pass"},
}

# Pinned, so that a figure can be repeated. The first of each is the peer. SpecForge asks for torch
# 2.11 and runs unchanged on later ones; it needs a transformers older than ours.
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
        "openai==3.52.0",
        "httpx2==2.16.2",
        "httpcore2==2.16.2",
        "truststore==0.10.5",
        "jiter==0.19.0",
        "sniffio==1.3.1",
        "pydantic==2.14.3",
        "pydantic-core==2.50.4",
        "annotated-types==0.8.0",
        "typing-inspection==0.4.5",
    ),
    "specforge": (
        "specforge==0.2.0",
        "transformers==5.8.1",
        "tokenizers==0.22.2",
        "huggingface-hub==1.33.0",
        # On CUDA torch brings the one that it was built for.
        *(() if torch.version.cuda else ("triton==3.9.0",)),
    ),
}


def build(name: str, case: Case, tensors: CaseTensors, setting: str) -> Contestant:
    """Import the contestant's module and build it."""
    return importlib.import_module(MODULES[name]).build(case, tensors, setting)  # type: ignore[no-any-return]


def default_setting(name: str, case: Case) -> str:
    """The setting that a contestant runs with."""
    # As fast as 1024 tokens a pass within 2 %, and the leanest.
    if name == "ours" and case.device == "cpu" and case.dtype == "float32":
        return "512 tokens a pass"
    return DEFAULT_SETTINGS[name][case.device]


def default_directory() -> Path:
    """The folder of the environments, in the user's cache."""
    return Path.home() / ".cache" / "slipstream" / "benchmark-peers"


def python_of(peer: str, directory: Path) -> Path:
    """The interpreter of a peer's environment, which is made if it is missing or out of date.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    home = directory / peer
    python = home / "bin" / "python"
    stamp = home / "installed"
    parts = (*REQUIREMENTS[peer], sys.version, torch.__version__)
    wanted = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"{peer}: installing {', '.join(REQUIREMENTS[peer])} into {home}", file=sys.stderr)
        venv.create(home, clear=True, with_pip=False, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq"]
        subprocess.run(
            [*pip, "--disable-pip-version-check", "--no-deps", *REQUIREMENTS[peer]],
            check=True,
            stdout=sys.stderr,
        )
        stamp.write_text(wanted)
    # After pip, so that it does not take this project's packages for the peer's. With the folders
    # of PYTHONPATH, which itself would come before the peer's own packages. Links are followed:
    # torch.compile passes the path of torch to a linker without quotes.
    [packages] = home.glob("lib/python*/site-packages")
    (packages / "this_project.pth").write_text(
        "\n".join(str(Path(path).resolve()) for path in sys.path if path)
    )
    return python
