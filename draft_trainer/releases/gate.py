"""Lets a candidate release through only when its gain over the incumbent is real."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch

from draft_trainer.eagle3.acceptance import AcceptanceEstimate, Method, expected_acceptance
from draft_trainer.eagle3.head import Eagle3Head
from draft_trainer.eagle3.policy_head import PolicyHeads
from draft_trainer.feed.sample import Sample
from slipstream.refusal import RefusedError
from slipstream.v1 import release_pb2

_MIN_PROMPTS = 4


@dataclass(frozen=True)
class GateConfig:
    """What counts as a gain.

    Attributes:
        min_gain: the least gain in acceptance length (tokens per verification step) that is worth
            a release; at least 0.
        confidence: of the two-sided interval of the paired difference, in (0, 1).
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
        passed: the gain is at least ``min_gain`` and its interval lies above 0.
        candidate: expected acceptance length of the candidate; NaN if it could not be measured.
        incumbent: that of the incumbent.
        difference: candidate minus incumbent.
        half_width: half width of the interval of ``difference``.
        anchors: expected verification steps of the incumbent on the held-out samples.
        reason: one line for people.
    """

    passed: bool
    candidate: float
    incumbent: float
    difference: float
    half_width: float
    anchors: int
    reason: str

    def to_proto(self) -> release_pb2.GateFigures:
        """For a release manifest."""
        return release_pb2.GateFigures(
            candidate_acceptance_length=self.candidate,
            incumbent_acceptance_length=self.incumbent,
            difference_half_width=self.half_width,
            anchors=self.anchors,
            passed=self.passed,
        )


class Gate:
    """Compares two heads on held-out samples. Stateless.

    Args:
        config: what counts as a gain.
    """

    def __init__(self, config: GateConfig) -> None:
        self._config = config

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
        own difficulty cancels. Its interval is Student's over prompts: completions of one prompt
        are one cluster, because what a head gains on one of them it gains on all.

        Args:
            candidate: the head that wants to be released.
            incumbent: the head that is released.
            samples: held-out, recent.
            policy_heads: must hold their policy versions.
            k: served draft length.
            method: how vLLM drafts.
        """
        try:
            ours = expected_acceptance(candidate, samples, policy_heads, k, method)
            theirs = expected_acceptance(incumbent, samples, policy_heads, k, method)
        except RefusedError as error:
            if error.field != "samples":
                raise
            return _unmeasured("no held-out sample has an anchor")
        anchors, prompts = math.floor(theirs.drafts), len(set(theirs.groups))
        if anchors < self._config.min_anchors or prompts < _MIN_PROMPTS:
            return _unmeasured(
                f"too few held-out states: {anchors} anchors in {prompts} prompts, "
                f"need {self._config.min_anchors} in {_MIN_PROMPTS}",
                anchors,
            )
        difference, half_width = self._interval(ours, theirs)
        figures = f"{ours.acceptance_length:.3f} against {theirs.acceptance_length:.3f}"
        # NaN fails both: a ruined candidate compares false with everything.
        passed = difference >= self._config.min_gain and difference - half_width > 0.0
        if passed:
            reason = f"passed: {figures}, gain {difference:+.3f} ± {half_width:.3f}"
        elif difference - half_width > 0.0:
            reason = f"gain {difference:+.3f} is below {self._config.min_gain} ({figures})"
        else:
            reason = f"no real gain: {figures}, difference {difference:+.3f} ± {half_width:.3f}"
        return GateVerdict(
            passed,
            ours.acceptance_length,
            theirs.acceptance_length,
            difference,
            half_width,
            anchors,
            reason,
        )

    def _interval(
        self, ours: AcceptanceEstimate, theirs: AcceptanceEstimate
    ) -> tuple[float, float]:
        paired = ours.per_sequence - theirs.per_sequence
        mean = float(paired.mean())
        numbers = {group: index for index, group in enumerate(dict.fromkeys(theirs.groups))}
        clusters = torch.zeros(len(numbers), dtype=paired.dtype)
        clusters.index_add_(0, torch.tensor([numbers[g] for g in theirs.groups]), paired - mean)
        freedom = len(clusters) - 1
        # Cluster-robust (Liang and Zeger 1986), with the small-sample factor G / (G - 1).
        variance = float(clusters.square().sum()) * len(clusters) / freedom
        return mean, math.sqrt(variance) / len(paired) * _student(self._config.confidence, freedom)


def _student(confidence: float, freedom: int) -> float:
    """Two-sided quantile of Student's t (Cornish-Fisher, Abramowitz & Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def _unmeasured(reason: str, anchors: int = 0) -> GateVerdict:
    return GateVerdict(False, math.nan, math.nan, math.nan, math.nan, anchors, reason)
