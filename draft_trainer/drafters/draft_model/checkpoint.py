"""Checkpoints of draft models: Hugging Face's layout, with the policy's width in config.json."""

from __future__ import annotations

from pathlib import Path

import torch

from draft_trainer.checkpoints.policy import read_policy_config, size_of
from draft_trainer.drafters.draft import Checkpoint, OneLayout, check_fits
from draft_trainer.drafters.draft_model.config import POLICY_WIDTH, TIED, LmConfig
from draft_trainer.drafters.draft_model.model import DraftLm
from slipstream.checkpoints import CONFIG_FILE, load_tensors
from slipstream.errors import RefusedError
from slipstream.hub import read_json

_HEAD = "lm_head.weight"
_ADVICE = "give a small causal language model as Hugging Face save_pretrained writes it"


class DraftModel(OneLayout):
    """Checkpoints of draft models."""

    name, module, shape, advice = DraftLm.kind, DraftLm, LmConfig, _ADVICE

    def read(self, directory: Path, policy: Path | None = None) -> Checkpoint:
        """See ``Drafter.read``; a model that is no release yet needs ``policy``."""
        stored = load_tensors(directory)
        found = read_json(directory / CONFIG_FILE, _ADVICE)
        document = dict(found)
        if policy is not None:
            theirs = read_policy_config(policy)
            next_step = "give a model with its tokenizer"
            check_fits({"vocab_size": document.get("vocab_size")}, theirs, next_step)
            document[POLICY_WIDTH] = size_of(theirs, "hidden_size")
        elif POLICY_WIDTH not in document:
            raise RefusedError(
                f"{directory}: {POLICY_WIDTH}", "nothing", "the policy's", "set draft.policy"
            )
        head, embeddings = stored.get(_HEAD), stored.get("model.embed_tokens.weight")
        if head is not None and document.get(TIED) is True:
            if embeddings is not None and torch.equal(head, embeddings):
                del stored[_HEAD]
            else:
                # vLLM loads what is stored, whatever config.json says.
                document[TIED] = False
        config: LmConfig = self.shape_of(directory, document)
        return self.checkpoint(directory, config, stored, document, document == found)
