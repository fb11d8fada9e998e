"""EAGLE-3 (arXiv 2503.01840): a decoder layer over fused auxiliary states of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from draft_trainer.drafters.draft import Draft
from draft_trainer.drafters.eagle3.checkpoint import Checkpoint, read_checkpoint, save_draft
from draft_trainer.drafters.eagle3.config import HeadConfig
from draft_trainer.drafters.eagle3.head import Eagle3Head


class Eagle3:
    """EAGLE-3 as a ``Drafter``."""

    name = Eagle3Head.kind

    def build(self, document: Mapping[str, Any]) -> Eagle3Head:
        """See ``Drafter.build``."""
        return Eagle3Head(HeadConfig.from_dict(document))

    def read(self, directory: Path, policy: Path | None = None) -> Checkpoint:
        """See ``Drafter.read``."""
        return read_checkpoint(directory, policy)

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
        """See ``Drafter.save``."""
        assert isinstance(draft, Eagle3Head), "a draft of another mechanism"
        save_draft(directory, draft, dtype, layout=layout, policy=policy, like=like)
