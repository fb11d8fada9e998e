"""The random case that every contestant trains on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

EPS = 1e-5
ROPE_THETA = 10000.0
LEARNING_RATE = 1e-4
GRAD_CLIP = 1.0
NUM_AUX = 3


@dataclass(frozen=True)
class Case:
    """Sizes of one measurement.

    Attributes:
        name: for tables.
        hidden_size: H, of the policy and of the head.
        intermediate_size: of the head's MLP.
        num_attention_heads: of the head.
        num_key_value_heads: of the head.
        head_dim: of the head.
        vocab_size: of the policy.
        draft_vocab_size: rows of the head's lm_head.
        rows: B, sequences of a step.
        tokens: T, of one sequence.
        ttt_steps: K.
        dtype: "float32" or "bfloat16", of the policy's states and of the computing.
        device: "cpu" or "cuda".
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rows: int
    tokens: int
    ttt_steps: int = 3
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch has it."""
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.dtype]

    @property
    def label(self) -> str:
        """The case in words, such as "A bfloat16 K=3"."""
        return f"{self.name} {self.dtype} K={self.ttt_steps}"

    def to_dict(self) -> dict[str, Any]:
        """Return the case for JSON."""
        return asdict(self)


SHAPES = {
    "A": Case("A", 256, 1024, 8, 4, 32, 4096, 4096, rows=8, tokens=512),
    "B": Case("B", 1024, 3072, 16, 8, 64, 32000, 8000, rows=1, tokens=1024),
    "8B": Case("8B", 4096, 12288, 32, 8, 128, 151936, 32000, rows=1, tokens=2048),
}


@dataclass(frozen=True, eq=False)
class CaseTensors:
    """The states that the policy handed over, and the head's first weights.

    Every position is in the loss, so nobody gains by skipping masked tokens. All states have the
    case's type, the weights are float32.

    Attributes:
        token_ids: int64 [B, T].
        aux: [B, T, 3 * H].
        final_hidden: [B, T, H], of root mean square 1: a final norm with weight 1 keeps it.
        embed_tokens: [vocab, H].
        lm_head: [vocab, H].
        draft_vocab_ids: int64 [draft_vocab], ascending.
        weights: the head's, under the names of the plain checkpoint layout.
    """

    token_ids: Tensor
    aux: Tensor
    final_hidden: Tensor
    embed_tokens: Tensor
    lm_head: Tensor
    draft_vocab_ids: Tensor
    weights: dict[str, Tensor]


def make_tensors(case: Case, seed: int = 0) -> CaseTensors:
    """The same values in every process of one device."""
    generator = torch.Generator(case.device).manual_seed(seed)
    hidden, vocab = case.hidden_size, case.vocab_size

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        values = torch.empty(shape, device=case.device)
        return values.normal_(std=std, generator=generator)

    final = normal(case.rows, case.tokens, hidden)
    final = final * torch.rsqrt(final.square().mean(-1, keepdim=True))
    ids = torch.randint(vocab, (case.rows, case.tokens), generator=generator, device=case.device)
    dtype = case.torch_dtype
    return CaseTensors(
        token_ids=ids,
        aux=normal(case.rows, case.tokens, NUM_AUX * hidden).to(dtype),
        final_hidden=final.to(dtype),
        embed_tokens=normal(vocab, hidden, std=0.5).to(dtype),
        lm_head=normal(vocab, hidden, std=2.0 * hidden**-0.5).to(dtype),
        draft_vocab_ids=torch.arange(case.draft_vocab_size, device=case.device)
        * (vocab // case.draft_vocab_size),
        weights={
            name: torch.ones(shape, device=case.device)
            if len(shape) == 1
            else normal(*shape, std=shape[1] ** -0.5)
            for name, shape in weight_shapes(case).items()
        },
    )


def weight_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """The head's parameters, by their names in the plain checkpoint layout."""
    hidden, inner = case.hidden_size, case.intermediate_size
    queries = case.num_attention_heads * case.head_dim
    keys = case.num_key_value_heads * case.head_dim
    return {
        "fc.weight": (hidden, NUM_AUX * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (case.draft_vocab_size, hidden),
    }
