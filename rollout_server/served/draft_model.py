"""External draft models as vLLM serves them: nothing is shared with the verifier."""

from __future__ import annotations

from pathlib import Path

from rollout_server.checkpoint import read_draft_layout
from rollout_server.served.served import Served, check_path, check_sizes


class DraftModel(Served):
    """A small causal language model with the policy's vocabulary."""

    name = "draft_model"

    def check(self, model_dir: Path, draft_dir: Path) -> None:
        """See ``Served.check``."""
        check_path(draft_dir)
        read_draft_layout(draft_dir)
        next_step = "give a draft model with the model's tokenizer"
        check_sizes(model_dir, draft_dir, ("vocab_size",), next_step)
