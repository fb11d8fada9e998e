"""Lets a candidate release through only when its gain over the incumbent is real."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft_trainer.eagle3.acceptance import AcceptanceEstimate, Method, expected_acceptance
from draft_trainer.eagle3.head import Eagle3Head
from draft_trainer.eagle3.policy_head import PolicyHeads
from draft_trainer.feed.sample import Sample
from draft_trainer.releases.paired_interval import MIN_CLUSTERS, paired_interval
from slipstream.refusal import RefusedError
from slipstream.v1 import release_pb2


@dataclass(frozen=True)
class GateConfig:
    """What counts as a gain.

    Attributes:
        min_gain: the gain in acceptance length (tokens per verification step) that a candidate
            must surely exceed; at least 0.
        confidence: of the two-sided interval of the paired difference, in (0, 1). A candidate
            whose true gain is ``min_gain`` or less passes with probability (1 - confidence) / 2.
        min_anchors: expected verification steps that the held-out samples must hold.
    """

    min_gain: float = 0.0
    confidence: float = 0.95
    min_anchors: int = 200

    def __post_init__(self) -> None:
        if not self.min_gain >= 0.0:
            raise RefusedError("min_gain", self.min_gain, "at least 0", "raise it")
        if not 0.0 < self.confidence < 1.0:
            raise RefusedError("confidence", self.confidence, "in (0, 1)", "0.95 is usual")


@dataclass(frozen=True)
class GateVerdict:
    """Outcome of one comparison.

    Attributes:
        passed: the interval of the gain lies above ``min_gain``.
        candidate: expected acceptance length of the candidate; NaN if it could not be measured.
        incumbent: that of the incumbent.
        difference: candidate minus incumbent.
        half_width: how far below ``difference`` its interval begins.
        anchors: expected verification steps of the incumbent on the held-out samples.
        prompts: different prompts of the held-out samples, the independent observations.
        reason: one line for people.
    """

    passed: bool
    candidate: float
    incumbent: float
    difference: float
    half_width: float
    anchors: int
    prompts: int
    reason: str

    @property
    def measured(self) -> bool:
        """Whether there are figures. False where there was too little, and for a ruined head."""
        return not math.isnan(self.difference)


class Gate:
    """Compares two heads on held-out samples. Stateless.

    Args:
        config: what counts as a gain.
    """

    def __init__(self, config: GateConfig) -> None:
        self._config = config

    def figures(self, verdict: GateVerdict, k: int, method: Method) -> release_pb2.GateFigures:
        """A measured verdict at draft length ``k`` as a message."""
        return release_pb2.GateFigures(
            candidate_acceptance_length=verdict.candidate,
            incumbent_acceptance_length=verdict.incumbent,
            difference=verdict.difference,
            difference_half_width=verdict.half_width,
            confidence=self._config.confidence,
            min_gain=self._config.min_gain,
            anchors=verdict.anchors,
            prompts=verdict.prompts,
            num_speculative_tokens=k,
            draft_sample_method=method,
            passed=verdict.passed,
        )

    def compare(
        self,
        candidate: Eagle3Head,
        incumbent: Eagle3Head,
        samples: Sequence[Sample],
        policy_heads: PolicyHeads,
        k: int,
        method: Method,
    ) -> GateVerdict:
        """Judge ``candidate``, both heads with the weights that are (or would be) served.

        The difference is paired: both heads replay the same recordings, so that the sequences'
        own difficulty cancels. Its interval is over prompts (``paired_interval``): what a head
        gains on one completion of a prompt it gains on all.

        Args:
            candidate: the head that wants to be released.
            incumbent: the head that is released.
            samples: held-out, recent.
            policy_heads: must hold their policy versions.
            k: served draft length.
            method: how vLLM drafts.
        """
        theirs = _estimate(incumbent, samples, policy_heads, k, method)
        if theirs is None:
            return unmeasured("no held-out sample has an anchor")
        anchors, prompts = math.floor(theirs.drafts), len(set(theirs.groups))
        if anchors < self._config.min_anchors or prompts < MIN_CLUSTERS:
            return unmeasured(
                f"too few held-out states: {anchors} anchors in {prompts} prompts, "
                f"need {self._config.min_anchors} in {MIN_CLUSTERS}",
                anchors,
                prompts,
            )
        # Greedily, a head of NaNs still proposes something, and is measured like any other.
        for name, weight in candidate.named_parameters():
            if not bool(torch.isfinite(weight).all()):
                return unmeasured(f"ruined: {name} is not finite", anchors, prompts)
        ours = _estimate(candidate, samples, policy_heads, k, method)
        # A sequence on which a head's probabilities are not finite is left out of its estimate.
        if ours is None or ours.groups != theirs.groups:
            return unmeasured("ruined: its probabilities are not finite", anchors, prompts)
        paired = ours.per_sequence - theirs.per_sequence
        difference, half_width = paired_interval(paired, theirs.groups, self._config.confidence)
        figures = f"{ours.acceptance_length:.3f} against {theirs.acceptance_length:.3f}"
        passed = difference - half_width > self._config.min_gain
        if passed:
            reason = f"passed: {figures}, gain {difference:+.3f} ± {half_width:.3f}"
        elif difference - half_width > 0.0:
            reason = (
                f"gain {difference:+.3f} ± {half_width:.3f} is not surely above "
                f"{self._config.min_gain} ({figures})"
            )
        else:
            reason = f"no real gain: {figures}, difference {difference:+.3f} ± {half_width:.3f}"
        return GateVerdict(
            passed,
            ours.acceptance_length,
            theirs.acceptance_length,
            difference,
            half_width,
            anchors,
            prompts,
            reason,
        )


def _estimate(
    head: Eagle3Head, samples: Sequence[Sample], heads: PolicyHeads, k: int, method: Method
) -> AcceptanceEstimate | None:
    """None where no sample has an anchor with finite probabilities."""
    try:
        return expected_acceptance(head, samples, heads, k, method)
    except RefusedError as error:
        if error.field != "samples":
            raise
        return None


def unmeasured(reason: str, anchors: int = 0, prompts: int = 0) -> GateVerdict:
    """A verdict where nothing could be measured. Nothing passes unmeasured."""
    return GateVerdict(False, math.nan, math.nan, math.nan, math.nan, anchors, prompts, reason)
