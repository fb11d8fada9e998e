"""DFlash, a block draft: decoder layers over a block of positions and its context.

For the anchor i, the block is x_{i+1} and K times the mask token, at positions i + 1 .. i + 1 + K;
place s + 1 proposes x_{i+2+s}, so all K tokens come from one forward pass. In every layer the
places attend to each other, in both directions, and to the context: the positions up to i, whose
keys and values are projections of fc(aux), the same states for all layers. K is a part of the
function: with more places, each attends to more. This is what vLLM 0.32 computes
(``v1/spec_decode/dflash.py``, ``model_executor/models/qwen3_dflash.py``). Embeddings are the
policy's, and so is lm_head, unless the draft has a vocabulary of its own: then it has its rows.

The speculators library (0.9) nests the layers' sizes in config.json and stores copies of the
policy's embeddings and lm_head, which a release leaves out. ``flattened`` reads such a file as vLLM
does (``transformers_utils/configs/speculators/algos.py``): there the places of a draft that says
``sliding_window_non_causal: false``, as the library writes by default, attend to those before them
and to themselves alone, in every layer. That is what is trained here, too.

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
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draft_trainer.checkpoints import Refuse, read_policy_config, size_of
from draft_trainer.drafters.attention import ttt_attention
from draft_trainer.drafters.batch import Batch, ahead, moved
from draft_trainer.drafters.block import Block, BlockShape
from draft_trainer.drafters.draft import Checkpoint, Draft, OneLayout, StoredShape, check_fits
from draft_trainer.drafters.eagle3.layouts import LAYER, nested_layer
from draft_trainer.drafters.ops import linear
from draft_trainer.drafters.rope import Rope
from slipstream.checkpoints import CONFIG_FILE, WEIGHTS_FILE, load_tensors, pickles
from slipstream.errors import RefusedError
from slipstream.hub import read_json
from slipstream.layers import check_layers

ARCHITECTURE = "DFlashDraftModel"
NESTED = "dflash_config"
_ADVICE = "give a DFlash draft for this policy, or make one: draft-trainer init --draft-kind dflash"
_SPECULATORS = "speculators_model_type"
_LM_HEAD = "lm_head.weight"
_POLICYS = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")
_FULL = "full_attention"
_AROUND = (
    *("draft_vocab_size", "target_hidden_size", "mask_token_id", "sample_from_anchor"),
    *("markov_rank", "markov_head_type", "block_size", "use_aux_hidden_state"),
    *("enable_confidence_head", "confidence_head_with_markov"),
)
"""The fields that speculators writes beside the nested ones, as far as vLLM passes them on."""
_FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen3",),
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
    "causal": (False, True, None),
    "sample_from_anchor": (False, None),
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
        causal: a place attends to those of its block before it and to itself, not to all of them.
        sample_from_anchor: the place of the sampled token proposes, too: there is one mask fewer.
    """

    num_hidden_layers: int
    mask_token_id: int
    causal: bool = False
    sample_from_anchor: bool = False

    @property
    def plain_logits(self) -> bool:
        """True, as in vLLM's DFlash drafts, whatever the policy does to its logits."""
        return True

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> DflashConfig:
        """Read a ``config.json`` as vLLM reads it.

        ``target_layer_ids`` are outputs of layers, counted from 0; here they are 1 more.

        Raises:
            RefusedError: a field is missing, or asks for a function that is not represented:
                windowed attention, another width than the policy's.
        """
        flat = flattened(document, DflashHead.kind, ARCHITECTURE)
        if document.get(_SPECULATORS) is not None:
            flat[NESTED] = {
                name: flat.pop(name, None)
                for name in ("mask_token_id", "target_layer_ids", "sample_from_anchor")
            } | {"causal": not document.get("sliding_window_non_causal", True)}
        nested = flat.get(NESTED)
        if not isinstance(nested, Mapping):
            _refuse(NESTED, nested, "an object with mask_token_id and target_layer_ids")
        _refuse.other_values(nested, _FIXED_NESTED, f"{NESTED}.")
        shape = block_shape(flat, ARCHITECTURE, nested, f"{NESTED}.")
        # vLLM takes is_causal, where it is given, before the nested field.
        causal = bool(nested.get("causal")) and flat.get("is_causal") is None
        return cls(**shape, causal=causal, document=dict(document))


def flattened(document: Mapping[str, Any], kind: str, architecture: str) -> dict[str, Any]:
    """Return a config.json without speculators' nesting, its layers' numbers as outputs from 0.

    Raises RefusedError: the library's, of another kind of draft.
    """
    if document.get(_SPECULATORS) is None:
        return dict(document)
    if document[_SPECULATORS] != kind:
        _refuse(_SPECULATORS, document[_SPECULATORS], kind)
    around = {name: value for name, value in document.items() if value is not None}
    ids = around.pop("aux_hidden_state_layer_ids", None)
    return nested_layer(document, _refuse) | {
        "sample_from_anchor": False,
        **{name: around[name] for name in _AROUND if name in around},
        "architectures": [architecture],
        "target_layer_ids": None if ids is None else [layer - 1 for layer in ids],
    }


def block_shape(
    flat: Mapping[str, Any], architecture: str, block: Mapping[str, Any], prefix: str
) -> dict[str, Any]:
    """The fields of a ``DflashConfig`` that every block draft has.

    Args:
        flat: config.json, ``flattened``.
        architecture: that it must name.
        block: the part of it with mask_token_id and target_layer_ids; ``prefix`` is its path.

    Raises:
        RefusedError: as ``DflashConfig.from_dict``.
    """
    _refuse.other_values(flat, _FIXED_VALUES | {"architectures": ([architecture],)})
    whose = "the draft's"
    hidden, vocab, depth = (
        size_of(flat, name, whose) for name in ("hidden_size", "vocab_size", "num_hidden_layers")
    )
    if flat.get("target_hidden_size") not in (hidden, None):
        found = flat["target_hidden_size"]
        _refuse("target_hidden_size", found, f"{hidden}: the embeddings are the policy's")
    own = flat.get("draft_vocab_size")
    draft_vocab = vocab if own is None else size_of(flat, "draft_vocab_size", whose)
    if draft_vocab > vocab:
        _refuse("draft_vocab_size", draft_vocab, f"at most {vocab}")
    kinds = flat.get("layer_types")
    if kinds is not None and any(kind != _FULL for kind in kinds):
        _refuse("layer_types", kinds, f"{_FULL} alone")
    field = f"{_refuse.file} {prefix}target_layer_ids"
    layers = check_layers(block.get("target_layer_ids"), field, _refuse.next_step)
    mask = block.get("mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < vocab:
        _refuse(f"{prefix}mask_token_id", mask, f"a token of the policy, 0 to {vocab - 1}")
    return {
        "aux_layer_ids": tuple(layer + 1 for layer in layers),
        "target_hidden_size": hidden,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        "block": BlockShape.of(flat, whose, Rope.from_dict(flat), qk_norm=True),
        "num_hidden_layers": depth,
        "mask_token_id": mask,
    }


class DflashHead(Draft):
    """The trainable part; ``state_dict`` has the checkpoint's names.

    Args:
        config: its shape.
        draft_vocab_ids: see ``Draft``.
    """

    kind = "dflash"

    def __init__(self, config: DflashConfig, draft_vocab_ids: Tensor | None = None) -> None:
        super().__init__(draft_vocab_ids)
        self.config: DflashConfig = config
        shape = config.block
        width = len(config.aux_layer_ids) * config.target_hidden_size
        self.fc = nn.Linear(width, shape.hidden_size, bias=False)
        self.hidden_norm = shape.norm()
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(config.num_hidden_layers))
        self.norm = shape.norm()
        self.lm_head = None
        if not config.full_vocabulary:
            self.lm_head = nn.Linear(shape.hidden_size, config.draft_vocab_size, bias=False)

    def normed(self, output: Tensor) -> Tensor:
        """See ``Draft.normed``."""
        return self.norm(output)

    def unroll(self, batch: Batch, steps: int, first_anchor: int = 0) -> Iterator[Tensor]:
        """See ``Draft.unroll``; it computes in the type of the parameters."""
        dtype = self.norm.weight.dtype
        context = self.hidden_norm(linear(batch.aux.to(dtype), self.fc.weight))
        first = ahead(batch.embeds, 1)[:, first_anchor:].to(dtype)
        mask = batch.policy.embed_tokens[self.config.mask_token_id]
        places = 1 + steps - self.config.sample_from_anchor
        count = first.shape[1]
        masks = moved(mask, first.device).to(dtype).expand(len(first), (places - 1) * count, -1)
        # The places follow each other along the rows, so that one product serves all of them.
        hidden = torch.cat([first, masks], dim=1)
        anchors = batch.positions[:, first_anchor:]
        positions = torch.cat([anchors + 1 + place for place in range(places)], dim=1)
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            keys, values = layer.context(context, batch.positions)
            q, k, v, _ = layer.project(hidden, positions)
            own = list(zip(k.split(count, 1), v.split(count, 1), strict=True))
            attended = [
                ttt_attention(one, keys, values, own[: place + 1] if self.config.causal else own)
                for place, one in enumerate(q.split(count, 1))
            ]
            hidden = layer.finish(hidden, torch.cat(attended, dim=1), None)
        yield from hidden.split(count, dim=1)[-steps:]


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

    name, advice = DflashHead.kind, _ADVICE
    module: ClassVar[type[Any]] = DflashHead
    shape: ClassVar[type[Any]] = DflashConfig

    def read(self, directory: Path, policy: Path | None = None) -> Checkpoint:
        """See ``Drafter.read``."""
        stored, document = load_tensors(directory), read_json(directory / CONFIG_FILE, self.advice)
        if pickled := pickles(directory):
            # vLLM would load a mask_embedding.pt in place of the mask token's embedding.
            raise RefusedError(str(directory / pickled[0]), "a pickle", WEIGHTS_FILE, self.advice)
        config: DflashConfig = self.shape_of(directory, document)
        if policy is not None:
            theirs = read_policy_config(policy)
            sizes = {"hidden_size": config.target_hidden_size, "vocab_size": config.vocab_size}
            check_fits(sizes, theirs, self.advice)
            outputs = [layer - 1 for layer in config.aux_layer_ids]
            last = size_of(theirs, "num_hidden_layers") - 1
            check_layers(outputs, "the draft's target_layer_ids", self.advice, last=last)
        policys = (*_POLICYS, _LM_HEAD) if config.full_vocabulary else _POLICYS
        own = {name: tensor for name, tensor in stored.items() if name not in policys}
        checkpoint = self.checkpoint(directory, config, own, document)
        said = (document.get(LAYER) or document).get("hidden_act")
        unsaid = () if said else ('hidden_act = "silu"',)
        return replace(checkpoint, assumed=unsaid)
