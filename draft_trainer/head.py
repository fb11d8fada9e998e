"""The EAGLE-3 head: one decoder layer over embeddings and fused hidden states.

The function is that of vLLM 0.32 (``model_executor/models/llama_eagle3.py``), the parameter names
those of the checkpoints that it loads. The embeddings are the policy's and not part of the head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draft_trainer.head_config import HeadConfig
from slipstream.refusal import RefusedError

__all__ = ["Eagle3Head", "HeadConfig", "RMSNorm"]


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the mean of squares in float32, as vLLM has it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size], in the type of ``x``."""
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Projections of the attention; where keys come from is the unroll's business."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = 2 * config.hidden_size
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(
            config.num_attention_heads * config.head_dim, config.hidden_size, bias=False
        )

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values.

        Args:
            x: [B, T, 2 * H].
            cos: float32 [B, 1, T, head_dim / 2].
            sin: the same shape.

        Returns:
            q [B, heads, T, head_dim]; k and v [B, kv_heads, T, head_dim].
        """
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, cos, sin), rotate(k, cos, sin), v


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """The head's only layer (``midlayer`` in checkpoints)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(size, config.intermediate_size)

    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's input [..., 2 * H] and the residual [..., H]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat([self.input_layernorm(embeds), normed], dim=-1), residual

    def leave(self, attended: Tensor, residual: Tensor) -> Tensor:
        """From the attention's heads [B, heads, T, head_dim] to the pre-norm output [B, T, H]."""
        residual = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle3Head(nn.Module):
    """The trainable part of an EAGLE-3 draft. ``state_dict`` has the checkpoint's names.

    Args:
        config: its shape.
        draft_vocab_ids: int [draft_vocab], the target id of every draft id; None for the full
            vocabulary, and where nobody asks for acceptance.
    """

    draft_vocab_ids: Tensor | None

    def __init__(self, config: HeadConfig, draft_vocab_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("draft_vocab_ids", draft_vocab_ids, persistent=False)
        size = config.hidden_size
        self.fc = nn.Linear(config.num_aux_layers * config.target_hidden_size, size, bias=False)
        self.midlayer = DecoderLayer(config)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        # float64, cast where used: ``head.to(bfloat16)`` must not coarsen the rotary angles.
        self._inv_freq = config.rope_theta**-exponents

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each [B, 1, T, head_dim / 2], of integer positions [B, T]."""
        inv_freq = self._inv_freq.to(positions.device, dtype)
        angles = positions.to(dtype)[:, None, :, None] * inv_freq
        return angles.cos(), angles.sin()

    def logits(self, output: Tensor) -> Tensor:
        """Draft-vocabulary logits [..., draft_vocab] of the layer's pre-norm output [..., H]."""
        return self.lm_head(self.norm(output))

    def draft_ids_of(self, token_ids: Tensor) -> Tensor:
        """Draft ids of target ids, -1 where a token is outside the draft vocabulary.

        Args:
            token_ids: int64, any shape.

        Raises:
            RefusedError: a reduced vocabulary whose ids the head was not given.
        """
        if self.config.full_vocabulary:
            return token_ids
        if self.draft_vocab_ids is None:
            raise RefusedError(
                "draft_vocab_ids",
                "nothing",
                f"the target ids of {self.config.draft_vocab_size} draft ids",
                "build the head with its draft vocabulary, for example by load_head",
            )
        ids = torch.full((self.config.vocab_size,), -1, device=token_ids.device)
        ids[self.draft_vocab_ids.long()] = torch.arange(
            self.config.draft_vocab_size, device=token_ids.device
        )
        return ids[token_ids]

    def feedback(self, output: Tensor) -> Tensor:
        """What the next TTT step takes as its hidden state, [..., H]."""
        return self.norm(output) if self.config.norm_output else output


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the NeoX layout: the two halves of a head are the pair.

    Args:
        x: [B, heads, T, head_dim].
        cos: [B, 1, T, head_dim / 2].
        sin: the same shape.
    """
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)
