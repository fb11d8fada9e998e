"""The DFlash draft: decoder layers over a block of positions and its context.

For the anchor i, the block is x_{i+1} and K times the mask token, at positions i + 1 .. i + 1 + K;
place s + 1 proposes x_{i+2+s}, so all K tokens come from one forward pass. In every layer the
places attend to each other, in both directions, and to the context: the positions up to i, whose
keys and values are projections of fc(aux), the same states for all layers. K is a part of the
function: with more places, each attends to more. This is what vLLM 0.32 computes
(``v1/spec_decode/dflash.py``, ``model_executor/models/qwen3_dflash.py``). Embeddings and lm_head
are the policy's.

No place sees a proposed token. So teacher forcing on a recording is exact here, too, and every
place learns its token's distribution given the context, averaged over the tokens in between.

Source: DFlash (arXiv 2602.06036). Its loss is cross-entropy on sampled tokens, weighted by
exp(-s / gamma); here it is ``drafters.loss`` against the policy's own distribution, weighted by
``training.step_weight_decay`` to the power s, and every token of a completion is an anchor.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from draft_trainer.drafters.attention import ttt_attention
from draft_trainer.drafters.batch import Batch, ahead, moved
from draft_trainer.drafters.block import Block
from draft_trainer.drafters.dflash.config import DflashConfig
from draft_trainer.drafters.draft import Draft
from draft_trainer.drafters.ops import linear


class DflashHead(Draft):
    """The trainable part; ``state_dict`` has the checkpoint's names.

    Args:
        config: its shape.
        draft_vocab_ids: None; it proposes every token of the policy.
    """

    kind = "dflash"
    lm_head = None

    def __init__(self, config: DflashConfig, draft_vocab_ids: Tensor | None = None) -> None:
        super().__init__(draft_vocab_ids)
        self.config: DflashConfig = config
        shape = config.block
        width = len(config.aux_layer_ids) * config.target_hidden_size
        self.fc = nn.Linear(width, shape.hidden_size, bias=False)
        self.hidden_norm = shape.norm()
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(config.num_hidden_layers))
        self.norm = shape.norm()

    def normed(self, output: Tensor) -> Tensor:
        """See ``Draft.normed``."""
        return self.norm(output)

    def unroll(self, batch: Batch, steps: int, first_anchor: int = 0) -> Iterator[Tensor]:
        """See ``Draft.unroll``; the parameters' type is what is computed in."""
        dtype = self.norm.weight.dtype
        context = self.hidden_norm(linear(batch.aux.to(dtype), self.fc.weight))
        first = ahead(batch.embeds, 1)[:, first_anchor:].to(dtype)
        mask = batch.policy.embed_tokens[self.config.mask_token_id]
        masks = moved(mask, first.device).to(dtype).expand(len(first), steps * first.shape[1], -1)
        # Place after place along the rows: one product for all of them.
        hidden = torch.cat([first, masks], dim=1)
        anchors, count = batch.positions[:, first_anchor:], first.shape[1]
        positions = torch.cat([anchors + 1 + place for place in range(steps + 1)], dim=1)
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            keys, values = layer.context(context, batch.positions)
            q, k, v, _ = layer.project(hidden, positions)
            own = list(zip(k.split(count, 1), v.split(count, 1), strict=True))
            attended = [ttt_attention(one, keys, values, own) for one in q.split(count, 1)]
            hidden = layer.finish(hidden, torch.cat(attended, dim=1), None)
        yield from hidden.split(count, dim=1)[1:]


class _Layer(Block):
    """A decoder layer whose context is not a residual stream of its own."""

    def context(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T, kv_heads, D] of normed states [B, T, H] at positions [B, T]."""
        attention, size = self.self_attn, self.shape.head_dim
        k, v = (
            linear(states, part.weight).unflatten(-1, (-1, size))
            for part in (attention.k_proj, attention.v_proj)
        )
        assert attention.k_norm is not None, "DFlash's layers have norms of queries and keys"
        return self.rotary(attention.k_norm(k), positions), v
