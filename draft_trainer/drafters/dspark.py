"""DSpark: DFlash's block, with a Markov head, by which proposals depend on each other.

The block and its layers are ``drafters.dflash``. With h the output of step s, its logits are

    lm_head . h + w2 . w1[x],    x = x_{i+1+s}, the token before the proposed one:

the sampled token at step 0, and the proposal of the step before it at every later one. vLLM runs
the layers once and samples the steps in turn, on Model Runner V2 alone
(``v1/worker/gpu/spec_decode/dspark/``, ``model_executor/models/qwen3_dspark.py``). The sum is one
product, that of [h, w1[x]] and [lm_head, w2]: ``unroll`` yields these pairs, so loss and acceptance
are those of any draft. Teacher forcing on a recording stays exact: where a step counts, all before
it were accepted, so x is the recorded token. The place of the sampled token proposes as well, with
K - 1 masks behind it; with ``sample_from_anchor: false`` it does not, and K follow, as in DFlash.

The confidence head predicts the acceptance rate A of a step from [h, w1[x]], or from h alone. vLLM
uses it for ``enable_adaptive_verification`` alone: no proposal depends on it.

Objective: DSpark (arXiv 2607.05147) as in ``deepspec/modeling/dspark/loss.py`` of its authors'
DeepSpec (afdfa7c): 0.1 times the cross-entropy of the sampled token, 0.9 times the L1 distance of
draft and policy, and the binary cross-entropy of the confidence to A, a constant there. Here
(``drafters.loss``, ``dspark``) the cross-entropy is its mean over the policy's distribution, and
steps weigh ``training.step_weight_decay`` ** s, not exp(-s / 4). speculators 0.9 halves the L1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draft_trainer.checkpoints import Refuse, size_of
from draft_trainer.drafters.batch import Batch, ahead
from draft_trainer.drafters.dflash import (
    NESTED,
    Dflash,
    DflashConfig,
    DflashHead,
    block_shape,
    flattened,
)
from draft_trainer.drafters.policy import PolicyHead

ARCHITECTURE = "Qwen3DSparkModel"
_ADVICE = "give a DSpark draft for this policy, or make one: draft-trainer init --draft-kind dspark"
_FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    "markov_head_type": ("vanilla", None),
    "sample_from_anchor": (True, False, None),
    "enable_confidence_head": (True, False, None),
    "confidence_head_with_markov": (True, False, None),
    "use_aux_hidden_state": (True, None),
    # vLLM would propose only the tokens that are the likeliest before the Markov head's part.
    "dspark_draft_topk": (None,),
    # vLLM prefers what these say to the fields at top level.
    NESTED: (None,),
    "eagle_config": (None,),
    "dspark_target_layer_ids": (None,),
}
_refuse = Refuse("the draft's config.json", "give a DSpark draft of vLLM's Qwen3DSparkModel")


@dataclass(frozen=True, kw_only=True)
class DsparkConfig(DflashConfig):
    """Everything that determines the draft's function besides its weights; see ``StoredShape``.

    Attributes:
        markov_rank: r, width of w1's rows.
        confidence: whether it has a confidence head.
        confidence_with_markov: whether that head sees w1[x] beside h.
    """

    markov_rank: int
    confidence: bool
    confidence_with_markov: bool

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> DsparkConfig:
        """Read a ``config.json`` as vLLM reads it.

        Raises:
            RefusedError: as ``DflashConfig.from_dict``; or a gated or recurrent Markov head.
        """
        flat = flattened(document, DsparkHead.kind, ARCHITECTURE)
        _refuse.other_values(flat, _FIXED_VALUES)
        return cls(
            **block_shape(flat, ARCHITECTURE, flat, ""),
            # Absent is true, null is not.
            sample_from_anchor=bool(flat.get("sample_from_anchor", True)),
            markov_rank=size_of(flat, "markov_rank", "the draft's"),
            confidence=bool(flat.get("enable_confidence_head")),
            confidence_with_markov=bool(flat.get("confidence_head_with_markov")),
            document=dict(document),
        )


class DsparkHead(DflashHead):
    """The trainable part; ``state_dict`` has the checkpoint's names.

    Args:
        config: its shape.
        draft_vocab_ids: see ``Draft``; w1 has a row for every token of the policy all the same.
    """

    kind = "dspark"
    config: DsparkConfig

    def __init__(self, config: DsparkConfig, draft_vocab_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_vocab_ids)
        rank, self.size = config.markov_rank, config.block.hidden_size
        markov = {
            "markov_w1": nn.Embedding(config.vocab_size, rank),
            "markov_w2": nn.Linear(rank, config.draft_vocab_size, bias=False),
        }
        self.markov_head = nn.ModuleDict(markov)
        self.frozen = self.size if config.full_vocabulary else 0
        heads = {}
        if config.confidence:
            heads["proj"] = nn.Linear(self.size + rank * config.confidence_with_markov, 1)
            nn.init.zeros_(heads["proj"].bias)
        self.confidence_head = nn.ModuleDict(heads)

    @property
    def confidence(self) -> nn.Linear | None:  # type: ignore[override]
        """See ``Draft``."""
        proj = self.confidence_head["proj"] if self.confidence_head else None
        assert proj is None or isinstance(proj, nn.Linear)
        return proj

    def unroll(self, batch: Batch, steps: int, first_anchor: int = 0) -> Iterator[Tensor]:
        """See ``Draft.unroll``: h before the last norm, then w1[x]; size is H + r."""
        for step, output in enumerate(super().unroll(batch, steps, first_anchor)):
            before = ahead(batch.token_ids, step + 1)[:, first_anchor:]
            yield torch.cat([output, self.markov_head["markov_w1"](before)], dim=-1)

    def normed(self, output: Tensor) -> Tensor:
        """See ``Draft.normed``: the norm of h, then w1[x]."""
        return torch.cat([self.norm(output[..., : self.size]), output[..., self.size :]], dim=-1)

    def lm_head_rows(self, policy: PolicyHead | None) -> Tensor:
        """[draft_vocab, H + r]: the rows of lm_head and of w2 beside each other."""
        w2 = self.markov_head["markov_w2"].weight
        assert isinstance(w2, Tensor)
        return torch.cat([super().lm_head_rows(policy).to(w2.dtype), w2], dim=1)


class Dspark(Dflash):
    """Checkpoints of DSpark drafts, in the layouts of its authors and of speculators."""

    name, module, shape, advice = DsparkHead.kind, DsparkHead, DsparkConfig, _ADVICE
