"""What ``draft-trainer fit`` reads: TOML with the sections [fit] and [training]."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from draft_trainer.config import Section, TrainingConfig, read_toml, validated
from slipstream.refusal import RefusedError


class FitSection(Section):
    """[fit]: how long, and what the result is judged by."""

    epochs: Annotated[int, Field(ge=1)] = 3
    evaluations: Annotated[int, Field(ge=1)] = 10
    held_out_fraction: Annotated[float, Field(gt=0.0, lt=1.0, allow_inf_nan=False)] = 0.05
    held_out_tokens: Annotated[int, Field(ge=1)] = 65536
    num_speculative_tokens: Annotated[int, Field(ge=1, le=16)] = 3
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    decay_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    decay_floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1


class FitConfig(Section):
    """The whole file. Of [training], what only a running service needs has no effect."""

    fit: FitSection = FitSection()
    training: TrainingConfig = TrainingConfig()

    @model_validator(mode="after")
    def _depth_covers_the_served_drafts(self) -> FitConfig:
        k, depth = self.fit.num_speculative_tokens, self.training.ttt_steps
        if depth < k:
            raise RefusedError(
                "training.ttt_steps",
                depth,
                f"at least fit.num_speculative_tokens = {k}",
                "raise training.ttt_steps, or serve a shorter draft",
            )
        return self


def fit_config(path: Path | None, options: Mapping[str, object]) -> FitConfig:
    """The file, where one is given, with the command line's options over it.

    Args:
        path: TOML; None for the defaults.
        options: dotted keys ("training.seed") and values.

    Raises:
        RefusedError: as ``draft_trainer.config.load_config``.
    """
    raw = {} if path is None else read_toml(path)
    for key, value in options.items():
        section, _, name = key.partition(".")
        held = raw.setdefault(section, {})
        if isinstance(held, dict):
            held[name] = value
    return validated(FitConfig, raw)
