"""External draft models: a small causal language model whose only inputs are tokens.

Step s of the anchor i is what the model says after x_{i+1+s}: with the recorded tokens fed, all
steps of all anchors are one forward pass over the sequence. While drafts are accepted they are the
recorded tokens, so this is what vLLM's proposer computes, too. vLLM's counters are higher by what
is accepted past the end of a completion, where a model much like the policy still agrees with it.

With ``LmConfig.parallel_token`` one forward pass proposes all tokens: x_{i+1} and K - 1 times that
token are fed, at positions i + 1 .. i + K, and place s says x_{i+2+s}. A place sees what comes
before it: the recorded tokens up to x_{i+1} and the places up to its own. No place sees a proposed
token, so a recording says exactly what is served, too. Source: PARD (arXiv 2504.18583). Its loss is
cross-entropy on a subset of the places; here all of them have ``drafters.loss``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draft_trainer.checkpoints import Refuse, read_policy_config, size_of
from draft_trainer.drafters.attention import ttt_attention
from draft_trainer.drafters.batch import Batch, ahead
from draft_trainer.drafters.block import Block, BlockShape
from draft_trainer.drafters.draft import Checkpoint, Draft, OneLayout, StoredShape, check_fits
from draft_trainer.drafters.policy import PolicyHead
from draft_trainer.drafters.rope import Rope
from slipstream.checkpoints import CONFIG_FILE, load_tensors
from slipstream.errors import RefusedError
from slipstream.hub import read_json

POLICY_WIDTH = "target_hidden_size"
"""Our field: the policy's hidden size, which nothing else in a draft model says."""

TIED = "tie_word_embeddings"

PARALLEL_TOKEN = "pard_token"
"""PARD's field, and the one by which vLLM knows the token: the input of places that are drafted in
parallel."""

_HEAD = "lm_head.weight"
_ADVICE = "give a small causal language model as Hugging Face save_pretrained writes it"
# By model_type: whether q and k are normed, and whether q, k and v have a bias.
_LAYERS = {"llama": (False, False), "qwen2": (False, True), "qwen3": (True, False)}
_FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
}
_refuse = Refuse(
    "the draft's config.json",
    "give a small Llama, Qwen2 or Qwen3 model with the policy's vocabulary",
)


@dataclass(frozen=True, kw_only=True)
class LmConfig(StoredShape):
    """Everything that determines the model's function besides its weights; see ``StoredShape``.

    Attributes:
        num_hidden_layers: number of decoder layers.
        tied: the embeddings are its lm_head as well.
        parallel_token: see ``PARALLEL_TOKEN``; None where tokens are drafted one after the other.
    """

    num_hidden_layers: int
    tied: bool
    parallel_token: int | None = None

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> LmConfig:
        """Read a ``config.json`` that has ``POLICY_WIDTH``.

        Raises:
            RefusedError: a field is missing, or asks for a function that is not represented.
        """
        kind = document.get("model_type")
        if kind not in _LAYERS:
            _refuse("model_type", kind, f"one of {[*_LAYERS]}")
        _refuse.other_values(document, _FIXED_VALUES)
        whose = "the draft's"
        vocab, depth, width = (
            size_of(document, name, whose)
            for name in ("vocab_size", "num_hidden_layers", POLICY_WIDTH)
        )
        token = document.get(PARALLEL_TOKEN)
        if token is not None and not (type(token) is int and 0 <= token < vocab):
            _refuse(PARALLEL_TOKEN, token, f"a token of the vocabulary, 0 to {vocab - 1}")
        if token is not None and document.get("mask_token_id") is not None:
            # vLLM would use that one instead.
            _refuse("mask_token_id", document["mask_token_id"], f"none beside {PARALLEL_TOKEN}")
        qk_norm, qkv_bias = _LAYERS[kind]
        return cls(
            aux_layer_ids=(),
            target_hidden_size=width,
            vocab_size=vocab,
            draft_vocab_size=vocab,
            block=BlockShape.of(
                document, whose, Rope.from_dict(document), qk_norm=qk_norm, qkv_bias=qkv_bias
            ),
            num_hidden_layers=depth,
            tied=document.get(TIED, False) is True,
            parallel_token=token,
            document=dict(document),
        )


class DraftLm(Draft):
    """The model; ``state_dict`` has Hugging Face's names.

    Args:
        config: its shape.
    """

    kind = "draft_model"

    def __init__(self, config: LmConfig) -> None:
        super().__init__()
        self.config: LmConfig = config
        size = config.block.hidden_size
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, size),
                "layers": nn.ModuleList(
                    Block(config.block) for _ in range(config.num_hidden_layers)
                ),
                "norm": config.block.norm(),
            }
        )
        self.lm_head = None if config.tied else nn.Linear(size, config.vocab_size, bias=False)

    def lm_head_rows(self, policy: PolicyHead | None) -> Tensor:
        """Return the model's own lm_head, which is its embeddings where the two are tied."""
        return self._embeddings if self.lm_head is None else self.lm_head.weight

    @property
    def _embeddings(self) -> Tensor:
        """The embeddings, [vocab, H]; no ``nn.Parameter`` in a pass that casts parameters."""
        module = self.model["embed_tokens"]
        assert isinstance(module, nn.Embedding)
        return module.weight

    def normed(self, output: Tensor) -> Tensor:
        """See ``Draft.normed``."""
        return self.model["norm"](output)

    def unroll(self, batch: Batch, steps: int, first_anchor: int = 0) -> Iterator[Tensor]:
        """See ``Draft.unroll``; it computes in the type of the parameters."""
        embeddings, token = self._embeddings, self.config.parallel_token
        hidden, positions = F.embedding(batch.token_ids, embeddings), batch.positions
        # The places follow each other along the rows, so that one product serves all of them. Those
        # of the anchor i are at index i + 1, whose token is the last that they see.
        seen = positions[:, first_anchor:]
        rows, count = seen.shape
        places = 0 if token is None else steps - 1
        parallel = None
        if token is not None and places:
            parallel = embeddings[token].expand(rows, places * count, -1)
            ahead_of = torch.cat([seen + place for place in range(1, places + 1)], dim=1)
        layers = self.model["layers"]
        assert isinstance(layers, nn.ModuleList)
        for layer in layers:
            assert isinstance(layer, Block)
            q, k, v, gate = layer.project(hidden, positions)
            hidden = layer.finish(hidden, ttt_attention(q, k, v, ()), gate)
            if parallel is not None:
                q, own_k, own_v, gate = layer.project(parallel, ahead_of)
                own = list(zip(own_k.split(count, 1), own_v.split(count, 1), strict=True))
                attended = [
                    ttt_attention(one, k, v, own[: place + 1])
                    for place, one in enumerate(q.split(count, 1))
                ]
                parallel = layer.finish(parallel, torch.cat(attended, dim=1), gate)
        if token is None:
            for step in range(steps):
                yield ahead(hidden, step + 1)[:, first_anchor:]
            return
        yield ahead(hidden, 1)[:, first_anchor:]
        if parallel is not None:
            yield from (ahead(place, 1) for place in parallel.split(count, dim=1))


class DraftModel(OneLayout):
    """Checkpoints of draft models."""

    name, module, shape, advice = DraftLm.kind, DraftLm, LmConfig, _ADVICE

    def read(self, directory: Path, policy: Path | None = None) -> Checkpoint:
        """See ``Drafter.read``; a model that is not a release yet needs ``policy``."""
        stored = load_tensors(directory)
        found = read_json(directory / CONFIG_FILE, _ADVICE)
        document = dict(found)
        if policy is not None:
            theirs = read_policy_config(policy)
            next_step = "give a model with its tokenizer"
            check_fits({"vocab_size": document.get("vocab_size")}, theirs, next_step)
            document[POLICY_WIDTH] = size_of(theirs, "hidden_size")
        elif POLICY_WIDTH not in document:
            raise RefusedError(
                f"{directory}: {POLICY_WIDTH}", "nothing", "the policy's", "set draft.policy"
            )
        head, embeddings = stored.get(_HEAD), stored.get("model.embed_tokens.weight")
        if head is not None and document.get(TIED) is True:
            if embeddings is not None and torch.equal(head, embeddings):
                del stored[_HEAD]
            else:
                # vLLM loads what is stored, whatever config.json says.
                document[TIED] = False
        config: LmConfig = self.shape_of(directory, document)
        return self.checkpoint(directory, config, stored, document, document == found)
