"""The matrix products that one training step cannot do without, derived from the case's sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.draft_training.case import NUM_AUX, Case

Kind = Literal["forward", "grad_input", "grad_weight", "scores", "values"]


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


def derivation(case: Case) -> str:
    """The sum in words and numbers."""
    lines = [
        f"FLOPs of one step of {case.name}, K = {case.ttt_steps}: "
        f"{case.rows} x {case.tokens} tokens, anchors per row and step {anchors(case)}",
    ]
    names = list(dict.fromkeys(p.name for p in products(case)))
    for name in names:
        mine = [p for p in products(case) if p.name == name]
        kinds = " + ".join(f"{p.kind} {p.flops / 1e9:.2f}" for p in mine)
        shape = " x ".join(map(str, mine[0].shape))
        lines.append(f"  {name:<12} {shape:<22} {kinds} GFLOP")
    total = sum(p.flops for p in products(case))
    lines.append(f"  {'sum':<12} {'':<22} {total / 1e9:.2f} GFLOP")
    return "\n".join(lines)
