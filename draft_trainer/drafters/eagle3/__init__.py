"""EAGLE-3 (arXiv 2503.01840): a decoder layer over fused auxiliary states of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draft_trainer.drafters.eagle3.checkpoint import read_checkpoint, save_draft
from draft_trainer.drafters.eagle3.config import HeadConfig
from draft_trainer.drafters.eagle3.head import Eagle3Head


class Eagle3:
    """EAGLE-3 as a ``Drafter``."""

    name = Eagle3Head.kind
    read = staticmethod(read_checkpoint)
    save = staticmethod(save_draft)

    def build(self, document: Mapping[str, Any]) -> Eagle3Head:
        """See ``Drafter.build``."""
        return Eagle3Head(HeadConfig.from_dict(document))
