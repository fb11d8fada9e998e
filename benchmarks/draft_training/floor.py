"""The floor: how long the step's matrix products alone take on this core, by the best kernel.

It takes part in the rounds like a contestant. Every distinct product is multiplied by each kernel
that torch ships for it, on all rows at once and on a part of them whose result stays in a cache;
the highest rate stands for all products of that shape. Attention is measured a block of queries
at a time, as a kernel does it that never writes the scores out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.draft_training.case import Case, CaseTensors
from benchmarks.draft_training.flops import Product, products

Kernel = tuple[int, Callable[[], object]]
"""FLOPs of a call, and the call."""

_PART = 512
_QUERY_BLOCK = 128


class Floor:
    """Operands of every product.

    Attributes:
        detail: of the last step, "seconds" of the floor and FLOP/s per "name kind".
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.products = products(case)
        self.kernels = [_kernels(product, case) for product in self.products]
        self.detail: dict[str, object] = {}

    def step(self) -> float:
        """Measure each product; the return value is the floor in seconds."""
        rates = {
            f"{product.name} {product.kind}": max(flops / self._time(run) for flops, run in kernels)
            for product, kernels in zip(self.products, self.kernels, strict=True)
        }
        seconds = sum(p.flops / rates[f"{p.name} {p.kind}"] for p in self.products)
        self.detail = {"seconds": seconds, "rates": rates}
        return seconds

    def _time(self, run: Callable[[], object]) -> float:
        if self.case.device == "cpu":
            # Not wall time: another process on the core would halve the rate of one short call.
            began = time.thread_time()
            run()
            return time.thread_time() - began
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return time.perf_counter() - began


def _kernels(product: Product, case: Case) -> list[Kernel]:
    if product.kind in ("scores", "values"):
        return [_attention(product, case)]
    rows = product.shape[0]
    sizes = {rows, min(rows, _PART)} if case.device == "cpu" else {rows}
    return [kernel for size in sizes for kernel in _gemm(product, case, size)]


def _gemm(product: Product, case: Case, rows: int) -> list[Kernel]:
    _, inputs, outputs = product.shape

    def operand(*shape: int) -> Tensor:
        return torch.randn(shape, device=case.device).to(case.torch_dtype)

    a, b = {
        "forward": lambda: (operand(rows, inputs), operand(outputs, inputs).T),
        "grad_input": lambda: (operand(rows, outputs), operand(outputs, inputs)),
        "grad_weight": lambda: (operand(rows, outputs).T, operand(rows, inputs)),
    }[product.kind]()
    flops = 2 * rows * inputs * outputs
    runs: list[Callable[[], object]] = [partial(torch.mm, a, b)]
    # torch multiplies bfloat16 through oneDNN by itself, float32 through MKL unless asked.
    if case.device == "cpu" and a.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        onednn = torch.ops.mkldnn._linear_pointwise
        runs.append(partial(onednn, a, b.T, None, "none", [], ""))
        runs.append(partial(onednn, b.T, a, None, "none", [], ""))
    return [(flops, run) for run in runs]


def _attention(product: Product, case: Case) -> Kernel:
    heads, length, size = product.shape
    block = min(length, _QUERY_BLOCK) if case.device == "cpu" else length

    def operand(*shape: int) -> Tensor:
        return torch.randn(shape, device=case.device).to(case.torch_dtype)

    if product.kind == "scores":
        a, b = operand(heads, block, size), operand(heads, length, size).mT
        out = operand(block, length)
    else:
        a, b = operand(heads, block, length), operand(heads, length, size)
        out = operand(block, size)

    def run() -> None:
        for head in range(heads):
            torch.mm(a[head], b[head], out=out)

    return 2 * heads * block * length * size, run


def build(case: Case, tensors: CaseTensors, setting: str) -> Floor:
    """See ``contestant.build``."""
    del tensors, setting
    return Floor(case)
