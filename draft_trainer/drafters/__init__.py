"""Draft mechanisms: the states each needs, its loss, its acceptance, its checkpoint."""

from __future__ import annotations

from draft_trainer.drafters.draft import Checkpoint, Draft, Drafter, DraftShape
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.drafters.mtp.checkpoint import Mtp

DRAFTERS: dict[str, Drafter] = {drafter.name: drafter for drafter in (Eagle3(), Mtp())}
"""By ``[draft] kind``."""

__all__ = ["DRAFTERS", "Checkpoint", "Draft", "DraftShape", "Drafter"]
