"""A decoder layer as in Llama, Qwen2, Qwen3 and Qwen3-Next: attention, then a SwiGLU.

The parameter names are those of Hugging Face's checkpoints. The mechanism decides which keys a
query attends to: ``project`` returns queries, keys and values, ``finish`` takes what was attended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from draft_trainer.checkpoints import size_of
from draft_trainer.drafters.ops import linear, rms_norm, swiglu_linear
from draft_trainer.drafters.rope import Rope, Rotary
from slipstream.errors import RefusedError


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Sizes and switches of a layer.

    Attributes:
        hidden_size: H.
        intermediate_size: width of the MLP.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; divides the query heads.
        head_dim: D, size of one head.
        rms_norm_eps: epsilon of every RMSNorm.
        rope: the rotary embedding.
        qk_norm: an RMSNorm for each query and key head.
        qkv_bias: q, k and v have a bias.
        output_gate: the attention's output is multiplied by a sigmoid; q_proj's rows are a head's
            query, then its gate.
        zero_centred: a norm multiplies by 1 + its weight.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope: Rope = field(default_factory=Rope)
    qk_norm: bool = False
    qkv_bias: bool = False
    output_gate: bool = False
    zero_centred: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], whose: str, rope: Rope, **switches: bool) -> BlockShape:
        """Read a Hugging Face config.json.

        Raises:
            RefusedError: a field is missing or impossible; ``whose`` is part of its name.
        """
        heads, kv_heads = (
            size_of(config, f"num_{kind}_heads", whose) for kind in ("attention", "key_value")
        )
        eps: Any = config.get("rms_norm_eps")
        for name, found, fits, expected in (
            ("rms_norm_eps", eps, isinstance(eps, float), "a number"),
            ("num_key_value_heads", kv_heads, heads % kv_heads == 0, f"a divisor of {heads}"),
        ):
            if not fits:
                next_step = "give a model that vLLM loads"
                raise RefusedError(f"{whose} config.json {name}", found, expected, next_step)
        hidden = size_of(config, "hidden_size", whose)
        head_dim = size_of(config, "head_dim", whose) if config.get("head_dim") else hidden // heads
        return cls(
            hidden_size=hidden,
            intermediate_size=size_of(config, "intermediate_size", whose),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=eps,
            rope=rope,
            **switches,
        )

    def norm(self, size: int | None = None) -> Norm:
        """A norm of this kind over ``size`` values (H)."""
        return Norm(size or self.hidden_size, self.rms_norm_eps, 1.0 if self.zero_centred else 0.0)


class Norm(nn.Module):
    """x / rms(x) * (weight + ``offset``); with an offset of 1 the weight is centred on 0."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset, dtype=torch.float32))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size], in the type of ``x``."""
        weight: Tensor = self.weight
        if self.offset:
            # As in vLLM: bfloat16 has no numbers between 1 and 1.0078.
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + self.offset
        return rms_norm(x, weight, self.eps)


class Attention(nn.Module):
    """Projections of the attention.

    Args:
        shape: the layer's.
        input_size: width of the input of the query, key and value projections; H if None.
        output_bias: the output's projection has a bias.
    """

    def __init__(
        self, shape: BlockShape, input_size: int | None = None, output_bias: bool = False
    ) -> None:
        super().__init__()
        size, bias = input_size or shape.hidden_size, shape.qkv_bias
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(size, queries * (1 + shape.output_gate), bias=bias)
        self.k_proj = nn.Linear(size, keys, bias=bias)
        self.v_proj = nn.Linear(size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=output_bias)
        self.q_norm = shape.norm(shape.head_dim) if shape.qk_norm else None
        self.k_norm = shape.norm(shape.head_dim) if shape.qk_norm else None

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, [B, T, heads, D]; every head normed where the layer has such norms."""
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)


class MLP(nn.Module):
    """A SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]; the MLP must have no biases."""
        gate_up = torch.cat([self.gate_proj.weight, self.up_proj.weight])
        return swiglu_linear(linear(x, gate_up), self.down_proj.weight)


class Block(nn.Module):
    """The layer; ``mlp`` replaces its SwiGLU."""

    def __init__(self, shape: BlockShape, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.input_layernorm = shape.norm()
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = shape.norm()
        self.mlp = mlp or MLP(shape.hidden_size, shape.intermediate_size)
        self.rotary = Rotary(shape.rope, shape.head_dim)

    def project(
        self, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values of a residual stream, ready to attend.

        Args:
            hidden: [B, T, H], before ``input_layernorm``.
            positions: int64 [B, T].

        Returns:
            q [B, T, heads, D], k and v [B, T, kv_heads, D], and the gate before its sigmoid,
            [B, T, heads, D], None without one.
        """
        attention, heads = self.self_attn, self.shape.num_attention_heads
        normed = self.input_layernorm(hidden)
        q, k, v = (
            linear(normed, part.weight, part.bias)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k, v = (part.unflatten(-1, (-1, self.shape.head_dim)) for part in (q, k, v))
        gate = None
        if self.shape.output_gate:
            q, gate = q.unflatten(2, (heads, 2)).unbind(3)
        rotated = self.rotary(torch.cat(attention.normed(q, k), dim=2), positions)
        q, k = rotated.split([heads, k.shape[2]], dim=2)
        return q, k, v, gate

    def finish(self, hidden: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor:
        """The residual stream after the layer, [B, T, H].

        Args:
            hidden: [B, T, H], before the layer.
            attended: [B, T, heads, D], the attention's output.
            gate: from ``project``.
        """
        if gate is not None:
            attended = attended * gate.sigmoid()
        hidden = hidden + linear(attended.flatten(2), self.self_attn.o_proj.weight)
        mlp: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + mlp
