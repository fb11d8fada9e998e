"""Checkpoints of draft models: Hugging Face's layout, with the policy's width in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draft_trainer.checkpoints.draft import (
    WEIGHTS_FILE,
    check_tensors,
    load_tensors,
    read_document,
    tensor_names,
)
from draft_trainer.checkpoints.policy import read_policy_config, size_of
from draft_trainer.drafters.draft import Checkpoint, OneLayout, tensor_shapes
from draft_trainer.drafters.draft_model.config import POLICY_WIDTH, LmConfig
from draft_trainer.drafters.draft_model.model import DraftLm
from slipstream.errors import RefusedError

_ADVICE = "give a small causal language model as Hugging Face save_pretrained writes it"


class DraftModel(OneLayout):
    """Checkpoints of draft models."""

    name, module, advice = DraftLm.kind, DraftLm, _ADVICE

    def build(self, document: Mapping[str, Any]) -> DraftLm:
        """See ``Drafter.build``."""
        return DraftLm(LmConfig.from_dict(document))

    def read(self, directory: Path, policy: Path | None = None) -> Checkpoint:
        """See ``Drafter.read``; a model that is no release yet needs ``policy``."""
        stored = load_tensors(directory)
        found = read_document(directory, _ADVICE)
        document = dict(found)
        if policy is not None:
            theirs = read_policy_config(policy)
            vocab, width = size_of(theirs, "vocab_size"), size_of(theirs, "hidden_size")
            if document.get("vocab_size") != vocab:
                expected = f"{vocab}, for this policy"
                field, advice = "the draft's vocab_size", "give a model with its tokenizer"
                raise RefusedError(field, document.get("vocab_size"), expected, advice)
            document[POLICY_WIDTH] = width
        elif POLICY_WIDTH not in document:
            raise RefusedError(
                f"{directory}: {POLICY_WIDTH}", "nothing", "the policy's", "set draft.policy"
            )
        config = LmConfig.from_dict(document)
        if config.tied:
            stored.pop("lm_head.weight", None)
        wanted = tensor_shapes(lambda: DraftLm(config))
        check_tensors(stored, wanted, str(directory), _ADVICE)
        return Checkpoint(
            module=DraftLm,
            config=config,
            tensors=stored,
            d2t=None,
            document=document,
            names={name: name for name in wanted},
            with_t2d=False,
            as_stored=document == found
            and tensor_names(directory) == wanted.keys()
            and (directory / WEIGHTS_FILE).is_file(),
        )
