"""The MTP head and its unroll.

For the anchor i and step s: token in x_{i+1+s}, position i + s, hidden state in the policy's final
state h_i (after its final norm) at s = 0 and the head's own normed output of step s - 1 afterwards;
attention to the step-0 keys of positions up to i and to the anchor's own keys of steps 1 .. s; the
output predicts x_{i+2+s} through the policy's lm_head. This is what vLLM's V1 runner computes with
one module for all draft positions. Embeddings and lm_head are the policy's and follow its versions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from draft_trainer.drafters.attention import ttt_attention
from draft_trainer.drafters.batch import Batch, ahead
from draft_trainer.drafters.draft import Draft
from draft_trainer.drafters.mtp.config import FAMILIES, MtpConfig
from draft_trainer.drafters.ops import linear, rms_norm, rotate_heads, swiglu


class Norm(nn.Module):
    """x / rms(x) * (weight + ``offset``); with an offset of 1 the weight is centred on 0."""

    def __init__(self, size: int, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size], in the type of ``x``."""
        weight = self.weight + self.offset if self.offset else self.weight
        return rms_norm(x, weight, self.eps)


class Attention(nn.Module):
    """Projections of the attention; q_proj's rows are a head's query, then its gate, if any."""

    def __init__(self, config: MtpConfig, offset: float) -> None:
        super().__init__()
        size, family = config.target_hidden_size, FAMILIES[config.family]
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        bias = family.qkv_bias
        self.q_proj = nn.Linear(size, queries * (1 + config.output_gate), bias=bias)
        self.k_proj = nn.Linear(size, keys, bias=bias)
        self.v_proj = nn.Linear(size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, size, bias=False)
        norms = (config.head_dim, config.rms_norm_eps, offset)
        self.q_norm = Norm(*norms) if family.qk_norm else None
        self.k_norm = Norm(*norms) if family.qk_norm else None

    def joined(self, heads: int, head_dim: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of one product that makes queries, keys, values, then gates."""
        q = self.q_proj.weight.view(heads, -1, head_dim, self.q_proj.in_features)
        parts: list[Tensor] = [q[:, 0].flatten(0, 1), self.k_proj.weight, self.v_proj.weight]
        if q.shape[1] == 2:
            parts.append(q[:, 1].flatten(0, 1))
        if self.q_proj.bias is None:
            return torch.cat(parts), None
        biases: list[Tensor] = [self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]
        return torch.cat(parts), torch.cat(biases)


class MLP(nn.Module):
    """Projections of the SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)


class Block(nn.Module):
    """The head's decoder layer."""

    def __init__(self, config: MtpConfig, offset: float) -> None:
        super().__init__()
        size, eps = config.target_hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(size, eps, offset)
        self.self_attn = Attention(config, offset)
        self.post_attention_layernorm = Norm(size, eps, offset)
        self.mlp = MLP(size, config.intermediate_size)


class MtpHead(Draft):
    """The trainable part of an MTP head; ``Family.stored`` gives the checkpoint's names.

    Args:
        config: its shape.
        draft_vocab_ids: None; the head proposes every token of the policy.
    """

    kind = "mtp"
    lm_head = None

    def __init__(self, config: MtpConfig, draft_vocab_ids: Tensor | None = None) -> None:
        super().__init__(draft_vocab_ids)
        self.config: MtpConfig = config
        size, eps = config.target_hidden_size, config.rms_norm_eps
        offset = 1.0 if FAMILIES[config.family].zero_centred else 0.0
        self.embed_norm = Norm(size, eps, offset)
        self.hidden_norm = Norm(size, eps, offset)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layer = Block(config, offset)
        self.norm = Norm(size, eps, offset)
        # Not a buffer: ``head.to(bfloat16)`` must not round the rotary angles.
        self._inv_freq = config.rope.inverse_frequencies(config.head_dim)
        self._attention_scale = config.rope.attention_scale()

    def normed(self, output: Tensor) -> Tensor:
        """The output itself: ``unroll`` norms it, because the next step takes it normed."""
        return output

    def unroll(self, batch: Batch, steps: int, first_anchor: int = 0) -> Iterator[Tensor]:
        """See ``Draft.unroll``; the parameters' type is what is computed in."""
        config, layer, dtype = self.config, self.layer, self.norm.weight.dtype
        family, attention, mlp = FAMILIES[config.family], layer.self_attn, layer.mlp
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        halves = self.fc.weight.chunk(2, dim=1)
        fc_of_embeds, fc_of_hidden = halves if family.embedding_first else halves[::-1]
        qkv_weight, qkv_bias = attention.joined(heads, config.head_dim)
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        tokens_in = linear(self.embed_norm(batch.embeds.to(dtype)), fc_of_embeds)
        hidden, positions = batch.final_hidden.to(dtype), batch.positions
        prefix: tuple[Tensor, Tensor] | None = None
        later: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            tokens_in = fed = ahead(tokens_in, 1)
            if family.blind_start and step == 0:
                fed = tokens_in * (positions != 0)[..., None]
            residual = fed + linear(self.hidden_norm(hidden), fc_of_hidden)
            qkv = linear(layer.input_layernorm(residual), qkv_weight, qkv_bias)
            qkv = qkv.unflatten(-1, (-1, config.head_dim))
            q, k, v, gate = qkv.split(
                [heads, kv_heads, kv_heads, heads * config.output_gate], dim=2
            )
            if attention.q_norm is not None and attention.k_norm is not None:
                q, k = attention.q_norm(q), attention.k_norm(k)
            angles = self._angles(positions + step, dtype)
            q, k = rotate_heads(torch.cat([q, k], dim=2), heads + kv_heads, *angles).split(
                [heads, kv_heads], dim=2
            )
            if prefix is None:
                prefix = (k, v)
                q, gate, residual, positions, tokens_in = (
                    x[:, first_anchor:] for x in (q, gate, residual, positions, tokens_in)
                )
            else:
                later.append((k, v))
            attended = ttt_attention(q, *prefix, later)
            if config.output_gate:
                attended = attended * gate.sigmoid()
            residual = residual + linear(attended.flatten(2), attention.o_proj.weight)
            gated = swiglu(linear(layer.post_attention_layernorm(residual), gate_up))
            hidden = self.norm(residual + linear(gated, mlp.down_proj.weight))
            yield hidden

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each [B, T, 1, rotary_dim / 2], at least float32."""
        wide = torch.promote_types(dtype, torch.float32)
        inv_freq = self._inv_freq.to(positions.device, wide)
        angles = positions.to(wide)[..., None, None] * inv_freq
        return angles.cos() * self._attention_scale, angles.sin() * self._attention_scale
