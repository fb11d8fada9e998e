"""External draft models as vLLM serves them: nothing is shared with the verifier."""

from __future__ import annotations

from pathlib import Path

from rollout_server.checkpoint import read_config, read_draft_layout, read_layout
from rollout_server.served.served import Served, check_path
from slipstream.errors import RefusedError


class DraftModel(Served):
    """A small causal language model with the policy's vocabulary."""

    name = "draft_model"

    def check(self, model_dir: Path, draft_dir: Path) -> None:
        """See ``Served.check``."""
        check_path(draft_dir)
        model, draft = read_config(model_dir, "MODEL"), read_config(draft_dir, "--draft")
        read_layout(model_dir, "MODEL")
        read_draft_layout(draft_dir)
        vocab = (model.get("text_config") or model).get("vocab_size")
        if draft.get("vocab_size") != vocab:
            field, expected = f"{draft_dir / 'config.json'}: vocab_size", f"{vocab} (the model's)"
            next_step = "give a draft model with the model's tokenizer"
            raise RefusedError(field, draft.get("vocab_size"), expected, next_step)
