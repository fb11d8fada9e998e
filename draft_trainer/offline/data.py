"""Inputs of a fit: its configuration, and a recording split by prompt and ordered by seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from draft_trainer.config import DraftKind, Section, TrainingConfig
from draft_trainer.config_file import read_toml, validated
from draft_trainer.recordings.recording import Recording
from slipstream.errors import RefusedError
from slipstream.sample import Sample, is_held_out


class FitSection(Section):
    """[fit]: the mechanism, how long, and what the result is evaluated on."""

    kind: DraftKind = "eagle3"
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
                "training.ttt_steps", depth, f"at least the draft length {k}", "raise it"
            )
        return self


def fit_config(path: Path | None, options: Mapping[str, object]) -> FitConfig:
    """The file, where one is given, with the command line's options over it.

    Args:
        path: TOML; None for the defaults.
        options: dotted keys ("training.seed") and values.

    Raises:
        RefusedError: as ``draft_trainer.config_file.load_config``.
    """
    raw = {} if path is None else read_toml(path)
    for key, value in options.items():
        section, _, name = key.partition(".")
        held = raw.setdefault(section, {})
        if isinstance(held, dict):
            held[name] = value
    return validated(FitConfig, raw)


def split(recording: Recording, config: FitConfig) -> tuple[list[int], list[Sample]]:
    """Hold out a share of the prompts.

    Returns:
        The numbers of the samples that are trained on; the samples that are not, at most
        ``fit.held_out_tokens``.

    Raises:
        RefusedError: one of the two parts is empty.
    """
    fit, lengths = config.fit, recording.lengths()
    kept: list[int] = []
    training: list[int] = []
    groups = recording.groups()
    for number, group in enumerate(groups):
        (kept if is_held_out(group, fit.held_out_fraction) else training).append(number)
    # Any of them: the first would be the oldest policy version's.
    random.Random(config.training.seed).shuffle(kept)
    held_out: list[Sample] = []
    tokens = 0
    for number in kept:
        tokens += lengths[number]
        if held_out and tokens > fit.held_out_tokens:
            break
        held_out.append(recording[number])
    if not training or not held_out:
        raise RefusedError(
            "fit.held_out_fraction",
            f"{fit.held_out_fraction}: {len(training)} samples to train on, {len(kept)} held out, "
            f"of {len(set(groups))} prompts",
            "some of each",
            "record more prompts, or change fit.held_out_fraction",
        )
    return training, held_out


def steps_of(
    lengths: Sequence[int], batch_tokens: int, seed: int, epochs: int
) -> Iterator[tuple[int, list[int]]]:
    """The epoch and the samples of every step: each sample once per epoch.

    Every epoch has an order of its own. It is sorted by the numbers of ``random.Random``, whose
    sequence Python promises to keep for a seed; that of its shuffle, or of torch.randperm, may
    change between versions and would give a run that was resumed after an upgrade some samples
    twice and others never.

    Args:
        lengths: tokens of every sample.
        batch_tokens: bound on the tokens of one step; a sample that is longer has a step to itself.
        seed: of the orders.
        epochs: how many. A step never spans two; the last one of an epoch may be short.
    """
    for epoch in range(epochs):
        draw = random.Random(f"{seed}:{epoch}").random
        keys = [draw() for _ in lengths]
        chosen: list[int] = []
        tokens = 0
        for sample in sorted(range(len(keys)), key=keys.__getitem__):
            tokens += lengths[sample]
            if chosen and tokens > batch_tokens:
                yield epoch, chosen
                chosen, tokens = [], lengths[sample]
            chosen.append(sample)
        if chosen:
            yield epoch, chosen
