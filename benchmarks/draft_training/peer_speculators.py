"""speculators 0.9.0 as its trainer runs it (``speculators.train.trainer.Trainer.train_epoch``).

float32 master weights under autocast, AdamW as ``build_optimizers`` makes it, KL loss of step
decay 1. Its fused losses are Triton kernels, so on a CPU its own ``--loss-implementation eager``
is taken; its torch.compile is conditional on CUDA in its own code. Its lm_head, frozen by default,
is made trainable.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.train.optimizers import build_optimizers
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.draft_training.case import (
    EPS,
    GRAD_CLIP,
    LEARNING_RATE,
    NUM_AUX,
    ROPE_THETA,
    Case,
    CaseTensors,
)


class Speculators:
    """Its model, loss and optimizer."""

    def __init__(self, case: Case, tensors: CaseTensors, setting: str) -> None:
        self.case = case
        attention, sequences = setting.split()
        config = LlamaConfig(
            hidden_size=case.hidden_size,
            intermediate_size=case.intermediate_size,
            num_attention_heads=case.num_attention_heads,
            num_key_value_heads=case.num_key_value_heads,
            head_dim=case.head_dim,
            num_hidden_layers=1,
            vocab_size=case.vocab_size,
            rms_norm_eps=EPS,
            max_position_embeddings=max(2048, 2 * case.tokens),
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            pad_token_id=None,
        )
        config._attn_implementation = attention
        self.model = Eagle3DraftModel(
            Eagle3SpeculatorConfig(
                transformer_layer_config=config,
                draft_vocab_size=case.draft_vocab_size,
                eagle_aux_hidden_state_layer_ids=list(range(1, NUM_AUX + 1)),
            )
        ).to(case.device)
        self._load(tensors)
        self.model.train()
        self.optimizers = build_optimizers(
            self.model,
            SimpleNamespace(optimizer="adamw", lr=LEARNING_RATE, weight_decay=0.0),
        )
        rows = [_packed(tensors, [row]) for row in range(case.rows)]
        self.batches = rows if sequences == "summed" else [_packed(tensors, range(case.rows))]
        loss = "eager" if case.device == "cpu" else "fused"
        self.loss_config = resolve_loss_config("kl_div", loss)

    def step(self) -> float:
        """See ``Contestant``."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        losses = [self._backward(batch) for batch in self.batches]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
        return sum(losses)

    def _backward(self, batch: dict[str, Tensor]) -> float:
        with torch.autocast(
            self.case.device,
            dtype=self.case.torch_dtype,
            enabled=self.case.torch_dtype is not torch.float32,
        ):
            _, loss, metrics = self.model(
                **batch,
                ttt_steps=self.case.ttt_steps,
                ttt_step_loss_decay=1.0,
                loss_config=self.loss_config,
            )
        (loss / len(self.batches)).backward()
        numbers: dict[str, float] = {name: value.item() for name, value in metrics.items()}
        return numbers["loss_sum"] / len(self.batches)

    def _load(self, tensors: CaseTensors) -> None:
        state = {
            name.replace("midlayer.", "layers.0."): value for name, value in tensors.weights.items()
        }
        state["embed_tokens.weight"] = tensors.embed_tokens
        state["verifier_lm_head.weight"] = tensors.lm_head[tensors.draft_vocab_ids]
        if self.model.use_draft_vocab:
            order = torch.arange(len(tensors.draft_vocab_ids), device=self.case.device)
            mask = torch.zeros(self.case.vocab_size, dtype=torch.bool, device=self.case.device)
            mask[tensors.draft_vocab_ids] = True
            self.model.load_vocab_mappings(mask, tensors.draft_vocab_ids - order)
        wrong = self.model.load_state_dict(state, strict=False)
        assert not wrong.unexpected_keys, wrong
        assert set(wrong.missing_keys) <= {"verifier_norm.weight", "t2d", "d2t"}, wrong
        self.model.verifier_norm.weight.data.fill_(1.0)
        self.model.lm_head.weight.requires_grad_(True)


def _packed(tensors: CaseTensors, rows: Sequence[int]) -> dict[str, Tensor]:
    """Shifted by its own function, then all in one row, as its collator does."""
    length, device = tensors.token_ids.shape[1], tensors.token_ids.device
    parts = [
        shift_batch(
            {
                "input_ids": tensors.token_ids[row],
                "hidden_states": tensors.aux[row],
                "verifier_last_hidden_states": tensors.final_hidden[row],
                "loss_mask": torch.ones(length, dtype=torch.bool, device=device),
                "lengths": torch.tensor([length], device=device),
                "position_ids": torch.arange(length, device=device),
            }
        )
        for row in rows
    ]
    names = [name for name in parts[0] if name != "lengths"]
    batch = {name: torch.cat([part[name] for part in parts])[None] for name in names}
    documents = torch.arange(len(rows), device=device).repeat_interleave(length - 1)
    return batch | {"document_ids": documents[None]}


def build(case: Case, tensors: CaseTensors, setting: str) -> Speculators:
    """See ``contestants.build``."""
    return Speculators(case, tensors, setting)
