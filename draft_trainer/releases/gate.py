"""Lets a candidate release through only when its gain over the incumbent is real.

The interval of a paired difference over clusters: completions of one prompt are one observation.

The standard error is the jackknife over clusters ("CV3": leave one prompt out, each in turn). The
sandwich estimator (Liang and Zeger 1986), which it equals where all clusters are of one size, is
too narrow where they are few and unequal: MacKinnon, Nielsen and Webb, "Cluster-robust inference:
a guide to empirical practice", 2023, section 5.

The quantile is the greater of Student's and of the bootstrap's of the same statistic over resampled
prompts ("bootstrap-t", Efron 1981). Differences of acceptance between two heads are skewed, more so
the nearer the heads are: with Student's alone a head without any gain passed up to 5.5 % of the
time where 2.5 % was stated, on 4 to 32 prompts alike; with the greater of both, about 3 %.

Judges heads against the promoted release on the run's held-out states, and keeps record.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from draft_trainer.config import TrainerConfig
from draft_trainer.counters import Counters
from draft_trainer.drafters import Draft
from draft_trainer.drafters.acceptance import AcceptanceEstimate, Method, expected_acceptance
from draft_trainer.drafters.policy import PolicyHeads
from draft_trainer.ingest.run import Run
from draft_trainer.releases.promotions import Promotions
from draft_trainer.releases.registry import Registry
from draft_trainer.sample import Sample
from draft_trainer.state import GateResults
from slipstream.errors import RefusedError
from slipstream.v1 import release_pb2

MIN_CLUSTERS = 4
RESAMPLES = 999


def paired_interval(
    paired: Tensor, groups: Sequence[str], confidence: float
) -> tuple[float, float]:
    """Mean of paired differences, and how far below it its two-sided interval begins.

    The same differences always give the same interval.

    Args:
        paired: float64 [sequences], differences of pseudo-values (see ``acceptance``).
        groups: what each belongs to; at least ``MIN_CLUSTERS`` different ones.
        confidence: of the interval, in (0, 1).
    """
    numbers = {group: index for index, group in enumerate(dict.fromkeys(groups))}
    rows = torch.tensor([numbers[group] for group in groups])
    count = len(numbers)
    sums = torch.zeros(count, dtype=paired.dtype).index_add_(0, rows, paired)
    sizes = torch.zeros(count, dtype=paired.dtype).index_add_(0, rows, torch.ones_like(paired))
    mean, error = _jackknife(sums, sizes)
    if not float(error) > 0.0:
        return float(mean), 0.0 if float(error) == 0.0 else math.nan
    drawn = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    means, errors = _jackknife(sums[drawn], sizes[drawn])
    # One prompt drawn every time has no spread: such a draw counts as far out.
    statistics = ((means - mean) / errors).nan_to_num(nan=math.inf).sort().values
    place = math.ceil((0.5 + confidence / 2) * (RESAMPLES + 1)) - 1
    quantile = max(student(confidence, count - 1), float(statistics[min(place, RESAMPLES - 1)]))
    return float(mean), float(error) * quantile


def _jackknife(sums: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over all sequences and its standard error.

    Args:
        sums: float64 [..., clusters], of the values in each.
        sizes: float64 [..., clusters], how many they are.
    """
    count = sums.shape[-1]
    total, number = sums.sum(-1, keepdim=True), sizes.sum(-1, keepdim=True)
    mean = total / number
    away = (total - sums) / (number - sizes) - mean
    return mean[..., 0], (away.square().sum(-1) * (count - 1) / count).sqrt()


def student(confidence: float, freedom: int) -> float:
    """Two-sided quantile of Student's t (Cornish-Fisher, Abramowitz & Stegun 26.7.5).

    At 3 degrees of freedom and 95 % it is 1 % too small; from 6 on the error is below 0.1 %.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


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
        candidate: Draft,
        incumbent: Draft,
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
    head: Draft, samples: Sequence[Sample], heads: PolicyHeads, k: int, method: Method
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


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judgement:
    """A verdict and what it was made of.

    Attributes:
        verdict: the gate's.
        figures: the same as a message; None where nothing could be measured.
        incumbent: draft version that was compared with.
        run_id: whose held-out states.
        trained_against: newest policy version that the candidate was trained on, if known.
    """

    verdict: GateVerdict
    figures: release_pb2.GateFigures | None
    incumbent: int
    run_id: str
    trained_against: int | None

    @property
    def outcome(self) -> str:
        """The verdict in a word."""
        if self.verdict.passed:
            return "passed"
        return "failed" if self.verdict.measured else "not_measured"


class Judge:
    """The gate with its states, its incumbent and its log. Thread-safe; one judgement at a time.

    Args:
        config: the trainer's.
        registry: where the incumbent is.
        promotions: which one it is.
        verdicts: every judgement is added to it.
        counters: counts them.
    """

    def __init__(
        self,
        config: TrainerConfig,
        registry: Registry,
        promotions: Promotions,
        verdicts: GateResults,
        counters: Counters,
    ) -> None:
        gate = config.gate
        self._config = config
        self._gate = Gate(GateConfig(gate.min_gain, gate.confidence, gate.min_anchors))
        self._registry = registry
        self._promotions = promotions
        self._verdicts = verdicts
        self._counters = counters
        self._lock = threading.Lock()
        self._incumbent: tuple[int, Draft] | None = None

    def judge(self, candidate: Draft, run: Run, trained_against: int | None) -> Judgement:
        """Compare a head, with the weights that would be served, with the promoted release."""
        k = self._config.publish.num_speculative_tokens
        method = self._config.publish.draft_sample_method
        with self._lock:
            version, incumbent = self._promoted_head()
            try:
                verdict = self._gate.compare(
                    candidate,
                    incumbent.to(candidate.lm_head.weight.device),
                    self._held_out(run),
                    run.heads,
                    k,
                    method,
                )
            except RefusedError as error:
                if error.field != "policy_version":
                    raise
                # A newer policy version pushed one out while the gate was measuring.
                verdict = unmeasured("the policy moved on meanwhile")
        figures = self._gate.figures(verdict, k, method) if verdict.measured else None
        return Judgement(verdict, figures, version, run.run_id, trained_against)

    def record(
        self, judgement: Judgement, release: int | None = None, not_written: str = ""
    ) -> release_pb2.Verdict:
        """Put a judgement on record, here, in the log and in the status.

        Args:
            judgement: from ``judge``.
            release: the release that the candidate became, if it did.
            not_written: why it did not, though it was to.
        """
        outcome = "write_failed" if not_written else judgement.outcome
        text = f"not written: {not_written}" if not_written else judgement.verdict.reason
        record = release_pb2.Verdict(
            judged_at=time.time(),
            outcome=outcome,
            reason=text,
            draft_version=release,
            incumbent_version=judgement.incumbent,
            gate=judgement.figures,
            run_id=judgement.run_id,
            trained_against_policy_version=judgement.trained_against,
        )
        self._counters.verdicts.labels(outcome).inc()
        try:
            self._verdicts.add(record)
        except RefusedError as error:
            # A full disk must not end training.
            logger.error("the verdict was not written: %s (%s)", error, text)
        return record

    def _promoted_head(self) -> tuple[int, Draft]:
        version = self._promotions.now.promoted
        if self._incumbent is None or self._incumbent[0] != version:
            with self._registry.using(version):
                head = self._registry.drafter.read(self._registry.path(version)).draft()
            self._incumbent = (version, head.requires_grad_(False))
        return self._incumbent

    def _held_out(self, run: Run) -> list[Sample]:
        """Held-out samples, at most ``gate.max_tokens`` of them: of every prompt the newest first.

        Prompts are what the interval counts: sixteen completions of one say little more than two.
        """
        before: Counter[str] = Counter()
        ranked = []
        for age, sample in enumerate(reversed(run.held_out(self._config.gate.newest_versions))):
            if sample.policy_version in run.heads:
                ranked.append((before[sample.group], age, sample))
                before[sample.group] += 1
        chosen: list[Sample] = []
        tokens = 0
        for _, _, sample in sorted(ranked, key=lambda entry: entry[:2]):
            tokens += sample.tokens
            if tokens > self._config.gate.max_tokens:
                break
            chosen.append(sample)
        return chosen
