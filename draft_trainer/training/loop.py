"""The training thread: trains while there are samples, and gates and releases candidates.

It sleeps on an event while there is nothing to train on. While it takes a step, another thread
draws and collates the next batch. That draw counts as no other does: nothing that the weights or a
release contain has its number before it was trained on, and a restart undoes it.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from draft_trainer.config import TrainerConfig
from draft_trainer.counters import Counters
from draft_trainer.drafters import Draft
from draft_trainer.ingest.run import Run, Runs
from draft_trainer.ingest.store import Drawn
from draft_trainer.releases.gate import Gate
from draft_trainer.releases.pointer import PointerStore
from draft_trainer.releases.registry import Registry
from draft_trainer.training.cores import training_nice
from draft_trainer.training.device import make_handles
from draft_trainer.training.economy import Economy
from draft_trainer.training.learner import Collated, Learner
from draft_trainer.training.training_state import LearnerStates, Position
from slipstream.errors import RefusedError
from slipstream.shortage import raise_unless_shortage
from slipstream.v1 import release_pb2

logger = logging.getLogger(__name__)

_FORGOTTEN = release_pb2.REFUSAL_REASON_POLICY_FORGOTTEN
_DEVICE_MEMORY = release_pb2.REFUSAL_REASON_DEVICE_MEMORY

_RETRY_S = 1.0
_MOST_RETRY_S = 60.0

_BETWEEN_GATES = 4
"""Seconds after which a gate decision is due, over those that the last one took: on a slow machine
it takes as long as the steps of ``candidate_seconds``."""

T = TypeVar("T")


class _Next(NamedTuple):
    """A batch: of which run, what was drawn, and collated where that was done before."""

    run: Run
    drawn: Drawn
    collated: Collated | None = None


@dataclass(eq=False)
class TrainingLoop:
    """Owns the training thread, the one that works ahead of it and, while it runs, the learner.

    Attributes:
        learner: the weights; training continues from them whether or not a candidate passed.
        states: what a restart resumes from.
        position: of the learner's weights in the data.
        runs: whose current run is trained on.
        config: the trainer's.
        registry: where releases are written.
        gate: compares the weights with the promoted release.
        pointer: which release is wanted.
        economy: whether training pays; is told what the gate found.
        counters: count steps.
        arrived: set by ingest whenever there may be new samples; cleared here only.
        on_release: called after every new release.
        on_death: told when the thread ends without having been stopped, after its traceback was
            printed; training does not resume.
        stream: see ``own_stream``.
        after_gate: called after every gate decision.
    """

    learner: Learner
    states: LearnerStates
    position: Position
    runs: Runs
    config: TrainerConfig
    registry: Registry
    gate: Gate
    pointer: PointerStore
    economy: Economy
    counters: Counters
    arrived: threading.Event
    on_release: Callable[[], None]
    on_death: Callable[[], None]
    stream: torch.cuda.Stream | None = None
    after_gate: Callable[[], None] = lambda: None
    _stopping: threading.Event = field(default_factory=threading.Event, init=False)
    _steps_since_candidate: int = field(default=0, init=False)
    _first_step_at: float = field(default_factory=time.monotonic, init=False)
    _gate_seconds: float = field(default=0.0, init=False)
    _trained_against: int = field(default=0, init=False)
    _sized_at: float = field(default=-math.inf, init=False)
    _retry_s: float = field(default=_RETRY_S, init=False)

    def __post_init__(self) -> None:
        self._arrived = 0
        self._ahead: Future[_Next] | None = None
        self._helper = ThreadPoolExecutor(1, "collate", initializer=self._yield_to_others)
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)

    def start(self) -> None:
        """Begin. Once only."""
        self.counters.idle = False
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """End after the current step; True when the thread ended within ``timeout`` seconds."""
        self._stopping.set()
        self.arrived.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _yield_to_others(self) -> None:
        if sys.platform == "linux":
            # Per thread on Linux: training yields to everything else on the machine, the gRPC
            # threads of this process included. OpenMP's threads inherit it.
            nice = training_nice(self.config.training.nice)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        torch.set_num_threads(self.config.training.threads)

    def _run(self) -> None:
        self._yield_to_others()
        reason = "the training thread ended with an error"
        try:
            with torch.cuda.stream(self.stream):
                self._make_handles()
                self._train()
                self._give_back()
                self.states.save_last(self.learner, self.position)
        except torch.AcceleratorError as error:
            # Every later call on the device would fail, too.
            reason += f": {str(error).partition(chr(10))[0]}"
            raise
        finally:
            self._helper.shutdown()
            if not self._stopping.is_set():
                self.counters.training_goes_on()
                self.counters.training_error = reason
                self.on_death()

    def _train(self) -> None:
        """Until ``stop``: sample a batch, step, save; gate every ``steps_per_candidate`` steps."""
        learner = self.learner
        while not self._stopping.is_set():
            run = self.runs.current
            if run is None:
                self._sleep()
                continue
            if not self._pays(run):
                self.counters.training_goes_on()  # Nothing is waited for meanwhile.
                self._consider(run)
                self._sleep()
                continue
            # Before a draw: what is idle has nothing left that a draw took, and gated it.
            self.counters.idle = False
            following = self._following(run)
            if following is None:
                self._stopping.wait(_RETRY_S)
                continue
            _, drawn, collated = following
            if not drawn.samples:
                self.economy.ran_dry()
                self._consider(run)
                self._sleep()
                continue
            if run.run_id != self.position.run_id:
                self._begin_run(run)
            shortage = ""
            self._look_ahead(run)
            try:
                metrics = learner.step(drawn.samples, run.heads, collated)
            except RefusedError as error:
                # A version was forgotten between draw and step: its samples are too old to train.
                if error.reason not in (_FORGOTTEN, _DEVICE_MEMORY):
                    raise
                logger.info("a batch was put back: %s", error)
                if not (self._give_back() and self._undo(run, drawn)):
                    break
                metrics, shortage = None, str(error) if error.reason == _DEVICE_MEMORY else ""
            samples, number = len(drawn.samples), drawn.number
            # Samples that are held cannot leave the store, and a gate or a pause may be long. The
            # error held them, too.
            del following, drawn, collated
            if metrics is None:
                if shortage:
                    self._wait_for_memory(shortage)
                continue
            self._retry_s = _RETRY_S
            self.counters.device_memory.labels("step").inc(metrics.memory_retries)
            self.position = replace(self.position, draws=number)
            self.economy.trained(metrics.seconds, metrics.tokens)
            self.counters.trained(
                samples=samples,
                tokens=metrics.anchors,
                tokens_outside=metrics.outside_mass * metrics.anchors,
                seconds=metrics.seconds,
                skipped=metrics.skipped,
                loss=metrics.loss,
                step_acceptance=[a for a in metrics.step_acceptance if not math.isnan(a)],
            )
            if not metrics.skipped:
                if not self._steps_since_candidate:
                    self._first_step_at = time.monotonic() - metrics.seconds
                self._steps_since_candidate += 1
                # A job that resumes from an older checkpoint turns the policy back.
                before = min(self._trained_against, run.latest_policy_version or 0)
                self._trained_against = max(before, metrics.policy_version)
                self.states.after_step(learner, self.position)
            if self._is_due():
                self._consider(run)

    def _is_due(self) -> bool:
        """Return whether the weights are worth a gate decision."""
        config = self.config.training
        if self._steps_since_candidate >= self.learner.pace.steps_per_candidate(config):
            return True
        seconds = time.monotonic() - self._first_step_at
        return seconds >= max(config.candidate_seconds, _BETWEEN_GATES * self._gate_seconds)

    def _make_handles(self) -> None:
        while not self._stopping.is_set():
            try:
                make_handles(self.learner.head.device)
            except RuntimeError as error:
                raise_unless_shortage(error)
                self._wait_for_memory(f"the device has no memory for handles: {error}")
            else:
                self._retry_s = _RETRY_S
                self.counters.training_goes_on()
                return

    def _wait_for_memory(self, error: str) -> None:
        """Longer every time, so that what shares the device is left alone."""
        self.counters.device_memory.labels("step").inc()
        self.counters.training_waits_on(error, _DEVICE_MEMORY)
        logger.error("training waits %.0f s: %s", self._retry_s, error)
        self._stopping.wait(self._retry_s)
        self._retry_s = min(2 * self._retry_s, _MOST_RETRY_S)

    def _following(self, run: Run) -> _Next | None:
        """The next batch, drawn now or ahead; None where none can be drawn now."""
        following = self._ahead.result() if self._ahead is not None else None
        if following is not None and following.run is run and following.drawn.samples:
            self._ahead = None
            return following
        del following
        if not self._give_back():
            return None
        return self._stored(lambda: _Next(run, self._draw(run)))

    def _look_ahead(self, run: Run) -> None:
        """Draw and collate the next batch meanwhile, unless its size depends on this step."""
        pace, config = self.learner.pace, self.config.training
        judged = self._steps_since_candidate + 1 >= pace.steps_per_candidate(config)
        if pace.measured and not judged:
            # RuntimeError: the interpreter is about to end, and no thread takes new work.
            with suppress(RuntimeError):
                self._ahead = self._helper.submit(self._drawn_ahead, run)

    def _drawn_ahead(self, run: Run) -> _Next:
        try:
            drawn = self._draw(run, ahead=True)
        except RefusedError:
            return _Next(run, Drawn(0, []))  # The training thread finds the same, and says so.
        try:
            return _Next(run, drawn, self.learner.collate(drawn.samples, run.heads))
        except RefusedError:
            return _Next(run, drawn)

    def _give_back(self) -> bool:
        """Undo the draw that was made ahead, if any; return whether that is done."""
        if self._ahead is None:
            return True
        run, drawn, _ = self._ahead.result()
        if drawn.samples and not self._undo(run, drawn):
            return False
        self._ahead = None
        return True

    def _undo(self, run: Run, drawn: Drawn) -> bool:
        """Undo a draw, as soon as the store's index can be written; False: stopped before, and a
        restart undoes it. What went on meanwhile would count its samples as trained on."""

        def undone() -> bool:
            run.put_back(drawn)
            return True

        while not self._stored(undone):
            if self._stopping.wait(_RETRY_S):
                return False
        return True

    def _draw(self, run: Run, ahead: bool = False) -> Drawn:
        """The samples of the next step."""
        now = time.monotonic()
        if self.config.training.batch_tokens is None and now >= self._sized_at + _RETRY_S:
            self._arrived = run.store.tokens_of_a_version()
            self._sized_at = now
        epochs = self.config.replay.max_epochs
        tokens = self.learner.pace.batch_tokens(self.config.training, self._arrived * epochs)
        return run.draw(tokens, ahead)

    def _pays(self, run: Run) -> bool:
        """Decide by the economy whether to train on what is stored for this policy version."""
        economy, version = self.economy, run.latest_policy_version
        economy.begin(run.key)
        if version is None:
            return not economy.paused
        last, decision = economy.last, economy.decide(version)
        if last is None or last.train != decision.train:
            logger.info("policy version %d: %s", version, decision.reason)
        return decision.train

    def _stored(self, action: Callable[[], T]) -> T | None:
        """Run an action on the store; None where its index cannot be written now.

        A full disk must not end training: what was not drawn is drawn once there is space.
        """
        try:
            result = action()
        except RefusedError as error:
            self.counters.training_waits.inc()
            if not self.counters.training_error:
                logger.error("training waits: %s", error)
            self.counters.training_waits_on(str(error), error.reason)
            return None
        self.counters.training_goes_on()
        return result

    def _begin_run(self, run: Run) -> None:
        """Restart the optimizer: moments of another run's gradients misdirect the first steps."""
        self.position = replace(self.position, run_id=run.run_id)
        self._trained_against = 0
        self.learner.restart_optimizer()

    def _consider(self, run: Run) -> None:
        """Gate the weights if they moved since the last time, by states of the run they saw."""
        # A release contains every draw, and what is held cannot leave the store in a long gate.
        if not self._give_back():
            return
        if not self._steps_since_candidate or run.run_id != self.position.run_id:
            return
        steps, self._steps_since_candidate = self._steps_since_candidate, 0
        began = time.monotonic()
        version = self._candidate(run, steps)
        self.after_gate()
        self._gate_seconds = time.monotonic() - began
        if version is not None:
            self.position = replace(self.position, newest_release=version)
            self._stored(partial(run.store.released, version))
            # A state from before a release is never resumed.
            self.states.save(self.learner, self.position)
            self.on_release()
        else:
            self.states.moved()

    def _candidate(self, run: Run, steps: int) -> int | None:
        """Compare the averaged weights, as they would be served, with the promoted release.

        Args:
            run: whose held-out states are compared on.
            steps: since the candidate before it.

        Returns:
            The new release, if the candidate passed and was written.
        """
        learner = self.learner
        served, shares = self.gate.incumbent, learner.pace.shares
        result, best = self.gate.judge(
            lambda: (learner.snapshot(served=served, share=share) for share in shares),
            run,
            self._trained_against,
        )
        passed = result.outcome == "passed"
        try:
            candidate = learner.snapshot(served=served, share=shares[best]) if passed else None
        except RuntimeError as error:
            raise_unless_shortage(error)
            logger.error("the release was not written: %s", error)
            self.gate.record(result, not_written=f"too little device memory: {error}")
            return None
        version, promoted = None, False
        if candidate is None:
            self.gate.record(result)
        else:
            version = self._written(candidate, result, run)
        if version is not None:
            try:
                promoted = self.pointer.offer(version, result.incumbent_version)
                how = "promoted" if promoted else "kept (pinned, or the incumbent was replaced)"
            except RefusedError as error:
                # A full disk must not end training: the next release is offered, too.
                how = f"kept ({error})"
            logger.info("draft %d %s: %s", version, how, result.reason)
            self.gate.record(result, version)
            self.counters.released(version)
            self.registry.retain(self.config.draft)
        if result.HasField("gate"):
            gate = result.gate
            learner.pace.settle(gate.difference, gate.difference_half_width, steps, learner.config)
            self.economy.compared(gate, promoted, self.pointer.now.pinned)
        return version

    def _written(self, candidate: Draft, result: release_pb2.Verdict, run: Run) -> int | None:
        try:
            manifest = self.registry.create(
                candidate,
                release_pb2.ReleaseManifest(
                    parent_version=self.position.newest_release,
                    trained_against_policy_version=result.trained_against_policy_version,
                    run_id=run.run_id,
                    ttt_steps=self.config.training.ttt_steps,
                    gate=result.gate,
                    draft_sample_method=result.gate.draft_sample_method,
                    num_speculative_tokens=result.gate.num_speculative_tokens,
                ),
            )
        except (OSError, RefusedError) as error:
            # A full disk must not end training: the weights stay, the next release may fit. Older
            # releases that are no longer in use are removed to make room for it.
            logger.error("the release was not written: %s", error)
            self.registry.retain(self.config.draft)
            self.gate.record(result, not_written=str(error))
            return None
        return manifest.draft_version

    def _sleep(self) -> None:
        """Until samples arrive; then until none arrived for ``linger_s``, to fill a batch."""
        if self.stream is not None:
            # A device that has failed ends the process now, not when samples arrive.
            self.stream.synchronize()
        self.counters.idle = True
        self.arrived.wait()
        self.arrived.clear()
        until = time.monotonic() + 5 * self.config.training.linger_s
        while not self._stopping.is_set() and time.monotonic() < until:
            if not self.arrived.wait(self.config.training.linger_s):
                break
            self.arrived.clear()
