"""The device that a draft is trained on."""

from __future__ import annotations

import torch

from slipstream.errors import RefusedError


def training_device(name: str) -> torch.device:
    """The device of ``training.device``: the CPU, or the first GPU that this process sees.

    Raises RefusedError: it is "cuda", and torch sees no GPU.
    """
    if name == "cuda" and not torch.cuda.device_count():
        raise RefusedError(
            "training.device",
            '"cuda", and torch sees no GPU',
            'a GPU, or training.device = "cpu"',
            'set training.device = "cpu"; or see what nvidia-smi says, and whether torch is built '
            "with CUDA (deploy/requirements/cuda.lock)",
        )
    return torch.device(name, 0) if name == "cuda" else torch.device(name)
