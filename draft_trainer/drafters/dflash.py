"""DFlash, a block draft: decoder layers over a block of positions and its context.

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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draft_trainer.checkpoints import Refuse, read_policy_config, size_of
from draft_trainer.drafters.attention import ttt_attention
from draft_trainer.drafters.batch import Batch, ahead, moved
from draft_trainer.drafters.block import Block, BlockShape
from draft_trainer.drafters.draft import Checkpoint, Draft, OneLayout, StoredShape, check_fits
from draft_trainer.drafters.ops import linear
from draft_trainer.drafters.rope import Rope
from slipstream.checkpoints import CONFIG_FILE, WEIGHTS_FILE, load_tensors, pickles
from slipstream.errors import RefusedError
from slipstream.hub import read_json
from slipstream.layers import check_layers

ARCHITECTURE = "DFlashDraftModel"
NESTED = "dflash_config"
_ADVICE = "give a DFlash draft for this policy, or make one: draft-trainer init --draft-kind dflash"
_POLICYS = ("embed_tokens.weight", "lm_head.weight")
_FULL = "full_attention"
_FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    # The speculators library nests the sizes, and gives the draft a vocabulary of its own.
    "speculators_model_type": (None,),
    "model_type": ("qwen3",),
    "architectures": ([ARCHITECTURE],),
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "use_sliding_window": (False, None),
    "is_causal": (False, None),
    "is_neox_style": (True, None),
    "logit_scale": (1.0, None),
    "quantization_config": (None,),
    # vLLM prefers it to target_layer_ids, and numbers layers differently there.
    "eagle_aux_hidden_state_layer_ids": (None,),
}
_FIXED_NESTED: dict[str, tuple[Any, ...]] = {
    "causal": (False, None),
    "use_swa": (False, None),
    "use_aux_hidden_state": (True, None),
    "attention_sink_bias": (False, None),
    "attention_value_scale": (1.0, None),
}
_refuse = Refuse(
    "the draft's config.json",
    "give a DFlash draft with full attention, of the policy's width and vocabulary",
)


@dataclass(frozen=True, kw_only=True)
class DflashConfig(StoredShape):
    """Everything that determines the draft's function besides its weights; see ``StoredShape``.

    Attributes:
        num_hidden_layers: number of decoder layers.
        mask_token_id: the policy's token whose embedding stands at every place to be proposed.
    """

    num_hidden_layers: int
    mask_token_id: int

    @property
    def plain_logits(self) -> bool:
        """True, as in vLLM's DFlash drafts, whatever the policy does to its logits."""
        return True

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> DflashConfig:
        """Read a ``config.json`` as vLLM reads it.

        ``target_layer_ids`` are outputs of layers, counted from 0; here they are 1 more.

        Raises:
            RefusedError: a field is missing, or asks for a function that is not represented: causal
                or windowed attention, another width or vocabulary than the policy's.
        """
        _refuse.other_values(document, _FIXED_VALUES)
        nested = document.get(NESTED)
        if not isinstance(nested, Mapping):
            _refuse(NESTED, nested, "an object with mask_token_id and target_layer_ids")
        _refuse.other_values(nested, _FIXED_NESTED, f"{NESTED}.")
        whose = "the draft's"
        hidden, vocab, depth = (
            size_of(document, name, whose)
            for name in ("hidden_size", "vocab_size", "num_hidden_layers")
        )
        for name, only in (("target_hidden_size", hidden), ("draft_vocab_size", vocab)):
            if document.get(name) not in (only, None):
                _refuse(name, document[name], f"{only}: embeddings and lm_head are the policy's")
        kinds = document.get("layer_types")
        if kinds is not None and any(kind != _FULL for kind in kinds):
            _refuse("layer_types", kinds, f"{_FULL} alone")
        field = f"{_refuse.file} {NESTED}.target_layer_ids"
        layers = check_layers(nested.get("target_layer_ids"), field, _refuse.next_step)
        mask = nested.get("mask_token_id")
        if not isinstance(mask, int) or not 0 <= mask < vocab:
            _refuse(f"{NESTED}.mask_token_id", mask, f"a token of the policy, 0 to {vocab - 1}")
        return cls(
            aux_layer_ids=tuple(layer + 1 for layer in layers),
            target_hidden_size=hidden,
            vocab_size=vocab,
            draft_vocab_size=vocab,
            block=BlockShape.of(document, whose, Rope.from_dict(document), qk_norm=True),
            num_hidden_layers=depth,
            mask_token_id=mask,
            document=dict(document),
        )


class DflashHead(Draft):
    """The trainable part; ``state_dict`` has the checkpoint's names.

    Args:
        config: its shape.
    """

    kind = "dflash"
    lm_head = None

    def __init__(self, config: DflashConfig) -> None:
        super().__init__()
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
        """See ``Draft.unroll``; it computes in the type of the parameters."""
        dtype = self.norm.weight.dtype
        context = self.hidden_norm(linear(batch.aux.to(dtype), self.fc.weight))
        first = ahead(batch.embeds, 1)[:, first_anchor:].to(dtype)
        mask = batch.policy.embed_tokens[self.config.mask_token_id]
        masks = moved(mask, first.device).to(dtype).expand(len(first), steps * first.shape[1], -1)
        # The places follow each other along the rows, so that one product serves all of them.
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


class Dflash(OneLayout):
    """Checkpoints of DFlash drafts; copies of the policy's embeddings and lm_head are left out."""

    name, module, shape, advice = DflashHead.kind, DflashHead, DflashConfig, _ADVICE

    def read(self, directory: Path, policy: Path | None = None) -> Checkpoint:
        """See ``Drafter.read``."""
        stored, document = load_tensors(directory), read_json(directory / CONFIG_FILE, _ADVICE)
        if pickled := pickles(directory):
            # vLLM would load a mask_embedding.pt in place of the mask token's embedding.
            raise RefusedError(str(directory / pickled[0]), "a pickle", WEIGHTS_FILE, _ADVICE)
        config: DflashConfig = self.shape_of(directory, document)
        if policy is not None:
            theirs = read_policy_config(policy)
            sizes = {"hidden_size": config.target_hidden_size, "vocab_size": config.vocab_size}
            check_fits(sizes, theirs, _ADVICE)
            outputs = [layer - 1 for layer in config.aux_layer_ids]
            last = size_of(theirs, "num_hidden_layers") - 1
            check_layers(outputs, "the draft's target_layer_ids", _ADVICE, last=last)
        own = {name: tensor for name, tensor in stored.items() if name not in _POLICYS}
        checkpoint = self.checkpoint(directory, config, own, document)
        unsaid = () if document.get("hidden_act") else ('hidden_act = "silu"',)
        return replace(checkpoint, assumed=unsaid)
