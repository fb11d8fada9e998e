"""External draft models as vLLM serves them: nothing is shared with the verifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout_server.checkpoint import read_config, read_draft_layout
from rollout_server.served.served import Served, check_path, check_sizes
from slipstream.errors import RefusedError

PARALLEL_TOKEN = "pard_token"
"""In a config.json: the draft is PARD's, and proposes all tokens in one forward pass."""


class DraftModel(Served):
    """A small causal language model with the policy's vocabulary."""

    name = "draft_model"

    def check(self, model_dir: Path, draft_dir: Path) -> None:
        """See ``Served.check``."""
        check_path(draft_dir)
        read_draft_layout(draft_dir)
        next_step = "give a draft model with the model's tokenizer"
        _, draft = check_sizes(model_dir, draft_dir, ("vocab_size",), next_step)
        token, last = draft.get(PARALLEL_TOKEN), int(draft["vocab_size"]) - 1
        if token is not None and not (type(token) is int and 0 <= token <= last):
            field, expected = f"{draft_dir / 'config.json'}: {PARALLEL_TOKEN}", f"0 to {last}"
            raise RefusedError(field, token, expected, "give the token it was trained with")

    def speculative_config(
        self, draft_dir: Path | None, draft_length: int, sample_method: str
    ) -> dict[str, Any] | None:
        """See ``Served.speculative_config``."""
        settings = super().speculative_config(draft_dir, draft_length, sample_method)
        assert draft_dir is not None and settings is not None, "a draft model has weights"
        if read_config(draft_dir, "--draft").get(PARALLEL_TOKEN) is not None:
            settings["parallel_drafting"] = True
        return settings
