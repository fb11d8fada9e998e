"""Judges heads against the promoted release on the run's held-out states, and keeps record."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from dataclasses import dataclass

from draft_trainer.checkpoints.checkpoint import load_head
from draft_trainer.config import TrainerConfig
from draft_trainer.eagle3.head import Eagle3Head
from draft_trainer.feed.sample import Sample
from draft_trainer.feed.session import Run
from draft_trainer.releases.gate import Gate, GateConfig, GateVerdict, unmeasured
from draft_trainer.releases.promotions import Promotions
from draft_trainer.releases.registry import Registry
from draft_trainer.releases.verdicts import VerdictLog
from draft_trainer.sidecar.board import Board, GateResult
from slipstream.refusal import RefusedError
from slipstream.v1 import release_pb2

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
        board: counts them.
    """

    def __init__(
        self,
        config: TrainerConfig,
        registry: Registry,
        promotions: Promotions,
        verdicts: VerdictLog,
        board: Board,
    ) -> None:
        gate = config.gate
        self._config = config
        self._gate = Gate(GateConfig(gate.min_gain, gate.confidence, gate.min_anchors))
        self._registry = registry
        self._promotions = promotions
        self._verdicts = verdicts
        self._board = board
        self._lock = threading.Lock()
        self._incumbent: tuple[int, Eagle3Head] | None = None

    def judge(self, candidate: Eagle3Head, run: Run, trained_against: int | None) -> Judgement:
        """Compare a head, with the weights that would be served, with the promoted release."""
        k = self._config.publish.num_speculative_tokens
        method = self._config.publish.draft_sample_method
        with self._lock:
            version, incumbent = self._promoted_head()
            try:
                verdict = self._gate.compare(
                    candidate,
                    incumbent.to(candidate.norm.weight.device),
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
        self._board.gated(_result(outcome, judgement.verdict, text))
        try:
            self._verdicts.add(record)
        except OSError as error:
            # A full disk must not end training.
            logger.error("the verdict was not written: %s (%s)", error, text)
        return record

    def _promoted_head(self) -> tuple[int, Eagle3Head]:
        version = self._promotions.now.promoted
        if self._incumbent is None or self._incumbent[0] != version:
            with self._registry.using(version):
                head, _ = load_head(self._registry.path(version))
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
            tokens += sample.num_tokens
            if tokens > self._config.gate.max_tokens:
                break
            chosen.append(sample)
        return chosen


def _result(outcome: str, verdict: GateVerdict, text: str) -> GateResult:
    def known(value: float) -> float | None:
        return None if math.isnan(value) else value

    return GateResult(
        verdict=outcome,
        candidate=known(verdict.candidate),
        incumbent=known(verdict.incumbent),
        half_width=known(verdict.half_width),
        anchors=verdict.anchors,
        text=text,
    )
