"""vLLM's own draft modules on checkpoints: configuration, loader and function, without an engine.

Run as a process of its own (``python -m tests.draft_trainer.vllm_head JSON``): vLLM's distributed
state would stay in the test's process. The attention over the paged cache is replaced by the same
attention over the one sequence that is given; everything else is vLLM's.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model


class _OneSequence(nn.Module):
    """Causal attention over T keys; with a window, over the last of them."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
        super().__init__()
        self.shape = (heads, kv_heads, head_dim, window)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, kv_heads, head_dim, window = self.shape
        q, k, v = (x.view(len(x), -1, head_dim).transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (k, v))
        seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
        if window is not None:
            seen = seen.triu(1 - window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return out.transpose(0, 1).flatten(1)


def run(policy: str, draft: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The logits and the fed-back hidden states of two draft steps over the whole sequence."""
    config = EngineArgs(
        model=policy,
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        speculative_config={"method": "eagle3", "model": draft, "num_speculative_tokens": 2},
    ).create_engine_config()
    assert config.speculative_config is not None
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            initialize_model_parallel(1, 1)
        model = get_model(
            vllm_config=config, model_config=config.speculative_config.draft_model_config
        )
        attention = model.model.layers[0].self_attn
        window = attention.attn.sliding_window
        attention.attn = _OneSequence(
            attention.num_heads, attention.num_kv_heads, attention.head_dim, window
        )
        own = bool(getattr(model, "has_own_embed_tokens", False))
        out = {"own_embeddings": torch.tensor(own)}
        ids, positions = inputs["token_ids"], inputs["positions"]
        embeds = None if own else inputs["embeds"]
        aux = inputs["aux"][:, : model.model.fc_input_size]
        with torch.inference_mode():
            hidden = model.combine_hidden_states(aux)
            out["fused"] = hidden
            for step in range(2):
                taken = slice(step + 1, len(ids) - 1 + step)
                given = None if embeds is None else embeds[taken]
                normed, hidden = model(ids[taken], positions + step, hidden, given)
                out[f"logits{step}"] = model.compute_logits(normed)
                out[f"hidden{step}"] = hidden
    return {name: tensor.clone() for name, tensor in out.items()}


def main(job: dict[str, object]) -> None:
    """Run every draft of the job and save what came out beside it."""
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker has it
    with tempfile.NamedTemporaryFile() as rendezvous:
        init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, "gloo")
        for draft in job["drafts"]:  # type: ignore[attr-defined]
            inputs = load_file(str(job["inputs"]))
            save_file(run(str(job["policy"]), draft, inputs), f"{draft}.safetensors")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
