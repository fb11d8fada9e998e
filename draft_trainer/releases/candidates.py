"""From trained weights to a promoted release: gate, write, promote, prune."""

from __future__ import annotations

import logging
import math

from torch import Tensor

from draft_trainer.checkpoints.checkpoint import load_head
from draft_trainer.config import TrainerConfig
from draft_trainer.eagle3.head import Eagle3Head
from draft_trainer.feed.sample import Sample
from draft_trainer.feed.session import Run
from draft_trainer.releases.gate import Gate, GateConfig, GateVerdict
from draft_trainer.releases.promotions import Promotions
from draft_trainer.releases.registry import Registry
from draft_trainer.sidecar.board import Board, GateResult
from draft_trainer.sidecar.status import Status
from draft_trainer.training.learner import Learner
from slipstream.refusal import RefusedError

logger = logging.getLogger(__name__)


class Candidates:
    """Judges what the learner has and releases what is better. For the training thread only.

    Args:
        config: the trainer's.
        registry: where releases are written.
        promotions: which release is wanted.
        board: counts verdicts.
        status: learns of new releases.
    """

    def __init__(
        self,
        config: TrainerConfig,
        registry: Registry,
        promotions: Promotions,
        board: Board,
        status: Status,
    ) -> None:
        self._config = config
        self._gate = Gate(
            GateConfig(config.gate.min_gain, config.gate.confidence, config.gate.min_anchors)
        )
        self._registry = registry
        self._promotions = promotions
        self._board = board
        self._status = status
        self._incumbent: tuple[int, Eagle3Head] | None = None
        self._d2t: Tensor | None = None

    def consider(self, learner: Learner, run: Run, trained_against: int) -> int | None:
        """Compare the learner's weights, as they would be served, with the promoted release.

        Returns:
            The new release, if the candidate passed and was written.
        """
        samples = self._held_out(run)
        candidate = learner.snapshot()
        publish = self._config.publish
        try:
            verdict = self._gate.compare(
                candidate,
                self._promoted_head().to(candidate.norm.weight.device),
                samples,
                run.heads,
                publish.num_speculative_tokens,
                publish.draft_sample_method,
            )
        except RefusedError as error:
            if error.field != "policy_version":
                raise
            # A newer policy version pushed one out while the gate was measuring.
            verdict = GateVerdict(
                False, math.nan, math.nan, math.nan, math.nan, 0, "the policy moved on meanwhile"
            )
        self._note(verdict)
        if not verdict.passed:
            return None
        try:
            manifest = self._registry.create(
                candidate,
                candidate.config,
                self._d2t,
                parent=self._status.newest_release,
                trained_against=trained_against,
                run_id=run.run_id,
                ttt_steps=self._config.training.ttt_steps,
                gate=verdict.to_proto(),
            )
        except OSError as error:
            # A full disk must not end training: the weights are there, the next one may fit.
            logger.error("the release was not written: %s", error)
            self._board.gated(self._result("write_failed", verdict, f"not written: {error}"))
            return None
        version = manifest.draft_version
        promoted = self._promotions.offer(version)
        self._status.released(version, trained_against)
        logger.info(
            "draft %d %s: %s", version, "promoted" if promoted else "kept (pinned)", verdict.reason
        )
        self._prune(version)
        return version

    def _promoted_head(self) -> Eagle3Head:
        version = self._promotions.now.promoted
        if self._incumbent is None or self._incumbent[0] != version:
            head, self._d2t = load_head(self._registry.path(version))
            self._incumbent = (version, head.requires_grad_(False))
        return self._incumbent[1]

    def _held_out(self, run: Run) -> list[Sample]:
        """The newest held-out samples, at most ``gate.max_tokens`` of them."""
        chosen: list[Sample] = []
        tokens = 0
        for sample in reversed(run.replay.held_out(self._config.gate.newest_versions)):
            tokens += sample.num_tokens
            if tokens > self._config.gate.max_tokens:
                break
            if sample.policy_version in run.heads:
                chosen.append(sample)
        return chosen

    def _note(self, verdict: GateVerdict) -> None:
        if verdict.passed:
            name = "passed"
        else:
            name = "not_measured" if math.isnan(verdict.difference) else "failed"
        self._board.gated(self._result(name, verdict, verdict.reason))

    @staticmethod
    def _result(name: str, verdict: GateVerdict, text: str) -> GateResult:
        def known(value: float) -> float | None:
            return None if math.isnan(value) else value

        return GateResult(
            verdict=name,
            candidate=known(verdict.candidate),
            incumbent=known(verdict.incumbent),
            half_width=known(verdict.half_width),
            anchors=verdict.anchors,
            text=text,
        )

    def _prune(self, newest: int) -> None:
        now = self._promotions.now
        # Release 0 is what a restart compares the initial draft with.
        protect = {0, newest, now.promoted, *now.served[-2:]}
        self._registry.prune(self._config.draft.keep_releases, protect)
