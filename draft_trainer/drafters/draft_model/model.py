"""A draft model: a causal language model whose only inputs are tokens.

Step s of the anchor i is what the model says after x_{i+1+s}: with the recorded tokens fed, all
steps of all anchors are one forward pass over the sequence. While drafts are accepted they are the
recorded tokens, so this is what vLLM's proposer computes, too. vLLM's counters are higher by what
is accepted behind the end of a completion, where a model much like the policy still agrees with it.
"""

from __future__ import annotations

from collections.abc import Iterator

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
        hidden = F.embedding(batch.token_ids, self._embeddings)
        layers = self.model["layers"]
        assert isinstance(layers, nn.ModuleList)
        for layer in layers:
            assert isinstance(layer, Block)
            q, k, v, gate = layer.project(hidden, batch.positions)
            hidden = layer.finish(hidden, ttt_attention(q, k, v, ()), gate)
        for step in range(steps):
            yield ahead(hidden, step + 1)[:, first_anchor:]
