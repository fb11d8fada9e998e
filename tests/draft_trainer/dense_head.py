"""The head module by module, with a dense mask: the plainest way to run it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from draft_trainer.drafters.block import Norm
from draft_trainer.drafters.eagle3.head import DecoderLayer, Eagle3Head


def enter(
    layer: DecoderLayer, embeds: Tensor, hidden: Tensor, before: bool
) -> tuple[Tensor, Tensor]:
    """The attention's input [..., 2 * H] and the residual [..., H]."""
    normed = norm(layer.hidden_norm, hidden)
    return torch.cat(
        [norm(layer.input_layernorm, embeds), normed], -1
    ), normed if before else hidden


def leave(layer: DecoderLayer, attended: Tensor, residual: Tensor) -> Tensor:
    """Turn the heads side by side [..., heads * D] into the pre-norm output [..., H]."""
    residual = residual + layer.self_attn.o_proj(attended)
    x, mlp = norm(layer.post_attention_layernorm, residual), layer.mlp
    return residual + mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


def norm(module: Norm, x: Tensor) -> Tensor:
    return F.rms_norm(x, module.weight.shape, module.weight, module.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """NeoX layout: dimension i is paired with i + R / 2; [..., D] with cos and sin [..., R / 2]."""
    turned, kept = x.tensor_split([2 * cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, kept], dim=-1)


def dense_step(head: Eagle3Head, hidden: Tensor, embeds: Tensor, positions: Tensor) -> Tensor:
    """The layer's pre-norm output [1, T, H].

    Args:
        head: the head; its modules are used as they are.
        hidden: [1, T, H].
        embeds: [1, T, H], of the tokens that go in beside ``hidden``.
        positions: int64 [1, T].
    """
    attention = head.midlayer.self_attn
    x, residual = enter(head.midlayer, embeds, hidden, head.config.norm_before_residual)
    cos, sin = (angle.transpose(1, 2) for angle in head.rotary.angles(positions, torch.float32))
    q, k, v = (
        proj(x).unflatten(-1, (-1, head.config.head_dim)).transpose(1, 2)
        for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k = norm(attention.q_norm, q), norm(attention.k_norm, k)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    if head.config.sliding_window is not None:
        seen = seen.triu(1 - head.config.sliding_window)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    attended = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
    return leave(head.midlayer, attended.transpose(1, 2).flatten(2), residual)
