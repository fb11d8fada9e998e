"""Checkpoints of draft models: Hugging Face's layout, with the policy's width in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from draft_trainer.checkpoints.draft import (
    WEIGHTS_FILE,
    check_tensors,
    load_tensors,
    read_document,
    tensor_names,
)
from draft_trainer.checkpoints.policy import read_policy_config, size_of
from draft_trainer.drafters.draft import Checkpoint, Draft, Drafter
from draft_trainer.drafters.draft_model.config import POLICY_WIDTH, LmConfig
from draft_trainer.drafters.draft_model.model import DraftLm
from slipstream.errors import RefusedError

_ADVICE = "give a small causal language model as Hugging Face save_pretrained writes it"


class DraftModel(Drafter):
    """Checkpoints of draft models."""

    name = DraftLm.kind

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
        with torch.device("meta"):
            wanted = {name: p.shape for name, p in DraftLm(config).state_dict().items()}
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

    def save(
        self,
        directory: Path,
        draft: Draft,
        dtype: torch.dtype = torch.bfloat16,
        *,
        layout: str = "plain",
        policy: Path | None = None,
        like: Path | None = None,
    ) -> None:
        """See ``Drafter.save``; there is one layout."""
        config = draft.config
        assert isinstance(config, LmConfig), "a draft of another mechanism"
        if layout != "plain":
            raise RefusedError("layout", layout, "plain", "leave it out: there is no other")
        document = dict(config.document) if like is None else read_document(like, _ADVICE)
        tensors = {name: t.detach().to("cpu", dtype) for name, t in draft.state_dict().items()}
        names = {name: name for name in tensors}
        Checkpoint(
            *(DraftLm, config, tensors, None, document, names), with_t2d=False, as_stored=True
        ).write(directory)
