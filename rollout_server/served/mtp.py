"""Native MTP heads as vLLM serves them: the policy's config.json and its MTP tensors.

Embeddings and lm_head, GLM's ``shared_head.head``, are the verifier's modules (``_maybe_share_*``
in vLLM's ``v1/spec_decode/llm_base_proposer.py``): both follow policy pushes by themselves.
"""

from __future__ import annotations

from pathlib import Path

from rollout_server.checkpoint import quantization, read_config, read_draft_layout
from rollout_server.served.served import Config, Served, check_path, check_sizes
from slipstream.checkpoints import read_layout, text_config
from slipstream.errors import RefusedError

_SIZES = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")
_NEXT = "make it with draft-trainer init --draft-kind mtp, of this model or of one like it"


class Mtp(Served):
    """The names that policies have their MTP modules under, and nothing else."""

    name = "mtp"
    follows_policy = ("embed_tokens", "lm_head", "head")
    names = ("mtp.", "model.mtp_")

    def has(self, name: str, config: Config) -> bool:
        """See ``Served.has``; GLM's is a layer after the policy's own."""
        text = text_config(config)
        if text.get("model_type") == "glm4_moe":
            return name.startswith(f"model.layers.{text.get('num_hidden_layers')}.")
        return super().has(name, config)

    def check(self, model_dir: Path, draft_dir: Path) -> None:
        """See ``Served.check``."""
        check_path(draft_dir)
        _, config = check_sizes(model_dir, draft_dir, _SIZES, _NEXT)
        quantized = quantization(read_config(model_dir, "MODEL"), read_layout(model_dir))
        if quantized:
            # vLLM's MTP classes take the verifier's quantization, other drafts their own. Which
            # modules that leaves out is each method's own matter, and is not read here.
            raise RefusedError(
                f"MODEL {model_dir}",
                quantized,
                "unquantized weights: an MTP head is not supported with a quantized MODEL",
                "serve the unquantized checkpoint, or a draft of another kind",
            )
        others = [
            name
            for name in read_draft_layout(draft_dir)
            if not self.has(name, config) or name.endswith(_COPIES)
        ]
        if others:
            raise RefusedError(
                f"{draft_dir}: tensors",
                f"{len(others)} others, such as {others[0]}",
                "only those of the MTP module, without copies of embeddings and lm_head",
                _NEXT,
            )
