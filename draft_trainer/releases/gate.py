"""The gate: a candidate passes if its gain over the promoted release is significant.

Both are replayed on the same held-out samples, so that the samples' own difficulty cancels. The
interval of the paired difference is over prompts: completions of one prompt are one observation.
Where a run has few prompts a version, completions of all prompts are held out
(``ingest.held_out``); if these are of fewer than ``MIN_CLUSTERS`` prompts, the interval is over
completions. It is then of these prompts alone: for others it is too narrow by what differs between
prompts.

The standard error is the jackknife over clusters ("CV3": leave one prompt out, each in turn). The
sandwich estimator (Liang and Zeger 1986), which it equals where all clusters are of one size, is
too narrow where they are few and unequal: MacKinnon, Nielsen and Webb, "Cluster-robust inference:
a guide to empirical practice", 2023, section 5.

The quantile is the greater of Student's and of the bootstrap's of the same statistic over resampled
prompts ("bootstrap-t", Efron 1981). Differences of acceptance between two heads are skewed, more so
the nearer the heads are: Student's alone lets a head without any gain pass up to 5.5 % of the time
where 2.5 % is stated, on 4 to 32 prompts alike; the greater of both, about 3 %. Of few clusters the
bootstrap draws some again and again, whose spread is next to nothing, so its quantile is bounded.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist
from typing import TypeVar

import torch
from torch import Tensor

from draft_trainer.config import (
    ENOUGH_HELD_OUT,
    ENOUGH_PROMPTS,
    GateSection,
    TrainerConfig,
)
from draft_trainer.counters import Counters
from draft_trainer.drafters import Draft
from draft_trainer.drafters.batch import batches
from draft_trainer.drafters.expected_acceptance import AcceptanceEstimate, Method, acceptance_on
from draft_trainer.drafters.policy import PolicyHeads
from draft_trainer.ingest.run import Run
from draft_trainer.releases.pointer import PointerStore
from draft_trainer.releases.registry import Registry
from slipstream.errors import RefusedError
from slipstream.sample import Sample
from slipstream.shortage import raise_unless_shortage
from slipstream.v1 import release_pb2

logger = logging.getLogger(__name__)

MIN_CLUSTERS = 6
"""The clusters without which there is no interval."""

RESAMPLES = 999

MOST_QUANTILE = 2.0
"""The most by which the bootstrap's quantile counts, over Student's."""

PASS_TOKENS = 8192
"""Tokens of one forward pass; half of it where the device has too little memory."""

_NOT_NOW = {
    # A newer policy version evicted one while the gate was measuring.
    release_pb2.REFUSAL_REASON_POLICY_FORGOTTEN: "the policy moved on meanwhile",
    # A full disk must not end training.
    release_pb2.REFUSAL_REASON_DISK: "the held-out samples cannot be read now",
}

T = TypeVar("T")


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
    least, drawn_at = student(confidence, count - 1), float(statistics[min(place, RESAMPLES - 1)])
    return float(mean), float(error) * min(max(least, drawn_at), MOST_QUANTILE * least)


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


def compare(
    config: GateSection,
    candidates: Iterable[Draft],
    incumbent: Draft,
    samples: Sequence[Sample],
    policy_heads: PolicyHeads,
    k: int,
    method: Method,
    pass_tokens: int = PASS_TOKENS,
    by_completion: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> tuple[release_pb2.Verdict, int]:
    """Gate one of ``candidates``, with the weights that are (or would be) served.

    A candidate whose true gain is ``min_gain`` or less passes with probability
    (1 - confidence) / 2. What cannot be measured does not pass, and has no figures.

    It is the first, unless another is surely better on the same prompts. The gain of another is
    that of the best for each half of the prompts, chosen by the other half: choosing by the prompts
    that it is measured on would make it greater than it is.

    Args:
        config: the least gain in acceptance length (tokens per verification step), the confidence
            of the two-sided interval, and the least number of expected verification steps.
        candidates: one of them would be released.
        incumbent: is released.
        samples: held-out, recent.
        policy_heads: must hold their policy versions.
        k: served draft length.
        method: how vLLM drafts.
        pass_tokens: tokens of one forward pass.
        by_completion: whether completions are held out instead of prompts.
        compute_dtype: as ``acceptance_on``.

    Returns:
        The result, and which candidate it is of.
    """
    # Once for all heads: on a GPU that takes longer than a head's passes.
    collated = [*batches(samples, policy_heads, pass_tokens, incumbent.device)]

    def estimated(head: Draft) -> AcceptanceEstimate | None:
        try:
            return acceptance_on(collated, head, k, method, compute_dtype)
        except RefusedError as error:
            if error.reason != release_pb2.REFUSAL_REASON_NO_ANCHOR:
                raise
            return None  # no sample has an anchor with finite probabilities

    theirs = estimated(incumbent)
    if theirs is None:
        return unmeasured("no held-out sample has an anchor"), 0
    clusters = clusters_of(theirs.groups, theirs.completions, by_completion)
    anchors, prompts, count = math.floor(theirs.drafts), len(set(theirs.groups)), len(set(clusters))
    needed = config.needed_anchors(count)
    if anchors < needed or count < MIN_CLUSTERS:
        of = f"{count} completions of {prompts}" if clusters is theirs.completions else prompts
        result = unmeasured(
            f"{anchors} held-out anchors in {of} prompts, {needed} in {MIN_CLUSTERS} are needed"
        )
        result.held_out_anchors, result.held_out_prompts = anchors, prompts
        if by_completion:
            result.held_out_completions = len(set(theirs.completions))
        return result, 0
    # Greedily, a head of NaNs still proposes something, and is measured like any other.
    estimates: list[AcceptanceEstimate] = []
    for candidate in candidates:
        for name, weight in candidate.named_parameters():
            if not bool(torch.isfinite(weight).all()):
                return unmeasured(f"ruined: {name} is not finite"), 0
        estimate = estimated(candidate)
        # A sequence on which a head's probabilities are not finite is left out of its estimate.
        if estimate is None or estimate.groups != theirs.groups:
            return unmeasured("ruined: its probabilities are not finite"), 0
        estimates.append(estimate)
    values = torch.stack([estimate.per_sequence for estimate in estimates])
    best = surely_best(values, clusters, config.confidence)
    ours = estimates[best]
    gained = chosen_by_the_others(values, clusters) if best else values[0]
    paired = gained - theirs.per_sequence
    difference, half_width = paired_interval(paired, clusters, config.confidence)
    lengths = f"{ours.acceptance_length:.3f} against {theirs.acceptance_length:.3f}"
    gain = f"{difference:+.3f} ± {half_width:.3f}"
    passed = difference - half_width > config.min_gain
    if passed:
        reason = f"passed: {lengths}, gain {gain}"
    elif difference - half_width > 0.0:
        reason = f"gain {gain} is not surely above {config.min_gain} ({lengths})"
    else:
        reason = f"no real gain: {lengths}, difference {gain}"
    figures = release_pb2.GateFigures(
        candidate_acceptance_length=ours.acceptance_length,
        incumbent_acceptance_length=theirs.acceptance_length,
        difference=difference,
        difference_half_width=half_width,
        confidence=config.confidence,
        min_gain=config.min_gain,
        anchors=anchors,
        prompts=prompts,
        completions=count if clusters is theirs.completions else 0,
        num_speculative_tokens=k,
        draft_sample_method=method,
        passed=passed,
        candidate_acceptance_per_position=ours.accepted_per_position,
        by_position=[
            release_pb2.SpanFigures(
                first_position=first,
                drafts=drafts,
                candidate_acceptance_length=length,
                incumbent_acceptance_length=theirs.by_position[first][1],
            )
            for first, (drafts, length) in ours.by_position.items()
            if first in theirs.by_position
        ],
    )
    if figures.completions:
        which = "this prompt" if prompts == 1 else f"these {prompts} prompts"
        reason += f"; over {count} completions of {which} alone, others may differ"
    elif by_completion:
        reason += f"; over {prompts} prompts, of which other completions are trained on"
    if theirs.ignored:
        reason += f"; of the distribution before {', '.join(theirs.ignored)}"
    outcome = "passed" if passed else "failed"
    return release_pb2.Verdict(outcome=outcome, reason=reason, gate=figures), best


def clusters_of(
    groups: Sequence[str], completions: Sequence[str], by_completion: bool
) -> Sequence[str]:
    """Return what the interval is over, one name a sequence: ``groups``, the prompts, or, of fewer
    than ``MIN_CLUSTERS`` prompts whose completions are held out, ``completions``."""
    few = by_completion and len(set(groups)) < MIN_CLUSTERS
    return completions if few else groups


def surely_best(values: Tensor, groups: Sequence[str], confidence: float) -> int:
    """The first candidate, or a later one whose gain over it is no chance.

    Args:
        values: float64 [candidates, sequences].
        groups: the prompt of each sequence; at least ``MIN_CLUSTERS`` different ones.
        confidence: of the interval of the gain.
    """
    best = 0
    for other in range(1, len(values)):
        gain, half_width = paired_interval(values[other] - values[best], groups, confidence)
        if gain > half_width:
            best = other
    return best


def chosen_by_the_others(values: Tensor, groups: Sequence[str]) -> Tensor:
    """Every sequence's value under the candidate that is best for the other half of the prompts.

    Args:
        values: float64 [candidates, sequences].
        groups: the prompt of each sequence; at least two different ones.

    Returns:
        float64 [sequences].
    """
    halves = {group: index % 2 for index, group in enumerate(dict.fromkeys(groups))}
    first = torch.tensor([halves[group] == 0 for group in groups])
    chosen = torch.empty_like(values[0])
    for here in (first, ~first):
        chosen[here] = values[int(values[:, ~here].mean(1).argmax()), here]
    return chosen


def unmeasured(reason: str) -> release_pb2.Verdict:
    """The result where nothing could be measured."""
    return release_pb2.Verdict(outcome="not_measured", reason=reason)


def _clusters(samples: Sequence[Sample], by_completion: bool) -> Sequence[str]:
    """Return the cluster of each sample in an interval over them."""
    groups, completions = [s.group for s in samples], [s.completion for s in samples]
    return clusters_of(groups, completions, by_completion)


@dataclass(eq=False)
class Gate:
    """Compares drafts with the promoted release on a run's held-out states, and keeps the results.

    Thread-safe; one comparison at a time.

    Attributes:
        stream: of a GPU, on which training frees what a comparison uses; None on a CPU.
    """

    config: TrainerConfig
    registry: Registry
    pointer: PointerStore
    counters: Counters
    drafting: Callable[[], tuple[int, Method]]
    stream: torch.cuda.Stream | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _incumbent: tuple[int, Draft] | None = None

    @property
    def incumbent(self) -> Draft:
        """The promoted release."""
        with self._lock:
            return self._promoted()[1]

    def judge(
        self,
        candidates: Callable[[], Iterable[Draft]],
        run: Run,
        trained_against: int | None,
    ) -> tuple[release_pb2.Verdict, int]:
        """Compare drafts, with the weights that would be served, with the promoted release.

        Args:
            candidates: makes them, one at a time.
            run: whose held-out samples they are compared on.
            trained_against: newest policy version that was trained on.

        Returns:
            The result, and which of the drafts it is of, as ``compare``.
        """
        best = 0
        with self._lock, torch.cuda.stream(self.stream):
            version, incumbent = self._promoted()
            try:
                compared = self._with_room(partial(self._compared, candidates, incumbent, run))
                result, best = compared or (unmeasured("the device has too little memory"), 0)
            except RefusedError as error:
                if error.reason not in _NOT_NOW:
                    raise
                result = unmeasured(f"{_NOT_NOW[error.reason]}: {error}")
        result.judged_at = time.time()
        result.incumbent_version = version
        result.run_id = run.run_id
        if trained_against is not None:
            result.trained_against_policy_version = trained_against
        return result, best

    def _with_room(self, action: Callable[[int], T]) -> T | None:
        """Run an action on passes of so many tokens; None where even half are too many."""
        for tokens in (PASS_TOKENS, PASS_TOKENS // 2):
            try:
                return action(tokens)
            except RuntimeError as error:
                raise_unless_shortage(error)
                self.counters.device_memory.labels("gate").inc()
                logger.warning("out of memory in a gate's passes of %d tokens: %s", tokens, error)
            # Not in the handler: the exception holds what the pass held.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return None

    def _compared(
        self,
        candidates: Callable[[], Iterable[Draft]],
        incumbent: Draft,
        run: Run,
        pass_tokens: int = PASS_TOKENS,
    ) -> tuple[release_pb2.Verdict, int]:
        """Judge by what the teacher itself sampled; where that is too little by all, which is said.

        The replay takes recorded tokens for samples of the teacher. Those of an older policy
        version, as asynchronous loops train on, are only close to that.
        """
        device, drafting = self.config.training.device, self.drafting()
        held = self._held_out(run, incumbent, drafting[0])
        own = [sample for sample in held if sample.on_policy]
        by_completion = run.held_out_by_completion
        if len(set(_clusters(own, by_completion))) < MIN_CLUSTERS:
            own = held
        result, best = unmeasured(""), 0
        for samples in (own, held):
            result, best = compare(
                self.config.gate,
                (draft.to(device) for draft in candidates()),
                incumbent.to(device),
                samples,
                run.heads,
                *drafting,
                pass_tokens,
                by_completion,
                getattr(torch, self.config.training.compute_dtype),
            )
            if result.outcome != "not_measured" or len(samples) == len(held):
                if others := sum(not sample.on_policy for sample in samples):
                    result.reason += (
                        f"; {others} of {len(samples)} held-out samples were sampled by other "
                        "policy versions than their states are of"
                    )
                break
        return result, best

    def record(
        self, result: release_pb2.Verdict, release: int | None = None, not_written: str = ""
    ) -> None:
        """Count a result and write it to state.db."""
        if release is not None:
            result.draft_version = release
            now = self.pointer.now
            if result.outcome == "passed" and now.promoted != release:
                pinned = " and pinned" if now.pinned else ""
                result.reason += f"; not promoted: draft {now.promoted} is promoted{pinned}"
        if not_written:
            result.outcome, result.reason = "write_failed", f"not written: {not_written}"
        self.counters.verdicts.labels(result.outcome).inc()
        try:
            self.pointer.state.gate_results.add(result)
        except RefusedError as error:
            # A full disk must not end training.
            logger.error("the gate's result was not written: %s (%s)", error, result.reason)

    def _promoted(self) -> tuple[int, Draft]:
        version = self.pointer.now.promoted
        if self._incumbent is None or self._incumbent[0] != version:
            with self.registry.using(version):
                head = self.registry.drafter.read(self.registry.path(version)).draft()
            self._incumbent = (version, head.requires_grad_(False))
        return self._incumbent

    def _held_out(self, run: Run, head: Draft, k: int) -> list[Sample]:
        """Held-out samples of ``gate.max_tokens`` in all: of every cluster the newest first.

        Without those on which the head cannot be unrolled as far as the fleet drafts, ``k`` tokens.

        Those that their teacher sampled come before all others. Clusters, mostly prompts, are what
        the interval counts: sixteen completions of one say little more than two, and where the
        newest of each of ``ENOUGH_PROMPTS`` are more tokens than that, they are chosen all the
        same.
        While the newest versions have fewer than ``ENOUGH_HELD_OUT``, those before them count too.
        """
        config, most = self.config.gate, self.config.replay.max_policy_lag + 1
        window = head.config.max_row_tokens
        longest = math.inf if window is None else window - k + 1

        def fits(sample: Sample) -> bool:
            return sample.policy_version in run.heads and sample.tokens <= longest

        most = max(most, config.newest_versions)
        held = [sample for sample in run.held_out(most) if fits(sample)]
        versions = sorted({sample.policy_version for sample in held}, reverse=True)
        for number in range(config.newest_versions, most + 1):
            samples = [sample for sample in held if sample.policy_version in versions[:number]]
            clusters = _clusters(samples, run.held_out_by_completion)
            count = len(set(clusters))
            enough = sum(s.tokens for s in samples) >= 2 * config.needed_anchors(count)
            if enough and count >= ENOUGH_HELD_OUT:
                break
        before: Counter[str] = Counter()
        ranked = []
        newest_first = reversed([*zip(samples, clusters, strict=True)])
        for age, (sample, cluster) in enumerate(newest_first):
            ranked.append((not sample.on_policy, before[cluster], age, cluster, sample))
            before[cluster] += 1
        chosen: list[Sample] = []
        taken, tokens = set[str](), 0
        for *_, cluster, sample in sorted(ranked, key=lambda entry: entry[:3]):
            tokens += sample.tokens
            enough = cluster in taken or len(taken) >= ENOUGH_PROMPTS
            if enough and tokens > self.config.gate.max_tokens:
                continue
            taken.add(cluster)
            chosen.append(sample)
        return chosen
