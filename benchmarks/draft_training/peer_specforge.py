"""SpecForge 0.2.0 as its trainer runs it (``Eagle3TrainStrategy`` over ``OnlineEagle3Model``).

Weights of the case's type and ``BF16Optimizer``'s float32 masters, step decay 0.8. Its loss is a
Triton kernel, so on a CPU the reference of the same file takes its place. Its target head is built
by its own class and given the case's type; it computes full-vocabulary logits, because its loss
mask and its acceptance metric are defined by them.
"""

from __future__ import annotations

from types import SimpleNamespace

import specforge.algorithms.eagle3.model as eagle3
import torch
from specforge.core.loss import _compute_loss
from specforge.modeling.draft import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import Eagle3TrainStrategy
from torch import Tensor, nn
from transformers import LlamaConfig

from benchmarks.draft_training.case import (
    EPS,
    GRAD_CLIP,
    LEARNING_RATE,
    ROPE_THETA,
    Case,
    CaseTensors,
)


class SpecForge:
    """Its model, strategy and optimizer."""

    def __init__(self, case: Case, tensors: CaseTensors, setting: str) -> None:
        attention, teacher, passes = setting.split()
        if case.device == "cpu":
            eagle3.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
        config = LlamaConfig(
            hidden_size=case.hidden_size,
            intermediate_size=case.intermediate_size,
            num_attention_heads=case.num_attention_heads,
            num_key_value_heads=case.num_key_value_heads,
            head_dim=case.head_dim,
            num_hidden_layers=1,
            vocab_size=case.vocab_size,
            draft_vocab_size=case.draft_vocab_size,
            rms_norm_eps=EPS,
            max_position_embeddings=max(2048, 2 * case.tokens),
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            pad_token_id=None,
            pretraining_tp=1,
        )
        draft = LlamaForCausalLMEagle3(config, attention_backend=attention)
        _load(draft, case, tensors)
        draft.freeze_embedding()
        draft = draft.to(case.device, case.torch_dtype)
        model = eagle3.OnlineEagle3Model(
            draft, length=case.ttt_steps, attention_backend=attention
        ).train()
        self.strategy = Eagle3TrainStrategy(
            model,
            target_head=_target_head(case, tensors),
            compact_teacher=teacher == "compact",
        )
        self.optimizer = BF16Optimizer(
            draft, lr=LEARNING_RATE, max_grad_norm=GRAD_CLIP, lr_scheduler="constant"
        )
        rows = torch.arange(case.rows, device=case.device)
        self.batches = [
            _batch(tensors, part) for part in rows.split(1 if passes == "summed" else case.rows)
        ]

    def step(self) -> float:
        """See ``Contestant``."""
        losses = []
        for batch in self.batches:
            loss = self.strategy.forward_loss(batch).loss / len(self.batches)
            loss.backward()
            losses.append(float(loss.detach()))
        self.optimizer.step()
        return sum(losses)


def _batch(tensors: CaseTensors, rows: Tensor) -> TrainBatch:
    ids = tensors.token_ids[rows]
    return TrainBatch(
        sample_ids=[str(row) for row in rows.tolist()],
        strategy="eagle3",
        tensors={
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "loss_mask": torch.ones_like(ids),
            "hidden_state": tensors.aux[rows],
            "target": tensors.final_hidden[rows],
        },
        metadata={"target_repr": "hidden_state"},
    )


def _load(draft: nn.Module, case: Case, tensors: CaseTensors) -> None:
    state = dict(tensors.weights)
    state["embed_tokens.weight"] = tensors.embed_tokens
    order = torch.arange(len(tensors.draft_vocab_ids), device=case.device)
    state["d2t"] = tensors.draft_vocab_ids - order
    state["t2d"] = torch.zeros(case.vocab_size, dtype=torch.bool, device=case.device)
    state["t2d"][tensors.draft_vocab_ids] = True
    draft.load_state_dict(state)


def _target_head(case: Case, tensors: CaseTensors) -> TargetHead:
    """Without the files that its constructor reads the sizes from."""
    head = TargetHead.__new__(TargetHead)
    nn.Module.__init__(head)
    head.fc = nn.Linear(case.hidden_size, case.vocab_size, bias=False)
    head.fc.weight.data = tensors.lm_head
    head.freeze_weights()
    return head.eval()


def build(case: Case, tensors: CaseTensors, setting: str) -> SpecForge:
    """See ``contestants.build``."""
    return SpecForge(case, tensors, setting)
