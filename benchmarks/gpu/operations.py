"""The sections of single operations that only a GPU has: right or not, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, Figures, K, NotMeasuredError
from draft_trainer.drafters import loss
from draft_trainer.drafters.attention import ttt_attention
from draft_trainer.drafters.compiled_score import compile_score
from draft_trainer.drafters.ops import rms_norm
from rollout_server.vllm.swap import element_hash, swap_contents

_HASHED = (torch.bfloat16, torch.float16, torch.float32, torch.int64)
_EPS = 1e-6


def smoke(bench: Bench) -> Figures:
    """One of each against float64, the CPU, or what a captured graph has to read."""
    torch.manual_seed(0)
    product = [torch.randn(256, 512), torch.randn(512, 128)]
    # 96 anchors behind a context of 32, four heads on two.
    shapes = [(2, 96, 4, 64), *[(2, 128, 2, 64)] * 2, *[(2, 96, 2, 64)] * 4]
    attention = [torch.randn(shape) for shape in shapes]
    norm = [torch.randn(64, 512), torch.randn(512)]
    return {
        "relative error of a product": _error(bench, torch.matmul, product),
        "relative error of attention": _error(bench, _attention, attention),
        "relative error of a norm": _error(bench, lambda x, w: rms_norm(x, w, _EPS), norm),
        "hashes that differ": sum(_differs(bench, dtype) for dtype in _HASHED),
        "swaps that a graph does not see": int(not _graph_sees_swap(bench)),
    }


def _attention(q: Tensor, k: Tensor, v: Tensor, *later: Tensor) -> Tensor:
    """A context before the anchors, and two later steps: the parts share one log-sum-exp."""
    return ttt_attention(q, k, v, [(later[0], later[1]), (later[2], later[3])])


def _error(bench: Bench, function: Callable[..., Tensor], given: Sequence[Tensor]) -> float:
    """The largest error of an output and its gradients, relative to their norms in float64."""
    dtype = torch.bfloat16 if bench.cuda else torch.float32
    found = []
    for device, compute in ((torch.device("cpu"), torch.float64), (bench.device, dtype)):
        inputs = [x.to(dtype).to(device, compute).requires_grad_() for x in given]
        output = function(*inputs)
        (
            output.double() * torch.linspace(0.5, 1.5, output.shape[-1], device=device)
        ).sum().backward()
        results = (output, *(x.grad for x in inputs if x.grad is not None))
        found.append([x.detach().cpu().double() for x in results])
    return max(float((b - a).norm() / a.norm()) for a, b in zip(*found, strict=True))


def _differs(bench: Bench, dtype: torch.dtype) -> bool:
    """Return whether a tensor's hash is not that of its copy on the device."""
    bits = torch.randint(-(1 << 63), (1 << 63) - 1, (100_003,)).view(dtype)
    return element_hash(bits) != element_hash(bits.to(bench.device))


def _graph_sees_swap(bench: Bench) -> bool:
    """Return whether a CUDA graph reads what was swapped into a tensor that it reads."""
    live, standby = (torch.full((1 << 20,), value, device=bench.device) for value in (1.0, 2.0))
    seen, address = torch.zeros_like(live), live.data_ptr()

    def step() -> None:
        torch.mul(live, 3.0, out=seen)

    if bench.cuda:
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        swap_contents([(live, standby)])
        graph.replay()
    else:
        address = standby.data_ptr()  # On a CPU the two exchange their memory.
        swap_contents([(live, standby)])
        step()
    return bool((seen == 6.0).all() and (standby == 1.0).all()) and live.data_ptr() == address


def compiled(bench: Bench) -> Figures:
    """The loss's score function as ``training.compile`` makes it, against eager and Liger's."""
    case = bench.case
    device, vocab, rows = bench.device, case.draft_vocab_size, 64 if bench.tiny else 2048
    begin = time.perf_counter()
    # A self-check needs no code for the CPU.
    backend = "inductor" if bench.cuda else "aot_eager"
    refused = compile_score(device, K, vocab, "kl", backend)
    seconds = time.perf_counter() - begin
    fast, loss.compiled_score = loss.compiled_score, None
    if fast is None:
        raise NotMeasuredError(f"eager stays in use: {refused}")
    generator = torch.Generator(device).manual_seed(0)
    logits, policy = (
        torch.randn(*shape, vocab, device=device, generator=generator).bfloat16()
        for shape in ((K, rows), (rows,))
    )
    log_z = policy.float().logsumexp(-1, keepdim=True)
    given: Any = (policy, log_z, torch.ones_like(log_z), "kl", True, False)
    eager, other = logits.clone(), logits.clone()
    error = float((loss.score(eager, *given) - fast(other, *given)).abs().max())
    figures: Figures = {
        "error of a compiled score": error,
        "error_of_its_gradient": float((eager.float() - other.float()).abs().max()),
        "compile_seconds": seconds,
        "eager_ms": 1e3 * bench.seconds(lambda: loss.score(eager, *given)),
        "compiled_ms": 1e3 * bench.seconds(lambda: fast(other, *given)),
    }
    if bench.cuda and find_spec("liger_kernel"):
        figures["liger_ms"] = 1e3 * bench.seconds(_liger(logits, policy, log_z))
    return figures


def _liger(logits: Tensor, policy: Tensor, log_z: Tensor) -> Callable[[], None]:
    """The same losses and gradients by Liger's kernel, a call for each step, without metrics."""
    from liger_kernel.ops.backends._triton.kl_div import kl_loss_and_grad_triton

    def run() -> None:
        p = (policy.float() - log_z).exp_()
        for step in logits:
            kl_loss_and_grad_triton(step, p, None, -100, 1.0, 1e-10, 1.0)

    return run
