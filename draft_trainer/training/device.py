"""The device that a draft is trained on, and what its libraries keep there."""

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


def own_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for all that trains and gates; None on a CPU.

    In the policy's process the default stream is the policy's. Memory that is freed goes to the
    stream that it was allocated on, so what trains is allocated on this one too.
    """
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def make_handles(device: torch.device) -> None:
    """Create what cuBLAS keeps for this thread, and for the one in which its backward passes run.

    It is made with the first product, outside of torch's allocator: later, there may be no memory.

    Raises RuntimeError: a shortage (``slipstream.shortage``), for example.
    """
    if device.type == "cuda":
        x = torch.ones(8, 8, dtype=torch.bfloat16, device=device, requires_grad=True)
        (x @ x).sum().backward()
