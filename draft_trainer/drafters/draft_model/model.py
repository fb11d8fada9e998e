"""A draft model: a causal language model whose only inputs are tokens.

Step s of the anchor i is what the model says after x_{i+1+s}: with the recorded tokens fed, all
steps of all anchors are one forward pass over the sequence. While drafts are accepted they are the
recorded tokens, so this is what vLLM's proposer computes, too. vLLM's counters are higher by what
is accepted behind the end of a completion, where a model much like the policy still agrees with it.

With ``LmConfig.parallel_token`` one forward pass proposes all tokens: x_{i+1} and K - 1 times that
token are fed, at positions i + 1 .. i + K, and place s says x_{i+2+s}. A place sees what comes
before it: the recorded tokens up to x_{i+1} and the places up to its own. No place sees a proposed
token, so a recording says exactly what is served, too. Source: PARD (arXiv 2504.18583). Its loss is
cross-entropy on a subset of the places; here all of them have ``drafters.loss``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draft_trainer.drafters.attention import ttt_attention
from draft_trainer.drafters.batch import Batch, ahead
from draft_trainer.drafters.block import Block
from draft_trainer.drafters.draft import Draft
from draft_trainer.drafters.draft_model.config import LmConfig
from draft_trainer.drafters.policy import PolicyHead


class DraftLm(Draft):
    """The model; ``state_dict`` has Hugging Face's names.

    Args:
        config: its shape.
        draft_vocab_ids: None; it proposes every token of the policy.
    """

    kind = "draft_model"

    def __init__(self, config: LmConfig, draft_vocab_ids: Tensor | None = None) -> None:
        super().__init__(draft_vocab_ids)
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
        """Its own, which are its embeddings where the two are tied."""
        return self._embeddings if self.lm_head is None else self.lm_head.weight

    @property
    def _embeddings(self) -> Tensor:
        """[vocab, H]; in a pass that computes in another type no ``nn.Parameter``."""
        module = self.model["embed_tokens"]
        assert isinstance(module, nn.Embedding)
        return module.weight

    def normed(self, output: Tensor) -> Tensor:
        """See ``Draft.normed``."""
        return self.model["norm"](output)

    def unroll(self, batch: Batch, steps: int, first_anchor: int = 0) -> Iterator[Tensor]:
        """See ``Draft.unroll``; the parameters' type is what is computed in."""
        embeddings, token = self._embeddings, self.config.parallel_token
        hidden, positions = F.embedding(batch.token_ids, embeddings), batch.positions
        # Place after place along the rows: one product for all of them. The places of the anchor i
        # are at index i + 1, whose token is the last that they see.
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
