"""Draft mechanisms: the states each needs, its loss, its acceptance, its checkpoint."""

from __future__ import annotations

from draft_trainer.drafters.dflash import Dflash
from draft_trainer.drafters.draft import Checkpoint, Draft, Drafter, DraftShape
from draft_trainer.drafters.draft_model import DraftModel
from draft_trainer.drafters.dspark import Dspark
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.drafters.mtp import Mtp

DRAFTERS: dict[str, Drafter] = {
    one.name: one for one in (Eagle3(), Mtp(), DraftModel(), Dflash(), Dspark())
}
"""The mechanisms by ``[draft] kind``."""

__all__ = ["DRAFTERS", "Checkpoint", "Draft", "DraftShape", "Drafter"]
