"""The training thread: trains while there is something to train on, else sleeps on an event.

From trained weights to a promoted release: gate, write, promote, prune.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable

import torch

from draft_trainer.config import TrainerConfig, TrainingConfig
from draft_trainer.counters import Counters
from draft_trainer.ingest.run import Run, Runs
from draft_trainer.releases.gate import Judge
from draft_trainer.releases.registry import Registry, Retention
from draft_trainer.server.status import Status
from draft_trainer.state import Promotions
from draft_trainer.training.followers import Followers
from draft_trainer.training.learner import Learner
from draft_trainer.training.state import LearnerStates, Resumed
from slipstream.errors import RefusedError
from slipstream.v1 import release_pb2

logger = logging.getLogger(__name__)


class Candidates:
    """Judges what the learner has and releases what is better. For the training thread only.

    Args:
        config: the trainer's.
        registry: where releases are written.
        judge: the gate.
        promotions: which release is wanted.
        retention: applied after every release.
        status: learns of new releases.
    """

    def __init__(
        self,
        config: TrainerConfig,
        registry: Registry,
        judge: Judge,
        promotions: Promotions,
        retention: Retention,
        status: Status,
    ) -> None:
        self._config = config
        self._registry = registry
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
                release_pb2.ReleaseManifest(
                    parent_version=self._status.newest_release,
                    trained_against_policy_version=trained_against,
                    run_id=run.run_id,
                    ttt_steps=self._config.training.ttt_steps,
                    gate=judgement.figures,
                    draft_sample_method=self._config.publish.draft_sample_method,
                    num_speculative_tokens=self._config.publish.num_speculative_tokens,
                ),
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


class TrainingLoop:
    """Owns the training thread and, while it runs, the learner.

    Args:
        learner: the weights; they go on from where they are whether or not a candidate passed.
            With several ranks, rank 0's.
        followers: the other ranks.
        states: what a restart resumes from.
        resumed: the run that the learner's moments are of, and the last draw it has seen.
        newest_release: draft version of the newest release.
        config: [training].
        runs: whose current run is trained on.
        candidates: judges the weights.
        counters: counts steps.
        arrived: set by ingest whenever there may be something new; cleared here only.
        on_release: told of every new release.
        on_death: told when the thread ends without having been stopped. The traceback has
            been printed; nothing trains any more.
    """

    def __init__(
        self,
        learner: Learner,
        followers: Followers,
        states: LearnerStates,
        resumed: Resumed,
        newest_release: int,
        config: TrainingConfig,
        runs: Runs,
        candidates: Candidates,
        counters: Counters,
        arrived: threading.Event,
        on_release: Callable[[int], None],
        on_death: Callable[[], None],
    ) -> None:
        self._learner = learner
        self._followers = followers
        self._states = states
        self._run_id = resumed.run_id
        self._draws = resumed.draws or 0
        self._newest_release = newest_release
        self._config = config
        self._runs = runs
        self._candidates = candidates
        self._counters = counters
        self._arrived = arrived
        self._on_release = on_release
        self._on_death = on_death
        self._stopping = threading.Event()
        self._steps_since_candidate = 0
        self._trained_against = 0
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)

    def start(self) -> None:
        """Begin. Once only."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """End after the current step; True when the thread ended within ``timeout`` seconds."""
        self._stopping.set()
        self._arrived.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._config.nice and sys.platform == "linux":
            # Per thread there: training yields to everything else on the machine, the
            # gRPC threads of this very process included. OpenMP's threads inherit it.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._config.nice)
        torch.set_num_threads(self._config.threads)
        try:
            self._followers.begin(self._learner.head, self._learner.config)
            self._learner.take_rank_0()
            while not self._stopping.is_set():
                run = self._runs.current
                if run is None or not self._train_once(run):
                    self._sleep()
            self._states.save_last(self._learner, self._run_id, self._newest_release, self._draws)
            self._followers.end()
        finally:
            if not self._stopping.is_set():
                self._counters.training_error = "the training thread ended with an error"
                self._on_death()

    def _train_once(self, run: Run) -> bool:
        """One step, and a candidate when one is due. False when there was nothing to train on."""
        drawn = run.draw(self._config.batch_tokens)
        if not drawn.samples:
            if self._steps_since_candidate:
                self._consider(run)
            return False
        self._counters.idle = False
        if run.run_id != self._run_id:
            self._restart_optimizer(run.run_id)
        try:
            share = self._followers.give(drawn.samples, run.heads)
            metrics = self._learner.step(share, run.heads)
        except RefusedError as error:
            if error.field != "policy_version":
                raise
            # A version was forgotten between draw and step: its samples are too old to train.
            logger.info("a batch was put back: %s", error)
            run.put_back(drawn)
            return True
        self._draws = drawn.number
        self._counters.trained(
            samples=len(drawn.samples),
            tokens=metrics.anchors,
            seconds=metrics.seconds,
            skipped=metrics.skipped,
            loss=metrics.loss,
            step_acceptance=[a for a in metrics.step_acceptance if not math.isnan(a)],
        )
        if not metrics.skipped:
            self._steps_since_candidate += 1
            self._trained_against = metrics.policy_version
            self._states.after_step(self._learner, self._run_id, self._newest_release, self._draws)
        if self._steps_since_candidate >= self._config.steps_per_candidate:
            self._consider(run)
        return True

    def _consider(self, run: Run) -> None:
        self._steps_since_candidate = 0
        version = self._candidates.consider(self._learner, run, self._trained_against)
        if version is not None:
            self._newest_release = version
            run.store.released(version)
            # A state from before a release is never resumed.
            self._states.save(self._learner, self._run_id, version, self._draws)
            self._on_release(version)

    def _restart_optimizer(self, run_id: str) -> None:
        """Another run: the moments of the last one's gradients would misdirect the first steps."""
        self._run_id = run_id
        self._learner.restart_optimizer()
        self._followers.take_rank_0()
        self._learner.take_rank_0()

    def _sleep(self) -> None:
        """Until something arrives; then until it has been quiet for a moment, to fill a batch."""
        self._counters.idle = True
        while not self._arrived.wait(self._followers.patience):
            self._followers.keep_alive()
        self._arrived.clear()
        until = time.monotonic() + 5 * self._config.linger_s
        while not self._stopping.is_set() and time.monotonic() < until:
            if not self._arrived.wait(self._config.linger_s):
                break
            self._arrived.clear()
