"""What every section of a configuration file has in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

ConfigPath = Annotated[Path, Field(strict=False)]


class Section(BaseModel):
    """Keys of one [section], each with its type and range."""

    # strict: "5" is not 5. A config that is coerced hides the typo that made it.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
