"""speculators 0.9.0 as its trainer runs it (``speculators.train.trainer.Trainer.train_epoch``).

Its model, its packing of sequences into rows, its KL loss of step decay 1 and its optimizers;
float32 weights under bfloat16 autocast. As in ``benchmarks.draft_training``, attention is sdpa and
the loss is its eager one (flex attention and the fused loss need a GPU), and lm_head, frozen by
default, is trained. It would pack all sequences of a step into one row, whose dense mask costs more
than the shorter rows with summed gradients that it is given here.

Its clock leaves packing out, which its data loader does in other processes, and its padding of
every row to ``total_seq_len``. It wants the policy's last hidden state before the final norm; the
recording holds it after. So ``verifier_norm`` is the identity here, and the teacher is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.train.optimizers import build_optimizers
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import LlamaConfig, get_linear_schedule_with_warmup

from benchmarks.acceptance_curve.contestants import (
    GRAD_CLIP,
    LEARNING_RATE,
    TTT_STEPS,
    WARMUP_STEPS,
    Contestant,
)
from benchmarks.acceptance_curve.data import TrainingData
from draft_trainer.checkpoints.draft import d2t_of
from draft_trainer.config import Schedule
from draft_trainer.drafters.eagle3.config import HeadConfig
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.sample import Sample

# Rows as long as the samples are; longer ones only make its dense mask larger.
_ROW_TOKENS = 256
# ``speculators.train.config.schema``: what its command line does when it is told nothing.
_DEFAULT_RATE = 1e-3
_DEFAULTS = {
    "optimizer": "muon",
    "lr": _DEFAULT_RATE,
    "weight_decay": 0.01,
    "muon_lr": _DEFAULT_RATE,
    "muon_momentum": 0.95,
    "muon_weight_decay": 0.1,
    "muon_ns_steps": 5,
    "muon_adjust_lr_fn": "match_rms_adamw",
}


class Speculators:
    """See ``Trainer``."""

    def __init__(self, contestant: Contestant, data: TrainingData, total_steps: int) -> None:
        self._data = data
        self.model = _model(data.initial_head.config)
        self._load()
        self.model.train()
        own = contestant.optimizer == "muon"
        same = {"optimizer": "adamw", "lr": LEARNING_RATE, "weight_decay": 0.0}
        self._optimizers = build_optimizers(
            self.model, SimpleNamespace(**(_DEFAULTS if own else same))
        )
        self._schedules: list[LRScheduler] = [
            get_linear_schedule_with_warmup(optimizer, total_steps // 100, total_steps)
            if own
            else LambdaLR(optimizer, _constant)
            for optimizer in self._optimizers
        ]
        self._loss = resolve_loss_config("kl_div", "eager")

    def prepare(self, samples: Sequence[Sample]) -> object:
        """Rows, each with its share of the step's completion tokens."""
        rows: list[list[Sample]] = [[]]
        for sample in samples:
            if rows[-1] and sum(s.tokens for s in rows[-1]) + sample.tokens > _ROW_TOKENS:
                rows.append([])
            rows[-1].append(sample)
        batches = [_packed(row) for row in rows]
        counts = [int(batch["loss_mask"].sum()) for batch in batches]
        return [(batch, n / sum(counts)) for batch, n in zip(batches, counts, strict=True)]

    def step(self, batch: object) -> None:
        """See ``Trainer``."""
        assert isinstance(batch, list)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        for row, share in batch:
            self._backward(row, share)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP)
        for optimizer in self._optimizers:
            optimizer.step()
        for schedule in self._schedules:
            schedule.step()

    def _backward(self, row: dict[str, Tensor], share: float) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, loss, metrics = self.model(
                **row, ttt_steps=TTT_STEPS, ttt_step_loss_decay=1.0, loss_config=self._loss
            )
        (loss * share).backward()
        # As its trainer reads them for its log, after every step.
        assert math.isfinite(sum(value.item() for value in metrics.values()))

    def head(self) -> Eagle3Head:
        """See ``Trainer``; by the plain layout's names, which ours has as well."""
        state = {
            name.replace("layers.0.", "midlayer."): value.detach()
            for name, value in self.model.state_dict().items()
        }
        head = Eagle3Head(self._data.initial_head.config, self._data.draft_vocab_ids)
        head.load_state_dict({name: state[name] for name in head.state_dict()})
        return head

    def _load(self) -> None:
        head, data = self._data.initial_head, self._data
        policy = data.heads.get(data.policy_version)
        state = {
            name.replace("midlayer.", "layers.0."): value
            for name, value in head.state_dict().items()
        }
        state["embed_tokens.weight"] = policy.embed_tokens.float()
        state["verifier_lm_head.weight"] = policy.lm_head_rows.float()
        if not head.config.full_vocabulary:
            in_draft = torch.zeros(head.config.vocab_size, dtype=torch.bool)
            in_draft[data.draft_vocab_ids] = True
            self.model.load_vocab_mappings(in_draft, d2t_of(data.draft_vocab_ids))
        wrong = self.model.load_state_dict(state, strict=False)
        assert not wrong.unexpected_keys, wrong
        assert set(wrong.missing_keys) <= {"t2d", "d2t"}, wrong
        self.model.lm_head.weight.requires_grad_(True)


def _packed(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Shifted by its own function, then all in one row, as its collator does."""
    parts = [
        shift_batch(
            {
                "input_ids": sample.token_ids.long(),
                "hidden_states": sample.aux,
                "verifier_last_hidden_states": sample.final_hidden,
                "loss_mask": sample.loss_mask,
                "lengths": torch.tensor([sample.tokens]),
                "position_ids": torch.arange(sample.tokens),
            }
        )
        for sample in samples
    ]
    names = [name for name in parts[0] if name != "lengths"]
    batch = {name: torch.cat([part[name] for part in parts])[None] for name in names}
    lengths = torch.cat([part["lengths"] for part in parts])
    return batch | {"document_ids": torch.arange(len(parts)).repeat_interleave(lengths)[None]}


def _constant(step: int) -> float:
    """Ours as a share of the peak."""
    return Schedule(1.0, WARMUP_STEPS).rate(step, step)


def _model(config: HeadConfig) -> Eagle3DraftModel:
    layer = LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_hidden_layers=1,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=config.rope.to_dict(),
        pad_token_id=None,
    )
    layer._attn_implementation = "sdpa"
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=config.draft_vocab_size,
            eagle_aux_hidden_state_layer_ids=list(config.aux_layer_ids),
            norm_before_residual=config.norm_before_residual,
            norm_before_fc=config.norm_before_fc,
            fc_norm=config.fc_norm,
            norm_output=config.norm_output,
        )
    )
    model.verifier_norm = torch.nn.Identity()
    return model


def build(contestant: Contestant, data: TrainingData, total_steps: int) -> Speculators:
    """See ``contestants.build``."""
    return Speculators(contestant, data, total_steps)
