"""Native MTP heads as vLLM serves them: the policy's config.json and its MTP tensors.

Embeddings and lm_head are the verifier's modules (``_maybe_share_embeddings`` and
``_maybe_share_lm_head`` in vLLM's ``v1/spec_decode/llm_base_proposer.py``), so that both follow
policy pushes by themselves.
"""

from __future__ import annotations

from pathlib import Path

from rollout_server.checkpoint import read_draft_layout
from rollout_server.served.served import Served, check_path, check_sizes
from slipstream.errors import RefusedError

_SIZES = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
_NEXT = "make it with draft-trainer init --draft-kind mtp, of this model or of one like it"


class Mtp(Served):
    """The names that policies have their MTP modules under, and nothing else."""

    name = "mtp"
    follows_policy = ("embed_tokens", "lm_head")
    names = ("mtp.", "model.mtp_")

    def check(self, model_dir: Path, draft_dir: Path) -> None:
        """See ``Served.check``."""
        check_path(draft_dir)
        check_sizes(model_dir, draft_dir, _SIZES, _NEXT)
        others = [name for name in read_draft_layout(draft_dir) if not self.has(name)]
        if others:
            raise RefusedError(
                f"{draft_dir}: tensors",
                f"{len(others)} others, such as {others[0]}",
                f"only {' or '.join(f'{name}*' for name in self.names)}",
                _NEXT,
            )
