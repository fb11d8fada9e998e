"""Ours: the learner's step on a batch, without the service around it.

float32 masters, ``compute_dtype`` of the case, fused AdamW and clipping as ``DraftOptimizer`` does
them. log Z, which the policy hands over in production, is here the log-sum-exp over the draft
vocabulary's rows, so that the teacher is the peers' (they renormalise over the draft vocabulary).
It is made once, before the measurement, as the policy made its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.draft_training.case import (
    EPS,
    GRAD_CLIP,
    LEARNING_RATE,
    NUM_AUX,
    ROPE_THETA,
    Case,
    CaseTensors,
)
from draft_trainer.config import TrainingConfig
from draft_trainer.drafters.batch import Batch
from draft_trainer.drafters.eagle3.head import Eagle3Head, HeadConfig
from draft_trainer.drafters.loss import step_weights, ttt_objective
from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from draft_trainer.drafters.rope import Rope
from draft_trainer.kernels.library import use_kernels
from draft_trainer.training.optimizer import DraftOptimizer


def head_config(case: Case) -> HeadConfig:
    """The configuration of a case's head."""
    return HeadConfig(
        hidden_size=case.hidden_size,
        intermediate_size=case.intermediate_size,
        num_attention_heads=case.num_attention_heads,
        num_key_value_heads=case.num_key_value_heads,
        head_dim=case.head_dim,
        vocab_size=case.vocab_size,
        draft_vocab_size=case.draft_vocab_size,
        aux_layer_ids=tuple(range(1, NUM_AUX + 1)),
        target_hidden_size=case.hidden_size,
        rms_norm_eps=EPS,
        rope=Rope(ROPE_THETA),
        max_position_embeddings=max(2048, 2 * case.tokens),
    )


class Ours:
    """The head, its optimizer and a batch."""

    def __init__(self, case: Case, tensors: CaseTensors, setting: str) -> None:
        self.case = case
        # "1024 tokens a pass plain" is the same without the C kernels.
        use_kernels("off" if setting.endswith("plain") else "auto")
        self.head = Eagle3Head(head_config(case)).to(case.device)
        self.head.load_state_dict(tensors.weights)
        self.config = TrainingConfig(
            learning_rate=LEARNING_RATE,
            grad_clip=GRAD_CLIP,
            ttt_steps=case.ttt_steps,
            weight_averaging=0.0,  # as the peers
        )
        self.optimizer = DraftOptimizer(self.head, self.config)
        self.weights = step_weights(case.ttt_steps, self.config.step_weight_decay)
        self.token_ids = tensors.token_ids
        self.embed_tokens = tensors.embed_tokens
        self.aux, self.final_hidden = tensors.aux, tensors.final_hidden
        rows = tensors.lm_head[tensors.draft_vocab_ids]
        self.policy = PolicyHead(0, rows, tensors.embed_tokens)
        self.heads = PolicyHeads(1)
        self.log_z = (tensors.final_hidden @ rows.T).float().logsumexp(-1)
        # Every anchor whose teacher lies in the row: i + 1 + s <= T - 1, as the peers have it.
        # Masks lie on the CPU, where a GPU is not waited for.
        index = torch.arange(case.tokens)
        valid = torch.stack([index + 1 + s < case.tokens for s in range(case.ttt_steps)])
        self.valid = valid[:, None].expand(-1, case.rows, -1).contiguous()
        self.denominators = self.valid.flatten(1).sum(1)
        rows = torch.arange(case.rows)
        # As ``training.forward_tokens`` does it.
        max_batch_tokens = int(setting.partition(" ")[0])
        self.parts = rows.split(max(max_batch_tokens // case.tokens, 1))

    def step(self) -> float:
        """See ``Contestant``."""
        self.optimizer.clear_gradients()
        losses = [self._backward(rows) for rows in self.parts]
        self.optimizer.step(LEARNING_RATE, self.optimizer.gradient_norm())
        return sum(losses)

    def _backward(self, rows: Tensor) -> float:
        outcome = ttt_objective(
            self.head,
            self.batch(rows),
            self.valid[:, rows],
            weights=self.weights,
            denominators=self.denominators,
            compute_dtype=self.case.torch_dtype,
        )
        outcome.loss.backward()
        outcome.sums.tolist()
        return float(outcome.loss.detach())

    def batch(self, rows: Tensor) -> Batch:
        """Looks the embeddings up, as ``batches`` does in every step."""
        case, ids = self.case, self.token_ids[rows]
        every = torch.ones(ids.shape, dtype=torch.bool)
        return Batch(
            token_ids=ids,
            positions=torch.arange(case.tokens, device=case.device).expand(ids.shape),
            loss_mask=every,
            anchors=every,
            aux=self.aux[rows],
            embeds=torch.nn.functional.embedding(ids, self.embed_tokens),
            final_hidden=self.final_hidden[rows],
            policy=self.policy,
            heads=self.heads,
            logits_dtype=case.torch_dtype,
            log_z=self.log_z[rows],
            teacher_known=every,
            sampled_logprobs=torch.zeros(ids.shape, device=case.device),
            temperature=torch.ones(len(rows)),
            groups=tuple(map(str, rows.tolist())),
        )


def build(case: Case, tensors: CaseTensors, setting: str) -> Ours:
    """See ``contestants.build``."""
    return Ours(case, tensors, setting)
