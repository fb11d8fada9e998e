"""Compiles the loss's score function, and compares it with eager before it is used.

A step scores [K, rows, draft vocabulary] logits by about ten operations, each of which reads and
writes them in float32; compiled, they are read and written once or twice. What torch.compile makes
of a function depends on the versions of torch, Triton and the driver: it is used only where it
compiles at the start of the trainer and computes there what eager computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draft_trainer.drafters import loss

_ROWS = 64
_MOST_GRAPHS = 64


@torch.no_grad()  # As where it is called, in the forward pass of an autograd.Function.
def compile_score(
    device: torch.device,
    steps: int,
    vocab: int,
    target: loss.Target,
    backend: str | Callable[..., Any] = "inductor",
) -> str:
    """Use a compiled score function from now on, in all of this process, where it can be.

    Args:
        device: where it will run.
        steps, vocab: K and the draft vocabulary.
        target: the loss that is trained with.
        backend: of torch.compile.

    Returns:
        Why eager stays in use; empty if it does not.
    """
    # One compile thread: torch's own choice is up to 32 processes beside the policy's.
    options: Any = {"compile_threads": 1} if backend == "inductor" else None
    # A graph for every part of a sum, type of logits, temperature or none: eight, after which torch
    # would raise, in a step whose last chunk has one row.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    score = torch.compile(loss.score, backend=backend, fullgraph=True, options=options)
    try:
        found = [
            _difference(score, device, steps, vocab, one, dtype, scaled)
            for one in loss.MIXED.get(target, (target,))
            for dtype in (torch.bfloat16, torch.float32)
            for scaled in (False, True)
        ]
    # OSError: no C compiler; ImportError: no Triton.
    except (RuntimeError, OSError, ImportError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split(chr(10))[:2])}"
    said = "; ".join(filter(None, found))
    if not said:
        loss.compiled_score = score
    return said


def _difference(
    score: Callable[..., Tensor],
    device: torch.device,
    steps: int,
    vocab: int,
    target: loss.Target,
    dtype: torch.dtype,
    scaled: bool,
) -> str:
    """Say how compiled scores and gradients of random logits differ from eager; empty if not.

    Args:
        dtype: of the policy's logits; the draft's are bfloat16.
        scaled: whether a temperature is not 1.
    """
    generator = torch.Generator(device).manual_seed(0)
    logits, policy = (
        torch.randn(*shape, vocab, device=device, generator=generator).bfloat16()
        for shape in ((steps, _ROWS), (_ROWS,))
    )
    policy = policy.to(dtype)
    log_z = policy.float().logsumexp(-1, keepdim=True) + 0.1
    inverse_t = torch.full_like(log_z, 1.25 if scaled else 1.0)
    results = []
    functions: tuple[Callable[..., Tensor], ...] = (loss.score, score)
    for function in functions:
        given = [each.clone() for each in (logits, policy, log_z, inverse_t)]
        # The rows of a chunk are as many as there is memory for.
        for tensor, dimension in zip(given, (1, 0, 0, 0), strict=True):
            torch._dynamo.mark_dynamic(tensor, dimension)
        results.append((function(*given, target, True, scaled), given[0].float()))
    (scores, gradient), (compiled, its_gradient) = results
    # A gradient may be rounded to the next bfloat16.
    if not torch.allclose(compiled, scores, rtol=1e-5, atol=1e-5):
        return f"scores differ by up to {float((compiled - scores).abs().max()):.1e}"
    if not torch.allclose(its_gradient, gradient, rtol=2**-7, atol=1e-6):
        return f"gradients differ by up to {float((its_gradient - gradient).abs().max()):.1e}"
    return ""
