"""One warm-up: rollouts through the policy, under the bridge, into a trainer in this process.

Its output folder is a draft that vLLM loads from its first instant on: the best draft so far. What
goes on after a kill is in ``work`` below it, until the end: the trainer's registry with its samples
and training states, and how many rollouts it was given. Samples are named after their rollouts:
those that are given again after a kill are recognised, and each trains as often as without one.

Rollouts are given to the trainer as those of policy versions that do not differ. A version brings a
part of what the replay buffer holds, and the next one begins when it was trained on to the end:
what is held is bounded, and the gate judges by recent prompts.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from draft_trainer.checkpoints import read_policy
from draft_trainer.config import ENOUGH_HELD_OUT, HELD_OUT_MOST
from draft_trainer.drafters import DRAFTERS, Draft
from draft_trainer.files import folder_written_whole, written_whole
from draft_trainer.local import LocalTrainer
from draft_trainer.releases.gate import MIN_CLUSTERS
from draft_trainer.releases.release import folder_name
from draft_trainer.warmup.forward import PASS_TOKENS, forward, no_memory, passes
from draft_trainer.warmup.report import Report, progress_line, say
from draft_trainer.warmup.report import is_finished as report_is_finished
from draft_trainer.warmup.rollouts import Reading, Rollout, Rollouts
from policy_bridge import BridgeConfig, PolicyBridge
from policy_bridge.capture import NullCapture
from slipstream.checkpoints import CONFIG_FILE, WEIGHTS_FILE
from slipstream.errors import RefusedError
from slipstream.sample import is_held_out
from slipstream.tensors import digest

WORK, POSITION_FILE, INITIAL, REGISTRY = "work", "position.json", "initial", "registry"
RUN_ID = "warmup"

AT_ONCE = 256
"""Rollouts that are sorted by length before they share passes."""

VERSION_SHARE = 4
"""Part of the replay buffer after which a policy version brings no more."""

PASS_SHARE = 8
"""Part of the replay buffer that one pass may fill."""

OUTBOX_BYTES = 4 << 30
"""Bound on the states of one pass; memory is taken as they are written."""

LOOK_SECONDS = 0.5
WAITING_SECONDS = 30.0
"""A trainer that cannot go on for so long, as where the disk is full, ends the warm-up."""

CONNECT_SECONDS = 60.0
SHUTDOWN_SECONDS = 600.0
LAG = 16
"""Policy versions whose samples a kill may bring back: those that were trained on since the last
training state."""

LEAST_HELD_OUT = 0.05
"""Share of the prompts that are held out at least."""
AGAIN = "give the same command again: it goes on with what was trained so far"
LEFT_OUT = ("non_finite", "teacher")
"""Reasons, or fields of the trainer's refusals, for which samples may be left out; any other ends
the warm-up."""


@dataclass(frozen=True)
class Goal:
    """The end of a warm-up whose rollouts do not end before.

    Attributes:
        tokens: completion tokens to train on, every pass counted; None: as many as there are.
        until_flat: when the held-out acceptance length no longer rises.
    """

    tokens: int | None = None
    until_flat: bool = False


@dataclass(frozen=True)
class Position:
    """The position up to which rollouts were given to the trainer.

    Attributes:
        facts: which rollouts they are, of which policy, and of which draft.
        rollouts: given so far.
        tokens: completion tokens that are trained on for these, every pass counted.
    """

    facts: dict[str, Any]
    rollouts: int = 0
    tokens: int = 0


class Warmup:
    """One warm-up. One thread.

    Args:
        out: the draft's folder.
        sections: of the trainer's configuration; draft, training and replay among them.
        rollouts: of the policy.
        goal: when it ends.
        console: for progress.

    Attributes:
        left_out: samples that were not trained on for what they are, by reason.
        outcome: of ``run``, in words.

    Raises:
        RefusedError: too few prompts differ, or the output folder has something else.
    """

    def __init__(
        self,
        out: Path,
        sections: Mapping[str, Mapping[str, Any]],
        rollouts: Rollouts,
        goal: Goal,
        console: Console,
    ) -> None:
        self._out, self._work = out, out / WORK
        draft = {"registry": str(self._work / REGISTRY), "keep_releases": 2}
        self._sections: dict[str, Mapping[str, Any]] = {
            **sections,
            "draft": {**sections["draft"], **draft},
            "server": {"shutdown_timeout_s": SHUTDOWN_SECONDS},
        }
        self._share = held_out_share(rollouts, sections["replay"].get("held_out_fraction"))
        self._sections["replay"] = {"max_policy_lag": LAG} | {
            **sections["replay"],
            "held_out_fraction": self._share,
        }
        self._rollouts = rollouts
        self._goal = goal
        self._console = console
        facts = {
            **rollouts.facts,
            # Another policy of the same shape has another lm_head.
            "policy": digest(read_policy(Path(sections["draft"]["policy"])).lm_head).hex(),
            "draft_kind": sections["draft"]["kind"],
            "held_out_fraction": self._share,
        }
        self._position = self._read_position(Position(facts))
        self._stopping: Callable[[], bool] = lambda: False
        self._stopped = False
        self._looked_at = 0.0
        self._well_at = time.monotonic()
        self._promoted = 0
        self.left_out: dict[str, int] = {}

    def run(
        self,
        model: PreTrainedModel,
        new_draft: Callable[[Reading], Draft],
        stopping: Callable[[], bool],
    ) -> bool:
        """Train to the goal, or until ``stopping`` says so; go on where that was done before.

        Args:
            model: the policy, on its device, in evaluation mode.
            new_draft: makes the draft to begin with, may look at the first rollouts.
            stopping: whether a signal came.

        Returns:
            Whether the goal was reached.

        Raises:
            RefusedError: the policy cannot be captured, the endpoint no longer answers, or the
                trainer cannot go on. The output folder has the best draft so far.
            OSError: the folder cannot be written.
        """
        self._stopping = stopping
        with ExitStack() as owned:
            reading = owned.enter_context(Reading(self._rollouts, self._position.rollouts))
            if not self._out.exists():
                self._begin(new_draft(reading))
            trainer = LocalTrainer(self._work / INITIAL, self._sections)
            self._trainer = owned.enter_context(trainer)
            self._report = Report(self._out)
            say(self._console, f"the trainer's page: {trainer.url}")
            bar = progress_line(self._console, self._report.tokens)
            self._progress = owned.enter_context(bar)
            self._bridge = owned.enter_context(self._connected(model))
            self._give_all(model, reading)
            to_the_end = self._wait_trained()
            self._look()
            status = trainer.status()
            tokens = self._report.tokens + status.tokens_trained
            if to_the_end and not self.left_out:
                # After a kill, some was trained on again, or is not counted.
                tokens = self._position.tokens
        if not self._stopped:
            self._check_enough(tokens, status.last_verdict.reason)
        self._report.draw()
        self._report.write(tokens, finished=not self._stopped)
        if self._stopped:
            return False
        shutil.rmtree(self._work)
        self.outcome = self._described(tokens)
        return True

    def _check_enough(self, tokens: int, reason: str) -> None:
        """Raise RefusedError where nothing was trained on, or the gate has measured nothing."""
        option = self._rollouts.option
        if not tokens:
            found = f"no sample; left out: {self.left_out}" if self.left_out else "no sample"
            expected = "completions with tokens to train on, whose log-probabilities are finite"
            step = "give others, or another --dtype where samples are non_finite; and another --out"
            raise RefusedError(option, found, expected, step)
        if not self._report.points:
            found = f"{tokens:,} tokens, too few to know of a draft whether it is better: {reason}"
            step = "give the same command with greater --tokens, or more prompts and another --out"
            raise RefusedError(option, found, "enough held-out prompts for the gate", step)

    def _described(self, tokens: int) -> str:
        report = self._report
        told = f"{tokens:,} completion tokens in {timedelta(seconds=round(report.seconds))}"
        if left := ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items()):
            told += f"; samples left out: {left}"
        if not self._promoted:
            return f"no draft was better than the one it began with; {told}"
        return (
            f"acceptance length {report.acceptance_length:.3f} on held-out prompts, "
            f"{report.first:.3f} at the start; {told}"
        )

    def _read_position(self, first: Position) -> Position:
        """The position in the output folder, or the first one where nothing is there.

        Raises:
            RefusedError: something else is there, or a warm-up with other rollouts.
        """
        path = self._work / POSITION_FILE
        if not self._out.exists():
            return first
        if not path.exists():
            advice = "remove it, or choose another"
            raise RefusedError(f"--out {self._out}", "something there", "a free name", advice)
        found = Position(**json.loads(path.read_text()))
        for name, value in found.facts.items():
            if (given := first.facts.get(name)) != value:
                step = "give the command that it began with, or another --out"
                raise RefusedError(f"--out {self._out}: {name}", given, value, step)
        return found

    def _begin(self, draft: Draft) -> None:
        with folder_written_whole(self._out) as folder:
            DRAFTERS[draft.kind].save(folder, draft)
            initial = folder / WORK / INITIAL
            initial.mkdir(parents=True)
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                shutil.copyfile(folder / name, initial / name)
            (folder / WORK / POSITION_FILE).write_text(json.dumps(asdict(self._position)))

    @contextmanager
    def _connected(self, model: PreTrainedModel) -> Iterator[PolicyBridge]:
        """A bridge that has announced a policy version, one more than the trainer knew."""
        config = BridgeConfig(
            self._trainer.address,
            RUN_ID,
            bytes_per_step=sys.maxsize,
            outbox_bytes=OUTBOX_BYTES,
            states_dtype="bfloat16",
            strict=True,
        )
        status = self._trainer.status()
        known = status.policy_version if status.HasField("policy_version") else -1
        with PolicyBridge(model.requires_grad_(False), config) as bridge:
            bridge.wait_connected(CONNECT_SECONDS)
            with bridge.sync(known + 1):
                pass
            yield bridge

    def _give_all(self, model: PreTrainedModel, reading: Reading) -> None:
        """Give the trainer rollouts until the goal is reached, or there are no more."""
        bridge, capacity = self._bridge, self._trainer.status().replay_capacity_bytes
        begin = bridge.stats().sent_bytes

        def most() -> int:
            stats = bridge.stats()
            token = stats.sent_bytes / max(stats.chosen_tokens, 1)
            # The first pass, which measures what a token takes, has one rollout.
            return min(int(capacity / PASS_SHARE / token), PASS_TOKENS) if token else 0

        while part := self._next_part(reading):
            for rollouts in passes(part, most):
                if bridge.stats().sent_bytes - begin >= capacity // VERSION_SHARE:
                    self._next_version()
                    begin = bridge.stats().sent_bytes
                if not self._goes_on():
                    return
                temperature = self._rollouts.temperature
                window = bridge.capture(temperature=temperature, forwards=1)
                if isinstance(window, NullCapture):
                    # All that is wanted of this version was chosen, though not all of it sent.
                    self._next_version()
                    window = bridge.capture(temperature=temperature, forwards=1)
                if isinstance(window, NullCapture):
                    stats = bridge.stats()
                    found = stats.capture_off_reason or stats.last_error
                    expected, step = "one whose states can be captured", "see what is said of it"
                    raise RefusedError("--policy", found, expected, step)
                forward(model, window, rollouts, temperature)
                while not bridge.flush(LOOK_SECONDS):
                    self._goes_on()
                self._check_sent(sum(one.tokens for one in rollouts))
            self._gave(part)

    def _next_version(self) -> None:
        """Begin another version of the policy, once what was given of this one was trained on."""
        self._wait_trained()
        with self._bridge.sync((self._bridge.policy_version or 0) + 1):
            pass

    def _next_part(self, reading: Reading) -> list[Rollout]:
        """The next rollouts that are there; none where the goal is reached or they end."""
        part: list[Rollout] = []
        due = self._position.tokens
        if self._is_enough(due):
            return []
        for one in reading:
            if not self._goes_on():
                return []
            if one is None and part:
                break
            if one is not None:
                part.append(one)
                due += self._tokens_of(one)
                if len(part) == AT_ONCE or self._is_enough(due):
                    break
        return part

    def _is_enough(self, tokens: int) -> bool:
        return self._goal.tokens is not None and tokens >= self._goal.tokens

    def _tokens_of(self, one: Rollout) -> int:
        """Completion tokens that are trained on for a rollout, every pass counted."""
        if is_held_out(one.group, self._share):
            return 0
        # vLLM drafts what follows the first token of a completion.
        return self._trainer.config.replay.max_epochs * max(len(one.completion) - 1, 0)

    def _gave(self, part: list[Rollout]) -> None:
        """Keep that these were taken. Raises OSError."""
        tokens = self._position.tokens + sum(map(self._tokens_of, part))
        self._position = Position(self._position.facts, part[-1].number + 1, tokens)
        with written_whole(self._work / POSITION_FILE) as temporary:
            temporary.write_text(json.dumps(asdict(self._position)))

    def _check_sent(self, tokens: int) -> None:
        """Raise RefusedError where a pass of so many tokens did not reach the trainer."""
        stats = self._bridge.stats()
        lost = {**stats.shed, **stats.refused_by_field}
        if lost.get("device_memory"):
            raise no_memory(tokens)
        for reason, samples in lost.items():
            self.left_out[reason] = samples
            if reason.partition(".")[0] not in LEFT_OUT:
                found = f"{samples} samples that were not taken: {reason} ({stats.last_error})"
                step = f"see what is said of them; where a disk is full, free some; then {AGAIN}"
                raise RefusedError(f"--out {self._out}", found, "every sample taken", step)

    def _wait_trained(self) -> bool:
        """Wait until all that was given was trained on and gated; False: the warm-up ends first."""
        while self._goes_on():
            status = self._trainer.status()
            if status.idle and not status.samples_pending:
                return True
            time.sleep(LOOK_SECONDS)
        return False

    def _goes_on(self) -> bool:
        """Look after the trainer now and then; whether nothing ends the warm-up.

        Raises:
            RefusedError: the trainer cannot go on.
            OSError: the output folder cannot be written.
        """
        self._stopped = self._stopped or self._stopping()
        if time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._look()
        return not (self._stopped or (self._goal.until_flat and self._report.flat))

    def _look(self) -> None:
        trainer, report = self._trainer, self._report
        status, total = trainer.status(), self._total()
        tokens = report.tokens + status.tokens_trained
        if status.promoted_release > self._promoted:
            folder = self._work / REGISTRY / folder_name(status.promoted_release)
            with written_whole(self._out / WEIGHTS_FILE) as temporary:
                shutil.copyfile(folder / WEIGHTS_FILE, temporary)
            self._promoted = status.promoted_release
        if status.last_verdict.judged_at > report.judged_at:
            better = report.add(trainer.verdicts(), tokens)
            for point in better:
                self._progress.better(point, total)
            report.write(tokens)
        self._progress.show(tokens, total, report.acceptance_length)
        if evicted := status.evicted_by_reason["capacity"]:
            self.left_out["capacity"] = evicted
        self._looked_at = now = time.monotonic()
        found = status.training_error
        if not found:
            self._well_at = now
        if status.verdicts["write_failed"]:
            found, self._well_at = status.last_verdict.reason, 0.0
        if now - self._well_at > WAITING_SECONDS:
            step = f"free space where the disk is full; then {AGAIN}"
            raise RefusedError(f"--out {self._out}", found, "a trainer that goes on", step)

    def _total(self) -> int | None:
        """Completion tokens that will be trained on, every pass counted, about; None: unknown."""
        if self._goal.tokens is not None or self._rollouts.completion_tokens is None:
            return self._goal.tokens
        epochs = self._trainer.config.replay.max_epochs
        return round(epochs * (1 - self._share) * self._rollouts.completion_tokens)


def held_out_share(rollouts: Rollouts, given: float | None) -> float:
    """The share of prompts that are held out: enough for the gate, and no more than a quarter.

    Args:
        rollouts: whose prompts are known.
        given: in the configuration.

    Raises:
        RefusedError: the gate would have too few.
    """
    found = len(rollouts.groups)
    share = given or min(max(LEAST_HELD_OUT, ENOUGH_HELD_OUT / found), HELD_OUT_MOST)
    held = sum(is_held_out(group, share) for group in rollouts.groups)
    if not MIN_CLUSTERS <= held < found:
        raise RefusedError(
            rollouts.option,
            f"{found:,} different prompts, {held} of them held out",
            f"at least {MIN_CLUSTERS} held out and others to train on",
            "give more prompts that differ, 100 or more",
        )
    return share


def is_finished(out: Path) -> bool:
    """Return whether a warm-up ended in this folder; what it left to remove is gone then."""
    if not report_is_finished(out):
        return False
    shutil.rmtree(out / WORK, ignore_errors=True)
    return True
