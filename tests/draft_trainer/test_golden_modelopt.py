"""Logits, losses and gradients against ModelOpt 0.47.0.

How the golden file is made: ``mtsp.convert`` of ``modelopt.torch.speculative`` gives a
``LlamaForCausalLM`` without layers an "eagle" draft, with eagle_offline, eagle_ttt_steps 4, no
torch.compile, and the dims of the file, has_lm_head, use_aux_hidden_state, rms_norm_eps 1e-5,
rope_theta 10000 and sdpa attention in eagle_architecture_config. It gets the weights ``w.*`` of
golden_specforge.safetensors (``midlayer`` is its ``layers.0``) and one forward and backward pass on
``in.*``: final states and aux states as base_model_outputs, tokens, loss mask, and an attention
mask of ones. Its ``_eagle_forward`` gives the logits of a step, ``_eagle_loss`` loss and accuracy.

Two things of ModelOpt's are mapped here. It rolls its hidden states by one position a step, so its
query q of step s is the anchor q - s. And its first layer is a stock Llama layer, which applies
``input_layernorm``, meant for the embeddings, to the hidden state as well, before ``hidden_norm``;
vLLM does not, so what ModelOpt trains is not quite what is served.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draft_trainer.drafters.batch import ahead
from draft_trainer.drafters.block import Norm
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.drafters.loss import ttt_objective
from tests.draft_trainer.synthetic import logits_of
from tests.draft_trainer.test_golden import (
    STEPS,
    _batch,
    _check_gradients,
    _close,
    _head,
    _load,
)

pytestmark = pytest.mark.contract("alignment")

golden, dims = _load("modelopt")


class _NormedTwice(Norm):
    """ModelOpt's ``input_layernorm`` before ``hidden_norm``."""

    def __init__(self, first: Norm, second: Norm) -> None:
        super().__init__(len(second.weight), second.eps)
        self.weight, self._first = second.weight, [first]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self._first[0](x))


@pytest.fixture
def head() -> Eagle3Head:
    """The golden head, its hidden state normed twice."""
    head = _head(golden, dims)
    layer = head.midlayer
    layer.hidden_norm = _NormedTwice(layer.input_layernorm, layer.hidden_norm)
    return head


def test_modelopt_logits(head: Eagle3Head) -> None:
    """Every anchor whose token in exists, in all four steps."""
    length = golden["in.input_ids"].shape[1]
    for step, output in enumerate(head.unroll(_batch(golden), STEPS)):
        theirs = golden[f"step{step}.logits"][:, step : length - 1]
        _close(logits_of(head, output)[:, : length - 1 - step], theirs)


def test_modelopt_loss_and_gradients(head: Eagle3Head) -> None:
    """Mask l[i+1+s] over its sum + 1e-5, weights 0.9^s, soft cross-entropy; accuracy is top-1."""
    batch = _batch(golden)
    valid = torch.stack([ahead(batch.loss_mask, s + 1) for s in range(STEPS)])
    counts = valid.flatten(1).sum(1) + 1e-5
    outcome = ttt_objective(
        head, batch, valid, weights=[0.9**s for s in range(STEPS)], denominators=counts
    )
    for step in range(STEPS):
        _close(outcome.sums[step, 0] / counts[step], golden[f"step{step}.loss"][0])
        top1 = float(outcome.sums[step, 1] / outcome.counts[step])
        assert top1 == pytest.approx(float(golden[f"step{step}.acc"][0]), abs=1e-6)
    _close(outcome.loss, golden["loss"][0])
    _check_gradients(head, outcome, golden)
