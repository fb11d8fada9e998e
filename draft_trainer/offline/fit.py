"""Trains a draft offline on recorded states and keeps the weights with the best estimate.

A fit is a function of its inputs: the recording, the draft, the configuration and the number of
threads. A killed fit resumes from its newest training state and ends with the bits that it would
have ended with.

The output folder is a draft that vLLM loads, from its first instant to its last: ``config.json``
and ``model.safetensors`` are the best draft so far, ``training.jsonl`` is the log, ``state/`` what
``--resume`` needs; at the end it is removed and ``training.svg`` is drawn.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from draft_trainer.checkpoints import read_policy
from draft_trainer.drafters import DRAFTERS, Draft
from draft_trainer.drafters.expected_acceptance import expected_acceptance
from draft_trainer.files import folder_written_whole, fsync
from draft_trainer.offline.data import FitConfig, split, steps_of
from draft_trainer.offline.report import (
    LOG_FILE,
    TrainingLog,
    draw,
    open_recording,
    progress_of,
    read_log,
    say,
)
from draft_trainer.recordings.recording import INDEX_FILE
from draft_trainer.training.device import training_device
from draft_trainer.training.learner import Learner, StepMetrics
from draft_trainer.training.optimizer import Schedule
from draft_trainer.training.pace import BATCH_TOKENS
from draft_trainer.training.training_state import Facts, StateStore, head_facts
from slipstream.checkpoints import WEIGHTS_FILE
from slipstream.errors import RefusedError
from slipstream.tensors import digest

STATE_FOLDER = "state"
PLOT_FILE = "training.svg"
_WRITE_SECONDS = 600.0
_NOT_IN_THE_RESULT = {
    *("threads", "nice", "device"),
    *("linger_s", "steps_per_candidate", "state_every_steps", "state_seconds"),
    "gpu_memory_fraction",
}


@dataclass(frozen=True)
class FitProgress:
    """How far a fit is: with the learner's tensors all that the rest of it depends on.

    Attributes:
        step: optimizer steps done, skipped ones included.
        tokens: trained on.
        seconds: spent on it, evaluations not counted.
        best: highest estimated acceptance length.
        best_step: the step after which it was reached.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0


class FitOutput:
    """One output folder. One process writes.

    Args:
        folder: where.
        every_steps: optimizer steps between two training states; 0 writes one only at a stop.
    """

    def __init__(self, folder: Path, every_steps: int) -> None:
        self.folder = folder
        self._states = folder / STATE_FOLDER
        self._every_steps = every_steps
        self._saved = 0

    @property
    def is_finished(self) -> bool:
        """Whether a fit ended here, be it that a kill came before ``finish`` was done."""
        log = self.folder / LOG_FILE
        events = read_log(log) if log.is_file() else []
        return bool(events) and events[-1]["event"] == "end"

    def begin(self, learner: Learner, belongs_to: Facts, resume: bool) -> FitProgress:
        """Make the folder, or put what is in it into ``learner``.

        Raises:
            RefusedError: the folder is not to be resumed, or cannot be with these inputs and this
                configuration.
            OSError: the folder cannot be written.
        """
        if not self.folder.exists():
            draft = learner.snapshot()
            with folder_written_whole(self.folder) as temporary:
                DRAFTERS[draft.kind].save(temporary, draft)
                (temporary / LOG_FILE).touch()
                (temporary / STATE_FOLDER).mkdir()
        elif not (resume and self._states.is_dir()):
            unfinished = self._states.is_dir()
            advice = "give --resume to go on" if unfinished else "remove it, or choose another"
            raise RefusedError(f"--out {self.folder}", "something there", "a free name", advice)
        self._store = StateStore(self._states, belongs_to)
        state = self._store.load()
        if state is None:
            self.log = TrainingLog(self.folder / LOG_FILE)
            return FitProgress()
        learner.load_state_dict(state.tensors)
        position = dict(state.position)
        self.log = TrainingLog(self.folder / LOG_FILE, position.pop("log_bytes"))
        self._saved = state.step
        return FitProgress(**position)

    def put(self, draft: Draft) -> None:
        """Replace the draft's weights whole."""
        with tempfile.TemporaryDirectory(prefix=".draft-", dir=self._states) as name:
            DRAFTERS[draft.kind].save(Path(name), draft)
            fsync(Path(name) / WEIGHTS_FILE)
            (Path(name) / WEIGHTS_FILE).replace(self.folder / WEIGHTS_FILE)
        fsync(self.folder)

    def after_step(self, learner: Learner, now: FitProgress) -> None:
        """Write a training state when it is time: beside training, unless every step has one."""
        every = self._every_steps
        if every == 1:
            self.save(learner, now)
        elif 0 < every <= now.step - self._saved and self._store.free:
            self._store.write(learner.state_dict(), now.step, self._position(now))
            self._saved = now.step

    def save(self, learner: Learner, now: FitProgress) -> None:
        """Write a training state now. Raises OSError."""
        self._store.wait(_WRITE_SECONDS)
        self._store.save(learner.state_dict(), now.step, self._position(now))
        self._saved = now.step

    def close(self) -> None:
        """Wait for what is being written."""
        self._store.wait(_WRITE_SECONDS)
        self.log.sync()
        self.log.close()

    def finish(self) -> None:
        """Of a fit that is done, after ``close`` or in a later process: draw the plot; nothing is
        left to resume."""
        if self._states.exists():
            draw(read_log(self.folder / LOG_FILE), self.folder / PLOT_FILE)
            shutil.rmtree(self._states)

    def _position(self, now: FitProgress) -> Facts:
        return asdict(now) | {"log_bytes": self.log.sync()}


class Fit:
    """One fit, from reading its inputs to its last step.

    Args:
        states: folder of the recording.
        draft: folder of the draft that it begins with.
        out: folder that it makes.
        policy: the draft's policy, where the draft's checkpoint does not say everything.
        config: how.

    Raises:
        RefusedError: states, draft and configuration do not fit one another; nothing was written.
    """

    def __init__(
        self,
        states: Path,
        draft: Path,
        out: Path,
        policy: Path | None,
        config: FitConfig,
    ) -> None:
        self._config = config
        device = training_device(config.training.device)
        self._console = Console(stderr=True)
        fit, training = config.fit, config.training
        head = DRAFTERS[fit.kind].read(draft, policy).draft()
        self._recording = open_recording(states, self._console)
        if policy is not None:
            self._recording.check_policy(read_policy(policy))
        recorded, steps = len(self._recording), training.ttt_steps
        self._recording.fit_to(head.config, steps)
        if left_out := recorded - len(self._recording):
            text = f"too long for the draft's sliding_window with training.ttt_steps = {steps}"
            say(self._console, f"{left_out} of {recorded} samples are left out: {text}")
        self._heads = self._recording.policy_heads(head.target_ids())
        self._training, self._held_out = split(self._recording, config)
        lengths = self._recording.lengths()
        self._lengths = [lengths[number] for number in self._training]
        self._steps = list(
            steps_of(
                self._lengths, training.batch_tokens or BATCH_TOKENS[1], training.seed, fit.epochs
            )
        )
        self._total = len(self._steps)
        self._evaluate_at = {
            round(self._total * (i + 1) / fit.evaluations) for i in range(fit.evaluations)
        }
        self._read = {"states": str(states), "draft": str(draft)}
        self._sha256 = {
            "states": hashlib.sha256((states / INDEX_FILE).read_bytes()).hexdigest(),
            "draft": _sha256(head),
        }
        schedule = Schedule(
            training.learning_rate,
            training.warmup_steps,
            self._total,
            fit.decay_floor,
            fit.decay_share,
        )
        self._learner = Learner(head.to(device), training, schedule)
        self._output = FitOutput(out, training.state_every_steps)
        self._now = FitProgress()

    def run(self, stopping: Callable[[], bool], resume: bool) -> bool:
        """Train to the end, or to the end of the step during which ``stopping`` says so.

        Args:
            stopping: whether a signal came.
            resume: go on with the unfinished fit in the output folder, if there is one.

        Returns:
            Whether the fit is done.

        Raises:
            RefusedError: the output folder holds something else, or an unfinished fit of other
                inputs or another configuration.
            OSError: the output folder cannot be written.
        """
        output, console = self._output, self._console
        if resume and output.is_finished:
            output.finish()
            say(console, f"{output.folder} is finished")
            return True
        self._now = output.begin(self._learner, self._belongs_to(), resume)
        try:
            if self._now.step:
                say(console, f"going on after step {self._now.step} of {self._total}")
            else:
                output.log.write("start", **self._start_facts())
                self._evaluate()
            with progress_of(console, "training") as (bar, task):
                done = self._train(stopping, bar, task)
            now = self._now
            if not done:
                say(console, f"stopped after step {now.step} of {self._total}; --resume goes on")
            else:
                self._end()
        finally:
            output.close()
        if done:
            output.finish()
        return done

    def _train(self, stopping: Callable[[], bool], bar: Progress, task: TaskID) -> bool:
        """Steps, states and evaluations until the last epoch ends or ``stopping`` says so."""
        output = self._output
        for epoch, chosen in self._steps[self._now.step :]:
            metrics = self._step(chosen)
            now = self._now
            stop = stopping()
            bar.update(task, completed=now.step, total=self._total, description=_line(metrics))
            figures = asdict(metrics) | {"step": now.step, "epoch": epoch}
            figures |= {"tokens": now.tokens, "seconds": now.seconds}
            for unlogged in ("anchors", "memory_retries", "policy_version"):
                del figures[unlogged]
            output.log.write("step", **figures)
            if now.step in self._evaluate_at:
                self._evaluate()
            output.after_step(self._learner, self._now)
            if stop and now.step < self._total:
                output.save(self._learner, self._now)
                return False
        return True

    def _step(self, chosen: list[int]) -> StepMetrics:
        """One step on the samples that were chosen for it."""
        started = time.perf_counter()
        samples = [self._recording[self._training[i]] for i in chosen]
        metrics = self._learner.step(samples, self._heads)
        self._now = replace(
            self._now,
            step=self._now.step + 1,
            tokens=self._now.tokens + metrics.tokens,
            seconds=self._now.seconds + time.perf_counter() - started,
        )
        return metrics

    def _evaluate(self) -> None:
        """Estimate the acceptance of what would be served; keep it if it is the best so far."""
        started = time.perf_counter()
        served, fit, now = self._learner.snapshot(), self._config.fit, self._now
        estimate = expected_acceptance(
            served,
            self._held_out,
            self._heads,
            fit.num_speculative_tokens,
            fit.draft_sample_method,
            max_batch_tokens=self._config.training.forward_tokens,
        )
        length = estimate.acceptance_length
        error = float(estimate.per_sequence.std()) / estimate.sequences**0.5
        best = length > now.best
        if best:
            self._now = replace(now, best=length, best_step=now.step)
            self._output.put(served)
        self._output.log.write(
            "evaluation",
            step=now.step,
            tokens=now.tokens,
            acceptance_length=length,
            standard_error=error,
            accepted_per_position=estimate.accepted_per_position,
            best=best,
            seconds=now.seconds,
        )
        positions = " ".join(f"{rate:.3f}" for rate in estimate.accepted_per_position)
        say(
            self._console,
            f"step {now.step}/{self._total}: expected acceptance length {length:.3f} ± {error:.3f} "
            f"(s.e.) at k = {fit.num_speculative_tokens}, per position {positions}"
            f"{', the best so far' if best else ''} ({time.perf_counter() - started:.1f} s)",
        )

    def _end(self) -> None:
        now = self._now
        self._output.log.write(
            "end",
            step=now.step,
            tokens=now.tokens,
            seconds=now.seconds,
            best_step=now.best_step,
            acceptance_length=now.best,
        )
        say(
            self._console,
            f"{self._output.folder}: expected acceptance length {now.best:.3f}, of step "
            f"{now.best_step}; {now.tokens:,} tokens in {timedelta(seconds=round(now.seconds))}",
        )

    def _belongs_to(self) -> dict[str, object]:
        """What makes another fit's training state wrong for this one."""
        # 2: the position is the number of steps alone.
        facts: dict[str, object] = {"format": 2}
        facts |= {f"sha256 of {k}": v for k, v in self._sha256.items()}
        for name, section in self._config.model_dump(mode="json").items():
            for key in section.keys() - _NOT_IN_THE_RESULT:
                facts[f"{name}.{key}"] = section[key]
        return facts | head_facts(self._learner.head.config)

    def _start_facts(self) -> dict[str, Any]:
        return {
            **self._read,
            "sha256": self._sha256,
            "config": self._config.model_dump(mode="json"),
            "threads": torch.get_num_threads(),
            "steps": self._total,
            "samples": len(self._training),
            "tokens_per_epoch": sum(self._lengths),
            "held_out_samples": len(self._held_out),
            "held_out_tokens": sum(sample.tokens for sample in self._held_out),
        }


def _line(metrics: StepMetrics) -> str:
    """The last step beside the progress bar."""
    rates = " ".join(f"{rate:.3f}" for rate in metrics.step_acceptance)
    pace = metrics.tokens / metrics.seconds
    return f"{pace:,.0f} tokens/s  loss {metrics.loss:.4f}  acceptance {rates}"


def _sha256(draft: Draft) -> str:
    """Over the names and bytes of the weights."""
    total = hashlib.sha256()
    for name, tensor in sorted(draft.state_dict().items()):
        total.update(name.encode() + digest(tensor))
    return total.hexdigest()
