"""Pretrains the sorting policy: ``python -m examples.sorting_grpo.pretrain --out DIR``."""

from __future__ import annotations

from transformers import LlamaConfig

from examples.arithmetic_grpo.pretrain import main
from examples.arithmetic_grpo.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE
from examples.sorting_grpo import task


def policy_config() -> LlamaConfig:
    """Shape of the policy: Llama, 8 layers, 1.4 million parameters."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


if __name__ == "__main__":
    main(task, policy_config)
