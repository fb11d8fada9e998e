"""The training-time test: the head run K steps ahead from every position at once.

Source: EAGLE-3 (arXiv 2503.01840), section 3.2; the alignment is that of vLLM's proposer. For the
anchor i and step s: token in x_{i+1+s}, position i + s, hidden in fc(aux_i) at s = 0 and the
head's own pre-norm output of step s - 1 afterwards; the output predicts x_{i+2+s}.

The layer is the head's own (``head.DecoderLayer``), computed with fewer and larger products: the
queries, keys and values are one product and so are gate and up, and the half of them that comes
from a token's embedding is the same at every step but for a shift, so it is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from draft_trainer.drafters.eagle3.attention import ttt_attention
from draft_trainer.drafters.eagle3.batch import Batch
from draft_trainer.drafters.eagle3.head import (
    Attention,
    Eagle3Head,
    RMSNorm,
    linear,
    rms_norm,
    rotate_heads,
    swiglu,
)


def ttt_unroll(
    head: Eagle3Head, batch: Batch, steps: int, first_anchor: int = 0
) -> Iterator[Tensor]:
    """Yield the layer's pre-norm output of every step, for ``head.logits``.

    Args:
        head: the draft head; its parameters' type is what is computed in.
        batch: rows of tokens, auxiliary states and embeddings; none of them gets a gradient.
        steps: K, at least 1.

    Yields:
        ``steps`` tensors [B, T, H]. Entries whose token in lies past the row's end mean nothing,
        and no meaningful entry depends on them.

    Raises:
        RefusedError: the rows are longer than the head's sliding window.
    """
    head.check_window(batch.token_ids.shape[1] + steps - 1)
    config, layer, dtype = head.config, head.midlayer, head.norm.weight.dtype
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    projections = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    # In the order in which DecoderLayer.enter concatenates: embedding first, hidden second.
    qkv_of_embeds, qkv_of_hidden = torch.cat([p.weight for p in projections]).split(
        config.hidden_size, dim=1
    )
    gate_up = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
    hidden = head.fuse(batch.aux.to(dtype))
    own_embeddings = head.embed_tokens
    given = batch.embeds if own_embeddings is None else own_embeddings(batch.token_ids)
    embeds = _normed(layer.input_layernorm, given.to(dtype))
    from_embeds = linear(embeds, qkv_of_embeds, _joined_bias(projections))
    prefix: tuple[Tensor, Tensor] | None = None
    own: list[tuple[Tensor, Tensor]] = []
    positions, tokens_in = batch.positions, from_embeds
    for step in range(steps):
        normed = _normed(layer.hidden_norm, hidden)
        residual = normed if config.norm_before_residual else hidden
        tokens_in = ahead(tokens_in, 1)
        qkv = linear(normed, qkv_of_hidden) + tokens_in
        wide = torch.promote_types(dtype, torch.float32)
        cos, sin = (x.transpose(1, 2) for x in head.rotary(positions + step, wide))
        qkv = _heads_normed(layer.self_attn, qkv.unflatten(-1, (-1, config.head_dim)))
        qkv = rotate_heads(qkv, heads + kv_heads, cos, sin)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
        if prefix is None:
            prefix = (k, v)
            q, residual, positions, tokens_in = (
                x[:, first_anchor:] for x in (q, residual, positions, tokens_in)
            )
        else:
            own.append((k, v))
        attended = ttt_attention(q, *prefix, own).flatten(2)
        residual = residual + _linear(layer.self_attn.o_proj, attended)
        gated = linear(
            _normed(layer.post_attention_layernorm, residual),
            gate_up,
            _joined_bias([layer.mlp.gate_proj, layer.mlp.up_proj]),
        )
        output = residual + _linear(layer.mlp.down_proj, swiglu(gated))
        yield output
        hidden = head.feedback(output)


def ahead(x: Tensor, count: int) -> Tensor:
    """x[:, i + count] at index i, zeros past the end; [B, T, ...] to the same shape."""
    if count >= x.shape[1]:
        return torch.zeros_like(x)
    return torch.cat([x[:, count:], torch.zeros_like(x[:, :count])], dim=1)


def _normed(norm: RMSNorm, x: Tensor) -> Tensor:
    return rms_norm(x, norm.weight, norm.eps)


def _heads_normed(attention: Attention, qkv: Tensor) -> Tensor:
    """Queries and keys [B, T, heads, D] normed head by head, where the head has those norms."""
    if attention.q_norm is None or attention.k_norm is None:
        return qkv
    sizes = [attention.num_heads, attention.num_kv_heads, attention.num_kv_heads]
    q, k, v = qkv.split(sizes, dim=2)
    return torch.cat([_normed(attention.q_norm, q), _normed(attention.k_norm, k), v], dim=2)


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def _joined_bias(modules: list[nn.Linear]) -> Tensor | None:
    biases: list[Tensor] = [module.bias for module in modules if module.bias is not None]
    return torch.cat(biases) if biases else None
