"""ModelOpt 0.47.0 as its example trains it (``examples/speculative_decoding/main.py``).

Offline mode: hidden states of the base model come in, its lm_head makes the teacher. The draft
takes the base model's type, so in bfloat16 the weights and AdamW's moments are bfloat16 too and
autocast (the recipe's ``bf16: true``) finds nothing to cast; there are no float32 masters. The
optimizer is the Hugging Face Trainer's default, fused AdamW with clipping at 1.
"""

from __future__ import annotations

from typing import Any

import modelopt.torch.speculative as mtsp
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.draft_training.case import (
    EPS,
    GRAD_CLIP,
    LEARNING_RATE,
    NUM_AUX,
    ROPE_THETA,
    Case,
    CaseTensors,
)


class ModelOpt:
    """Its converted base model and the Trainer's optimizer."""

    def __init__(self, case: Case, tensors: CaseTensors, setting: str) -> None:
        self.case = case
        attention, compiled, passes = setting.split()
        self.model = _convert(case, attention, compiled == "compiled")
        self._load(tensors)
        self.model.train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True
        )
        rows = torch.arange(case.rows, device=case.device)
        self.batches = [
            _batch(tensors, part) for part in rows.split(1 if passes == "summed" else case.rows)
        ]

    def step(self) -> float:
        """See ``Contestant``."""
        losses = [self._backward(batch) for batch in self.batches]
        torch.nn.utils.clip_grad_norm_(self.parameters, GRAD_CLIP)
        self.optimizer.step()
        self.model.zero_grad()
        return sum(losses)

    def _backward(self, batch: dict[str, Any]) -> float:
        with torch.autocast(
            self.case.device,
            dtype=self.case.torch_dtype,
            enabled=self.case.torch_dtype is not torch.float32,
        ):
            outputs = self.model(**batch)
        loss = outputs.loss / len(self.batches)
        loss.backward()
        return float(loss.detach())

    def _load(self, tensors: CaseTensors) -> None:
        state = {
            f"eagle_module.{name.replace('midlayer.', 'layers.0.')}": value
            for name, value in tensors.weights.items()
        }
        state["model.embed_tokens.weight"] = tensors.embed_tokens
        state["lm_head.weight"] = tensors.lm_head
        if self.case.draft_vocab_size < self.case.vocab_size:
            order = torch.arange(len(tensors.draft_vocab_ids), device=self.case.device)
            state["eagle_module.d2t"] = tensors.draft_vocab_ids - order
        wrong = self.model.load_state_dict(state, strict=False)
        assert not wrong.unexpected_keys, wrong
        assert set(wrong.missing_keys) <= {"model.norm.weight"}, wrong


def _batch(tensors: CaseTensors, rows: Tensor) -> dict[str, Any]:
    return {
        "input_ids": tensors.token_ids[rows],
        "base_model_outputs": {
            "base_model_hidden_states": tensors.final_hidden[rows],
            "aux_hidden_states": tensors.aux[rows],
        },
    }


def _convert(case: Case, attention: str, compiled: bool) -> LlamaForCausalLM:
    base = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=case.hidden_size,
            intermediate_size=case.intermediate_size,
            num_attention_heads=case.num_attention_heads,
            num_key_value_heads=case.num_key_value_heads,
            head_dim=case.head_dim,
            num_hidden_layers=0,
            vocab_size=case.vocab_size,
            rms_norm_eps=EPS,
            max_position_embeddings=max(2048, 2 * case.tokens),
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            pad_token_id=None,
            dtype=case.torch_dtype,
        )
    ).to(case.device, case.torch_dtype)
    architecture = {
        "intermediate_size": case.intermediate_size,
        "num_attention_heads": case.num_attention_heads,
        "num_key_value_heads": case.num_key_value_heads,
        "head_dim": case.head_dim,
        "rms_norm_eps": EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "draft_vocab_size": case.draft_vocab_size,
        "has_lm_head": True,
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": list(range(1, NUM_AUX + 1)),
        "_attn_implementation": attention,
    }
    mtsp.convert(
        base,
        [
            (
                "eagle",
                {
                    "eagle_offline": True,
                    "eagle_ttt_steps": case.ttt_steps,
                    "eagle_use_torch_compile": compiled,
                    "eagle_architecture_config": architecture,
                },
            )
        ],
    )
    return base


def build(case: Case, tensors: CaseTensors, setting: str) -> ModelOpt:
    """See ``contestants.build``."""
    return ModelOpt(case, tensors, setting)
