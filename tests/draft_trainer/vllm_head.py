"""vLLM's own draft modules on checkpoints: configuration, loader and function, without an engine.

Run as a process of its own (``python -m tests.draft_trainer.vllm_head JSON``): vLLM's distributed
state would stay in the test's process. The attention over the paged cache is replaced by the same
attention over the one sequence that is given; everything else is vLLM's.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import (
    destroy_model_parallel,
    model_parallel_is_initialized,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

from rollout_server.vllm.patches import allow_dense_qwen3_next, norm_context_by_layer


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


class _Chain(nn.Module):
    """Attention of new tokens to all tokens since ``start`` was called."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.shape = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
        self.start()

    def start(self) -> None:
        self.keys, self.values = torch.empty(0), torch.empty(0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, kv_heads, head_dim = self.shape
        q, k, v = (x.view(len(x), -1, head_dim).transpose(0, 1) for x in (q, k, v))
        self.keys = torch.cat([self.keys, k], 1) if self.keys.numel() else k
        self.values = torch.cat([self.values, v], 1) if self.values.numel() else v
        k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (self.keys, self.values))
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return out.transpose(0, 1).flatten(1)


def _configs(policy: str, method: str, draft: str, steps: int) -> tuple[VllmConfig, ModelConfig]:
    """The configuration of vLLM for a policy and its draft, and that of the draft."""
    config = EngineArgs(
        model=policy,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        speculative_config={"method": method, "model": draft, "num_speculative_tokens": steps},
    ).create_engine_config()
    assert config.speculative_config is not None
    return config, config.speculative_config.draft_model_config


def run_mtp(head: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run an MTP head at each anchor: a chain of steps, as vLLM's V1 runner drafts.

    Args:
        head: a release, which is also taken for the policy's configuration.
        inputs: ``embeds`` and ``final`` [T, H], ``lm_head`` [vocab, H], ``anchors`` [N], ``steps``.

    Returns:
        ``hidden`` [N, steps, H], what the next step is given, and ``logits`` [N, steps, vocab].
    """
    steps, rows = int(inputs["steps"]), inputs["lm_head"]
    config, drafter = _configs(head, "mtp", head, steps)
    hidden_states, logits = [], []
    # Which groups there are depends on whether the model has experts.
    destroy_model_parallel()
    with set_current_vllm_config(config):
        initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config, model_config=drafter)
        chains = []
        for module in model.modules():
            if hasattr(module, "qkv_proj"):
                chains.append(_Chain(module))
                module.attn = chains[-1]
        heads = [m for n, m in model.named_modules() if n.endswith(("lm_head", "shared_head.head"))]
        assert len(chains) == len(heads) == 1
        heads[0].weight = nn.Parameter(rows)
        heads[0].quant_method = _Plain()
        with torch.inference_mode(), set_forward_context(None, config):
            for anchor in inputs["anchors"].tolist():
                chains[0].start()
                taken, hidden = slice(0, anchor + 1), inputs["final"][: anchor + 1]
                for step in range(steps):
                    positions = torch.arange(64)[taken]
                    embeds = inputs["embeds"][1:][taken].clone()
                    hidden = model(None, positions, hidden, inputs_embeds=embeds)[-1:]
                    hidden_states.append(hidden[0].clone())
                    logits.append(model.compute_logits(hidden)[0].clone())
                    taken = slice(anchor + step + 1, anchor + step + 2)
    return {
        "hidden": torch.stack(hidden_states).unflatten(0, (-1, steps)),
        "logits": torch.stack(logits).unflatten(0, (-1, steps)),
    }


class _Block(nn.Module):
    """Attention of a block's places to the context and to the block, as a paged cache would have.

    It takes the place of vLLM's attention layer, to which context K/V are written by its ``impl``.
    """

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.shape = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
        self.causal, self.impl, self.kv_cache = attention.causal, self, None

    def do_kv_cache_update(self, _: object, k: Tensor, v: Tensor, *rest: object) -> None:
        self.keys, self.values = k.transpose(0, 1), v.transpose(0, 1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, kv_heads, head_dim = self.shape
        q, k, v = (x.view(len(x), -1, head_dim).transpose(0, 1) for x in (q, k, v))
        k, v = torch.cat([self.keys, k], 1), torch.cat([self.values, v], 1)
        k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (k, v))
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        if self.causal:
            seen = seen.tril(k.shape[1] - q.shape[1])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return out.transpose(0, 1).flatten(1)


def run_block(kind: str, policy: str, draft: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run a block draft at each anchor, as Model Runner V2's speculators do.

    Args:
        kind: "dflash" or "dspark".
        policy: a folder with its config.json.
        draft: a release.
        inputs: ``token_ids`` [T], ``aux`` [T, A * H], ``embed_tokens`` and ``lm_head`` [vocab, H],
            ``anchors`` [N], ``steps``.

    Returns:
        ``logits`` [N, steps, vocab], -inf outside the draft's vocabulary, each given the token that
        is recorded before; for DSpark, ``confidence`` [N, steps].
    """
    steps, ids = int(inputs["steps"]), inputs["token_ids"]
    # vLLM has DSpark on Model Runner V2 alone, which this process has not: its module needs none.
    VllmConfig._validate_v1_model_runner = lambda self: None
    config, drafter = _configs(policy, kind, draft, steps)
    hf, destroy = drafter.hf_config, destroy_model_parallel
    destroy()
    with set_current_vllm_config(config), torch.inference_mode(), set_forward_context(None, config):
        initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config, model_config=drafter)
        inner = model.model
        inner.embed_tokens.weight = nn.Parameter(inputs["embed_tokens"])
        if not getattr(model, "has_own_lm_head", False):
            model.lm_head.weight = nn.Parameter(inputs["lm_head"])
            model.lm_head.quant_method = _Plain()
        for layer in inner.layers:
            layer.self_attn.attn = _Block(layer.self_attn)
        inner._attn_layers = [layer.self_attn.attn for layer in inner.layers]
        mask = get_parallel_drafting_token_id(hf)
        from_anchor = kind == "dspark" and getattr(hf, "sample_from_anchor", True)
        context, logits, confidence = model.combine_hidden_states(inputs["aux"]), [], []
        for anchor in inputs["anchors"].tolist():
            there = torch.arange(anchor + 1)
            model.precompute_and_store_context_kv(context[: anchor + 1], there, there)
            given = torch.full((steps + (not from_anchor),), mask)
            given[0] = ids[anchor + 1]
            hidden = model(given, anchor + 1 + torch.arange(len(given)))[-steps:]
            if kind == "dflash":
                logits.append(model.compute_logits(hidden))
                continue
            embedded = model.markov_embed(ids[anchor + 1 : anchor + 1 + steps])
            z = model.compute_draft_logits(hidden) + model.markov_bias(embedded)
            whole = torch.full((steps, len(inputs["lm_head"])), -torch.inf)
            whole[:, model.map_draft_to_target(torch.arange(z.shape[1]))] = z
            logits.append(whole)
            confidence.append(model.compute_confidence(hidden, embedded))
    found = {"logits": torch.stack(logits)}
    return found | ({"confidence": torch.stack(confidence)} if confidence else {})


class _Plain:
    """An lm_head's method: the product with the rows that it was given."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight, bias)


def main(job: dict[str, object]) -> None:
    """Run every draft of the job and save what came out beside it."""
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker has it
    # vLLM collects garbage twice for each model, a second each time among all that it imports.
    gc.freeze()
    allow_dense_qwen3_next()
    norm_context_by_layer(DFlashQwen3Model)
    with tempfile.NamedTemporaryFile() as rendezvous:
        init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, "gloo")
        for draft in job["drafts"]:  # type: ignore[attr-defined]
            inputs = load_file(str(job["inputs"]))
            kind, policy = job.get("kind"), str(job["policy"])
            if kind:
                found = run_block(str(kind), policy, draft, inputs)
            else:
                found = run(policy, draft, inputs) if policy else run_mtp(draft, inputs)
            save_file(found, f"{draft}.safetensors")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
