"""The EAGLE-3 head: one decoder layer over embeddings and fused hidden states, and its unroll.

The function is that of vLLM 0.32 (``model_executor/models/llama_eagle3.py`` and, with ``qk_norm``,
``qwen3_eagle3.py``), the parameter names those of the checkpoints that it loads. The embeddings are
the policy's as a rule, and then not part of the head.

The modules here hold parameters; ``Eagle3Head.unroll`` computes with fewer and larger products
than a module by module forward pass would: queries, keys and values are one product, so are gate
and up, and the half of them that comes from a token's embedding is the same at every step but for
a shift, so it is computed once.

Source of the training-time test: EAGLE-3 (arXiv 2503.01840), section 3.2, with the alignment of
vLLM's proposer. For the anchor i and step s: token in x_{i+1+s}, position i + s, hidden state in
fc(aux_i) at s = 0 and the head's own pre-norm output of step s - 1 afterwards; the output predicts
x_{i+2+s}.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draft_trainer.drafters.attention import ttt_attention
from draft_trainer.drafters.batch import Batch, ahead
from draft_trainer.drafters.block import MLP, Attention
from draft_trainer.drafters.draft import Draft
from draft_trainer.drafters.eagle3.config import HeadConfig
from draft_trainer.drafters.ops import linear, swiglu_linear
from draft_trainer.drafters.rope import Rotary
from slipstream.errors import RefusedError


class FrozenEmbedding(nn.Module):
    """Embeddings that are not trained: a buffer, which no optimizer moves or decays."""

    weight: Tensor

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(vocab_size, size, dtype=torch.float32))

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [...] to [..., size]."""
        return F.embedding(token_ids, self.weight)


class DecoderLayer(nn.Module):
    """The head's only layer (``midlayer`` in checkpoints)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_layernorm = config.norm()
        self.hidden_norm = config.norm()
        self.post_attention_layernorm = config.norm()
        # vLLM's Qwen3 attention has no output bias, whatever attention_bias says.
        output_bias = config.qkv_bias and not config.qk_norm
        self.self_attn = Attention(config, 2 * size, output_bias)
        self.mlp = MLP(size, config.intermediate_size, config.mlp_bias)


class Eagle3Head(Draft):
    """The trainable part of an EAGLE-3 draft. ``state_dict`` has the checkpoint's names.

    Args:
        config: its shape.
        draft_vocab_ids: see ``Draft``.

    Attributes:
        embed_tokens: the head's own embeddings, frozen, as in the trainers that have them;
            None where the head takes the policy's.
    """

    kind = "eagle3"
    lm_head: nn.Linear

    def __init__(self, config: HeadConfig, draft_vocab_ids: Tensor | None = None) -> None:
        super().__init__(draft_vocab_ids)
        self.config: HeadConfig = config
        size, target = config.hidden_size, config.target_hidden_size
        width = len(config.aux_layer_ids) * target
        self.input_norm = config.norm(width) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(config.norm(target) for _ in config.aux_layer_ids)
            if config.fc_norm
            else None
        )
        self.fc = nn.Linear(width, size, bias=False)
        self.midlayer = DecoderLayer(config)
        self.norm = config.norm()
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.embed_tokens = (
            FrozenEmbedding(config.vocab_size, size) if config.own_embeddings else None
        )
        self.rotary = Rotary(config.rope, config.head_dim)

    def fuse(self, aux: Tensor) -> Tensor:
        """The first step's hidden state, from the auxiliary states.

        Args:
            aux: [..., A * H_target], in the order of ``aux_layer_ids``, in the head's type.

        Returns:
            [..., H].
        """
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            states = aux.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
            aux = torch.cat(normed, dim=-1)
        return self.fc(aux)

    def normed(self, output: Tensor) -> Tensor:
        """See ``Draft.normed``."""
        return self.norm(output)

    def feedback(self, output: Tensor) -> Tensor:
        """Return the hidden state that the next TTT step takes, [..., H]."""
        return self.norm(output) if self.config.norm_output else output

    def unroll(self, batch: Batch, steps: int, first_anchor: int = 0) -> Iterator[Tensor]:
        """See ``Draft.unroll``; it computes in the type of the parameters."""
        self._check_window(batch.token_ids.shape[1] + steps - 1)
        config, layer, dtype = self.config, self.midlayer, self.norm.weight.dtype
        attention, mlp = layer.self_attn, layer.mlp
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        sizes = [heads, kv_heads, kv_heads]
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        # The layer's input is the embedding followed by the hidden state.
        qkv_of_embeds, qkv_of_hidden = torch.cat([p.weight for p in projections]).split(
            config.hidden_size, dim=1
        )
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        gate_up_bias = _joined_bias([mlp.gate_proj, mlp.up_proj])
        own = self.embed_tokens
        embeds = layer.input_layernorm(
            (batch.embeds if own is None else own(batch.token_ids)).to(dtype)
        )
        tokens_in = linear(embeds, qkv_of_embeds, _joined_bias(projections))
        hidden, positions = self.fuse(batch.aux.to(dtype)), batch.positions
        prefix: tuple[Tensor, Tensor] | None = None
        later: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            normed = layer.hidden_norm(hidden)
            residual = normed if config.norm_before_residual else hidden
            tokens_in = ahead(tokens_in, 1)
            qkv = (linear(normed, qkv_of_hidden) + tokens_in).unflatten(-1, (-1, config.head_dim))
            if config.qk_norm:
                q, k, v = qkv.split(sizes, dim=2)
                qkv = torch.cat([*attention.normed(q, k), v], dim=2)
            qkv = self.rotary(qkv, positions + step, heads + kv_heads)
            q, k, v = qkv.split(sizes, dim=2)
            if prefix is None:
                prefix = (k, v)
                q, residual, positions, tokens_in = (
                    x[:, first_anchor:] for x in (q, residual, positions, tokens_in)
                )
            else:
                later.append((k, v))
            attended = ttt_attention(q, *prefix, later).flatten(2)
            residual = residual + _linear(attention.o_proj, attended)
            gated = linear(layer.post_attention_layernorm(residual), gate_up, gate_up_bias)
            output = residual + swiglu_linear(gated, mlp.down_proj.weight)
            if mlp.down_proj.bias is not None:
                output = output + mlp.down_proj.bias
            yield output
            hidden = self.feedback(output)

    def _check_window(self, tokens: int) -> None:
        """Refuse rows in which a query would see past the sliding window."""
        window = self.config.max_row_tokens
        if window is not None and tokens > window:
            raise RefusedError(
                "sliding_window", window, f"at least {tokens}, the row", "send shorter sequences"
            )


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def _joined_bias(modules: list[nn.Linear]) -> Tensor | None:
    biases: list[Tensor] = [module.bias for module in modules if module.bias is not None]
    return torch.cat(biases) if biases else None
