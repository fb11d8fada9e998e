"""Pretrains a policy that sorts: ``python -m examples.sorting_grpo.pretrain --out DIR``.

``--policy`` chooses the architecture: 8 layers of width 128 each. The committed policy is a Llama.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from examples.arithmetic_grpo import pretrain
from examples.arithmetic_grpo.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE
from examples.sorting_grpo import task

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}

POLICIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": partial(LlamaConfig, **_SIZES),
    "qwen3": partial(Qwen3Config, **_SIZES),
    "qwen3-tied": partial(Qwen3Config, **_SIZES | {"tie_word_embeddings": True}),
    "qwen3-moe": partial(
        Qwen3MoeConfig, **_SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128
    ),
}
"""The configuration of each: dense, with tied embeddings, with experts."""


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.sorting_grpo.pretrain",
        description="Pretrain a policy that sorts letters, from scratch (CPU).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--policy", choices=POLICIES, default="llama", help="architecture")
    parser.add_argument("--out", required=True, help="checkpoint folder, replaced whole")
    parser.add_argument("--minutes", default="9", help="training time, in minutes")
    parser.add_argument("--threads", default="2", help="torch CPU threads")
    chosen = parser.parse_args(argv)
    rest = ["--out", chosen.out, "--minutes", chosen.minutes, "--threads", chosen.threads]
    pretrain.main(task, POLICIES[chosen.policy], rest)


if __name__ == "__main__":
    main()
