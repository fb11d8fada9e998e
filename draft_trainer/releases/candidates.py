"""From trained weights to a promoted release: gate, write, promote, prune."""

from __future__ import annotations

import logging

from torch import Tensor

from draft_trainer.config import TrainerConfig
from draft_trainer.feed.session import Run
from draft_trainer.releases.judge import Judge
from draft_trainer.releases.promotions import Promotions
from draft_trainer.releases.registry import Registry
from draft_trainer.releases.retention import Retention
from draft_trainer.sidecar.status import Status
from draft_trainer.training.learner import Learner
from slipstream.refusal import RefusedError

logger = logging.getLogger(__name__)


class Candidates:
    """Judges what the learner has and releases what is better. For the training thread only.

    Args:
        config: the trainer's.
        registry: where releases are written.
        d2t: the draft vocabulary of every release (see ``checkpoint``).
        judge: the gate.
        promotions: which release is wanted.
        retention: applied after every release.
        status: learns of new releases.
    """

    def __init__(
        self,
        config: TrainerConfig,
        registry: Registry,
        d2t: Tensor | None,
        judge: Judge,
        promotions: Promotions,
        retention: Retention,
        status: Status,
    ) -> None:
        self._config = config
        self._registry = registry
        self._d2t = d2t
        self._judge = judge
        self._promotions = promotions
        self._retention = retention
        self._status = status

    def consider(self, learner: Learner, run: Run, trained_against: int) -> int | None:
        """Compare the learner's weights, as they would be served, with the promoted release.

        Returns:
            The new release, if the candidate passed and was written.
        """
        candidate = learner.snapshot()
        judgement = self._judge.judge(candidate, run, trained_against)
        if not judgement.verdict.passed:
            self._judge.record(judgement)
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
                gate=judgement.figures,
                draft_sample_method=self._config.publish.draft_sample_method,
                num_speculative_tokens=self._config.publish.num_speculative_tokens,
            )
        except (OSError, RefusedError) as error:
            # A full disk must not end training: the weights are there, the next one may fit.
            logger.error("the release was not written: %s", error)
            self._judge.record(judgement, not_written=str(error))
            return None
        version = manifest.draft_version
        promoted = self._promotions.offer(version)
        self._judge.record(judgement, version)
        self._status.released(version, trained_against)
        reason = judgement.verdict.reason
        logger.info("draft %d %s: %s", version, "promoted" if promoted else "kept (pinned)", reason)
        self._retention.apply()
        return version
