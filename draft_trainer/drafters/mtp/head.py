"""The MTP head and its unroll.

For the anchor i and step s: token in x_{i+1+s}, position i + s, hidden state in the policy's final
state h_i (after its final norm) at s = 0 and the head's own output of step s - 1 afterwards;
attention to the step-0 keys of positions up to i and to the anchor's own keys of steps 1 .. s; the
output predicts x_{i+2+s} through the policy's lm_head. This is what vLLM's V1 runner computes with
one module for all draft positions. Embeddings and lm_head are the policy's and follow its versions.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from draft_trainer.drafters.attention import ttt_attention
from draft_trainer.drafters.batch import Batch, ahead
from draft_trainer.drafters.block import Block
from draft_trainer.drafters.draft import Draft
from draft_trainer.drafters.mtp.config import FAMILIES, PARTS, MtpConfig
from draft_trainer.drafters.mtp.experts import Experts
from draft_trainer.drafters.ops import linear


class MtpHead(Draft):
    """The trainable part of an MTP head; ``MtpConfig.stored`` gives the checkpoint's names.

    Args:
        config: its shape.
        draft_vocab_ids: None; the head proposes every token of the policy.
    """

    kind = "mtp"
    lm_head = None

    def __init__(self, config: MtpConfig, draft_vocab_ids: Tensor | None = None) -> None:
        super().__init__(draft_vocab_ids)
        self.config: MtpConfig = config
        shape, experts = config.block, config.experts
        self.embed_norm, self.hidden_norm = shape.norm(), shape.norm()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layer = Block(shape, Experts(shape.hidden_size, experts) if experts else None)
        has_norm = FAMILIES[config.family].names[PARTS.index("norm.")] is not None
        self.norm = shape.norm() if has_norm else nn.Identity()

    def normed(self, output: Tensor) -> Tensor:
        """The output itself where ``unroll`` norms it, because the next step takes it normed."""
        return output if FAMILIES[self.config.family].norm_fed else self.norm(output)

    def unroll(self, batch: Batch, steps: int, first_anchor: int = 0) -> Iterator[Tensor]:
        """See ``Draft.unroll``; the parameters' type is what is computed in."""
        family, dtype = FAMILIES[self.config.family], self.fc.weight.dtype
        halves = self.fc.weight.chunk(2, dim=1)
        fc_of_embeds, fc_of_hidden = halves if family.embedding_first else halves[::-1]
        # The embedding's half is the same at every step but for a shift.
        tokens_in = linear(self.embed_norm(batch.embeds.to(dtype)), fc_of_embeds)
        hidden, positions = batch.final_hidden.to(dtype), batch.positions
        prefix: tuple[Tensor, Tensor] | None = None
        later: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            tokens_in = fed = ahead(tokens_in, 1)
            if family.blind_start and step == 0:
                fed = tokens_in * (positions != 0)[..., None]
            fused = fed + linear(self.hidden_norm(hidden), fc_of_hidden)
            q, k, v, gate = self.layer.project(fused, positions + step)
            if prefix is None:
                prefix = (k, v)
                q, fused, positions, tokens_in = (
                    x[:, first_anchor:] for x in (q, fused, positions, tokens_in)
                )
                gate = None if gate is None else gate[:, first_anchor:]
            else:
                later.append((k, v))
            attended = ttt_attention(q, *prefix, later)
            hidden = self.layer.finish(fused, attended, gate)
            if family.norm_fed:
                hidden = self.norm(hidden)
            yield hidden
