"""The floor: the time of the matrix products that a step cannot do without, by the best kernel.

The products are derived from the case's sizes. The floor takes part in the rounds like a
contestant: every distinct product is multiplied by each kernel that torch ships for it, on all rows
at once and on a part of them whose result stays in a cache; the highest rate stands for all
products of that shape. Attention is measured a block of queries at a time, as by a kernel that
never writes the scores out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from benchmarks.draft_training.case import NUM_AUX, Case, CaseTensors

Kind = Literal["forward", "grad_input", "grad_weight", "scores", "values"]
Kernel = tuple[int, Callable[[], object]]
"""FLOPs of a call, and the call."""

_PART = 512
_QUERY_BLOCK = 128


@dataclass(frozen=True)
class Product:
    """All multiplications of one shape in a step.

    Attributes:
        name: of the layer.
        kind: x W^T, g W, g^T x; for attention q k^T (and its like) or p v (and its like).
        shape: (M, K, N) of x [M, K] and W [N, K]; (heads, T, head_dim) for attention.
        flops: of all of them in a step, exactly.
    """

    name: str
    kind: Kind
    shape: tuple[int, int, int]
    flops: int


def layers(case: Case) -> dict[str, tuple[int, int]]:
    """Linear layers of a TTT step: name to (inputs, outputs).

    q, k and v take the embedding and the hidden state side by side; only the half of the hidden
    state changes from step to step.
    """
    hidden, inner = case.hidden_size, case.intermediate_size
    queries = case.num_attention_heads * case.head_dim
    keys = case.num_key_value_heads * case.head_dim
    return {
        "qkv, hidden": (hidden, queries + 2 * keys),
        "o_proj": (queries, hidden),
        "gate, up": (hidden, 2 * inner),
        "down_proj": (inner, hidden),
        "lm_head": (hidden, case.draft_vocab_size),
    }


def anchors(case: Case) -> list[int]:
    """Anchors per row and TTT step that have a teacher: i + 1 + s <= T - 1."""
    return [case.tokens - 1 - step for step in range(case.ttt_steps)]


def products(case: Case) -> list[Product]:
    """Every product of a step.

    A layer is multiplied forward, for the gradient of its input and for that of its weight. fc
    has no gradient of its input (the auxiliary states are data), the teacher's lm_head has none
    at all and is multiplied once for all TTT steps. So is the half of q, k and v that takes the
    embeddings: step s takes that of step 0, shifted by s. Attention is two products forward
    (q k^T, p v) and four backward (dp = g v^T; dv, dq, dk), over the causal half of step 0 and
    each anchor's own keys of the steps before.
    """
    counts = anchors(case)
    tokens, once, every = case.rows * case.tokens, case.rows * counts[0], case.rows * sum(counts)
    hidden = case.hidden_size
    found: list[Product] = []

    def layer(name: str, sizes: tuple[int, int], rows: int, *kinds: Kind) -> None:
        flops = 2 * rows * sizes[0] * sizes[1]
        found.extend(Product(name, kind, (tokens, *sizes), flops) for kind in kinds)

    layer("fc", (NUM_AUX * hidden, hidden), once, "forward", "grad_weight")
    qkv = layers(case)["qkv, hidden"]
    layer("qkv, embeds", qkv, once, "forward", "grad_input", "grad_weight")
    for name, sizes in layers(case).items():
        layer(name, sizes, every, "forward", "grad_input", "grad_weight")
    layer("teacher", (hidden, case.draft_vocab_size), once, "forward")
    pairs = sum(n * (n + 1) // 2 + step * n for step, n in enumerate(counts))
    flops = 2 * case.rows * case.num_attention_heads * case.head_dim * pairs
    shape = (case.rows * case.num_attention_heads, case.tokens, case.head_dim)
    found.append(Product("attention", "scores", shape, 2 * flops))
    found.append(Product("attention", "values", shape, 4 * flops))
    return found


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
    """See ``contestants.build``."""
    del tensors, setting
    return Floor(case)
